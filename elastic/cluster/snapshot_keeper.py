"""In a process of its own on each node of a run: keeps the pieces of snapshots in its memory.

It outlives the worker processes that fill it, digests what they have sealed, and hands a copy to
the keeper of another node. A generation that was replaced can put nothing into it. Must not import
torch, so that it starts at once and holds little memory of its own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray

from elastic.cluster.segment import Place, Segment, available_bytes
from elastic.policy.coverage import SLOTS, Piece, Unneeded
from elastic.storage.chunk_digests import CHUNK_BYTES, ChunkDigester
from elastic.storage.manifest import FileDigest

logger = logging.getLogger("elastic")

_NICE = 10
_IN_FLIGHT = 2
_SENT_S = 60.0
_SPARE_BYTES = 1 << 16
_COPIES = 0
"""In place of the process id of a worker here, for what other keepers send."""


class Refused(RuntimeError):
    """The keeper does not take this, or has it no more: says why."""


@dataclass
class _Kept:
    piece: Piece
    segment: Segment
    num_bytes: int
    owner: int
    index: bytes = b""
    digests: FileDigest | None = None
    is_digested: threading.Event = field(default_factory=threading.Event)
    is_sealed: bool = False


@dataclass(frozen=True)
class Described:
    """One piece for whoever loads it."""

    index: bytes
    digests: FileDigest
    place: Place


class SnapshotKeeper:
    """One per node and run. Safe to call from several threads."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._fence = -1
        self._kept: dict[Piece, _Kept] = {}
        self._free: dict[int, list[Segment]] = {}

    # --- the driver -----------------------------------------------------------------------------

    def open(self, generation: int) -> list[Piece]:
        """Take nothing more of older generations; the sealed pieces that are here."""
        with self._lock:
            self._fence = max(self._fence, generation)
            return [piece for piece, kept in self._kept.items() if kept.is_sealed]

    def keep_only(self, age: tuple[int, int] | None) -> None:
        """Drop all snapshots but that of this generation and step, and what waits to be reused."""
        with self._lock:
            fence = self._fence
            self._drop(lambda one: one.age != age and one.generation < fence)
            # Of workers that are gone, and of nodes whose buddy this one may be no more.
            for owner in [one for one in self._free if one == _COPIES or not _lives(one)]:
                for segment in self._free.pop(owner):
                    segment.close()

    def drop(self, age: tuple[int, int]) -> None:
        """This snapshot is of no use."""
        with self._lock:
            self._drop(lambda one: one.age == age)

    # --- a worker on this node ------------------------------------------------------------------

    def check(self, needed_bytes: int, beside_bytes: int = 0) -> str:
        """Why so much memory cannot be had here, with what saves are about to take; "" if it can.

        What is here already counts for the first of them.
        """
        with self._lock:
            segments = [one.segment for one in self._kept.values()]
            segments += [one for owned in self._free.values() for one in owned]
            missing = needed_bytes - sum(segment.num_bytes for segment in segments)
        found = available_bytes()
        if max(0, missing) + beside_bytes <= found:
            return ""
        saves = f", saves {beside_bytes / 1e9:.2f} GB more" if beside_bytes else ""
        needed = f"snapshots need {needed_bytes / 1e9:.2f} GB of memory"
        return f"{needed}{saves}, found {found / 1e9:.2f} GB available"

    def rooms(
        self, owner: int, generation: int, num_bytes: int, unneeded: Unneeded
    ) -> list[tuple[Place, Piece | None]]:
        """The segments of this worker, each of at least that size unless a piece lies in it.

        What is unneeded gives way: in a smaller group each piece is larger than those before.

        Raises `Refused`.
        """
        with self._lock:
            self._check_fence(generation)
            self._drop(unneeded.has)
            used = [kept for kept in self._kept.values() if kept.owner == owner]
            free = self._free.setdefault(owner, [])
            for segment in [segment for segment in free if segment.num_bytes < num_bytes]:
                free.remove(segment)
                segment.close()
            while len(used) + len(free) < SLOTS:
                free.append(_new_segment(num_bytes))
            occupied = [(kept.segment.place, kept.piece) for kept in used]
            return [*((segment.place, None) for segment in free), *occupied]

    def seal(
        self,
        owner: int,
        place: Place,
        piece: Piece,
        num_bytes: int,
        index: bytes,
        buddy: Any,
        unneeded: Unneeded,
    ) -> None:
        """The segment at `place` holds this piece; ends when it is digested and copied.

        What is unneeded gives way. `buddy` is the keeper that gets the copy; None for none. Raises
        `Refused`.
        """
        with self._lock:
            self._check_fence(piece.generation)
            self._drop(unneeded.has)
            segment = next((s for s in self._free.get(owner, ()) if s.place == place), None)
            if segment is None or segment.num_bytes < num_bytes:
                raise Refused(f"{piece} lies where worker {owner} has no room")
            self._free[owner].remove(segment)
            kept = _Kept(piece, segment, num_bytes, owner, index, is_sealed=True)
            self._kept[piece] = kept
        with ThreadPoolExecutor(max_workers=1, initializer=_yield_to_training) as thread:
            thread.submit(self._secure, kept, buddy, unneeded).result()

    def _secure(self, kept: _Kept, buddy: Any, unneeded: Unneeded) -> None:
        view = kept.segment.view[: kept.num_bytes]
        try:
            digester = ChunkDigester()
            digester.update(view)
            kept.digests = digester.file(f"the piece of rank {kept.piece.world_rank}")
        finally:
            kept.is_digested.set()
        if buddy is not None:
            self._send(kept, view, buddy, unneeded)

    # --- another keeper -------------------------------------------------------------------------

    def begin_copy(self, piece: Piece, num_bytes: int, unneeded: Unneeded) -> None:
        """Room for a copy. Raises `Refused`."""
        with self._lock:
            self._check_fence(piece.generation)
            self._drop(lambda one: one == piece or unneeded.has(one))
            segment = self._room_for_copy(num_bytes)
            self._kept[piece] = _Kept(piece, segment, num_bytes, _COPIES)

    def receive(self, piece: Piece, start: int, data: Any) -> None:
        """Some bytes of the copy. Raises `Refused`."""
        kept = self._find(piece)
        kept.segment.view[start : start + data.nbytes] = memoryview(data)

    def end_copy(self, piece: Piece, index: bytes, digests: FileDigest) -> None:
        """All of it was sent. Raises `Refused`."""
        with self._lock:
            self._check_fence(piece.generation)
            kept = self._find(piece)
            kept.index, kept.digests, kept.is_sealed = index, digests, True
            kept.is_digested.set()

    # --- whoever loads --------------------------------------------------------------------------

    def describe(self, piece: Piece) -> Described:
        """What is here of a piece, once its digests are known. Raises `Refused`."""
        kept = self._find(piece)
        kept.is_digested.wait()
        if kept.digests is None:
            raise Refused(f"{piece} could not be digested")
        return Described(kept.index, kept.digests, kept.segment.place)

    def read(self, piece: Piece, start: int, num_bytes: int) -> Any:
        """These bytes of it, for another machine. Raises `Refused`."""
        view = self._find(piece).segment.view[start : start + num_bytes]
        return np.frombuffer(view, dtype=np.uint8)

    # --------------------------------------------------------------------------------------------

    def _check_fence(self, generation: int) -> None:
        if generation < self._fence:
            raise Refused(f"generation {generation} was replaced by generation {self._fence}")

    def _find(self, piece: Piece) -> _Kept:
        with self._lock:
            if piece not in self._kept:
                raise Refused(f"{piece} is not here")
            return self._kept[piece]

    def _room_for_copy(self, num_bytes: int) -> Segment:
        free = self._free.setdefault(_COPIES, [])
        for segment in free:
            if segment.num_bytes >= num_bytes:
                free.remove(segment)
                return segment
        for segment in free:  # too small for what it was kept for
            segment.close()
        free.clear()
        return _new_segment(num_bytes)

    def _drop(self, is_old: Callable[[Piece], bool]) -> None:
        for piece in [piece for piece in self._kept if is_old(piece)]:
            kept = self._kept.pop(piece)
            if _lives(kept.owner):
                self._free.setdefault(kept.owner, []).append(kept.segment)
            else:
                kept.segment.close()

    def _send(self, kept: _Kept, view: memoryview, buddy: Any, unneeded: Unneeded) -> None:
        piece = kept.piece
        _get([buddy.begin_copy.remote(piece, len(view), unneeded)])
        flying: list[Any] = []
        for start in range(0, len(view), CHUNK_BYTES):
            if len(flying) >= _IN_FLIGHT:
                _get([flying.pop(0)])
            data = np.frombuffer(view[start : start + CHUNK_BYTES], dtype=np.uint8)
            flying.append(buddy.receive.remote(piece, start, data))
        _get(flying)
        _get([buddy.end_copy.remote(piece, kept.index, kept.digests)])


def _new_segment(num_bytes: int) -> Segment:
    try:
        # The text of random streams and counters is not always of one length.
        return Segment(-(-(num_bytes + _SPARE_BYTES) // _SPARE_BYTES) * _SPARE_BYTES)
    except OSError as error:
        raise Refused(f"no {num_bytes} bytes of memory: {error}") from error


def _yield_to_training() -> None:
    """This thread alone: others here load what training waits for."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def _get(answers: list[Any]) -> None:
    ray.get(answers, timeout=_SENT_S)


def _lives(owner: int) -> bool:
    return owner == _COPIES or os.path.exists(f"/proc/{owner}")
