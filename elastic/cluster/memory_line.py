"""A rank's line to the memories of the nodes: the keeper of its own node, and those of the others.

Room on the own node is mapped into this process, so that filling it is a copy and no more.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO, cast

import numpy as np
import ray

from elastic.cluster.segment import MapStream, Place, map_place, stream_place
from elastic.cluster.snapshot_keeper import Described
from elastic.policy.coverage import Piece, Resume, Snapshot, Unneeded, room_bytes
from elastic.storage.manifest import FileDigest
from elastic.training.coordinator import NoSoundCheckpoint
from elastic.training.membership import Membership
from elastic.training.node_memory import NotKept, PieceLost, PieceSource
from elastic.training.node_name import node_name

_ROOM_S = 60.0
_SEAL_S = 120.0
_READ_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Keepers:
    """What the driver tells a rank of the keepers of a generation: actor handles."""

    by_node: Mapping[str, Any]
    own: str
    buddy: str | None
    """The node that has the copies; None: there is no other."""


@dataclass
class Mapped:
    """What this process has mapped of its keeper's memory, over generations."""

    rooms: dict[Place, mmap.mmap] = field(default_factory=dict)

    def only(self, places: Iterable[Place]) -> None:
        """From now on these. Raises `OSError`."""
        wanted = list(places)
        for place in self.rooms.keys() - wanted:
            with contextlib.suppress(BufferError):  # in use: it goes with that
                self.rooms.pop(place).close()
        for place in wanted:
            if place not in self.rooms:
                self.rooms[place] = room = map_place(place)
                # Each page is found once, here: training does not wait for it.
                np.frombuffer(room, dtype=np.uint8)[:: mmap.PAGESIZE] |= np.uint8(0)


