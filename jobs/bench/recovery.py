"""`bench recovery`: strike a training run, and measure the time to the first new step.

One fresh cluster per measurement; engines alternate within a repeat, so that a drift of the machine
meets them all. Must not import torch or elastic.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from jobs.bench.cluster import local_cluster
from jobs.bench.engine_process import (
    EngineProcess,
    MeasurementFailed,
    engine_process,
    wait_for,
)
from jobs.bench.engines import Engine, Plan
from jobs.bench.faults import Cluster, Fault, Victim
from jobs.bench.namespaces import namespaced_cluster
from jobs.bench.site import measurement_directory
from jobs.bench.statistics import Recovery, measure_recovery, median_ratio

START_DEADLINE_S, LEDGER_DEADLINE_S = 300.0, 15.0
OURS = "elastic"
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What is measured: each engine `num_repeats` times under one fault."""

    fault: Fault
    engines: Sequence[Engine]
    num_repeats: int
    save_every_steps: int = 20
    state_bytes: int = 0

    def run(self, say: Say) -> dict[str, Any]:
        """The report, ready for JSON; measurements that failed are in its `failures`."""
        recoveries: dict[str, list[Recovery]] = {engine.name: [] for engine in self.engines}
        failures: list[dict[str, Any]] = []
        for repeat in range(self.num_repeats):
            for engine in self.engines:
                say(f"[{repeat + 1}/{self.num_repeats}] {engine.name}: {self.fault.name} ...")
                try:
                    recovery = self._measure(engine)
                except MeasurementFailed as error:
                    failures.append(
                        {"engine": engine.name, "repeat": repeat, "message": str(error)}
                    )
                    say(f"    failed: {error}")
                    continue
                recoveries[engine.name].append(recovery)
                say(f"    {_described(recovery)}")
        return report(self.fault.name, recoveries, failures, self.state_bytes)

    def _measure(self, engine: Engine) -> Recovery:
        """One measurement, on a cluster of its own where the engine needs one.

        Raises MeasurementFailed when the engine ends, or misses a deadline before the strike or
        after.
        """
        with contextlib.ExitStack() as stack:
            directory, cluster = stack.enter_context(_started(engine, self.fault))
            plan = Plan(
                directory=str(directory),
                address=cluster.address if cluster else "",
                save_every_steps=self.save_every_steps,
                state_bytes=self.state_bytes,
                hang_limit_s=self.fault.hang_limit_s,
                **engine.plan,
            )
            process = stack.enter_context(
                engine_process(
                    engine.module,
                    plan.to_json(),
                    directory=directory,
                    environment=engine.environment,
                )
            )
            return _measure(engine, self.fault, plan, process, cluster)


def report(
    fault: str,
    recoveries: dict[str, list[Recovery]],
    failures: Sequence[dict[str, Any]],
    state_bytes: int = 0,
) -> dict[str, Any]:
    """The JSON of `bench recovery`; a ratio is our median over the other engine's, None when one
    has no measurement.
    """
    times_s = {name: [r.kill_to_step_s for r in done] for name, done in recoveries.items()}
    return {
        "fault": fault,
        "state_bytes": state_bytes,
        "engines": {
            name: {
                "kill_to_step_s": times_s[name],
                "lost_steps": [r.lost_steps for r in done],
                "phases_s": [r.phases_s for r in done],
                "world_size": [r.world_size for r in done],
                # Of engines that say when they knew; what is beyond is the recovery proper.
                "detect_s": [r.phases_s["detect"] for r in done if "detect" in r.phases_s],
                "detected_to_step_s": [
                    r.kill_to_step_s - r.phases_s["detect"] for r in done if "detect" in r.phases_s
                ],
            }
            for name, done in recoveries.items()
        },
        "median_ratio_to": {
            name: median_ratio(times_s.get(OURS, []), times_s[name])
            for name in recoveries
            if name != OURS
        },
        "failures": list(failures),
    }


