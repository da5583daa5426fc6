"""Pacing: hands the computed save interval on to the ranks, and warns of saves that are skipped.

Between a `Cadence`, which decides, and whoever drives a run: the driver under Ray, rank 0's book
without it. Must import neither ray nor torch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from elastic.policy.cadence import Cadence
from elastic.policy.events import Record

logger = logging.getLogger("elastic")

_WARN_S = 60.0


class Pacing:
    """The cadence of one run at work. Not for use by several threads at once.

    `record` takes what the ledger should have, `order` generation and seconds for its ranks.
    """

    def __init__(
        self,
        cadence: Cadence,
        *,
        record: Callable[[Record], None],
        order: Callable[[int, float], None],
    ) -> None:
        self._cadence = cadence
        self._record = record
        self._order = order
        self._ordered: tuple[int, float] | None = None
        self._warned_s: float | None = None
        self._num_unwarned = 0

    def look(self, generation: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Rank 0 of this generation has told that the steps of these rows are done."""
        for row in rows:
            step_s = row["values"].get("step_s")
            if step_s is not None:
                self._cadence.stepped(row["step"], step_s, time.time())
        record = self._cadence.look()
        if record is not None:
            logger.info("saves: %s", record.reason)
            if record.data.get("held_by_write"):
                logger.warning("storage is too slow for the best interval: %s", record.reason)
            self._record(replace(record, generation=generation))
        every_s = self._cadence.every_s
        if every_s is not None and self._ordered != (generation, every_s):
            self._ordered = (generation, every_s)
            self._order(generation, every_s)

    def skipped(self, generation: int, step: int, since_s: float) -> None:
        """The save of `step` was skipped, the one before it being on its way for `since_s`.

        Each one is recorded; the log is warned at most once a minute.
        """
        record = self._cadence.skipped(step, since_s)
        self._record(replace(record, generation=generation))
        self._num_unwarned += 1
        now_s = time.monotonic()
        if self._warned_s is None or now_s - self._warned_s >= _WARN_S:
            logger.warning(
                "%d save(s) skipped, the last at step %d: %s",
                self._num_unwarned,
                step,
                record.reason,
            )
            self._warned_s, self._num_unwarned = now_s, 0
