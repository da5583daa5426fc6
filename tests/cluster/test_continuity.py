"""The promise: a run that loses workers and nodes has the losses of one that does not.

And survivors keep their processes, whoever dies.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from elastic.cli import main
from tests.cluster.local_cluster import (
    Job,
    LocalCluster,
    digest,
    losses,
    unaccounted_s,
    wait_for,
    worst_difference,
)
from tests.dist.undisturbed import undisturbed

STEPS = 60
FLAGS = (
    *("--steps", str(STEPS), "--global-batch", "12", "--micro-batch", "2", "--model", "nano"),
    *("--sequence-length", "64", "--save-every", "5", "--save-behind", "wait", "--keep", "-1"),
    *("--grow-interval", "1", "--quiet"),
)


@pytest.mark.thorough
@pytest.mark.timeout(180)
def test_killed_at_the_same_size_not_a_bit_differs(three_nodes: LocalCluster, tmp_path: Path):
    flags = (*FLAGS, "--optimizer", "sgd", "--dtype", "float32")
    expected = undisturbed(3, tmp_path, *flags)
    with Job(three_nodes, tmp_path, "killed", *flags, "--num-workers", "3") as job:
        job.wait_for_commit(30)
        first, _, last = pids(job)
        job.kill_rank(1)
        found = job.wait()
        assert {first, last} < set(pids(job))  # they waited for the third with all they hold
    assert found["restarts"] == 1 and found["world_sizes"] == [3, 3]
    assert job.events("recovered")[0].data["phases_s"]["start"] == 0.0
    assert losses(found) == losses(expected)
    assert losses(found, "grad_norms") == losses(expected, "grad_norms")
    assert digest(job.url, STEPS) == digest(expected["run"], STEPS)


@pytest.mark.timeout(300)
def test_workers_and_nodes_go_and_come(three_nodes: LocalCluster, tmp_path: Path):  # B65, B70, B84
    flags = (*FLAGS, "--optimizer", "adamw", "--dtype", "float64")
    expected = undisturbed(3, tmp_path, *flags)
    pace = tmp_path / "pace"
    pace.touch()
    started = (*flags, "--num-workers", "1:3")
    with Job(three_nodes, tmp_path, "struck", *started, pace=pace) as job:
        job.wait_for_event("generation_started")
        kill_a_worker(job)
        lose_a_node(job, three_nodes)
        pace.unlink()
        found = job.wait()
    assert found["world_sizes"] == [3, 2, 3, 2, 3]
    assert_same_samples(job.url, expected["run"])
    assert worst_difference(losses(found), losses(expected)) <= 1e-9
    norms = losses(found, "grad_norms"), losses(expected, "grad_norms")
    assert worst_difference(*norms) <= 1e-9
    assert job.events("reform_failed") == []
    for lost in job.events("recovered")[::2]:
        phases: dict[str, Any] = lost.data["phases_s"]
        assert phases["start"] == 0.0 and phases["place"] == 0.0  # nothing was started
    assert unaccounted_s(job.events()) < 0.3


def assert_same_samples(*runs: str) -> None:
    """In each step, as `elastic data` works it out from what the driver has recorded."""
    found = CliRunner().invoke(main, ["data", "diff", *runs, "--json"])
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["num_steps"] == STEPS


def kill_a_worker(job: Job) -> None:
    """Rank 1 dies; the others go on in their processes, and a new one joins them."""
    job.wait_for_commit(5)
    first, _, last = pids(job)
    job.kill_rank(1)
    wait_for("the re-form without rank 1", lambda: len(job.events("recovered")) == 1)
    assert pids(job) == [first, last]
    wait_for("another worker in its place", lambda: len(job.events("recovered")) == 2)
    assert {first, last} < set(pids(job))


def lose_a_node(job: Job, cluster: LocalCluster) -> None:
    """Rank 0 goes with its node and the store that it holds; another node comes."""
    job.wait_for_commit(job.events("recovered")[-1].step + 1)
    before = pids(job)
    cluster.remove(job.ranks()[0]["node_id"])
    wait_for("the re-form without rank 0", lambda: len(job.events("recovered")) == 3)
    assert pids(job) == before[1:]
    cluster.add()
    wait_for("the new node's worker", lambda: len(job.events("recovered")) == 4)
    assert set(before[1:]) < set(pids(job))


def pids(job: Job) -> list[int]:
    return [rank["pid"] for rank in job.ranks()]
