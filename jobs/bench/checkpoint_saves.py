"""The ranks' side of `bench checkpoint`'s saves: all ways in turn, beside steps of training."""

from __future__ import annotations

import random
import resource
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from elastic.training.collector import settle
from jobs.bench.checkpoint import NONE, OURS, Plan
from jobs.bench.checkpoint_savers import Saver, savers
from jobs.bench.checkpoint_state import Job, join
from jobs.bench.quiet import hush

_STEPS_BETWEEN = 6


def main(plan: Plan, what: str, rank: int, num_ranks: int) -> None:
    hush()
    directory = Path(plan.directory)
    member, groups, store = join(directory, what, rank, num_ranks)
    job = Job(groups, plan.bytes_per_rank * num_ranks)
    ways = savers(directory, job.state, member, groups, store)
    job.calibrate(plan.step_s)
    settle()  # as the service does, and for all ways
    watch = Watch(job, groups.control)
    for way in plan.ways:  # the first makes buffers, processes and files that stay
        watch.save(ways[way], way)
    del watch.found[:]
    for turn in range(plan.num_saves):
        # In another order each time, so that no way always follows the same one.
        for way in random.Random(turn).sample(plan.ways, len(plan.ways)):
            watch.save(ways[way], way)
    watch.rest()
    if rank == 0:
        for found in watch.found:
            plan.log.write("save", **watch.judged(found))
    dist.barrier()


class Watch:
    """Measures a save by the steps beside it.

    Added time is all the time from the beginning of the save to the end of the step in which it
    ended on every rank, less what so many steps take in the pauses before and after.
    """

    def __init__(self, job: Job, control: dist.ProcessGroup) -> None:
        self._job = job
        self._control = control
        self._num_beside_ours = 3
        self._pauses: list[list[float]] = []
        self._pauses_cpu_s: list[float] = []
        self.found: list[dict[str, Any]] = []

    def save(self, saver: Saver, way: str) -> None:
        self.rest()
        cpu_s, begun_s = _cpu_s(), time.perf_counter()
        saver.begin()
        blocking_s = time.perf_counter() - begun_s
        # Without a save, as many steps are watched as beside one of ours.
        at_least = self._num_beside_ours if way == NONE else 1
        num_steps, is_over = 0, False
        while not is_over or num_steps < at_least:
            is_over = self._job.step(is_over=saver.is_over())
            num_steps += 1
        took_s, cpu_s = time.perf_counter() - begun_s, _cpu_s() - cpu_s
        if way == OURS:
            self._num_beside_ours = num_steps
        self.found.append(
            {
                "way": way,
                "blocking_s": self._longest(blocking_s),
                "took_s": took_s,
                "num_steps": num_steps,
                "cpu_s": cpu_s,
                "pause": len(self._pauses) - 1,
            }
        )
        saver.clear()

    def rest(self) -> None:
        """Steps without a save, which tell how long one takes now."""
        self._job.step(is_over=True)
        steps_s, cpu_s = [], _cpu_s()
        for _ in range(_STEPS_BETWEEN):
            begun_s = time.perf_counter()
            self._job.step(is_over=True)
            steps_s.append(time.perf_counter() - begun_s)
        self._pauses.append(steps_s)
        self._pauses_cpu_s.append((_cpu_s() - cpu_s) / _STEPS_BETWEEN)

    def judged(self, found: dict[str, Any]) -> dict[str, Any]:
        """With what the save has added."""
        pause = found["pause"]
        step_s = median(self._pauses[pause] + self._pauses[pause + 1])
        step_cpu_s = median(self._pauses_cpu_s[pause : pause + 2])
        return {
            **found,
            "step_s": step_s,
            "added_s": found["took_s"] - found["num_steps"] * step_s,
            "cpu_added_s": found["cpu_s"] - found["num_steps"] * step_cpu_s,
        }

    def _longest(self, seconds: float) -> float:
        longest = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=self._control)
        return longest.item()


def _cpu_s() -> float:
    """Of this process, all its threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