class MemoryLine:
    """See `elastic.training.node_memory.NodeMemory`."""

    def __init__(self, keepers: Keepers, member: Membership, driver: Any, mapped: Mapped) -> None:
        self._keepers = keepers
        self._member = member
        self._driver = driver
        self._mapped = mapped
        self._rooms: dict[Place, Piece | None] = {}
        self._filled: Place | None = None
        self._keeper = keepers.by_node.get(keepers.own)

    def check(self, piece_bytes: int, beside_bytes: int) -> str:
        """Asks the keeper of this node, which knows what it holds already."""
        has_buddy = self._keepers.buddy is not None
        num_ranks = self._member.local_world_size
        needed = room_bytes(piece_bytes, num_ranks, has_buddy=has_buddy)
        try:
            found: str = self._ask("check", needed, beside_bytes * num_ranks, timeout_s=_READ_S)
        except NotKept:
            return ""  # which says nothing about memory
        return found and f"node {node_name(self._member.store_host)}: {found}"

    def prepare(self, num_bytes: int, unneeded: Unneeded) -> None:
        """Asks the keeper of this node, and maps what it gives."""
        asked = (os.getpid(), self._member.generation, num_bytes, unneeded)
        rooms = self._ask("rooms", *asked, timeout_s=_ROOM_S)
        try:
            self._mapped.only(place for place, _ in rooms)
        except OSError as error:
            raise NotKept(
                f"the memory of this node's keeper cannot be mapped ({error}): it must be a "
                "process of the same user, in the same container"
            ) from error
        self._rooms = dict(rooms)

    def room(self, num_bytes: int, unneeded: Unneeded) -> memoryview | None:
        """Of what is mapped; nobody is asked."""
        for place, piece in self._rooms.items():
            if place.num_bytes >= num_bytes and (piece is None or unneeded.has(piece)):
                self._filled = place
                return memoryview(self._mapped.rooms[place])
        return None

    def seal(self, piece: Piece, num_bytes: int, index: bytes, unneeded: Unneeded) -> None:
        """The keeper digests it, and sends the copy."""
        place, buddy = self._filled, self._keepers.by_node.get(self._keepers.buddy or "")
        if self._keepers.buddy is not None and buddy is None:
            raise NotKept(f"node {self._keepers.buddy[:12]} has no keeper for the copy")
        assert place is not None, "no room was taken"
        self._rooms[place] = piece
        self._ask(
            *("seal", os.getpid(), place, piece, num_bytes, index, buddy, unneeded),
            timeout_s=_SEAL_S,
        )

    def sources(self, snapshot: Snapshot) -> Sequence[Sequence[PieceSource]]:
        """Copies on this node first, and then in another order on each rank."""
        found: list[list[_Copy]] = []
        for rank, nodes in enumerate(snapshot.nodes):
            piece = Piece(
                generation=snapshot.generation,
                step=snapshot.step,
                world_rank=rank,
                world_size=snapshot.world_size,
            )
            start = self._member.world_rank % len(nodes)
            turned = sorted(
                [*nodes[start:], *nodes[:start]], key=lambda node: node != self._keepers.own
            )
            found.append([self._source(node, piece) for node in turned])
            found[-1][0].ask()  # all of them at once: they are read one after the other
        return found

    def _source(self, node_id: str, piece: Piece) -> _Copy:
        return _Copy(self._keepers.by_node.get(node_id), piece, node_id[:12], self._mapped.rooms)

    def reject(self, snapshot: Snapshot, reason: str) -> Resume:
        """Asks the driver."""
        resume, problem = ray.get(
            self._driver.reject_snapshot.remote(self._member.generation, snapshot, reason)
        )
        if problem:
            raise NoSoundCheckpoint(problem)
        found: Resume = resume
        return found

    def _ask(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        if self._keeper is None:
            raise NotKept("this node has no keeper")
        try:
            return ray.get(getattr(self._keeper, method).remote(*arguments), timeout=timeout_s)
        except Exception as error:  # noqa: BLE001 - Ray has many errors for an actor that is gone
            raise NotKept(_in_words(error)) from None


class _Copy:
    """One copy of a piece, in the memory of this node or of another."""

    def __init__(
        self, keeper: Any, piece: Piece, where: str, mapped: Mapping[Place, mmap.mmap]
    ) -> None:
        self._mapped = mapped
        self._asked: Any = None
        self._keeper = keeper
        self._piece = piece
        self.where = where
        self._told: Described | None = None

    def ask(self) -> None:
        """What it will be asked for first, without waiting for it."""
        if self._keeper is not None:
            self._asked = self._begin("describe", self._piece)

    def _described(self) -> Described:
        if self._told is None:
            asked = self._asked or self._begin("describe", self._piece)
            self._told = self._wait_for(asked)
        return self._told

    def index(self) -> bytes:
        """As `PieceSource` says."""
        return self._described().index

    def digests(self) -> FileDigest:
        """As `PieceSource` says."""
        return self._described().digests

    def open(self) -> BinaryIO | None:
        """As `PieceSource` says. Several nodes may be on one machine."""
        place = self._described().place
        if place in self._mapped:  # this process has filled it itself
            return cast("BinaryIO", MapStream(self._mapped[place]))
        try:
            return cast("BinaryIO", stream_place(place))
        except OSError:
            return None  # it can be asked for, all the same

    def fetch(self, start: int, num_bytes: int) -> Callable[[], memoryview]:
        """As `PieceSource` says."""
        answer = self._begin("read", self._piece, start, num_bytes)
        return lambda: memoryview(self._wait_for(answer))

    def _begin(self, method: str, *arguments: Any) -> Any:
        if self._keeper is None:
            raise PieceLost(f"node {self.where} has no keeper any more")
        return getattr(self._keeper, method).remote(*arguments)

    def _wait_for(self, answer: Any) -> Any:
        try:
            return ray.get(answer, timeout=_READ_S)
        except Exception as error:  # noqa: BLE001 - Ray has many errors for an actor that is gone
            raise PieceLost(f"node {self.where}: {_in_words(error)}") from None


def _in_words(error: Exception) -> str:
    cause = getattr(error, "cause", None)
    return str(cause) if cause is not None else f"{type(error).__name__}: {error}"
