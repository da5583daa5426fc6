"""The inheritance: what a driver takes over from those before it in the same job.

Folded from the ledger. Empty for the first driver of a job: what earlier submissions were asked
for, or were forgiven, is no business of this one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from elastic.cluster.driver_config import TakeOver
from elastic.policy.events import Event, SaveRequested, StopRequested
from elastic.storage import requests
from elastic.storage.ledger import LedgerEvent


class Inheritance:
    """`past` is all that the ledger holds of the run."""

    def __init__(self, take_over: TakeOver | None, past: Sequence[LedgerEvent]) -> None:
        lives = frozenset() if take_over is None else take_over.lives
        self._own = [event for event in past if event.life in lives]

    @property
    def epochs(self) -> frozenset[int]:
        """Of the leases of earlier drivers: what they were asked for, this one is asked for."""
        found = (e.data.get("lease_epoch") for e in self._own if e.kind == "run_started")
        return frozenset(epoch for epoch in found if isinstance(epoch, int))

    @property
    def num_recovered(self) -> int:
        """Re-forms that came to their first step."""
        return sum(event.kind == "recovered" for event in self._own)

    @property
    def step(self) -> int:
        """The last one that is known to have been made; -1 where none is."""
        telling = ("progress", "started", "resumed", "recovered", "checkpoint_committed")
        return next((e.step for e in reversed(self._own) if e.kind in telling), -1)

    @property
    def world_size(self) -> int:
        """Of the last group; 0 if there was none."""
        started = (e for e in reversed(self._own) if e.kind == "generation_started")
        return next((int(event.data["world_size"]) for event in started), 0)

    @property
    def taken(self) -> set[str]:
        """Ids of the requests that a dead driver took, and may not have cleared away."""
        return {str(e.data.get("id")) for e in self._own if e.kind == "request_taken"}

    def unanswered(self) -> Iterator[Event]:
        """What people have asked for that a dead driver took, and could not do any more."""
        saved = max(
            (n for n, event in enumerate(self._own) if event.kind == "checkpoint_committed"),
            default=-1,
        )
        for number, event in enumerate(self._own):
            if event.kind != "request_taken":
                continue
            if event.data.get("request") == requests.STOP:
                yield StopRequested(reason=event.reason)
            elif number > saved:
                yield SaveRequested(reason=event.reason)
