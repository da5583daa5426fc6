"""Fitting: which numbers of workers the mesh allows, and at which of them the model has been found
to fit in its GPUs' memory.

A size that has made a step fits. One that ran out of CUDA memory before its first step does not,
and no smaller one does where a larger one is known: fewer workers hold larger shards. Pure data.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from elastic.policy.mesh import Mesh


class Recorded(Protocol):
    """An event of the ledger."""

    @property
    def kind(self) -> str: ...

    @property
    def step(self) -> int: ...

    @property
    def data(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True, kw_only=True)
class Fitting:
    """Numbers of workers, by what is known of them."""

    tried: frozenset[int] = frozenset()
    """They have made steps."""
    ran_out: frozenset[int] = frozenset()
    """They have run out of memory before their first step."""
    mesh: Mesh = field(default_factory=Mesh)

    def stepped(self, size: int) -> Fitting:
        """With word that this size has made a step."""
        return self if size in self.tried else replace(self, tried=self.tried | {size})

    def without(self, size: int) -> Fitting:
        """With word that this size has run out of memory before its first step."""
        return replace(self, ran_out=self.ran_out | {size})

    @property
    def infeasible(self) -> frozenset[int]:
        """They are not started again."""
        ruled_out = set(self.ran_out)
        for size in self.ran_out:
            if any(other > size for other in self.tried | self.ran_out):
                least = max((one for one in self.tried if one < size), default=0)
                ruled_out |= set(range(least + 1, size))
        return frozenset(ruled_out - self.tried)

    def largest(self, most: int) -> int:
        """The largest size up to `most` that may be started; 0 where there is none."""
        ruled_out = self.infeasible
        size = self.mesh.largest(most)
        while size in ruled_out:
            size = self.mesh.largest(size - 1)
        return size

    def bounds(self, least: int, most: int) -> tuple[int, int] | None:
        """The smallest and the largest size of this range that may be started, None without any."""
        if not self.ran_out:
            low, high = self.mesh.smallest(least), self.mesh.largest(most)
            return (low, high) if low <= high else None
        ruled_out = self.infeasible
        sizes = [size for size in range(least, most + 1) if self.mesh.fits(size)]
        left = [size for size in sizes if size not in ruled_out]
        return (left[0], left[-1]) if left else None

    @property
    def note(self) -> str:
        """For a person who wonders why a size is not used; empty where none is ruled out."""
        sizes = ", ".join(str(size) for size in sorted(self.ran_out))
        memory = f"out of CUDA memory at {sizes} workers" if sizes else ""
        return "; ".join(filter(None, (memory, self.mesh.note)))


def fold(events: Iterable[Recorded]) -> Fitting:
    """What the records of one submission say, in ledger order: a checkpoint above the step that
    its group began with tells that this group has made steps."""
    fitting, size, begun_at = Fitting(), 0, 0
    for event in events:
        if event.kind == "size_infeasible":
            tried = frozenset(int(one) for one in event.data.get("tried", ()))
            ran_out = frozenset(int(one) for one in event.data.get("ran_out", ()))
            fitting = Fitting(tried=fitting.tried | tried, ran_out=ran_out)
        elif event.kind == "generation_started":
            size, begun_at = int(event.data.get("world_size", 0)), max(0, event.step)
        elif event.kind == "checkpoint_committed" and event.step > begun_at and size:
            fitting = fitting.stepped(size)
    return fitting
