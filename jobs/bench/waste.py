"""What preemptions waste: steps that are done again, and time in which no step is made that was not
made before.

Pure: takes an event log and times, returns numbers. Must not import ray or torch, read a clock, or
touch a file.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from jobs.bench.statistics import Event, finish_times_s

STANDSTILL_FACTOR = 5.0


@dataclass(frozen=True, kw_only=True)
class NewStep:
    """A step that was finished, by all ranks of a group, for the first time."""

    time_s: float
    number: int
    group: str
    world_size: int


@dataclass(frozen=True, kw_only=True)
class Standstill:
    """A gap between two new steps in which the group changed, or that is much longer than a step.

    `wasted_s` is the gap less the usual time of the step that ends it.
    """

    begun_s: float
    gap_s: float
    wasted_s: float
    world_size: int
    group_changed: bool


@dataclass(frozen=True, kw_only=True)
class Waste:
    """What a trace of preemptions cost a run.

    `wasted_s` is the sum over the standstills. `slower_s` is all other time beyond the usual, saves
    and steps beside the start of a worker: no standstill, and not part of `wasted_s`.
    """

    wasted_steps: int
    wasted_s: float
    slower_s: float
    trace_s: float
    num_new_steps: int
    usual_step_s: Mapping[int, float]
    standstills: Sequence[Standstill]


def new_steps(events: Sequence[Event]) -> list[NewStep]:
    """The steps that were not done before, in the order they were finished."""
    finished = sorted(
        (time_s, step, name, of_group[0]["world_size"])
        for name, of_group in _by_group(events).items()
        for step, time_s in finish_times_s(of_group).items()
    )
    found: list[NewStep] = []
    for time_s, step, name, world_size in finished:
        if not found or step > found[-1].number:
            found.append(NewStep(time_s=time_s, number=step, group=name, world_size=world_size))
    return found


def measure_waste(events: Sequence[Event], begun_s: float) -> Waste:
    """The waste from `begun_s`, the first notice, to the last new step of the log.

    A step that ranks of n groups did was wasted n - 1 times. A gap between new steps is a
    standstill when it is between two groups, or longer than `STANDSTILL_FACTOR` usual steps; the
    usual time of a step is the median gap within the groups of that size, over the whole log.

    Raises ValueError when the log has no new step after `begun_s`.
    """
    steps = new_steps(events)
    if not steps or steps[-1].time_s <= begun_s:
        raise ValueError("no new step was made after the first notice: nothing can be measured")
    usual_s = _usual_step_s(steps)
    standstills, slower_s, num_new_steps = [], 0.0, 0
    for before, after in pairwise(steps):
        if after.time_s <= begun_s:
            continue
        num_new_steps += 1
        gap_s, step_s = after.time_s - before.time_s, usual_s[after.world_size]
        changed = before.group != after.group
        if not changed and gap_s <= STANDSTILL_FACTOR * step_s:
            slower_s += gap_s - step_s
            continue
        standstills.append(
            Standstill(
                begun_s=before.time_s - begun_s,
                gap_s=gap_s,
                wasted_s=max(0.0, gap_s - step_s),
                world_size=after.world_size,
                group_changed=changed,
            )
        )
    return Waste(
        wasted_steps=_steps_done_again(events),
        wasted_s=sum(standstill.wasted_s for standstill in standstills),
        slower_s=slower_s,
        trace_s=steps[-1].time_s - begun_s,
        num_new_steps=num_new_steps,
        usual_step_s=usual_s,
        standstills=standstills,
    )


def _by_group(events: Sequence[Event]) -> dict[str, list[Event]]:
    by_group: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        by_group[event["group"]].append(event)
    return by_group


def _usual_step_s(steps: Sequence[NewStep]) -> dict[int, float]:
    """By world size; that of all sizes where a size has no two steps in a row."""
    gaps_s: dict[int, list[float]] = defaultdict(list)
    for before, after in pairwise(steps):
        if before.group == after.group:
            gaps_s[after.world_size].append(after.time_s - before.time_s)
    anywhere_s = [gap_s for of_size in gaps_s.values() for gap_s in of_size] or [0.0]
    sizes = sorted({step.world_size for step in steps})
    return {size: median(gaps_s[size] or anywhere_s) for size in sizes}


def _steps_done_again(events: Sequence[Event]) -> int:
    # By any rank: what a killed group's fastest rank has done is work too.
    done: dict[str, set[Any]] = {
        name: {event["step"] for event in of_group if event["event"] == "step"}
        for name, of_group in _by_group(events).items()
    }
    return sum(len(steps) for steps in done.values()) - len(set().union(*done.values()))
