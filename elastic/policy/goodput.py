"""Goodput: every second of every slot in exactly one bucket, so that the buckets add up. Pure.

The whole is `elastic.policy.occupancy`: the slots a run held, over the time it held them. Where
each second comes from:

- `useful`: steps that count, as long as their `step_s` says. `recomputed`: steps that a later
  generation did again, of the generation that lost them; `lost_steps` that no metric tells of are
  taken to be as long as its median step, or the run's.
- `save_stall`: what saves held up. The first save, and those before a group leaves or the run ends,
  are waited for as a whole.
- `detection`: from the moment that a group was seen to stand still, or since its last step where
  more than one step had no word, to the decision; and from a driver's last word to its successor.
- `reform_*`: from the decision, or from the end of a group that left, until all ranks have loaded,
  divided as the phases of `recovered` say; `reform_wait` is what they leave.
- `waiting_for_capacity`: survivors that held their slots while too few were left.
- `start_up`: from a plan until all ranks have loaded, where no re-form was under way, and joiners
  while the others trained.
- `compile`, `evaluation`: only from rank 0's phase in `progress`, one look every few seconds, so
  shorter ones show by chance. They are taken out of the steps they are part of.
- `idle`: what nothing accounts for: waiting for data, agreement between steps, ending a group.
- `injected`: what a failure cost that was injected on purpose.

What a first step took beyond the median of its generation counts as `reform_first_step` or, with no
re-form, as `start_up`. A run that times no steps (`run.end_step`) has all of the time that nothing
else accounts for as its steps. What cannot be told apart: a compile that no `progress` fell into is
part of a first step; a step that was broken off is `idle`, and so is one whose values were lost,
but what a group did shortly before it failed and told nobody may be `detection`; ranks that wait
for the slowest are in their steps, as every rank is counted like rank 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

from elastic.policy.occupancy import Occupancy, Reform, Told, Training, occupancy, seconds

_REFORM_PHASES = ("stop", "join", "place", "start", "connect", "build", "load", "take_over")

BUCKETS = (
    "useful",
    "recomputed",
    "save_stall",
    "detection",
    *(f"reform_{phase}" for phase in _REFORM_PHASES),
    "reform_first_step",
    "reform_wait",
    "waiting_for_capacity",
    "start_up",
    "compile",
    "evaluation",
    "idle",
    "injected",
)

_FEWEST_FOR_FIRST = 3


class TimedStep(Protocol):
    """A step that some generation has finished."""

    @property
    def generation(self) -> int: ...

    @property
    def step(self) -> int: ...

    @property
    def time_s(self) -> float:
        """When it was told, in wall time."""

    @property
    def step_s(self) -> float: ...

    @property
    def counts(self) -> bool:
        """No later generation has done it again."""


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Where the time of a run's slots went. The buckets add up to the whole."""

    share: float | None
    """Useful slot-seconds of all, between 0 and 1; None where no slot was held yet."""
    slot_seconds: dict[str, float]
    """By bucket, every one of `BUCKETS`."""
    whole_slot_seconds: float
    without_slots_s: float
    """Seconds in which the run held no slot: it waited for capacity, or for its driver."""


def goodput(events: Iterable[Told], steps: Iterable[TimedStep]) -> Goodput:
    """Of all lives of a run's driver up to the last word. `events` are in ledger order."""
    held = occupancy(events)
    by_generation: dict[int, list[TimedStep]] = {}
    for step in steps:
        by_generation.setdefault(step.generation, []).append(step)
    timed = [step for steps in by_generation.values() for step in steps]
    account = _Account(held, typical_s=_typical_s(timed))
    for generation, training in held.trainings.items():
        account.training(training, by_generation.get(generation, []))
    for reform in held.reforms:
        account.reform(reform)
    whole, useful = held.whole.slot_s, account.slot_seconds["useful"]
    return Goodput(
        share=min(1.0, useful / whole) if whole > 0 else None,
        slot_seconds=account.slot_seconds,
        whole_slot_seconds=whole,
        without_slots_s=held.without_slots_s,
    )


def money(found: Goodput, *, price_per_slot_hour: float) -> dict[str, float]:
    """What each bucket cost, in the price's own currency."""
    return {name: held * price_per_slot_hour / 3600.0 for name, held in found.slot_seconds.items()}


