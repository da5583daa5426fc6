"""`elastic data`: which samples a step used and whether two runs agree, from ledgers alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.cli import main
from elastic.dashboard.data_history import DataHistory, NotRecorded
from elastic.dashboard.data_report import compare
from elastic.storage.ledger import LedgerEvent, LedgerWriter
from elastic.training.order import SampleStream, micro_batches
from tests.made_run import BORN_S, fingerprint, make_run

FACTS: dict[str, Any] = {
    "loader": "data",
    "dataset": "Numbers",
    "read": "by index",
    "num_samples": 31,
    "seed": 3,
    "shuffle": True,
    "global_batch": 12,
    "micro_batch": 2,
    "world_size": 2,
    "samples_done": 0,
}
BY_COUNT = {name: FACTS[name] for name in ("loader", "dataset", "micro_batch", "world_size")} | {
    "read": "by count",
    "global_batch": 3,
    "samples_done": 0,
    "passes": [],
    "is_longer": False,
}


def word(kind: str, generation: int, step: int, **data: Any) -> LedgerEvent:
    return LedgerEvent(
        life=0, seq=0, time_s=BORN_S, kind=kind, generation=generation, step=step, data=data
    )


def reads(generation: int, step: int, to_step: int, **changed: Any) -> list[LedgerEvent]:
    """A generation that resumes at `step`, reads from there on and finishes `to_step`."""
    facts = {**FACTS, "samples_done": 12 * step, **changed}
    return [
        word("resumed" if step else "started", generation, step),
        word("data_read", generation, step, **facts),
        word("checkpoint_committed", generation, to_step),
    ]


def order(num_steps: int, **changed: Any) -> list[list[tuple[int, int]]]:
    """The samples of each step, by the definition of the order."""
    facts = {**FACTS, **changed}
    stream = SampleStream(num_samples=facts["num_samples"], seed=facts["seed"])
    flat = stream.indices(0, 12 * num_steps)
    return [flat[12 * step : 12 * step + 12] for step in range(num_steps)]


# --- history -----------------------------------------------------------------------------------


@given(
    num_samples=st.integers(1, 50),
    global_batch=st.integers(1, 9),
    micro_batch=st.integers(1, 4),
    lives=st.lists(
        st.tuples(st.integers(1, 9), st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=8
    ),
    seed=st.integers(0, 9),
)
@settings(deadline=None, max_examples=50)
def test_any_history_has_used_the_samples_of_an_undisturbed_one(
    num_samples: int,
    global_batch: int,
    micro_batch: int,
    lives: list[tuple[int, int, int]],
    seed: int,
) -> None:
    """B28 B35 B36 B53: any corpus, batch, sizes, and lost work; each index once an epoch."""
    facts = {"num_samples": num_samples, "seed": seed, "micro_batch": micro_batch}
    facts |= {"global_batch": global_batch}
    events: list[LedgerEvent] = []
    trained: dict[int, list[list[tuple[int, int]]]] = {}
    step = 0
    stream = SampleStream(num_samples=num_samples, seed=seed)
    for generation, (size, num_steps, lost) in enumerate(lives):
        size = min(size, global_batch)
        begun, position = step, step * global_batch
        changed = {**facts, "world_size": size, "samples_done": position}
        events += reads(generation, begun, begun + num_steps, **changed)
        for _ in range(num_steps):
            spans = [micro_batches(global_batch, micro_batch, size, rank) for rank in range(size)]
            assert len({len(of_rank) for of_rank in spans}) == 1
            step += 1
            trained[step] = [
                [
                    key
                    for begin, end in of_rank
                    for key in stream.indices(position + begin, end - begin)
                ]
                for of_rank in spans
            ]
            position += global_batch
        step = max(0, step - lost)  # it is killed, and its last steps are lost
    history = DataHistory(events)
    last = history.last_step
    for number in range(1, last + 1):
        use = history.use(number)
        assert use.is_done and use.counts
        of_ranks = [[key for batch in rank for key in batch] for rank in use.stretch.split(number)]
        assert of_ranks == trained[number]
        assert [key for rank in of_ranks for key in rank] == use.stretch.samples(number)
    used = [
        key for number in range(1, last + 1) for key in history.use(number).stretch.samples(number)
    ]
    assert len(set(used)) == len(used), "no index twice within its epoch"
    assert used == stream.indices(0, last * global_batch), "and none left out"


def test_the_newest_generation_that_made_a_step_counts() -> None:
    events = [*reads(0, 0, 17), *reads(1, 10, 12, world_size=5), *reads(2, 11, 20, world_size=3)]
    history = DataHistory(events)
    assert [history.use(step).stretch.generation for step in (10, 11, 12, 17)] == [0, 1, 2, 2]
    assert [use.stretch.generation for use in history.uses(12)] == [0, 1, 2]
    assert [use.counts for use in history.uses(12)] == [False, False, True]
    ended_in = [(use.stretch.generation, use.is_done) for use in history.uses(18)]
    assert ended_in == [(0, False), (2, True)]
    assert [(first, last) for first, last, _ in history.stretches()] == [
        (1, 10),
        (11, 11),
        (12, 20),
    ]
    assert history.last_step == 20


def test_the_step_that_nobody_finished_is_told_too() -> None:
    """What broke in a step is what an operator asks of first."""
    history = DataHistory(reads(0, 0, 7))
    assert (history.use(7).is_done, history.use(8).is_done) == (True, False)
    assert history.use(8).stretch.samples(8) == order(8)[7]


def test_a_generation_that_has_told_nothing_yet() -> None:
    history = DataHistory([*reads(0, 0, 17), word("resumed", 1, 10)])
    assert (history.use(12).stretch.generation, history.use(12).counts) == (0, False)
    assert history.last_step == 10
    with pytest.raises(NotRecorded, match="nothing of its data"):
        DataHistory([word("started", 0, 0), word("progress", 0, 9)]).use(3)
    with pytest.raises(NotRecorded, match="of the data of step 11 and later ones, not of step 3"):
        DataHistory(reads(4, 10, 12)).use(3)


def test_a_bad_checkpoint_that_was_passed_by_is_no_step_that_was_made() -> None:
    events = [word("checkpoint_quarantined", 1, 60), *reads(1, 50, 52)]
    assert DataHistory(events).last_step == 52


def test_what_a_driver_still_tells_of_the_group_before() -> None:
    told = word("progress", 1, 17)
    events = [*reads(0, 0, 17), *reads(1, 10, 10)[:2], told]
    assert DataHistory(events).last_step == 10
    assert DataHistory([*events, word("recovered", 1, 11)]).last_step == 11
    assert DataHistory([*events, word("recovered", 1, 11), told]).last_step == 17


def test_passes_over_a_source_that_are_not_of_one_length() -> None:
    """B39: a source of 8, 8 and 10, three samples a step."""
    begun = word("data_read", 0, 0, **BY_COUNT)
    events = [word("started", 0, 0), begun, word("progress", 0, 9)]
    first_end = {**BY_COUNT, "samples_done": 6, "passes": [[8, 1]]}
    longer = {**BY_COUNT, "samples_done": 24, "passes": [[8, 2]], "is_longer": True}
    history = DataHistory([*events, word("data_read", 0, 2, **first_end)])
    assert history.use(3).stretch.samples(3) == [(0, 6), (0, 7), (1, 0)]
    assert history.use(6).stretch.samples(6) == [(1, 7), (2, 0), (2, 1)]
    assert history.use(9).stretch.samples(9) == [(3, 0), (3, 1), (3, 2)], "as foretold"
    events += [word("data_read", 0, 2, **first_end), word("data_read", 0, 8, **longer)]
    assert DataHistory(events).use(9).stretch.samples(9) == [(2, 8), (2, 9), (2, 10)]


def test_ranks_of_a_tensor_parallel_group_have_read_the_same() -> None:
    stretch = DataHistory(reads(0, 0, 3, world_size=2, tensor=3)).use(2).stretch
    assert stretch.world_size == 6
    plain = DataHistory(reads(0, 0, 3, world_size=2)).use(2).stretch
    assert stretch.split(2) == [part for part in plain.split(2) for _ in range(3)]
    assert stretch.samples(2) == plain.samples(2)


def test_a_run_that_has_finished_has_no_later_steps() -> None:
    events = [*reads(0, 0, 30), word("run_finished", 0, 30)]
    assert DataHistory(events).use(30).is_done
    with pytest.raises(NotRecorded, match="the run has finished at step 30: no step 31"):
        DataHistory(events).use(31)
    gone_on = DataHistory([*events, *reads(1, 30, 35)])
    assert not gone_on.use(40).is_done, "it was given more steps, and those are foretold"


# --- comparison --------------------------------------------------------------------------------


def test_histories_of_other_sizes_agree() -> None:
    a = DataHistory(reads(0, 0, 40, world_size=1))
    b = DataHistory(
        [*reads(0, 0, 17, world_size=3), *reads(1, 10, 30, world_size=5, micro_batch=1)]
    )
    found = compare(a, b)
    assert (found.agree, found.num_steps) == (True, 30)
    assert (found.last_step_a, found.last_step_b) == (40, 30)


@pytest.mark.parametrize(
    ("changed", "first", "why"),
    [
        ({"seed": 4}, 11, "seed: 3 and 4"),
        ({"num_samples": 32}, 11, "num_samples: 31 and 32"),
        ({"global_batch": 6, "samples_done": 120}, 11, "global_batch: 12 and 6"),
        ({"samples_done": 132}, 11, "samples_done: 120 and 132"),
        ({"shuffle": False}, 11, "shuffle: True and False"),
    ],
)
def test_where_and_why_histories_part(changed: dict[str, Any], first: int, why: str) -> None:
    a = DataHistory(reads(0, 0, 40))
    b = DataHistory([*reads(0, 0, 17), *reads(1, 10, 30, **changed)])
    (difference,) = compare(a, b).differences
    assert (difference.first_step, difference.last_step) == (first, 30)
    assert why in difference.why
    assert difference.samples_a == order(first)[first - 1]
    assert difference.samples_b != difference.samples_a


def test_what_differs_and_makes_no_difference() -> None:
    """Other facts of which nothing follows, at first or ever."""
    plain = {"shuffle": False}
    a = DataHistory(reads(0, 0, 40, **plain))
    assert compare(a, DataHistory(reads(0, 0, 40, seed=4, **plain))).agree
    # 31 samples and 40: the same until the shorter one begins again, in step 3.
    (found,) = compare(a, DataHistory(reads(0, 0, 40, num_samples=40, **plain))).differences
    assert found.first_step == 3
    by_count = DataHistory(
        [word("started", 0, 0), word("data_read", 0, 0, **BY_COUNT), word("progress", 0, 99)]
    )
    known = {**BY_COUNT, "passes": [[500, 1]], "samples_done": 0}
    told_later = DataHistory(
        [word("started", 0, 0), word("data_read", 0, 0, **known), word("progress", 0, 99)]
    )
    assert compare(by_count, told_later).agree, "the pass ends after all steps"


def test_what_makes_no_difference_to_the_samples() -> None:
    a = DataHistory(reads(0, 0, 40))
    told = {"loader": "b", "other_loaders": ["c"], "tensor": 2, "accepted": "global_batch"}
    assert compare(a, DataHistory(reads(0, 0, 40, **told))).agree
    (first, _, stretch), *_ = DataHistory(reads(0, 0, 40, **told)).stretches()
    assert stretch.way(first) == a.stretches()[0][2].way(first)


# --- the verbs ---------------------------------------------------------------------------------


def write(root: Path, events: Sequence[LedgerEvent]) -> Path:
    make_run(root)
    ledger = LedgerWriter(make_fs(root), 0, "life0")
    for event in events:
        ledger.append(
            event.kind,
            time_s=event.time_s,
            generation=event.generation,
            step=event.step,
            data=event.data,
        )
    ledger.close()
    return root


def make_fs(root: Path) -> Any:
    from elastic.storage.filesystem import Filesystem

    return Filesystem.at(str(root))


def called(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["data", *map(str, arguments)])


def test_show(tmp_path: Path) -> None:
    run = write(tmp_path / "run", [*reads(0, 0, 17), *reads(1, 10, 30, world_size=5)])
    before = fingerprint(run)
    found = called("show", run, "--step", 13, "--json")
    assert found.exit_code == 0, found.output
    told = json.loads(found.stdout)
    assert [tuple(key) for key in told["samples"]] == order(13)[12]
    by_rank = [[len(batch) for batch in rank["micro_batches"]] for rank in told["ranks"]]
    assert by_rank == [[2, 1], [2, 1], [2], [2], [2]], "12 on 5 ranks"
    assert (told["generation"], told["world_size"], told["position"]) == (1, 5, 144)
    (other,) = told["other_generations"]
    assert other == {"generation": 0, "world_size": 2, "is_done": True, "same_samples": True}
    assert told["source"]["seed"] == 3
    assert fingerprint(run) == before

    text = called("show", run, "--step", 13).stdout
    assert "12 samples of Numbers: epoch 4 and 5, from position 144 of the run" in text
    first = " ".join(f"{epoch}:{index}" for epoch, index in order(13)[12][:2])
    assert f"   0  {first} | " in text
    assert "generation 0, world size 2: the same samples" in text
    assert "not told to be finished" in called("show", run, "--step", 31).stdout


def test_show_says_what_it_cannot_tell(tmp_path: Path) -> None:
    run = write(tmp_path / "run", [word("started", 0, 0)])
    found = called("show", run, "--step", 1)
    assert found.exit_code == 2 and "tells nothing of its data" in found.output
    assert called("show", tmp_path / "none", "--step", 1).exit_code == 2
    assert called("show", run, "--step", 0).exit_code == 2


def two_phases() -> list[LedgerEvent]:
    """Steps to 10 of one loader, then those of another, and a third that no step is of."""
    others = {"other_loaders": ["held out", "second"]}
    then = {**FACTS, "loader": "second", "num_samples": 50, "other_loaders": ["data", "held out"]}
    return [*reads(0, 0, 10, **others), word("data_read", 0, 10, **then), word("progress", 0, 15)]


def test_show_of_several_loaders(tmp_path: Path) -> None:
    run = write(tmp_path / "run", two_phases())
    text = called("show", run, "--step", 3).stdout
    assert "of the loader 'data'; 'held out', 'second' not among it" in text
    found = called("show", run, "--step", 12, "--loader", "second", "--json")
    told = json.loads(found.stdout)
    assert (told["loader"], told["other_loaders"]) == ("second", ["data", "held out"])
    for step, loader, why in (
        (12, "data", "step 12 is one of loader 'second', not of 'data'"),
        (3, "held out", "of loader 'held out' only that there is one"),
        (3, "none", "nothing of a loader 'none'. It tells what was read of: 'data', 'second'"),
    ):
        found = called("show", run, "--step", step, "--loader", loader)
        assert (found.exit_code, why in found.output) == (2, True), found.output


def test_diff_of_several_loaders(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", two_phases()), write(tmp_path / "b", two_phases())
    text = called("diff", a, b).stdout
    assert "of the loaders 'data', 'second'; 'held out' not among it" in text
    assert "each of 15 common steps" in text
    text = called("diff", a, b, "--loader", "second").stdout
    assert "of the loader 'second'; 'data', 'held out' not among it" in text
    assert "each of 5 common steps" in text
    found = called("diff", a, b, "--loader", "held out")
    assert (found.exit_code, "only that there is one" in found.output) == (2, True)


def test_show_of_a_tensor_parallel_run(tmp_path: Path) -> None:
    run = write(tmp_path / "run", reads(0, 0, 9, world_size=1, tensor=2))
    text = called("show", run, "--step", 2).stdout
    assert "world size 2, in tensor-parallel groups of 2 that read the same" in text
    told = json.loads(called("show", run, "--step", 2, "--json").stdout)
    assert (told["world_size"], told["tensor"]) == (2, 2)
    assert [rank["rank"] for rank in told["ranks"]] == [0, 1]
    assert told["ranks"][0]["micro_batches"] == told["ranks"][1]["micro_batches"]


def test_diff(tmp_path: Path) -> None:
    a = write(tmp_path / "a", reads(0, 0, 40, world_size=1))
    b = write(tmp_path / "b", [*reads(0, 0, 17), *reads(1, 10, 30, world_size=5)])
    c = write(tmp_path / "c", [*reads(0, 0, 17), *reads(1, 10, 30, seed=4)])
    found = called("diff", a, b)
    assert found.exit_code == 0, found.output
    assert "the same samples in each of 30 common steps" in found.stdout
    assert json.loads(called("diff", a, b, "--json").stdout)["agree"] is True
    found = called("diff", a, c)
    assert found.exit_code == 1
    assert "other samples in step 11, to step 30: 12 and 12 samples" in found.stdout
    assert "  seed: 3 and 4" in found.stdout
    told = json.loads(called("diff", a, c, "--json").stdout)
    assert (told["agree"], told["differences"][0]["first_step"]) == (False, 11)


def test_diff_of_what_cannot_be_compared(tmp_path: Path) -> None:
    a = write(tmp_path / "a", reads(0, 0, 9))
    later = write(tmp_path / "later", reads(0, 10, 12))
    silent = write(tmp_path / "silent", [word("started", 0, 0)])
    for other, why in ((later, "no step that both"), (silent, "no finished step")):
        found = called("diff", a, other)
        assert (found.exit_code, why in found.output) == (2, True), found.output
    assert called("diff", a, tmp_path / "none").exit_code == 2
