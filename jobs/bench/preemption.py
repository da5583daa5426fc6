"""`bench preemption`: the same trace of preemptions under each engine, and what it wastes.

A preemption is what a spot market does: notice, then the loss of the node at the deadline that the
notice named, free or not, and a replacement some seconds after the loss. The next notice comes when
the run is whole again and has gone on for a while, so that each one costs all that it can. One
fresh cluster per engine. Must not import torch or elastic.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jobs.bench.cluster import LocalCluster, local_cluster
from jobs.bench.engine_process import (
    EngineProcess,
    MeasurementFailed,
    engine_process,
    wait_for,
)
from jobs.bench.engines import Engine, Plan
from jobs.bench.waste import Waste, measure_waste, new_steps

OURS = "elastic"
NUM_NODES = 3
# The rank whose node goes, for each preemption of the trace.
WORLD_RANKS = (1, 2, 0, 1)
DEADLINE_S, REPLACEMENT_S = 10, 10
# Both engines look this often whether they may grow, so that the trace does not wait for it.
GROW_INTERVAL_S = 5.0
WHOLE_DEADLINE_S = 300.0
Say = Callable[[str], None]


@dataclass(kw_only=True)
class Preemption:
    """One of the trace: who was struck, and when, in wall time."""

    world_rank: int
    group: str
    step: int
    noticed_s: float
    lost_s: float = 0.0
    replaced_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Measurement:
    preemptions: Sequence[Preemption]
    waste: Waste


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What is measured: each engine once, under the trace of `world_ranks`."""

    engines: Sequence[Engine]
    world_ranks: Sequence[int] = WORLD_RANKS
    save_every_steps: int = 100
    steps_between: int = 40

    def run(self, say: Say) -> dict[str, Any]:
        """The report, ready for JSON; measurements that failed are in its `failures`."""
        measured: dict[str, Measurement] = {}
        failures: list[dict[str, Any]] = []
        for engine in self.engines:
            say(f"{engine.name}: {len(self.world_ranks)} preemptions ...")
            try:
                measured[engine.name] = self._measure(engine, say)
            except MeasurementFailed as error:
                failures.append({"engine": engine.name, "message": str(error)})
                say(f"    failed: {error}")
                continue
            waste = measured[engine.name].waste
            say(f"    {waste.wasted_steps} steps and {waste.wasted_s:.1f} s wasted")
        return report(measured, failures)

    def _measure(self, engine: Engine, say: Say) -> Measurement:
        """Raises MeasurementFailed when the engine ends, or is not whole again by its deadline."""
        with contextlib.ExitStack() as stack:
            cluster = stack.enter_context(
                local_cluster(
                    num_nodes=NUM_NODES,
                    fast_health_checks=engine.fast_health_checks,
                    # While a placement group lacks a node Ray's control store keeps a core busy,
                    # which on a real cluster is another machine's.
                    same_priority=True,
                )
            )
            plan = Plan(
                directory=str(cluster.directory),
                address=cluster.address,
                num_workers=NUM_NODES,
                num_steps=1_000_000,
                save_every_steps=self.save_every_steps,
                grow_interval_s=GROW_INTERVAL_S,
                saves_on_preemption=True,
                **engine.plan,
            )
            process = stack.enter_context(
                engine_process(
                    engine.module,
                    plan.to_json(),
                    directory=cluster.directory,
                    environment=engine.environment,
                )
            )
            trace = _Trace(cluster, plan, process, self.steps_between)
            for world_rank in self.world_ranks:
                trace.wait_until_whole()
                trace.preempt(world_rank)
                say(f"    {trace.preemptions[-1]}")
            trace.wait_until_whole()
            waste = measure_waste(plan.log.read(), trace.preemptions[0].noticed_s)
            return Measurement(preemptions=trace.preemptions, waste=waste)