class _Account:
    def __init__(self, held: Occupancy, *, typical_s: float) -> None:
        self._typical_s = typical_s
        self.slot_seconds = dict.fromkeys(BUCKETS, 0.0)
        self.slot_seconds["start_up"] = held.start_up.slot_s
        self.slot_seconds["waiting_for_capacity"] = held.waiting.slot_s
        self.slot_seconds["idle"] = held.closing.slot_s

    def training(self, training: Training, steps: Sequence[TimedStep]) -> None:
        parts = _parts(training, steps, typical_s=self._typical_s)
        self._divide(training.trains.wall_s, training.trains.slot_s, parts, rest="idle")
        cause = "injected" if training.is_injected else "detection"
        self.slot_seconds[cause] += training.detects.slot_s

    def reform(self, reform: Reform) -> None:
        if reform.is_injected:
            self.slot_seconds["injected"] += reform.held.slot_s
            return
        parts = {f"reform_{name}": reform.phases_s.get(name, 0.0) for name in _REFORM_PHASES}
        self._divide(reform.held.wall_s, reform.held.slot_s, parts, rest="reform_wait")

    def _divide(self, wall_s: float, slot_s: float, parts: dict[str, float], *, rest: str) -> None:
        """Slot-seconds as the seconds in `parts` divide the wall time, what they leave to `rest`.

        Several clocks measure them: parts that are more than the whole shrink alike.
        """
        told_s = sum(parts.values())
        unit = slot_s / max(wall_s, told_s) if told_s > 0 and wall_s > 0 else 0.0
        for name, part_s in parts.items():
            self.slot_seconds[name] += part_s * unit
        self.slot_seconds[rest] += slot_s - told_s * unit


def _parts(training: Training, steps: Sequence[TimedStep], *, typical_s: float) -> dict[str, float]:
    """Seconds by bucket of the time in which one generation trained; the rest is idle.

    `typical_s` is the run's median step, 0 if it times none.
    """
    parts = {name: seconds(training.phases_s.get(name)) for name in ("compile", "evaluation")}
    told_s = sum(parts.values())
    parts["save_stall"] = training.save_stall_s
    free_s = max(0.0, training.trains.wall_s - training.save_stall_s)
    first_s = max(0.0, _first_excess_s(steps) - parts["compile"])
    useful_s = sum(seconds(step.step_s) for step in steps if step.counts)
    again_s = sum(seconds(step.step_s) for step in steps if not step.counts)
    if typical_s == 0.0:
        useful_s, again_s = _untimed(training, free_s)
    done_s = useful_s + again_s
    # Both are part of the steps they happen in.
    keep = max(0.0, done_s - told_s - first_s) / done_s if done_s > 0 else 0.0
    useful_s, again_s = useful_s * keep, again_s * keep
    rest_s = max(0.0, free_s - told_s - first_s - useful_s - again_s)
    typical_s = _typical_s(steps) or typical_s
    num_untold = max(0, training.lost_steps - sum(not step.counts for step in steps))
    untold_s = min(rest_s, num_untold * typical_s)
    again_s, rest_s = again_s + untold_s, rest_s - untold_s
    silent_s = min(rest_s, _silent_s(training, steps, untold_s + typical_s))
    parts["useful"] = useful_s
    for name, part_s in (
        (_first_bucket(training.reform), first_s),
        ("injected" if training.is_injected else "recomputed", again_s),
        ("injected" if training.is_injected else "detection", silent_s),
    ):
        parts[name] = parts.get(name, 0.0) + part_s
    return parts


def _first_bucket(reform: Reform | None) -> str:
    if reform is None:
        return "start_up"
    return "injected" if reform.is_injected else "reform_first_step"


def _typical_s(steps: Sequence[TimedStep]) -> float:
    return median(seconds(step.step_s) for step in steps) if steps else 0.0


def _first_excess_s(steps: Sequence[TimedStep]) -> float:
    if len(steps) < _FEWEST_FOR_FIRST:
        return 0.0
    first = min(steps, key=lambda step: step.step)
    others = [step for step in steps if step is not first]
    return max(0.0, seconds(first.step_s) - _typical_s(others))


def _silent_s(training: Training, steps: Sequence[TimedStep], work_s: float) -> float:
    """Since the last step was told, less `work_s` that may have been done meanwhile."""
    if training.ended_s is None or not steps:
        return 0.0
    return max(0.0, training.ended_s - max(step.time_s for step in steps) - work_s)


def _untimed(training: Training, free_s: float) -> tuple[float, float]:
    """Useful seconds and those that were lost, of a generation whose steps nobody timed."""
    num = training.last_step - training.first_step + 1
    if num <= 0:
        return 0.0, 0.0
    lost = min(num, training.lost_steps) / num
    return free_s * (1.0 - lost), free_s * lost
