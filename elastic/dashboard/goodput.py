"""Goodput: which part of the time that drivers spent at a run became steps of it.

Read from metrics and ledger. Must import neither ray nor torch.
"""

from __future__ import annotations

from collections.abc import Iterable

from elastic.storage.filesystem import Filesystem
from elastic.storage.ledger import LedgerEvent
from elastic.storage.metrics import current_metrics

DEFINITION = (
    "GOODPUT is the time spent in steps that count, each step once however often it was done, "
    "over the time from each submission to its last word. What is missing went into starts, "
    "waiting for capacity, data, saves, restarts, and steps that had to be done again."
)


def goodput(fs: Filesystem, events: Iterable[LedgerEvent]) -> float | None:
    """Between 0 and 1; None before the first step. The time between two submissions is nobody's.

    Raises `UnsupportedFormat`.
    """
    attended_s = attended(events)
    steps = [values["step_s"] for values in current_metrics(fs).values() if "step_s" in values]
    return min(1.0, sum(steps) / attended_s) if steps and attended_s > 0 else None


def attended(events: Iterable[LedgerEvent]) -> float:
    """Seconds, summed over the lives of the driver, from its start to its last event.

    A driver that takes over from a dead one starts where that one ended.
    """
    began: dict[int, float] = {}
    ended: dict[int, float] = {}
    last_s: float | None = None
    for event in events:
        if event.kind == "driver_lost" and last_s is not None:
            began[event.life] = last_s
        if event.kind == "run_started":
            began.setdefault(event.life, event.time_s)
        last_s = event.time_s
        ended[event.life] = event.time_s
    return sum(max(0.0, ended[life] - begin_s) for life, begin_s in began.items())
