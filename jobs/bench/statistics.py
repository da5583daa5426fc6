"""Numbers drawn from measurements: the recovery that an event log shows, medians, ratios and a
bootstrap interval.

Pure: takes lists and times, returns numbers. Must not import ray or torch, read a clock, or touch a
file.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Any

Event = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """What one fault cost: time from the kill to the first new step, and the steps that had to be
    done again.
    """

    kill_to_step_s: float
    lost_steps: int
    first_step: int
    world_size: int
    phases_s: dict[str, float]


def measure_recovery(events: Sequence[Event], killed_s: float) -> Recovery | None:
    """The recovery that `events` show, or None while no group formed after `killed_s` has finished
    a step.

    A group is new when the first of its ranks entered the training function after the kill.
    Survivors of the old group may go on for a while (a dead raylet's worker does); what they do is
    lost work, not recovery. A step is finished when every rank of its group logged it.
    """
    by_group: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        by_group[event["group"]].append(event)
    new = {group for group, of_group in by_group.items() if _entered_s(of_group) > killed_s}
    finished = [done for group in new if (done := _first_finished(by_group[group])) is not None]
    if not finished:
        return None
    time_s, step, group = min(finished)
    old_steps = [e["step"] for e in events if e["event"] == "step" and e["group"] not in new]
    return Recovery(
        kill_to_step_s=time_s - killed_s,
        lost_steps=max(0, max(old_steps, default=0) - (step - 1)),
        first_step=step,
        world_size=by_group[group][0]["world_size"],
        phases_s=_phases_s(by_group[group], killed_s, time_s),
    )


@dataclass(frozen=True, kw_only=True)
class Growth:
    """What it cost to take a new worker in.

    `stall_s` is the time in which no step was finished: from the last step of the smaller group to
    the first of the larger one, each finished when its last rank was done; that step's own time is
    in it. `lost_steps` were done by both groups.
    """

    stall_s: float
    lost_steps: int
    first_step: int
    world_size: int
    added_to_step_s: float
    """From the time the node was added to the first step of the larger group."""
    usual_step_s: float
    """Median time from step to step of the smaller group."""
    slowest_step_s: float
    """The longest such time once the node was added: the start of a worker takes its share of the
    machine.
    """


def measure_growth(events: Sequence[Event], added_s: float) -> Growth | None:
    """The growth that `events` show, or None while no group that is larger than any before
    `added_s` has finished a step, or the smaller ones have not finished two.
    """
    by_group: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        by_group[event["group"]].append(event)
    before = [of for of in by_group.values() if _entered_s(of) <= added_s]
    before_size = max((of[0]["world_size"] for of in before), default=0)
    larger = [of for of in by_group.values() if of[0]["world_size"] > before_size]
    finished = [done for of_group in larger if (done := _first_finished(of_group)) is not None]
    if not finished:
        return None
    time_s, step, group = min(finished)
    old = [of for of in by_group.values() if of[0]["world_size"] <= before_size]
    old_s = sorted(s for of in old for s in finish_times_s(of).values() if s < time_s)
    old_steps = [e["step"] for of in old for e in of if e["event"] == "step"]
    if len(old_s) < 2:
        return None
    gaps_s = [(after_s - before_s, after_s) for before_s, after_s in pairwise(old_s)]
    return Growth(
        stall_s=time_s - old_s[-1],
        lost_steps=max(0, max(old_steps) - (step - 1)),
        first_step=step,
        world_size=by_group[group][0]["world_size"],
        added_to_step_s=time_s - added_s,
        usual_step_s=median(gap_s for gap_s, _ in gaps_s),
        slowest_step_s=max((gap_s for gap_s, end_s in gaps_s if end_s > added_s), default=0.0),
    )


def _entered_s(of_group: Sequence[Event]) -> float:
    return min((e["time_s"] for e in of_group if e["event"] == "enter"), default=float("-inf"))


def _first_finished(of_group: Sequence[Event]) -> tuple[float, int, str] | None:
    """(time of its last rank, step, group) of the lowest step that every rank logged."""
    finished_s = finish_times_s(of_group)
    step = min(finished_s, default=None)
    return None if step is None else (finished_s[step], step, of_group[0]["group"])


def finish_times_s(of_group: Sequence[Event]) -> dict[int, float]:
    """For every step that every rank logged the time of the last of them."""
    times_s: dict[int, dict[int, float]] = defaultdict(dict)
    for event in of_group:
        if event["event"] == "step":
            times_s[event["step"]][event["rank"]] = event["time_s"]
    world_size = of_group[0]["world_size"]
    return {
        step: max(by_rank.values())
        for step, by_rank in times_s.items()
        if len(by_rank) == world_size
    }


def _phases_s(of_group: Sequence[Event], killed_s: float, stepped_s: float) -> dict[str, float]:
    """The phases that show from outside; they add up to the whole. An engine with a ledger of its
    own knows more.
    """
    phases_s, before_s = {}, killed_s
    for name, event in (("until_function", "enter"), ("build", "build"), ("load", "load")):
        reached_s = max((e["time_s"] for e in of_group if e["event"] == event), default=before_s)
        phases_s[name] = reached_s - before_s
        before_s = reached_s
    phases_s["first_step"] = stepped_s - before_s
    return phases_s


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    """Median of `ours` over median of `theirs`; None when either is empty."""
    return median(ours) / median(theirs) if ours and theirs else None


def paired_ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Each block of `ours` over the mean of the two blocks of `theirs` beside it.

    Blocks alternate and start with theirs: theirs[0], ours[0], theirs[1], ..., so `theirs` has one
    more. A machine that grows slower over the run weighs on both sides alike.

    Raises ValueError when the lengths do not alternate.
    """
    if len(theirs) != len(ours) + 1:
        raise ValueError(
            "paired ratios need one block more of theirs than of ours: "
            f"expected {len(ours) + 1}, found {len(theirs)}"
        )
    return [block / fmean(pair) for block, pair in zip(ours, pairwise(theirs), strict=True)]


def bootstrap_interval(
    values: Sequence[float], *, confidence: float = 0.95, num_resamples: int = 10_000, seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap interval of the median (Efron 1979); for values drawn independently.

    Raises ValueError when `values` is empty.
    """
    if not values:
        raise ValueError("a bootstrap interval needs at least one value, found none")
    draw = random.Random(seed)
    medians = sorted(median(draw.choices(values, k=len(values))) for _ in range(num_resamples))
    tail = (1 - confidence) / 2
    last = num_resamples - 1
    return medians[round(tail * last)], medians[round((1 - tail) * last)]
