"""A node that is drained: the group saves and leaves it before it goes, and no step is lost."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from tests.cluster.local_cluster import RAY, Job, LocalCluster, is_running, unaccounted_s, wait_for

FLAGS = (
    *("--steps", "1000000", "--global-batch", "12", "--micro-batch", "2", "--model", "nano"),
    *("--sequence-length", "64", "--save-every", "1000000", "--grow-interval", "1", "--quiet"),
)
DEADLINE_S = 15


def drain(cluster: LocalCluster, node_id: str, deadline_s: int = DEADLINE_S) -> None:
    """As an operator does it; the node has so many seconds left."""
    command = [
        *(RAY, "drain-node", "--address", cluster.address, "--node-id", node_id),
        *("--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot"),
        *("--deadline-remaining-seconds", str(deadline_s)),
    ]
    subprocess.run(command, check=True, capture_output=True)


@pytest.mark.timeout(180)
def test_the_node_of_rank_0_is_left_in_time_and_another_is_taken(
    three_nodes: LocalCluster, tmp_path: Path
):
    with Job(three_nodes, tmp_path, "run", *FLAGS, "--num-workers", "1:3") as job:
        job.wait_for_event("started")
        before = job.ranks()
        going = before[0]
        drain(three_nodes, going["node_id"])
        drained_s = time.time()
        left = job.wait_for_event("recovered")
        assert left.data["lost_steps"] == 0 and left.data["new_world_size"] == 2
        assert "which goes in" in left.reason and going["node_id"][:12] in left.reason
        assert [one["pid"] for one in job.ranks()] == [one["pid"] for one in before[1:]]
        wait_for("the end of its worker", lambda: not is_running(going["pid"]), 5.0)
        assert time.time() - drained_s < DEADLINE_S
        assert [e.world_rank for e in job.events("drain_noticed")] == [-1]

        three_nodes.add()  # the one that is drained is still there, and must not be taken
        grown = job.wait_for_event("recovered", lambda event: event.time_s > left.time_s)
        assert grown.data["new_world_size"] == 3 and grown.data["lost_steps"] == 0
        assert going["node_id"] not in [one["node_id"] for one in job.ranks()]
        three_nodes.remove(going["node_id"])  # as its owner takes it
        time_s = time.time()
        wait_for("steps after it", lambda: steps_after(job, time_s))
        assert job.events("worker_died", "node_lost", "failure_decided") == []
        assert unaccounted_s(job.events()) < 0.3


def steps_after(job: Job, time_s: float) -> bool:
    return any(event.time_s > time_s + 1.0 and event.step > 0 for event in job.events("progress"))


@pytest.mark.timeout(120)
@pytest.mark.thorough
@pytest.mark.parametrize("rank", [0, 1])
def test_a_save_that_takes_too_long_is_left_behind(
    three_nodes: LocalCluster, tmp_path: Path, rank: int
):
    """B67: 5 s until the node goes, and a disk that has just become slow: 8 s for each file."""
    slow = tmp_path / "run.slow"
    with Job(
        three_nodes, tmp_path, "run", "--slow-s", "8", module="tests.cluster.departing"
    ) as job:
        job.wait_for_event("progress", lambda event: event.step > 20)
        going = job.ranks()[rank]
        saved = max(event.step for event in job.events("checkpoint_committed"))
        slow.touch()
        drained_s = time.time()
        drain(three_nodes, going["node_id"], deadline_s=5)
        left = job.wait_for_event("recovered")
        assert left.time_s - drained_s < 5 + 2.0
        assert left.data["lost_steps"] > 0
        resumed = job.events("resumed")[0]
        assert resumed.step == saved and "after a save; not all ranks had" in left.reason
        wait_for("the end of its worker", lambda: not is_running(going["pid"]), 5.0)
        slow.unlink()
        # The third node takes its place, at once or a moment later: it was asked to at the notice.
        job.wait_for_event("recovered", lambda event: event.data["new_world_size"] == 2)
        assert (
            sum(event.data["lost_steps"] for event in job.events("recovered"))
            == (left.data["lost_steps"])
        )
        (planned,) = job.events("growth_planned")
        assert planned.time_s < left.time_s and "in place of rank" in planned.reason
    three_nodes.remove(going["node_id"])
    three_nodes.add()