@dataclass
class _Trace:
    """The preemptions of one run, as they happen."""

    cluster: LocalCluster
    plan: Plan
    process: EngineProcess
    steps_between: int
    preemptions: list[Preemption] = field(default_factory=list)

    def wait_until_whole(self) -> None:
        """Until there is a group of all workers, none of them on a node that was lost, and it has
        made some new steps.
        """
        what = f"make {self.steps_between} steps on {self.plan.num_workers} workers"
        wait_for(self._is_whole, self.process, WHOLE_DEADLINE_S, what, interval_s=0.5)

    def _is_whole(self) -> bool:
        steps = new_steps(self.plan.log.read())[-self.steps_between :]
        return (
            len(steps) == self.steps_between
            and len({step.group for step in steps}) == 1
            and steps[-1].world_size == self.plan.num_workers
            # Stock Ray Train stays at its size until the node is gone.
            and steps[-1].group not in {preemption.group for preemption in self.preemptions}
        )

    def preempt(self, world_rank: int) -> None:
        """Notice, loss, replacement."""
        events = self.plan.log.read()
        last = new_steps(events)[-1]
        node_id = next(
            event["node_id"]
            for event in events
            if event["group"] == last.group and event["rank"] == world_rank
        )
        preemption = Preemption(
            world_rank=world_rank, group=last.group, step=last.number, noticed_s=time.time()
        )
        self.preemptions.append(preemption)
        self.cluster.drain_node(node_id, DEADLINE_S)
        # The deadline that Ray was told, or a moment later: the order takes its time to get there.
        self._wait(DEADLINE_S)
        preemption.lost_s = time.time()
        self.cluster.remove_node(node_id)
        self._wait(REPLACEMENT_S)
        preemption.replaced_s = time.time()
        self.cluster.add_node()

    def _wait(self, delay_s: float) -> None:
        until_s = time.monotonic() + delay_s
        what = f"live for {delay_s:g} s of the trace"
        wait_for(lambda: time.monotonic() >= until_s, self.process, delay_s + 60, what)


def report(measured: dict[str, Measurement], failures: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The JSON of `bench preemption`. `wasted_steps`: steps done again. `wasted_s`: seconds of the
    trace, from the first notice on, in which no step was made that was not made before, as
    `measure_waste` defines them. `share_of_wasted_s`: ours over the other engine's.
    """
    wasted_s = {name: one.waste.wasted_s for name, one in measured.items()}
    ours_s = wasted_s.get(OURS)
    return {
        "engines": {name: _report_of(one) for name, one in measured.items()},
        "share_of_wasted_s": {
            name: ours_s / theirs_s
            for name, theirs_s in wasted_s.items()
            if name != OURS and ours_s is not None and theirs_s > 0
        },
        "trace": {
            "deadline_s": DEADLINE_S,
            "replacement_after_loss_s": REPLACEMENT_S,
            "grow_interval_s": GROW_INTERVAL_S,
        },
        "failures": list(failures),
    }


def _report_of(measured: Measurement) -> dict[str, Any]:
    first_s = measured.preemptions[0].noticed_s
    times = ("noticed_s", "lost_s", "replaced_s")
    return {
        **dataclasses.asdict(measured.waste),
        "preemptions": [
            dataclasses.asdict(one) | {name: getattr(one, name) - first_s for name in times}
            for one in measured.preemptions
        ],
    }


def table(result: dict[str, Any]) -> str:
    """The report for a reader: one line per engine."""
    heads = ("preemptions", "wasted steps", "wasted s", "trace s", "longest s")
    lines = [f"{'engine':<18}" + "".join(f"{head:>14}" for head in heads) + f"{'elastic is':>16}"]
    for name, one in result["engines"].items():
        longest_s = max((still["gap_s"] for still in one["standstills"]), default=0.0)
        share = result["share_of_wasted_s"].get(name)
        lines.append(
            f"{name:<18}{len(one['preemptions']):>14}{one['wasted_steps']:>14}"
            f"{one['wasted_s']:>14.1f}{one['trace_s']:>14.1f}{longest_s:>14.1f}"
            f"{'' if share is None else f'{share:.3f} of it':>16}"
        )
    return "\n".join(lines)
