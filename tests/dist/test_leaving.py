"""All ranks leave at one place, whichever of them was told, and as soon as the time demands."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from elastic.storage.filesystem import Filesystem
from elastic.storage.ledger import read_ledger
from tests.dist.leaving_run import Plan, many_starts, one_start
from tests.dist.processes import run_ranks
from tests.dist.standalone_run import Numbers, Passes, catalog, curve

GRACE_S = 3.0


@pytest.mark.parametrize("told", [0, 1])
def test_a_signal_to_one_rank_at_any_moment_stops_all_at_one_step(tmp_path: Path, told: int):
    """B66 and B69: whoever hears first, all save the same step, and nobody waits for nobody."""
    seed = 71 + told
    print(f"seed {seed}")
    plan = Plan(root=f"{tmp_path}/run", until=10**6, told=told)
    ranks = run_ranks(many_starts, 2, plan, 15, seed, timeout_s=110)
    steps = [[step for step, _ in rank] for rank in ranks]
    assert steps[0] == steps[1] and steps[0] == sorted(steps[0])
    assert set(steps[0]) <= set(catalog(plan.root).complete_steps())
    assert max(took_s for _, took_s in ranks[told]) < GRACE_S


@pytest.mark.parametrize("source", [Numbers, Passes])
def test_a_long_step_is_dropped_and_nothing_of_it_remains(tmp_path: Path, source: Any):
    """Bit for bit the run that was never stopped: position, buffers, streams and counters too."""
    calm = Plan(root=f"{tmp_path}/calm", until=6, source=source)
    run_ranks(one_start, 2, calm)
    # Three micro-batches of 0.4 s: from step 2 on the ranks know that steps are long.
    hurried = dataclasses.replace(
        calm, root=f"{tmp_path}/run", pause_s=0.4, at_step=4, at_micro_batch=0
    )
    ended = run_ranks(one_start, 2, hurried)
    assert [rank["step"] for rank in ended] == [3, 3]
    assert [rank["samples"] for rank in ended] == [36, 36]
    # Told in the first of three, and known before the second.
    assert [rank["micro"]["batches"] for rank in ended] == [10, 10]
    (last,) = [e for e in read_ledger(Filesystem.at(hurried.root)) if e.kind == "run_stopped"]
    assert last.step == 3
    resumed = run_ranks(one_start, 2, dataclasses.replace(calm, root=hurried.root))
    assert [rank["resumed"] for rank in resumed] == [3, 3]
    assert [rank["micro"]["batches"] for rank in resumed] == [18, 18]
    assert curve(hurried.root) == curve(calm.root)
    assert digests(hurried.root) == digests(calm.root)


def digests(root: str) -> list[tuple[str, str]]:
    """Of every file of the last checkpoint: tensors, streams, counters."""
    found = catalog(root)
    return sorted((file.path, file.digest) for file in found.manifest(6).files)


def test_a_short_step_is_finished(tmp_path: Path):
    plan = Plan(root=f"{tmp_path}/run", until=100, at_step=4, at_micro_batch=0)
    ended = run_ranks(one_start, 2, plan)
    assert ended[0]["step"] == ended[1]["step"] in (4, 5)
    assert ended[0]["micro"]["batches"] == 3 * ended[0]["step"]


def test_an_evaluation_ends_early_and_its_step_is_saved(tmp_path: Path):
    """B69: SIGTERM during an evaluation that would last for 20 s."""
    plan = Plan(root=f"{tmp_path}/run", until=100, at_step=3, at_evaluation_batch=5)
    ended = run_ranks(one_start, 2, plan)
    assert [rank["is_cut"] for rank in ended] == [True, True]
    assert ended[0]["evaluated"] == ended[1]["evaluated"] < 20
    assert ended[0]["step"] == ended[1]["step"] in (3, 4)
    assert catalog(plan.root).highest().step == ended[0]["step"]
