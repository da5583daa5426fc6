"""A run at 1 rank, at 3, and at ever other sizes with SIGKILLs between: one history, one curve."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from elastic.cli import main
from elastic.dashboard.data_history import DataHistory
from elastic.storage.filesystem import Filesystem
from elastic.storage.ledger import read_ledger
from elastic.training.order import SampleStream
from tests.dist.processes import RankFailed
from tests.dist.standalone_run import Numbers, Passes, Recipe, curve, run, trained
from tests.dist.test_run import worst

UNTIL = 48
KILLED = ((1, 10), (2, 20), (5, 30), (3, 40))  # the save before the last is committed by then
Ids = dict[int, list[list[int]]]


def killed_on_the_way(recipe: Recipe, sizes: tuple[tuple[int, int], ...], last: int) -> None:
    """Trains at each size until all its ranks are killed, then to the end at `last`."""
    for size, die_at in sizes:
        dying = dataclasses.replace(recipe, die_at=die_at)
        assert run(size, dying, may_die=range(size)) == [None] * size
    (resumed,) = {rank["resumed"] for rank in run(last, recipe)}
    assert 0 < resumed < sizes[-1][1]


def used(root: str) -> Ids:
    """(epoch, index) of each step's samples over all ranks, in order of rank."""
    return {
        step: [item for rank in ranks for batch in rank for item in batch]
        for step, ranks in trained(root).items()
    }


def history(root: str) -> DataHistory:
    return DataHistory(read_ledger(Filesystem.at(root)))


def data(*arguments: object) -> Any:
    found = CliRunner().invoke(main, ["data", *map(str, arguments), "--json"])
    assert found.exit_code in (0, 1), found.output
    return json.loads(found.stdout)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("source", "dtype", "tolerance"),
    [
        (Numbers, "float64", 1e-9),
        pytest.param(Numbers, "float32", 1e-5, marks=pytest.mark.thorough),
        (Passes, "float64", 1e-9),
    ],
    ids=["float64", "float32", "stream"],
)
def test_sizes_change_and_everything_is_killed(
    tmp_path: Path, source: Any, dtype: str, tolerance: float
) -> None:
    """B28 B36 B53: samples in a step, their order, the curve and the learning rate stay."""
    one = Recipe(root=f"{tmp_path}/one", until=UNTIL, save_every=4, dtype=dtype, source=source)
    three = dataclasses.replace(one, root=f"{tmp_path}/three")
    many = dataclasses.replace(one, root=f"{tmp_path}/many")
    run(1, one)
    run(3, three)
    killed_on_the_way(many, KILLED, last=4)

    expected = used(one.root)
    assert sorted(expected) == list(range(1, UNTIL + 1))
    assert {len(samples) for samples in expected.values()} == {12}
    assert used(three.root) == expected
    assert used(many.root) == expected
    if source is Numbers:
        order = SampleStream(num_samples=100, seed=0).indices(0, 12 * UNTIL)
        assert [index for step in expected.values() for _, index in step] == [i for _, i in order]

    for name in ("loss", "grad_norm"):
        for other in (three, many):
            assert worst(curve(one.root, name), curve(other.root, name)) <= tolerance
    assert curve(one.root, "lr") == curve(three.root, "lr") == curve(many.root, "lr")

    again = dataclasses.replace(one, root=f"{tmp_path}/again")
    killed_on_the_way(again, ((3, 20),), last=3)
    for name in ("loss", "grad_norm"):
        assert curve(again.root, name) == curve(three.root, name), "not a bit, at the same size"
    check_what_the_ledger_tells(one.root, three.root, many.root)


def check_what_the_ledger_tells(one: str, three: str, many: str) -> None:
    """`elastic data` computes, by rank and micro-batch, what the ranks have really seen."""
    by_rank = trained(many)
    for step in range(1, UNTIL + 1):
        use = history(many).use(step)
        assert use.is_done and use.counts
        found = [[[index for _, index in b] for b in r] for r in use.stretch.split(step)]
        assert found == [[[index for _, index in b] for b in r] for r in by_rank[step]]
    sizes = {history(many).use(step).stretch.world_size for step in range(1, UNTIL + 1)}
    assert sizes == {1, 2, 5, 3, 4}
    shown = data("show", many, "--step", UNTIL)
    assert (shown["world_size"], shown["is_done"]) == (4, True)
    for other in (three, many):
        told = data("diff", one, other)
        assert (told["agree"], told["num_steps"]) == (True, UNTIL)


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_loader_processes_change_with_the_size(tmp_path: Path) -> None:
    """B34 B39: 8 items and 12 in a step, so that each step is in more than one pass."""
    one = Recipe(root=f"{tmp_path}/one", until=20, save_every=2, source=Passes, num_items=8)
    many = dataclasses.replace(one, root=f"{tmp_path}/many")
    run(1, one)
    for size, die_at, num_workers in ((2, 7, 2), (3, 13, 1)):
        recipe = dataclasses.replace(many, die_at=die_at, num_workers=num_workers)
        run(size, recipe, may_die=range(size))
    run(1, many)
    assert used(many.root) == used(one.root)
    assert worst(curve(one.root), curve(many.root)) <= 1e-9
    for step, samples in used(one.root).items():
        found = [list(key) for key in history(many.root).use(step).stretch.samples(step)]
        assert found == samples
    told = [e for e in read_ledger(Filesystem.at(one.root)) if e.kind == "data_read"]
    assert len(told) == 2, "the first pass has ended, and the others were as long"


class ByRank(Passes):
    """Another length on each rank, as of a source that is split by rank."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        import torch.distributed as dist

        self.items = Numbers((5, 4, 4)[dist.get_rank()])
        yield from super().__iter__()


def test_ranks_that_read_other_sources(tmp_path: Path) -> None:
    """B35: nobody waits for a rank whose pass is over; they are told what is wrong."""
    recipe = Recipe(root=f"{tmp_path}/run", until=20, source=ByRank)
    with pytest.raises(RankFailed, match="SourcesDiffer: the ranks read different samples"):
        run(3, recipe, timeout_s=30)
