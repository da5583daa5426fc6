"""Slow-down: what a save on its way adds to the steps beside it, from the times of steps. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median

MOST_STEPS = 1024
"""Of the newest steps, to compare with."""
LEAST_APART = 5
"""Fewer steps without a save beside them are no measure of what a step takes."""
MOST_APART = 32
"""Of the newest ones: a run becomes slower and faster for reasons of its own."""
MOST_SAVES, LEAST_SAVES = 25, 5
"""What one save adds is lost in the noise of steps; what the median of many says is not."""


@dataclass(frozen=True, kw_only=True)
class _Save:
    step: int
    write_s: float


class SlowDown:
    """Hears steps and saves of one generation after another."""

    def __init__(self) -> None:
        self._found_s: deque[float] = deque(maxlen=MOST_SAVES)
        self.begin()

    def begin(self) -> None:
        """Another generation: its steps take another time. What was found stays."""
        self._step_s: dict[int, float] = {}
        self._beside: set[int] = set()
        self._open: list[_Save] = []

    def stepped(self, step: int, step_s: float) -> None:
        """Rank 0 has finished a step, which took so long. In the order of steps."""
        self._step_s[step] = step_s
        while len(self._step_s) > MOST_STEPS:
            oldest = next(iter(self._step_s))
            del self._step_s[oldest]
            self._beside.discard(oldest)
        self._settle()

    def saved(self, step: int, write_s: float) -> None:
        """The save of `step` was on its way for so long beside the steps that followed."""
        self._open.append(_Save(step=step, write_s=write_s))
        self._settle()

    def typical_step_s(self) -> float | None:
        """The median time of a step, its wait for data not included; None before the first."""
        return median(self._step_s.values()) if self._step_s else None

    def per_save_s(self) -> float:
        """Seconds that one save adds, the median over the newest ones; 0 where it is not known.

        For each save (median of the steps beside it - median of the newest steps apart from any)
        times the number of steps beside it, and never more than it was written for. Not known
        before a few saves, nor while there are hardly any steps apart.
        """
        is_known = len(self._found_s) >= LEAST_SAVES
        return max(0.0, median(self._found_s)) if is_known else 0.0

    def _settle(self) -> None:
        # Where no steps are told of, as in a ledger of the past, nothing is ever settled.
        newest = self._open[-MOST_SAVES:]
        self._open = [save for save in newest if not self._is_settled(save)]

    def _is_settled(self, save: _Save) -> bool:
        beside = self._steps_beside(save)
        if beside is None:
            return False
        self._beside.update(beside)
        # Later steps may be beside a save that nobody has told of yet.
        apart = [
            step_s
            for step, step_s in self._step_s.items()
            if beside and step < beside[-1] and step not in self._beside
        ]
        if len(apart) >= LEAST_APART:
            newest = median(apart[-MOST_APART:])
            each_s = median(self._step_s[step] for step in beside) - newest
            self._found_s.append(min(each_s * len(beside), save.write_s))
        return True

    def _steps_beside(self, save: _Save) -> list[int] | None:
        """The steps that began before the save was written; None while the last is not known."""
        beside: list[int] = []
        left_s = save.write_s
        for step, step_s in self._step_s.items():
            if step <= save.step:
                continue
            if left_s <= 0:
                return beside
            beside.append(step)
            left_s -= step_s
        return beside if left_s <= 0 else None
