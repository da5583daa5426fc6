"""Snapshot reader: the parts of a snapshot's tensors that this rank needs, into the live tensors.

It is DCP's own reader interface over pieces in the nodes' memories, so that any mesh may read what
any other has left there. Nothing is used before its digest was checked. Must not import ray.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from elastic.storage.chunk_digests import CHUNK_BYTES, chunk_problem
from elastic.storage.manifest import TensorInfo
from elastic.training import jsonable
from elastic.training.loading import Restored, agree, read_tensors
from elastic.training.node_memory import PieceLost, PieceSource
from elastic.training.part import torch_dtype
from elastic.training.piece import Layout, Part
from elastic.training.saving import STATE, rank_file
from elastic.training.shard_reader import CheckpointCorrupt
from elastic.training.state import TrackedState

__all__ = ["SnapshotReader", "load_snapshot"]


def load_snapshot(
    sources: Sequence[Sequence[PieceSource]],
    name: str,
    tracked: TrackedState,
    process_group: dist.ProcessGroup | None = None,
) -> Restored:
    """Restores `tracked` in place from the snapshot called `name`; the same outcome on every rank.

    `sources` are the copies of each rank's piece, the nearest first. Raises as `loading.load` does:
    `CheckpointCorrupt` when no copy of some bytes is sound, and `PieceLost` or `LoadFailed` when
    no copy can be read; then some tensors may have changed.
    """
    rank = dist.get_rank(process_group) if process_group is not None else 0
    problem: Exception | None = None
    restored = None
    try:
        reader = SnapshotReader(sources, name)
        plain = jsonable.loads(reader.read_file(0, STATE))
        rank_plain = None
        if rank < len(sources):
            rank_plain = jsonable.loads(reader.read_file(rank, rank_file(rank)))
        # In DCP's read_tensors our reader stands in for that of files.
        tracked.restore(plain["tracked"], reader.tensors(), lambda t: read_tensors(reader, t))
        restored = Restored(plain=plain, rank_plain=rank_plain, is_snapshot=True)
    except Exception as error:  # noqa: BLE001 - the other ranks have to hear of it
        problem = error
    agree(problem, name, process_group)
    assert restored is not None
    return restored


class SnapshotReader(StorageReader):
    """Reads pieces, given the copies of each by the world rank that made it."""

    def __init__(self, sources: Sequence[Sequence[PieceSource]], name: str) -> None:
        """Asks for the index of every piece. Raises `PieceLost`."""
        super().__init__()
        self._pieces = [_Piece(copies, name) for copies in sources]
        self._parts: dict[tuple[str, torch.Size], tuple[int, Part]] = {}
        self._entries: dict[str, TensorStorageMetadata] = {}
        for rank, piece in enumerate(self._pieces):
            for part in piece.layout.parts:
                self._add(rank, part)

    def _add(self, rank: int, part: Part) -> None:
        entry = self._entries.get(part.name)
        if entry is None:
            entry = self._entries[part.name] = TensorStorageMetadata(
                properties=TensorProperties(dtype=torch_dtype(part.dtype)),
                size=torch.Size(part.shape),
                chunks=[],
            )
        key = part.name, torch.Size(part.offsets)
        if part.num_bytes and key not in self._parts:
            self._parts[key] = rank, part
            entry.chunks.append(
                ChunkStorageMetadata(
                    offsets=torch.Size(part.offsets), sizes=torch.Size(part.lengths)
                )
            )

    def tensors(self) -> dict[str, TensorInfo]:
        """Shape and dtype of every tensor, by name."""
        return {
            name: TensorInfo(
                shape=list(entry.size), dtype=str(entry.properties.dtype).removeprefix("torch.")
            )
            for name, entry in self._entries.items()
        }

    def read_file(self, world_rank: int, name: str) -> bytes:
        """A plain file of that rank's piece. Raises `CheckpointCorrupt`, `PieceLost`."""
        piece = self._pieces[world_rank]
        if name not in piece.layout.files:
            raise CheckpointCorrupt(piece.name, f"the piece of rank {world_rank} has no {name}")
        return bytes(piece.read(*piece.layout.files[name]))

    def read_metadata(self) -> Metadata:
        return Metadata(
            state_dict_metadata=dict(self._entries),
            storage_data=self._parts,
            storage_meta=StorageMeta(),
        )

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        def place(item: ReadItem) -> tuple[int, int]:
            rank, part = self._part(item.storage_index)
            return rank, part.start

        for item in sorted(plan.items, key=place):  # in the order in which the bytes lie
            rank, part = self._part(item.storage_index)
            saved = self._pieces[rank].tensor(part, item.storage_offsets, item.lengths)
            target = planner.resolve_tensor(item).detach()
            assert target.shape == saved.shape, f"{item.storage_index} into {target.shape}"
            target.copy_(saved)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _part(self, index: MetadataIndex) -> tuple[int, Part]:
        assert index.offset is not None
        return self._parts[index.fqn, index.offset]

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        pass

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        assert checkpoint_id is None, "the pieces are given at construction"

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False


