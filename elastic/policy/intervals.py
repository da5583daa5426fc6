"""Intervals: how often to save, from what a save and a failure cost. Pure arithmetic, in seconds.

T is the period from the start of one save to the start of the next, its own stall included. C is
the *stall*: how long training stands still (or is slowed down by) for one save. That is all of the
write for a blocking save and the copy to host memory for an asynchronous one; an asynchronous
save's write time W in place of C would space saves sqrt(W / C) times too far apart. M is the mean
time between failures that stop the run, D the time until one is noticed, R the time from there to
the first new step.

Sources:
    Young 1974, "A first order approximation to the optimum checkpoint interval", CACM 17(9).
    Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart dumps",
        Future Generation Computer Systems 22(3), equation 37.
    Vaidya 1997, "Impact of checkpoint latency on overhead ratio of a checkpointing scheme", IEEE
        Transactions on Computers 46(8): a checkpoint is of use only once it is written.
    Saxena, Hukerikar, Blaz, Raj 2024, "Optimal checkpoint interval with availability as an
        objective function", arXiv 2410.18124: the optimum with recovery time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from elastic.policy.durations import told

FORMULA = "T = C + sqrt(2 (M + R + D + W) C + C^2), not below C + W"
OVERHEAD_FORMULA = "C/T + (T/2 + W + D + R) / M"
SOURCE = "Saxena et al. 2024, arXiv 2410.18124; for C, R << M it is Young's sqrt(2 M C)"

DOUBTFUL_SHARE = 0.25
"""Up to this share of M for T + W + D + R, the formulas are trusted. Up to there (and W = 0) the
interval chosen here loses at most 0.5 % more time than the best one under Daly's complete model,
in which failures also strike while the run recovers, and R does not move the best interval."""


@dataclass(frozen=True, kw_only=True)
class SaveCosts:
    """What one save and one failure cost, in seconds.

    Failures are independent of each other and of the saves (Poisson), and each one stops the run.
    Raises `ValueError` for a number that is negative, infinite or NaN, and for a stall or an MTBF
    of 0: with nothing to balance there is no best interval.
    """

    mtbf_s: float
    stall_s: float
    write_s: float = 0.0
    """How long a save goes on beside training after its stall; 0 for a blocking save."""
    recovery_s: float = 0.0
    detection_s: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            needs_more = name in ("mtbf_s", "stall_s")
            if not math.isfinite(value) or value < 0 or (needs_more and value == 0):
                bound = "above 0" if needs_more else "0 or more"
                raise ValueError(f"{name} must be finite and {bound}; found {value}")

    def lost_work_s(self, interval_s: float) -> float:
        """Work lost with one failure, on average: T/2 + W.

        Failures come at any moment of the period alike, and until a save is written the one
        before it is the last that counts (Vaidya 1997). First order in C/T; holds for C + W <= T.
        """
        return interval_s / 2 + self.write_s

    def save_s(self) -> float:
        """How long one save takes from its start until it is written: C + W."""
        return self.stall_s + self.write_s

    def down_s(self) -> float:
        """How long one failure keeps the run from working: D + R."""
        return self.detection_s + self.recovery_s

    def overhead(self, interval_s: float) -> float:
        """Seconds lost per second: C/T + (T/2 + W + D + R) / M.

        Young's first-order model; without W, D and R it is C/T + T/(2M), least at sqrt(2 M C).
        Holds while it is small: nothing keeps it below 1.
        """
        lost_s = self.lost_work_s(interval_s) + self.down_s()
        return self.stall_s / interval_s + lost_s / self.mtbf_s

    def lost_share(self, interval_s: float) -> float:
        """The share of all time that does not advance training, 0 to 1: 1 - availability.

        Availability is (1 - C/T) / (1 + (T/2 + W + D + R) / M), as in arXiv 2410.18124, which
        counts W and D into its recovery time. At most one failure in a period, and none during
        recovery: holds for T + W + D + R << M.
        """
        lost_s = self.lost_work_s(interval_s) + self.down_s()
        return 1 - (1 - self.stall_s / interval_s) / (1 + lost_s / self.mtbf_s)


@dataclass(frozen=True, kw_only=True)
class Interval:
    """How often to save, and why."""

    seconds: float
    formula_s: float
    """What the formula alone says; less than `seconds` where writing takes longer than that."""
    why: str

    @property
    def held_by_write(self) -> bool:
        return self.seconds > self.formula_s


def best_interval(costs: SaveCosts) -> Interval:
    """The period that loses the least time, never below C + W: one save is written at a time.

    It minimises `lost_share` exactly over those periods: that function falls until the formula's T
    and rises after it. `doubts` tells where the model behind it no longer holds.
    """
    recovery_s = costs.down_s() + costs.write_s
    formula_s = available_interval_s(costs.mtbf_s, costs.stall_s, recovery_s)
    seconds = max(formula_s, costs.save_s())
    why = f"every {told(seconds)}: stall {told(costs.stall_s)}, MTBF {told(costs.mtbf_s)}"
    if seconds > formula_s:
        why += f"; the formula says {told(formula_s)}, and a save takes {told(costs.save_s())}"
    return Interval(seconds=seconds, formula_s=formula_s, why=why)


def young_interval_s(mtbf_s: float, stall_s: float) -> float:
    """Young's period, sqrt(2 M C): the least of C/T + T/(2M).

    Young 1974, first order. Holds for C << M; recovery does not move it. Within 1 % of Daly's
    period for C below M / 600, 7 % too short at C = M / 10.
    """
    return math.sqrt(2 * mtbf_s * stall_s)


def daly_interval_s(mtbf_s: float, stall_s: float) -> float:
    """Daly's period: sqrt(2 M C) (1 + sqrt(C / 2M) / 3 + C / 18M), for C < 2M; else M + C.

    Daly 2006, equation 37, whose tau is the working time alone: this is tau + C, a period as
    everywhere here. Failures also strike during saves and recovery; recovery does not move it.
    Holds for C < 2M and exponential times between failures.
    """
    ratio = stall_s / (2 * mtbf_s)
    if ratio >= 1:
        return mtbf_s + stall_s
    return young_interval_s(mtbf_s, stall_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9)


def available_interval_s(mtbf_s: float, stall_s: float, recovery_s: float) -> float:
    """The period of the highest availability: C + sqrt(2 (M + R) C + C^2).

    Saxena et al. 2024 (arXiv 2410.18124), T_s, T_f, T_r there being C, M, R here. It holds while
    errors are noticed much sooner than T; an error that stays unseen for longer may be in the
    checkpoints already, and the source then wants T at or above that latency. For C << R << M it
    becomes Young's.
    """
    return stall_s + math.sqrt(2 * (mtbf_s + recovery_s) * stall_s + stall_s**2)


def doubts(costs: SaveCosts, interval_s: float) -> list[str]:
    """Where the formulas' assumptions do not hold for these costs, in words; empty: they do."""
    found = []
    busy_s = interval_s + costs.write_s + costs.down_s()
    if busy_s > DOUBTFUL_SHARE * costs.mtbf_s:
        found.append(
            f"a save and a recovery take {told(busy_s)} of the {told(costs.mtbf_s)} between "
            "failures: a second one may come before the next save, so take these as rough"
        )
    if costs.detection_s > interval_s:
        found.append(
            f"a failure is noticed after {told(costs.detection_s)}, later than the next save: if "
            "it can spoil checkpoints in the meantime, save no more often than that"
        )
    return found
