"""The memory tier: a dead process and a lost node cost a step or two, and no look at storage."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elastic.storage.ledger import LedgerEvent
from tests.cluster.local_cluster import Job, LocalCluster, wait_for

EVERY = 2
FLAGS = (
    *("--steps", "1000000", "--global-batch", "12", "--micro-batch", "2", "--model", "nano"),
    *("--sequence-length", "64", "--save-every", "1000000steps", "--grow-interval", "600"),
    *("--num-workers", "1:3", "--snapshot-every", str(EVERY), "--quiet"),
)
# Each is taken after a whole step at least, so that the one before may still be in the making.
MOST_LOST = 2 * EVERY


@pytest.mark.timeout(180)
def test_a_death_and_a_lost_node_are_recovered_from_memory(
    three_nodes: LocalCluster, tmp_path: Path
) -> None:
    with Job(three_nodes, tmp_path, "run", *FLAGS) as job:
        wait_for_snapshot(job, generation=0)
        # Whoever looks for a checkpoint from now on finds none, and the run would fail.
        Path(job.url, "checkpoints").rename(tmp_path / "away")
        job.kill_rank(1)
        judge(job, generation=1)

        wait_for_snapshot(job, generation=1)
        three_nodes.remove(job.ranks()[0]["node_id"])
        three_nodes.add()
        judge(job, generation=2)
        assert [e.reason for e in job.events("snapshot_rejected", "snapshot_failed")] == []
    wait_for("the end of all that kept snapshots", lambda: not segments())


@pytest.mark.thorough
@pytest.mark.timeout(180)
def test_a_damaged_snapshot_is_told_and_the_checkpoint_resumed(
    three_nodes: LocalCluster, tmp_path: Path
) -> None:
    """B14, for snapshots: one bad copy is made up for by the other, two are not trusted."""
    with Job(three_nodes, tmp_path, "run", *FLAGS) as job:
        wait_for_snapshot(job, generation=0)
        os.kill(job.ranks()[0]["pid"], 19)  # SIGSTOP: no other snapshot is made meanwhile
        for path in segments():
            with path.open("r+b") as file:
                file.write(bytes(1 << 16))
        job.kill_rank(1)
        os.kill(job.ranks()[0]["pid"], 18)
        found = job.wait_for_event("recovered")
        assert found.data["source"] == "storage"
        (rejected, *_) = job.events("snapshot_rejected")
        assert "expected" in rejected.reason and "found" in rejected.reason
        assert job.wait_for_event("resumed").step == 0


def wait_for_snapshot(job: Job, generation: int) -> None:
    job.wait_for_event("snapshot_kept", lambda event: event.generation == generation)


def judge(job: Job, generation: int) -> None:
    found: LedgerEvent = job.wait_for_event("recovered", lambda e: e.generation == generation)
    told = [(e.kind, e.generation, e.step, e.reason, e.data) for e in job.events()]
    assert found.data["source"] == "memory", told
    assert found.data["new_world_size"] == found.data["old_world_size"] - 1, told
    assert found.data["lost_steps"] <= MOST_LOST, told


def segments() -> list[Path]:
    """Those that any process has open."""
    return [entry for entry in Path("/proc").glob("[0-9]*/fd/*") if is_segment(entry)]


def is_segment(entry: Path) -> bool:
    try:
        return "elastic-snapshot" in os.readlink(entry)
    except OSError:
        return False
