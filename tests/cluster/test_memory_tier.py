"""The memory tier: a dead process and a lost node cost a step or two, and no look at storage."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from elastic.cluster.memory_line import Keepers, Mapped, MemoryLine
from elastic.cluster.places import places
from elastic.cluster.ray_internals import GroupMember
from elastic.cluster.snapshot_keepers import SnapshotKeepers
from elastic.policy.coverage import Piece, Resume, Unneeded, newest
from elastic.storage.chunk_digests import CHUNK_BYTES, chunk_problem
from elastic.storage.ledger import LedgerEvent
from elastic.training.node_memory import PieceLost
from tests.cluster.local_cluster import Job, LocalCluster, wait_for

EVERY = 2
FLAGS = (
    *("--steps", "1000000", "--global-batch", "12", "--micro-batch", "2", "--model", "nano"),
    *("--sequence-length", "64", "--save-every", "1000000steps", "--grow-interval", "600"),
    *("--num-workers", "1:3", "--snapshot-every", str(EVERY), "--quiet"),
)
# The newest may still be on its way, and the workers of a node that goes may outlive its keeper.
MOST_LOST = 2 * EVERY


@pytest.mark.timeout(180)
def test_a_death_and_a_lost_node_are_recovered_from_memory(
    three_nodes: LocalCluster, tmp_path: Path
) -> None:
    pace = tmp_path / "pace"  # steps long enough that a copy ends within one
    pace.touch()
    with Job(three_nodes, tmp_path, "run", *FLAGS, pace=pace) as job:
        wait_for_snapshot(job, generation=0)
        # Whoever looks for a checkpoint from now on finds none, and the run would fail.
        Path(job.url, "checkpoints").rename(tmp_path / "away")
        job.kill_rank(1)
        judge(job, generation=1)

        wait_for_snapshot(job, generation=1)
        assert job.events("snapshot_rejected", "snapshot_failed") == []
        three_nodes.remove(job.ranks()[0]["node_id"])
        three_nodes.add()
        judge(job, generation=2)
        assert job.events("snapshot_rejected") == []
        # One may have been on its way to the node when that went, which is told.
        failed = [event.reason for event in job.events("snapshot_failed")]
        assert [reason for reason in failed if "actor" not in reason.lower()] == []
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


def test_a_piece_is_copied_to_the_next_node_and_read_from_another_machine(
    connected: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, other = [node.node_id for node in connected.nodes][:2]
    keepers = SnapshotKeepers(is_on=True)
    keepers.start([own, other])
    told = Keepers(by_node=keepers.told(own, []).by_node, own=own, buddy=other)
    member = places("run", 0, [member_on(own)], 0, Resume(step=None))[0]
    line = MemoryLine(told, member, None, Mapped())
    made = Piece(generation=0, step=2, world_rank=0, world_size=1)
    data = os.urandom(CHUNK_BYTES + 5000)
    try:
        line.prepare(len(data), Unneeded())
        room = line.room(len(data), Unneeded())
        room[: len(data)] = data
        line.seal(made, len(data), b"index", Unneeded())
        held = asyncio.run(keepers.open(1))
        assert held == {own: [made], other: [made]}

        keepers.forget([own])
        snapshot = newest({other: held[other]})
        ((copy,),) = line.sources(snapshot)
        assert copy.index() == b"index"
        stream = copy.open()
        assert stream is not None
        with stream:
            found = bytearray(len(data))
            assert stream.readinto(found) == len(data) and found == data
        monkeypatch.setattr("elastic.cluster.segment.machine", lambda: "another")
        assert copy.open() is None
        assert copy.fetch(0, CHUNK_BYTES)() == data[:CHUNK_BYTES]
        assert copy.fetch(CHUNK_BYTES, 5000)() == data[CHUNK_BYTES:]
        assert chunk_problem(copy.digests(), 1, data[CHUNK_BYTES:]) == ""
    finally:
        keepers.close()
    with pytest.raises(PieceLost):
        line.sources(snapshot)[0][0].index()


def member_on(node_id: str) -> GroupMember:
    return GroupMember(
        world_rank=0,
        world_size=1,
        local_rank=0,
        local_world_size=1,
        node_rank=0,
        node_id=node_id,
        node_ip="127.0.0.1",
        pid=os.getpid(),
    )


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