def table(result: dict[str, Any]) -> str:
    """The report for a reader: one line per engine, then where the time went."""
    lines = [
        f"{'engine':<18}{'median s':>10}{'min':>8}{'max':>8}{'lost steps':>12}{'elastic is':>14}"
    ]
    for name, measured in result["engines"].items():
        times_s, ratio = measured["kill_to_step_s"], result["median_ratio_to"].get(name)
        if not times_s:
            lines.append(f"{name:<18}{'none':>10}")
            continue
        lost = f"{median(measured['lost_steps']):g}"
        times = f"{median(times_s):>10.2f}{min(times_s):>8.2f}{max(times_s):>8.2f}"
        lines.append(
            f"{name:<18}{times}{lost:>12}{'' if ratio is None else f'{ratio:.3f} of it':>14}"
        )
    for name, measured in result["engines"].items():
        if measured["phases_s"]:
            lines.append(f"{name}: {_phases(_median_phases(measured['phases_s']))}")
    size = f", {result['state_bytes'] / 1e9:g} GB of state" if result["state_bytes"] else ""
    return "\n".join([f"fault: {result['fault']}{size}", *lines])


@contextlib.contextmanager
def _started(engine: Engine, fault: Fault) -> Iterator[tuple[Path, Cluster]]:
    """Where the engine runs: a directory, and a fresh cluster where it needs one."""
    if not engine.needs_cluster:
        with measurement_directory() as directory:
            yield directory, None
    elif fault.needs_namespaces:
        with namespaced_cluster(fast_health_checks=engine.fast_health_checks) as cluster:
            yield cluster.directory, cluster
    else:
        with local_cluster(fast_health_checks=engine.fast_health_checks) as local:
            yield local.directory, local


def _measure(
    engine: Engine, fault: Fault, plan: Plan, process: EngineProcess, cluster: Cluster
) -> Recovery:
    step = f"reach step {plan.kill_at_step}"
    wait_for(lambda: _last_step(plan) >= plan.kill_at_step, process, START_DEADLINE_S, step)
    killed_s = _strike(cluster, fault, plan)
    recovery = wait_for(
        lambda: measure_recovery(plan.log.read(), killed_s),
        process,
        fault.recover_deadline_s,
        "do a new step after the fault",
    )
    read_phases = engine.read_phases
    if read_phases is None:
        return recovery
    phases_s = wait_for(
        lambda: read_phases(Path(plan.directory), killed_s),
        process,
        LEDGER_DEADLINE_S,
        "record the phases of its recovery",
    )
    return dataclasses.replace(recovery, phases_s=phases_s)


def _strike(cluster: Cluster, fault: Fault, plan: Plan) -> float:
    """Strike the ranks of the newest group, and return the time just before."""
    entered = [e for e in plan.log.read() if e["event"] == "enter"]
    newest = entered[-1]["group"]
    by_rank = {e["rank"]: e for e in entered if e["group"] == newest}
    victims = [
        Victim(world_rank=rank, pid=by_rank[rank]["pid"], node_id=by_rank[rank]["node_id"])
        for rank in fault.world_ranks
    ]
    killed_s = time.time()
    for victim in victims:
        fault.strike(cluster, victim)
    return killed_s


def _last_step(plan: Plan) -> int:
    return max((e["step"] for e in plan.log.read() if e["event"] == "step"), default=0)


def _described(recovery: Recovery) -> str:
    return (
        f"{recovery.kill_to_step_s:.2f} s to step {recovery.first_step} "
        f"on {recovery.world_size} workers, {recovery.lost_steps} steps lost "
        f"({_phases(recovery.phases_s)})"
    )


def _phases(phases_s: dict[str, float]) -> str:
    return ", ".join(f"{name} {seconds:.2f}" for name, seconds in phases_s.items())


def _median_phases(phases_s: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: median(p.get(name, 0.0) for p in phases_s) for name in phases_s[0]}