class _Piece:
    """One piece, read from the first of its copies, and from the next where that is bad."""

    def __init__(self, copies: Sequence[PieceSource], name: str) -> None:
        self.name = name
        self._copies = list(copies)
        self._problems: list[Exception] = []
        self._open()

    def _open(self) -> None:
        """The next copy that answers."""
        while self._copies:
            copy = self._copies[0]
            try:
                self.layout = Layout.from_json(copy.index())
                self._digests = copy.digests()
                self._view = copy.view()
            except (PieceLost, ValueError) as error:
                self._next(error)
                continue
            self._checked: set[int] = set()
            self._fetched: dict[int, memoryview] = {}
            return
        bad = [found for found in self._problems if isinstance(found, CheckpointCorrupt)]
        raise (bad or self._problems or [PieceLost(f"{self.name}: no copy of a piece")])[-1]

    def _next(self, problem: Exception) -> None:
        self._problems.append(problem)
        self._copies.pop(0)

    def tensor(self, part: Part, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
        """These values of the part; of another machine's only the rows that they lie in."""
        dtype = torch_dtype(part.dtype)
        if not part.lengths:
            return _as_tensor(self.read(part.start, part.num_bytes), dtype).view(())
        row_bytes = part.num_bytes // part.lengths[0]
        start = part.start + offsets[0] * row_bytes
        rows = _as_tensor(self.read(start, lengths[0] * row_bytes), dtype)
        found = rows.view(lengths[0], *part.lengths[1:])
        for dim in range(1, len(lengths)):
            found = found.narrow(dim, offsets[dim], lengths[dim])
        return found

    def read(self, start: int, num_bytes: int) -> memoryview:
        """Checked bytes. Raises `CheckpointCorrupt`, `PieceLost` when no copy has them."""
        while True:
            try:
                return self._read(start, num_bytes)
            except (CheckpointCorrupt, PieceLost) as error:
                self._next(error)
            self._open()

    def _read(self, start: int, num_bytes: int) -> memoryview:
        end = start + num_bytes
        numbers = range(start // CHUNK_BYTES, -(-end // CHUNK_BYTES))
        if self._view is not None:
            for number in numbers:
                self._chunk(number)
            return self._view[start:end]
        found = bytearray(num_bytes)
        for number in numbers:
            chunk, begins = self._chunk(number), number * CHUNK_BYTES
            low, high = max(start, begins), min(end, begins + len(chunk))
            found[low - start : high - start] = chunk[low - begins : high - begins]
        # What is read next begins in the last chunk, if anywhere in these.
        self._fetched = {n: c for n, c in self._fetched.items() if n >= numbers.stop - 1}
        return memoryview(found)

    def _chunk(self, number: int) -> memoryview:
        start = number * CHUNK_BYTES
        end = min(start + CHUNK_BYTES, self.layout.num_bytes)
        if self._view is not None:
            chunk = self._view[start:end]
        elif number in self._fetched:
            return self._fetched[number]
        else:
            chunk = self._fetched[number] = self._copies[0].read(start, end - start)
        if number not in self._checked:
            problem = chunk_problem(self._digests, number, chunk)
            if problem:
                self._fetched.pop(number, None)
                where = f"{self.name} in the memory of node {self._copies[0].where}"
                raise CheckpointCorrupt(where, problem)
            self._checked.add(number)
        return chunk


def _as_tensor(data: memoryview, dtype: torch.dtype) -> torch.Tensor:
    flat = np.frombuffer(data, dtype=np.uint8)
    # It may not start where values of this dtype have to.
    tensor = torch.from_numpy(flat) if flat.flags.writeable else torch.from_numpy(flat.copy())
    return tensor.view(dtype) if flat.nbytes else torch.empty(0, dtype=dtype)
