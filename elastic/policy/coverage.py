"""Coverage: which snapshot is whole in the memories of the nodes, and what a group resumes from.

Each rank's piece of a snapshot lies in the memory of its node, and in that of another one. Nobody
keeps a list of them: it is put together from what the living nodes say they hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

SLOTS = 2
"""Pieces of one rank on a node at most: of the newest whole snapshot, and of the next one."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One rank's part of the snapshot of one step."""

    generation: int
    step: int
    world_rank: int
    world_size: int

    @property
    def age(self) -> tuple[int, int]:
        """Orders snapshots: what a newer generation has made follows on what it resumed."""
        return self.generation, self.step


@dataclass(frozen=True, kw_only=True)
class Unneeded:
    """The pieces that give their places to a rank's next one."""

    whole: Piece | None = None
    """The snapshot that this is of is whole: those before it are not needed."""
    failed: Piece | None = None
    """This one was not kept everywhere."""

    def has(self, piece: Piece) -> bool:
        """Whether this piece is one of them."""
        return piece == self.failed or (self.whole is not None and piece.age < self.whole.age)


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A snapshot of which a piece of every rank was found."""

    generation: int
    step: int
    nodes: tuple[tuple[str, ...], ...]
    """By the world rank that made it: ids of the nodes that hold its piece, at least one."""

    @property
    def world_size(self) -> int:
        """Of the group that made it."""
        return len(self.nodes)


@dataclass(frozen=True, kw_only=True)
class Resume:
    """Where a generation begins."""

    step: int | None
    """None: at step 0, with nothing to load."""
    snapshot: Snapshot | None = None
    """What that step is loaded from; None: the checkpoint of that step."""


def newest(held: Mapping[str, Iterable[Piece]]) -> Snapshot | None:
    """The newest snapshot that is whole, from the sealed pieces by the node that holds them."""
    nodes: dict[tuple[int, int, int], dict[int, list[str]]] = {}
    for node_id in sorted(held):
        for piece in held[node_id]:
            ranks = nodes.setdefault((*piece.age, piece.world_size), {})
            ranks.setdefault(piece.world_rank, []).append(node_id)
    whole = [key for key, ranks in nodes.items() if ranks.keys() == set(range(key[2]))]
    if not whole:
        return None
    generation, step, world_size = key = max(whole)
    found = tuple(tuple(nodes[key][rank]) for rank in range(world_size))
    return Snapshot(generation=generation, step=step, nodes=found)


def choose(checkpoint_step: int | None, snapshot: Snapshot | None) -> Resume:
    """The newer of the two; at the same step the snapshot, which is nearer."""
    if snapshot is not None and (checkpoint_step is None or snapshot.step >= checkpoint_step):
        return Resume(step=snapshot.step, snapshot=snapshot)
    return Resume(step=checkpoint_step)


def buddy(node_id: str, nodes: Iterable[str]) -> str | None:
    """Who holds the copies of a node's pieces: the next in the ring of these; None without any.

    `nodes` are those of the group, in one order on all of them.
    """
    ring = list(dict.fromkeys(nodes))
    if len(ring) < 2 or node_id not in ring:
        return None
    return ring[(ring.index(node_id) + 1) % len(ring)]


def room_bytes(piece_bytes: int, num_ranks: int, *, has_buddy: bool) -> int:
    """What snapshots take on a node with so many ranks: of its own and of those it is buddy of."""
    return SLOTS * piece_bytes * num_ranks * (2 if has_buddy else 1)
