"""Snapshot reader: the parts of a snapshot's tensors that this rank needs, into the live tensors.

It is DCP's own reader interface over pieces in the nodes' memories, so that any mesh may read what
any other has left there. Nothing is used before its digest was checked. Must not import ray.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from elastic.storage.chunk_digests import digest_of
from elastic.storage.manifest import FileDigest, TensorInfo
from elastic.storage.verified_file import CheckpointCorrupt, VerifiedFile
from elastic.training import jsonable
from elastic.training.loading import Restored, agree, read_tensors
from elastic.training.node_memory import PieceLost, PieceSource
from elastic.training.part import torch_dtype
from elastic.training.piece import Layout, Part
from elastic.training.saving import STATE, rank_file
from elastic.training.shard_reader import GivenReader
from elastic.training.state import TrackedState
from elastic.training.wanted import Wanted, fill, fill_shares, shared_out

__all__ = ["SnapshotReader", "load_snapshot"]

Found = TypeVar("Found")

_NUM_THREADS = 2
_AHEAD = 3


def load_snapshot(
    sources: Sequence[Sequence[PieceSource]],
    name: str,
    tracked: TrackedState,
    process_group: dist.ProcessGroup | None = None,
) -> Restored:
    """Restores `tracked` in place from the snapshot called `name`; the same outcome on every rank.

    `sources` are the copies of each rank's piece, the nearest first. Raises as `loading.load` does:
    `CheckpointCorrupt` when no copy of a piece is sound, and `PieceLost` or `LoadFailed` when no
    copy can be read; then some tensors may have changed.
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


class SnapshotReader(GivenReader):
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
        return piece.read_file(name)

    def read_metadata(self) -> Metadata:
        return Metadata(
            state_dict_metadata=dict(self._entries),
            storage_data=self._parts,
            storage_meta=StorageMeta(),
        )

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        targets = [planner.resolve_tensor(item).detach() for item in plan.items]
        wanted = [self._wanted(*one) for one in zip(plan.items, targets, strict=True)]
        fill_shares(shared_out(wanted, _NUM_THREADS), self._read_from)
        for item, target in zip(plan.items, targets, strict=True):
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _wanted(self, item: ReadItem, target: torch.Tensor) -> Wanted:
        assert item.storage_index.offset is not None
        rank, part = self._parts[item.storage_index.fqn, item.storage_index.offset]
        return Wanted(
            info=_StorageInfo(str(rank), part.start, part.num_bytes),
            shape=torch.Size(part.lengths),
            dtype=torch_dtype(part.dtype),
            offsets=item.storage_offsets,
            lengths=item.lengths,
            target=target,
            is_raw=True,
        )

    def _read_from(self, rank: str, wanted: Sequence[Wanted]) -> None:
        self._pieces[int(rank)].read(lambda file: fill(file, wanted))

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        pass


class _Piece:
    """One piece, read from the first of its copies, and from the next where that is bad."""

    def __init__(self, copies: Sequence[PieceSource], name: str) -> None:
        self.name = name
        self._copies = list(copies)
        self._problems: list[Exception] = []
        self._lock = threading.Lock()
        self._open()

    def read(self, read: Callable[[VerifiedFile], None]) -> None:
        """Has `read` read it, and all of it again from another copy if it fails; for many threads.

        Raises `CheckpointCorrupt`, `PieceLost` when no copy has what it wants.
        """

        def read_from(copy: PieceSource, digests: FileDigest) -> None:
            with VerifiedFile(_Copy(copy, digests), self._place(copy), digests) as file:
                read(file)

        self._of_any(read_from)

    def read_file(self, name: str) -> bytes:
        """A plain file in it. Raises as `read`."""

        def read_from(copy: PieceSource, _: FileDigest) -> bytes:
            start, size, expected = self.layout.files[name]
            data = _bytes_of(copy, start, size)
            found = digest_of(data)
            if found != expected:
                problem = f"{name}: expected digest {expected}, found {found}"
                raise CheckpointCorrupt(self._place(copy), problem)
            return data

        return self._of_any(read_from)

    def _place(self, copy: PieceSource) -> str:
        return f"{self.name} in the memory of node {copy.where}"

    def _of_any(self, read_from: Callable[[PieceSource, FileDigest], Found]) -> Found:
        """What it gives for the first copy that is sound."""
        while True:
            copy, digests = self._current()
            try:
                return read_from(copy, digests)
            except (CheckpointCorrupt, PieceLost) as error:
                self._give_up(copy, error)

    def _current(self) -> tuple[PieceSource, FileDigest]:
        with self._lock:
            if not self._copies:
                raise self._worst()
            return self._copies[0], self._digests

    def _give_up(self, copy: PieceSource, problem: Exception) -> None:
        with self._lock:
            if self._copies and self._copies[0] is copy:  # else another thread was first
                self._next(problem)
                self._open()

    def _open(self) -> None:
        """The next copy that answers."""
        while self._copies:
            try:
                self.layout = Layout.from_json(self._copies[0].index())
                self._digests = self._copies[0].digests()
            except (PieceLost, ValueError) as error:
                self._next(error)
                continue
            return
        raise self._worst()

    def _worst(self) -> Exception:
        bad = [found for found in self._problems if isinstance(found, CheckpointCorrupt)]
        return (bad or self._problems or [PieceLost(f"{self.name}: no copy of a piece")])[-1]

    def _next(self, problem: Exception) -> None:
        self._problems.append(problem)
        self._copies.pop(0)


def _bytes_of(copy: PieceSource, start: int, num_bytes: int) -> bytes:
    stream = copy.open()
    if stream is None:
        return bytes(copy.fetch(start, num_bytes)())
    with stream:
        stream.seek(start)
        found = stream.read(num_bytes)
    if len(found) < num_bytes:
        raise PieceLost(f"the memory of node {copy.where} ended before the bytes of a piece")
    return found


class _Copy:
    """One copy of a piece, as `VerifiedFile` reads it: with a stream here, else sent from afar."""

    def __init__(self, copy: PieceSource, digests: FileDigest) -> None:
        self._copy = copy
        self._num_bytes = digests.bytes
        self._stream = copy.open()
        self._coming: dict[int, Callable[[], memoryview]] = {}
        """What was asked for before it was wanted, by its start."""
        self.is_local = self._stream is not None
        self.url = f"the memory of node {copy.where}"

    def open_input(self, path: str) -> BinaryIO:
        stream, self._stream = self._stream or self._copy.open(), None
        if stream is None:
            raise PieceLost(f"{self.url} cannot be opened any more")
        return stream

    def read_range(self, path: str, start: int, num_bytes: int) -> memoryview:
        ahead = range(start, min(self._num_bytes, start + _AHEAD * num_bytes), num_bytes)
        self._coming = {
            begin: self._coming.get(begin)
            or self._copy.fetch(begin, min(num_bytes, self._num_bytes - begin))
            for begin in ahead
        }
        return self._coming[start]()

    def size(self, path: str) -> int | None:
        raise PieceLost(f"{self.url} ended before the {self._num_bytes} bytes of a piece")
