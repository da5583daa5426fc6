"""Departures: how to leave in the time that is left, told from what the run has measured of itself.

Pure. All durations are in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from elastic.policy.durations import told

_SLACK = 1.25
"""A step and a save may take this many times as long as they did."""
_REMEMBERED = 3
_BEFORE_S = 1.5
"""How long before a node goes its workers are ended, saved or not."""


class Way(StrEnum):
    """How the group leaves."""

    STEP = "step"
    """After the step that is under way, with a save."""
    MICRO_BATCH = "micro-batch"
    """After the micro-batch that is under way, with a save: what the step has accumulated is
    dropped. The parameters still are those of the last finished step."""
    LAST_CHECKPOINT = "last checkpoint"
    """Without a save."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How long things take in this run, as far as is known."""

    step_s: float | None = None
    """The slowest of the last steps."""
    saves_s: tuple[float, ...] = ()
    """The last saves, each from its beginning until it was complete."""

    @property
    def save_s(self) -> float | None:
        """The slowest of the last saves."""
        return max(self.saves_s, default=None)

    def saved(self, took_s: float) -> Pace:
        """With one more save."""
        return Pace(step_s=self.step_s, saves_s=(*self.saves_s, took_s)[-_REMEMBERED:])

    def stepped(self, step_s: float) -> Pace:
        """With the time of the newest steps."""
        return Pace(step_s=step_s, saves_s=self.saves_s)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How to leave, and the sum in words."""

    way: Way
    text: str


def choose(pace: Pace, remaining_s: float | None) -> Verdict:
    """How to leave within `remaining_s`; None is for as long as it takes.

    What was never measured is taken to fit: the deadline is kept in any case.
    """
    if remaining_s is None:
        return Verdict(way=Way.STEP, text="no deadline is known")
    step_s, save_s = pace.step_s or 0.0, pace.save_s or 0.0
    sums = f"a step takes {told(step_s)}, a save {told(save_s)}, and {told(remaining_s)} are left"
    if pace.step_s is None or pace.save_s is None:
        sums += " (0 where nothing was measured)"
    if _SLACK * (step_s + save_s) <= remaining_s:
        return Verdict(way=Way.STEP, text=sums)
    if _SLACK * save_s <= remaining_s:
        return Verdict(way=Way.MICRO_BATCH, text=f"{sums}: the step under way is dropped")
    return Verdict(way=Way.LAST_CHECKPOINT, text=f"{sums}: too little for a save")


def needed_s(pace: Pace) -> float:
    """How long before a deadline the group has to be asked to leave after a step, at the latest."""
    return 2 * _SLACK * ((pace.step_s or 0.0) + (pace.save_s or 0.0)) + 2 * _BEFORE_S


def latest_s(remaining_s: float) -> float:
    """In how long the leave has to be over, for the node to be free before it goes."""
    return max(0.0, remaining_s - _BEFORE_S)
