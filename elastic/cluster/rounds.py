"""Rounds: what the driver does again and again while a run lasts, each duty at its own pace."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from elastic.policy.situation import FINAL, Situation

_TICK_S = 0.25


@dataclass
class _Duty:
    work: Callable[[], object]
    every_s: float
    applies: Callable[[Situation], bool]
    done_s: float


class Rounds:
    """The duties of one life of the driver. Use from the event loop only."""

    def __init__(self, situation: Callable[[], Situation]) -> None:
        self._situation = situation
        self._duties: list[_Duty] = []

    def add(
        self,
        work: Callable[[], object],
        *,
        every_s: float = 0.0,
        applies: Callable[[Situation], bool] = lambda _: True,
    ) -> None:
        """Do `work` every so many seconds, or at every tick, while the situation asks for it."""
        self._duties.append(_Duty(work, every_s, applies, time.monotonic()))

    async def run(self) -> None:
        """Go on until the run is over."""
        while self._situation().phase not in FINAL:
            await asyncio.sleep(_TICK_S)
            if self._situation().phase in FINAL:
                return  # the ledger may be closed by now
            for duty in self._duties:
                self._do(duty)

    def _do(self, duty: _Duty) -> None:
        now_s = time.monotonic()
        if now_s - duty.done_s >= duty.every_s and duty.applies(self._situation()):
            duty.done_s = now_s
            duty.work()
