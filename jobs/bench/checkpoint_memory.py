"""The memory tier under `bench checkpoint`: what three ranks saved, in the memories of two nodes.

As after the loss of the third node of a ring: of its piece the copy on the next node is left. The
keepers are actors on a real cluster of two nodes, on one machine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ray
import torch.distributed as dist
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elastic.cluster.memory_line import Keepers, Mapped, MemoryLine
from elastic.cluster.snapshot_keeper import SnapshotKeeper
from elastic.policy.coverage import Piece, Snapshot, Unneeded
from elastic.training import jsonable, piece
from elastic.training.membership import Membership
from elastic.training.process_group import Groups
from elastic.training.saving import STATE, rank_file
from elastic.training.snapshot_reader import load_snapshot
from elastic.training.state import TrackedState
from jobs.bench.checkpoint import MEMORY
from jobs.bench.cluster import local_cluster

_HELD = ((0, 2), (1,))
"""Whose pieces each of the two nodes has."""


def write(directory: Path, state: TrackedState) -> None:
    """This rank's piece, for whoever plays its keeper later."""
    rank = dist.get_rank()
    captured = state.capture()
    files = {rank_file(rank): jsonable.dumps({}).encode()}
    if rank == 0:
        files[STATE] = jsonable.dumps({"tracked": captured.plain}).encode()
    layout, sources = piece.lay_out(captured.tensors, files, rank)
    block = bytearray(layout.num_bytes)
    piece.copy(layout, sources, files, memoryview(block))
    (directory / f"piece-{rank}").write_bytes(block)
    (directory / f"index-{rank}").write_bytes(layout.to_json())


@contextlib.contextmanager
def loader(
    directory: Path, member: Membership, state: TrackedState, groups: Groups
) -> Iterator[Callable[[], Any]]:
    """A load from the nodes' memories, as often as it is called, on both ranks at once."""
    rank = member.world_rank
    with contextlib.ExitStack() as undo:
        told: list[Any] = [None]
        if rank == 0:
            cluster = undo.enter_context(local_cluster(num_nodes=2, fast_health_checks=False))
            told = [cluster.address]
        dist.broadcast_object_list(told, group=groups.control)
        ray.init(address=told[0], namespace="bench", log_to_driver=False, logging_level="WARNING")
        undo.callback(ray.shutdown)
        nodes = sorted(node["NodeID"] for node in ray.nodes() if node["Resources"].get("CPU"))
        if rank == 0:
            told = [_keeper(node_id) for node_id in nodes]  # held until the end
        dist.barrier(group=groups.control)
        by_node = {node_id: ray.get_actor(node_id) for node_id in nodes}
        keepers = Keepers(by_node=by_node, own=nodes[rank], buddy=None)
        line = MemoryLine(keepers, member, None, Mapped())
        _put(line, directory, member.generation, _HELD[rank])
        dist.barrier(group=groups.control)
        held = tuple((nodes[0 if rank in _HELD[0] else 1],) for rank in range(3))
        snapshot = Snapshot(generation=member.generation, step=1, nodes=held)
        yield lambda: load_snapshot(line.sources(snapshot), MEMORY, state, groups.control)
        dist.barrier(group=groups.control)


def _keeper(node_id: str) -> Any:
    where = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
    made = ray.remote(num_cpus=0, max_concurrency=8)(SnapshotKeeper)
    return made.options(name=node_id, scheduling_strategy=where).remote()


def _put(line: MemoryLine, directory: Path, generation: int, ranks: tuple[int, ...]) -> None:
    blocks = {rank: (directory / f"piece-{rank}").read_bytes() for rank in ranks}
    line.prepare(max(map(len, blocks.values())), Unneeded())
    for rank, block in blocks.items():
        room = line.room(len(block), Unneeded())
        assert room is not None
        room[: len(block)] = block
        made = Piece(generation=generation, step=1, world_rank=rank, world_size=3)
        line.seal(made, len(block), (directory / f"index-{rank}").read_bytes(), Unneeded())
