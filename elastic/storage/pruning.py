"""Pruning: checkpoints that an operator wants gone, planned to be shown first, and then removed.

The rule is that of retention, with the pins above it. Must not import ray or torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from elastic.policy.retention import Retention
from elastic.storage.checkpoints import Catalog, Checkpoint
from elastic.storage.pins import pinned_steps
from elastic.storage.suspects import trusted_steps

__all__ = ["SUSPECT", "Fate", "perform", "plan"]

SUSPECT = "suspect"


@dataclass(frozen=True, kw_only=True)
class Fate:
    """What is to become of one complete checkpoint; `why` it stays, "" if it does not."""

    checkpoint: Checkpoint
    pinned: bool
    why: str

    @property
    def remove(self) -> bool:
        return self.why == ""


def plan(catalog: Catalog, policy: Retention) -> list[Fate]:
    """Every complete checkpoint, ascending. Removes nothing. Raises `UnsupportedFormat`."""
    steps = catalog.complete_steps()
    pinned = pinned_steps(catalog.fs)
    trusted = trusted_steps(catalog)
    going = set(policy.to_remove(trusted, pinned))
    return [
        Fate(
            checkpoint=catalog.inspect(step),
            pinned=step in pinned,
            why="" if step in going else _why(step, trusted, policy, step in pinned),
        )
        for step in steps
    ]


def perform(catalog: Catalog, fates: Sequence[Fate]) -> Iterator[int]:
    """Removes what the plan says, oldest first, and gives each step once it is gone.

    One that was pinned, saved anew or removed by somebody else since it was planned is left alone.
    """
    for fate in fates:
        step = fate.checkpoint.step
        if not fate.remove or step in pinned_steps(catalog.fs):
            continue
        if catalog.inspect(step) == fate.checkpoint:
            catalog.remove(step)
            yield step


def _why(step: int, steps: Sequence[int], policy: Retention, pinned: bool) -> str:
    if step not in steps:
        return SUSPECT
    if step == steps[-1]:
        return "the newest"
    if pinned:
        return "pinned"
    if step in steps[-policy.keep :]:
        return f"among the newest {policy.keep}"
    return f"one of every {policy.keep_every} steps"
