"""Faults that somebody has announced before striking: the failure that follows is no evidence.

It is marked `injected` in the ledger, so that it does not count as one of the cluster's own, and
what it costs stands apart.
"""

from __future__ import annotations

from dataclasses import replace

from elastic.policy.events import Record

ANNOUNCED = "fault_announced"
EXPIRES_S = 60.0
"""An announced fault that has not struck by then never will."""


class Injections:
    """Hears all that is recorded, in order."""

    def __init__(self) -> None:
        self._announced_s: float | None = None

    def marked(self, record: Record, time_s: float) -> Record:
        """The record, with the mark if it tells of an announced fault; `time_s` is wall time."""
        if record.kind == ANNOUNCED:
            self._announced_s = time_s
        if record.kind != "failure_decided" or self._announced_s is None:
            return record
        is_injected = 0 <= time_s - self._announced_s <= EXPIRES_S
        self._announced_s = None  # one strike, one failure
        return replace(record, data={**record.data, "injected": True}) if is_injected else record
