"""Node memory: what a rank needs of the memory that outlives its process.

The interface belongs to its consumers, `Snapshots` and the snapshot reader. Nothing here knows who
owns the memory or how the words travel. Must not import ray.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import BinaryIO, Protocol

from elastic.policy.coverage import Piece, Resume, Snapshot, Unneeded
from elastic.storage.manifest import FileDigest


class NotKept(RuntimeError):
    """A piece could not be put into memory, or not on the other node: says why."""


class PieceLost(RuntimeError):
    """A piece that was found in a node's memory can no longer be read there."""


class PieceSource(Protocol):
    """One copy of one piece."""

    where: str
    """The node that holds it, for people."""

    def index(self) -> bytes:
        """What the piece holds, as `seal` was given it. Raises `PieceLost`."""

    def digests(self) -> FileDigest:
        """Of all of it, and of each chunk. Raises `PieceLost`."""

    def open(self) -> BinaryIO | None:
        """A seekable stream with `readinto`, if it is in this machine's memory; for one thread."""

    def fetch(self, start: int, num_bytes: int) -> Callable[[], memoryview]:
        """Begins to have these bytes sent from another machine; what waits for them.

        Both raise `PieceLost`.
        """


class NodeMemory(Protocol):
    """Room for this rank's pieces, on its node and with a copy on another one."""

    def check(self, piece_bytes: int, beside_bytes: int) -> str:
        """Why there is too little memory for snapshots of such pieces; "" unless that is known.

        `beside_bytes` is what each rank is about to take besides.
        """

    def prepare(self, num_bytes: int, unneeded: Unneeded) -> None:
        """Have room for pieces of that size, in place of unneeded ones that were smaller.

        Takes its time; off the training thread.

        Raises `NotKept`.
        """

    def room(self, num_bytes: int, unneeded: Unneeded) -> memoryview | None:
        """Memory for the next piece, of at least that size; what lies in it is worthless.

        It is that of an unneeded piece, or of none. None where it has to be prepared first.
        """

    def seal(self, piece: Piece, num_bytes: int, index: bytes, unneeded: Unneeded) -> None:
        """The room last given holds this piece now; waits until the other node has it, too.

        Called off the training thread. Raises `NotKept`.
        """

    def sources(self, snapshot: Snapshot) -> Sequence[Sequence[PieceSource]]:
        """The copies of each rank's piece, by world rank, the nearest first."""

    def reject(self, snapshot: Snapshot, reason: str) -> Resume:
        """Have a snapshot dropped that cannot be loaded; what to resume from instead.

        Raises NoSoundCheckpoint: nothing is left.
        """
