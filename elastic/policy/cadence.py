"""Cadence: how often a run saves, computed anew while it goes on, and the reason in words. Pure.

From what this run has measured: stall, slow-down and write time of its newest saves, what its
recoveries took, and its failures with a prior. The formula and its sources stand in
`elastic.policy.intervals`, the estimate of the MTBF in `elastic.policy.mtbf`. Times of words are
wall times; nothing here reads a clock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import median, median_low
from typing import Protocol

from elastic.policy.durations import told
from elastic.policy.events import Record
from elastic.policy.exposure import Exposure
from elastic.policy.intervals import Interval, SaveCosts, best_interval
from elastic.policy.mtbf import learned_mtbf_s, prior_mtbf_s
from elastic.policy.saves import SaveInterval
from elastic.policy.slow_down import SlowDown

CHANGE = 0.2
"""An interval that would change by less stays: within it, at most 2 % more time is lost."""
BEFORE_MEASURED_S = 60.0
"""What a rank goes by until it has heard of an interval that was computed."""
MOST_MEASURED = 9
"""Of the newest saves and recoveries the median counts: one slow write changes nothing."""
LEAST_STALL_S = 1e-3


class Word(Protocol):
    """What an event of a ledger says."""

    @property
    def kind(self) -> str: ...
    @property
    def step(self) -> int: ...
    @property
    def time_s(self) -> float: ...
    @property
    def data(self) -> Mapping[str, object]: ...


@dataclass(frozen=True, kw_only=True)
class _Save:
    num_bytes: float
    stall_s: float
    write_s: float
    """Beside training, after the stall, until the save was committed."""


class Cadence:
    """Hears what a run tells of itself, in order, and says how often it should save.

    `asked` is what the owner wants, `mtbf_s` the owner's prior; None takes `prior_mtbf_s`.
    """

    def __init__(self, asked: SaveInterval, mtbf_s: float | None = None) -> None:
        self._asked = asked
        self._mtbf_s = mtbf_s
        self._exposure = Exposure()
        self._slow_down = SlowDown()
        self._saves: deque[_Save] = deque(maxlen=MOST_MEASURED)
        self._recoveries_s: deque[float] = deque(maxlen=MOST_MEASURED)
        self._detections_s: deque[float] = deque(maxlen=MOST_MEASURED)
        self._num_workers = 1
        self._stepped_s: float | None = None
        self._heard_s = 0.0
        self._failed_s: float | None = None
        self._interval: Interval | None = None
        self._basis: tuple[int, bool] | None = None
        self._is_told = False

    @property
    def every_s(self) -> float | None:
        """Seconds from the start of one save to the start of the next, as computed so far; None
        when the owner has said how often, or nothing was measured yet."""
        return None if self._interval is None else self._interval.seconds

    # --- hearing ---------------------------------------------------------------------------------

    def hear_past(self, words: Iterable[Word]) -> None:
        """What earlier lives of the driver have recorded."""
        for word in words:
            self.hear(word.kind, word.step, word.data, word.time_s)

    def hear(self, kind: str, step: int, data: Mapping[str, object], time_s: float) -> None:
        """One word on its way into the ledger."""
        if self._exposure.hear(kind, data, time_s) and kind == "failure_decided":
            self._failed(time_s)
        self._heard_s = time_s
        if kind == "generation_started":
            self._slow_down.begin()
            self._stepped_s = None
            self._num_workers = int(_number(data, "world_size") or 1)
        elif kind == "checkpoint_committed":
            self._saved(step, data)
        elif kind == "recovered" and self._failed_s is not None:
            self._recoveries_s.append(_recovery_s(data, time_s - self._failed_s))
            self._failed_s = None

    def stepped(self, step: int, step_s: float, time_s: float) -> None:
        """Rank 0 has told that a step is done, and that it took `step_s`."""
        self._slow_down.stepped(step, step_s)
        self._stepped_s = time_s

    def _failed(self, time_s: float) -> None:
        """Detection is what the failure took away beyond the step that was under way."""
        self._failed_s = self._heard_s  # where a later life tells of it: the last word before
        typical_s = self._slow_down.typical_step_s()
        if self._stepped_s is not None and typical_s is not None:
            self._detections_s.append(max(0.0, time_s - self._stepped_s - typical_s))

    def _saved(self, step: int, data: Mapping[str, object]) -> None:
        stall_s, taken_s = _number(data, "stall_s"), _number(data, "duration_s")
        if stall_s is None or taken_s is None:
            return  # a ledger that does not tell what its saves took
        write_s = max(0.0, taken_s - stall_s)
        num_bytes = _number(data, "bytes") or 0.0
        self._saves.append(_Save(num_bytes=num_bytes, stall_s=stall_s, write_s=write_s))
        self._slow_down.saved(step, write_s)

    # --- deciding --------------------------------------------------------------------------------

    def look(self) -> Record | None:
        """The interval as it should be now, for the ledger, when it or its reason has changed.

        It changes when it would by more than `CHANGE`, after each failure, and where the write
        time begins or ceases to hold it up.
        """
        if not self._asked.is_computed:
            was_told, self._is_told = self._is_told, True
            return None if was_told else _asked_for(self._asked)
        if not self._saves:
            return None
        costs = self._costs()
        found = best_interval(costs)
        basis = (self._exposure.num_failures, found.held_by_write)
        now = self._interval
        if now is not None and basis == self._basis and _is_near(found.seconds, now.seconds):
            return None
        self._basis = basis
        self._interval = replace(found, why=self._why(found, costs))
        return Record(
            kind="save_interval",
            reason=self._interval.why,
            data={"seconds": found.seconds, **vars(costs), **self._evidence(found)},
        )

    def _costs(self) -> SaveCosts:
        stall_s = median_low(save.stall_s for save in self._saves)
        return SaveCosts(
            mtbf_s=learned_mtbf_s(
                num_failures=self._exposure.num_failures,
                observed_s=self._exposure.observed_s,
                prior_s=self._prior_s(),
            ),
            stall_s=max(LEAST_STALL_S, stall_s + self._slow_down.per_save_s()),
            write_s=median(save.write_s for save in self._saves),
            recovery_s=median(self._recoveries_s) if self._recoveries_s else 0.0,
            detection_s=median(self._detections_s) if self._detections_s else 0.0,
        )

    def _prior_s(self) -> float:
        return prior_mtbf_s(self._num_workers) if self._mtbf_s is None else self._mtbf_s

    def _evidence(self, found: Interval) -> dict[str, object]:
        return {
            "slow_down_s": self._slow_down.per_save_s(),
            "formula_s": found.formula_s,
            "held_by_write": found.held_by_write,
            "num_failures": self._exposure.num_failures,
            "observed_s": self._exposure.observed_s,
            "prior_s": self._prior_s(),
        }

    def _why(self, found: Interval, costs: SaveCosts) -> str:
        """`every 41 s: stall 400 ms, MTBF 35 min from 3 failures in 1.8 h (prior 8 h)`."""
        number = self._exposure.num_failures
        prior = f"prior {told(self._prior_s())}" + (" by default" if self._mtbf_s is None else "")
        seen = told(self._exposure.observed_s)
        failures = f" from {number} failure{'' if number == 1 else 's'} in {seen} ({prior})"
        source = failures if number else f" ({prior}, no failure in {seen})"
        stall = f"stall {told(costs.stall_s)}"
        slower_s = self._slow_down.per_save_s()
        if slower_s > 0.1 * costs.stall_s:
            stall += f", {told(slower_s)} of it slower steps"
        why = f"every {told(found.seconds)}: {stall}, MTBF {told(costs.mtbf_s)}{source}"
        if not found.held_by_write:
            return why
        return (
            f"{why}; {told(found.formula_s)} would be best, and a save takes "
            f"{told(costs.save_s())}: {self._bandwidths(costs.write_s, found.formula_s)[0]}"
        )

    # --- storage that is too slow ----------------------------------------------------------------

    def skipped(self, step: int, since_s: float) -> Record:
        """For the ledger: the save of `step` was skipped, as the one before it was still being
        written after `since_s`. Tells the bandwidth seen, at most, and the one that is needed."""
        reason = f"the save before it was still being written after {told(since_s)}"
        if not self._saves:
            return Record(kind="checkpoint_skipped", step=step, reason=reason)
        words, data = self._bandwidths(max(since_s, self._saves[-1].write_s), self._due_s())
        return Record(kind="checkpoint_skipped", step=step, reason=f"{reason}; {words}", data=data)

    def _due_s(self) -> float | None:
        """Seconds between saves that are due; None where it is not known."""
        if self._asked.is_computed:
            return self.every_s
        step_s = self._slow_down.typical_step_s()
        if self._asked.steps is not None and step_s is not None:
            return self._asked.steps * step_s
        return self._asked.seconds

    def _bandwidths(
        self, write_s: float, interval_s: float | None
    ) -> tuple[str, dict[str, object]]:
        num_bytes = self._saves[-1].num_bytes
        seen = num_bytes / max(write_s, LEAST_STALL_S)
        words = f"storage takes {_rate(seen)}"
        data: dict[str, object] = {"bytes": int(num_bytes), "seen_bytes_per_s": seen}
        if interval_s is not None:
            needed = num_bytes / interval_s
            words += f", {_amount(num_bytes)} each {told(interval_s)} need {_rate(needed)}"
            data["needed_bytes_per_s"] = needed
        return words, data


def _asked_for(asked: SaveInterval) -> Record:
    data = {"seconds": asked.seconds, "steps": asked.steps}
    return Record(
        kind="save_interval",
        reason=f"{asked}: as asked for",
        data={key: value for key, value in data.items() if value is not None},
    )


def _recovery_s(data: Mapping[str, object], whole_s: float) -> float:
    """The sum of the phases of a recovery; where they are not told, all of it."""
    phases_s = data.get("phases_s")
    if not isinstance(phases_s, Mapping):
        return max(0.0, whole_s)
    return sum(_number(phases_s, name) or 0.0 for name in phases_s)


def _is_near(found_s: float, now_s: float) -> bool:
    return 1 / (1 + CHANGE) < found_s / now_s < 1 + CHANGE


def _number(data: Mapping[str, object], key: str) -> float | None:
    """None where it is missing or no amount: an older ledger may be damaged."""
    value = data.get(key)
    if not isinstance(value, int | float) or not 0 <= value < math.inf:
        return None
    return float(value)


def _rate(bytes_per_s: float) -> str:
    return f"{_amount(bytes_per_s)}/s"


def _amount(num_bytes: float) -> str:
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.3g} {name}"
    return f"{num_bytes:.0f} bytes"
