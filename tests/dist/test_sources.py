"""Sources through a loader: one order at any size, kept over resumes, read in whole batches."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import default_collate

import elastic
from elastic.policy.mesh import Mesh
from elastic.training.coordinator import Coordinator
from elastic.training.data import GlobalLoader
from elastic.training.loaders import Loaders
from elastic.training.membership import Membership
from elastic.training.order import EpochOrder
from elastic.training.order_choice import GlobalBatchDiffers, OrderDiffers, choose

pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]
SEED, LENGTH, WINDOW = 3, 4, 4
MEMBER = Membership(
    run_id="run",
    generation=0,
    world_rank=1,
    world_size=2,
    local_rank=0,
    local_world_size=1,
    node_rank=1,
    store_host="",
    store_port=0,
    resume_step=None,
)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr("elastic.training.parquet.BLOCK_TOKENS", 1)


@pytest.fixture
def dataset(tmp_path: Path) -> elastic.ParquetTokens:
    """83 items in 21 row groups."""
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"tokens": range(336)}), path, row_group_size=16)
    return elastic.ParquetTokens(path, length=LENGTH)


def loader_of(dataset: Any, **changed: Any) -> GlobalLoader:
    arguments: dict[str, Any] = {
        "global_batch": 6,
        "micro_batch": 2,
        "seed": SEED,
        "world_rank": 0,
        "world_size": 1,
        "window": WINDOW,
    }
    return GlobalLoader(dataset, **{**arguments, **changed})


def trained(dataset: Any, num_steps: int, **changed: Any) -> list[int]:
    """The items of the next steps over all ranks, in order of rank."""
    world_size = changed.pop("world_size", 1)
    ranks = []
    for rank in range(world_size):
        loader = loader_of(dataset, world_rank=rank, world_size=world_size, **changed)
        ranks.append([items(next(steps)) for steps in [iter(loader)] for _ in range(num_steps)])
        loader.close()
    return [item for number in range(num_steps) for of_rank in ranks for item in of_rank[number]]


def items(step: Any) -> list[int]:
    firsts = [micro.batch["input_ids"][:, 0] for micro in step if not micro.is_padding]
    return [int(token) // LENGTH for token in torch.cat(firsts)]


def in_windows(dataset: Any, stop: int) -> list[int]:
    stream = choose(dataset, seed=SEED, window=WINDOW)
    assert stream.window is not None
    return [index for _, index in stream.indices(0, stop)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_one_order_at_any_size(dataset: elastic.ParquetTokens, num_workers: int) -> None:
    """B28 B34 B35 B37: over the end of an epoch, whoever reads."""
    expected = in_windows(dataset, 120)
    for world_size in (1, 4):
        found = trained(dataset, 20, world_size=world_size, num_workers=num_workers)
        assert found == expected
    assert sorted(expected[:83]) == list(range(83))


def test_a_resume_goes_on_in_the_order_it_began_with(dataset: elastic.ParquetTokens) -> None:
    expected = in_windows(dataset, 120)
    loader = loader_of(dataset)
    steps = iter(loader)
    found = items(next(steps)) + items(next(steps))
    for world_size in (3, 2):
        state = json.loads(json.dumps(loader.state))
        assert state["samples"] == len(found)
        done = {"samples_done": state["samples"], "state": state, "window": None}
        found += trained(dataset, 3, world_size=world_size, **done)
        loader = loader_of(dataset, **{**done, "samples_done": len(found)})
    assert found == expected[: len(found)]
    with pytest.raises(OrderDiffers, match=r"blocks in a window of the order: 4 when .* 8 now"):
        loader_of(dataset, samples_done=6, state=loader.state, window=8)
    with pytest.raises(OrderDiffers, match="samples in the dataset: 83 when it began, 50 now"):
        loader_of([{"labels": 0}] * 50, samples_done=6, state=loader.state, window=None)
    loader_of([{"labels": 0}] * 50, samples_done=0, state=loader.state, window=None)


def test_a_dataset_is_not_gone_on_with_by_count_nor_the_other_way() -> None:
    class Stream:
        def __iter__(self) -> Iterator[dict[str, int]]:
            yield from items

    items = [{"labels": number} for number in range(50)]
    for first, then in ((items, Stream()), (Stream(), items)):
        begun = loader_of(first, window=None)
        next(iter(begun))
        resumed = {"samples_done": begun.position, "state": begun.state, "window": None}
        assert resumed["state"]["samples"] == 6
        loader_of(first, **resumed)
        with pytest.raises(OrderDiffers, match=r"loader 'second' began with .* 6 samples"):
            loader_of(then, name="second", **resumed)
    with pytest.raises(ValueError, match=r"window=4 .* an iterable comes in its own order"):
        loader_of(Stream())


def test_files_renamed_between_two_lives_are_refused(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text('{"labels": 1}\n' * 20)
    begun = loader_of(elastic.JsonLines(tmp_path))
    next(iter(begun))
    resumed = {"samples_done": begun.position, "state": json.loads(json.dumps(begun.state))}
    loader_of(elastic.JsonLines(tmp_path), **resumed)
    (tmp_path / "a.jsonl").rename(tmp_path / "c.jsonl")
    with pytest.raises(OrderDiffers, match="digest of the names of the files"):
        loader_of(elastic.JsonLines(tmp_path), **resumed)


def test_another_global_batch_is_an_identity_field() -> None:
    items = [{"labels": number} for number in range(50)]
    begun = loader_of(items, window=None)
    next(iter(begun))
    resumed = {"samples_done": 6, "state": begun.state, "window": None, "global_batch": 5}
    with pytest.raises(GlobalBatchDiffers, match="of loader 'data': was 6, now 5"):
        loader_of(items, **resumed)
    accepted = loader_of(items, **resumed, accepted=("global_batch",))
    assert accepted.change == "global_batch of loader 'data': was 6, now 5"
    assert accepted.state["global_batch"] == 5
    assert not loader_of(items, **{**resumed, "samples_done": 0}).change, "nothing was trained"


def test_a_run_from_before_there_were_blocks_keeps_its_order(
    dataset: elastic.ParquetTokens,
) -> None:
    loaders = Loaders(_Silent(), MEMBER, Mesh().shape(2))
    loaders.restored({"counters": {"samples": 12}})
    start = loaders.start("data", 12)
    found = trained(dataset, 3, window=None, **start)
    plain = EpochOrder(num_samples=83, seed=SEED, epoch=0).slice(0, 83).tolist()
    assert found == plain[12:30]
    with pytest.raises(OrderDiffers, match="none when it began, 4 now"):
        loader_of(dataset, window=4, **start)


class _Silent(Coordinator):
    def notify(self, kind: str, data: Any) -> None:
        raise AssertionError(kind)


def test_a_whole_batch_is_what_its_items_make(dataset: elastic.ParquetTokens) -> None:
    batch, expected = (
        dataset.collated([5, 0, 82]),
        default_collate([dataset[i] for i in (5, 0, 82)]),
    )
    assert batch.keys() == expected.keys()
    for name, value in batch.items():
        assert value.equal(expected[name]) and value.dtype == expected[name].dtype
        assert value.is_contiguous()
    batch["labels"].fill_(-100)
    assert batch["input_ids"].equal(expected["input_ids"])


def test_a_collate_function_of_the_user_is_given_items(dataset: elastic.ParquetTokens) -> None:
    given: list[int] = []

    def collate(samples: list[Any]) -> dict[str, torch.Tensor]:
        given.extend(int(one["input_ids"][0]) // LENGTH for one in samples)
        return {name: torch.stack([one[name] for one in samples]) for name in samples[0]}

    assert trained(dataset, 4, collate=collate) == in_windows(dataset, 24)
    assert given == [0, *in_windows(dataset, 24)], "the first is to see how padding is made"


def test_blocks_are_decoded_ahead_of_the_step(
    dataset: elastic.ParquetTokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    monkeypatch.setattr("elastic.training.reading._MOST_AHEAD", 12)
    monkeypatch.setattr(dataset, "prefetch", told.extend)
    steps = iter(loader_of(dataset))
    expected = in_windows(dataset, 60)
    for number in range(1, 6):
        assert items(next(steps)) == expected[6 * (number - 1) : 6 * number]
        assert told == expected[: len(told)] and 6 * number + 2 <= len(told) <= 6 * number + 12


@pytest.fixture
def bucket() -> Iterator[Any]:
    memory = fsspec.filesystem("memory")
    yield memory
    memory.rm("/bucket", recursive=True)


def test_sources_on_an_object_store(tmp_path: Path, bucket: Any) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"n": range(40)}), path, row_group_size=8)
    bucket.pipe_file("/bucket/rows/x.parquet", path.read_bytes())
    bucket.pipe_file("/bucket/lines/x.jsonl", b"".join(b'"%d"\n' % n for n in range(40)))
    rows = elastic.ParquetRows("memory://bucket/rows")
    lines = elastic.JsonLines("memory://bucket/lines")
    assert [rows[i]["n"] for i in range(40)] == [int(lines[i]) for i in range(40)] == [*range(40)]
    arguments: dict[str, Any] = {
        "length": 3,
        "end_of_text": 0,
        "index": "memory://bucket/kept/index.json",
    }
    for _ in range(2):
        packed = elastic.PackedTokens(lines, _digits, **arguments)
        assert packed.tokens(0, 6).tolist() == [48, 0, 49, 0, 50, 0]
    tokens = elastic.ParquetTokens("memory://bucket/rows", "n", length=LENGTH)
    assert tokens.num_threads == 16
    assert sorted(trained(tokens, 3, window=2, global_batch=3)) == [*range(9)]


def _digits(line: str) -> list[int]:
    return [*line.encode()]
