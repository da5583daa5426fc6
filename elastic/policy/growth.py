"""Whether it pays to grow: what more workers are expected to gain, against what they cost.

Pure. All durations are in seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PRIOR_COST_S = 5.0
"""What a growth is taken to cost before one was measured."""
_MARGIN = 2.0
_REMEMBERED = 3


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether growing pays, and the sum in words."""

    pays: bool
    text: str


def judge(
    old_size: int,
    new_size: int,
    *,
    cost_s: float,
    lifetimes_s: Sequence[float],
    quiet_s: float,
) -> Verdict:
    """Weigh a growth from `old_size` to `new_size` workers.

    `cost_s` is for how long the last growth held training up, `lifetimes_s` how long earlier ones
    lasted until a worker was lost, `quiet_s` how long none has been lost now. What has lasted is
    expected to last as long again: in that time the new size does (new / old) times the work. The
    gain has to be twice the cost, since both are guesses. Until a growth was lost growing pays.
    """
    if not lifetimes_s:
        return Verdict(pays=True, text="no growth was lost yet")
    expected_s = max(quiet_s, sum(lifetimes_s) / len(lifetimes_s))
    gain_s = expected_s * (new_size / old_size - 1.0)
    pays = gain_s >= _MARGIN * cost_s
    text = (
        f"{old_size} to {new_size} workers for an expected {expected_s:.0f} s gain the work of "
        f"{gain_s:.1f} s, and taking them in costs {cost_s:.1f} s"
    )
    return Verdict(pays=pays, text=text)


def remember(lifetimes_s: Sequence[float], lasted_s: float) -> tuple[float, ...]:
    """The last few lifetimes, with one more."""
    return (*lifetimes_s, lasted_s)[-_REMEMBERED:]
