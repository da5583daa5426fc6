"""`bench growth`: add a node to a run that wants it, and measure what taking it in costs.

One fresh cluster per growth. Must not import torch or elastic.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from jobs.bench.cluster import local_cluster
from jobs.bench.engine_process import MeasurementFailed, engine_process, wait_for
from jobs.bench.engines import ENGINES, Plan
from jobs.bench.statistics import Growth, measure_growth

NUM_NODES, NUM_WORKERS = 2, 3
START_DEADLINE_S, GROW_DEADLINE_S = 180.0, 120.0
# Short, so that the measurement waits for the new worker's start and not for the interval.
GROW_INTERVAL_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A run on two nodes that wants three workers is given the third, `num_repeats` times."""

    num_repeats: int
    save_every_steps: int = 20

    def run(self, say: Callable[[str], None]) -> dict[str, Any]:
        """The report, ready for JSON; measurements that failed are in its `failures`."""
        growths: list[Growth] = []
        failures: list[dict[str, Any]] = []
        for repeat in range(self.num_repeats):
            say(f"[{repeat + 1}/{self.num_repeats}] growth to {NUM_WORKERS} workers ...")
            try:
                growth = self._measure()
            except MeasurementFailed as error:
                failures.append({"repeat": repeat, "message": str(error)})
                say(f"    failed: {error}")
                continue
            growths.append(growth)
            say(
                f"    no step for {growth.stall_s:.2f} s, {growth.lost_steps} steps lost, "
                f"{growth.added_to_step_s:.1f} s from the node to the first step with it"
            )
        return report(growths, failures)

    def _measure(self) -> Growth:
        """Raises MeasurementFailed when the engine ends, or misses a deadline."""
        with local_cluster(num_nodes=NUM_NODES, fast_health_checks=True) as cluster:
            plan = Plan(
                directory=str(cluster.directory),
                address=cluster.address,
                num_workers=NUM_WORKERS,
                save_every_steps=self.save_every_steps,
                grow_interval_s=GROW_INTERVAL_S,
            )
            module = ENGINES["elastic"].module
            with engine_process(module, plan.to_json(), directory=cluster.directory) as process:
                reach = f"reach step {plan.kill_at_step}"
                wait_for(lambda: _has_reached(plan), process, START_DEADLINE_S, reach)
                added_s = time.time()
                cluster.add_node()
                return wait_for(
                    lambda: measure_growth(plan.log.read(), added_s),
                    process,
                    GROW_DEADLINE_S,
                    f"do a step on {NUM_WORKERS} workers",
                )


def _has_reached(plan: Plan) -> bool:
    steps = [event["step"] for event in plan.log.read() if event["event"] == "step"]
    return max(steps, default=0) >= plan.kill_at_step


def report(growths: Sequence[Growth], failures: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The JSON of `bench growth`. `stall_s`: seconds in which no step was finished, from the last
    step of the smaller group to the first of the larger one. `lost_steps`: steps done twice.
    """
    return {
        "stall_s": [growth.stall_s for growth in growths],
        "lost_steps": [growth.lost_steps for growth in growths],
        "growths": [dataclasses.asdict(growth) for growth in growths],
        "failures": list(failures),
    }


def table(result: dict[str, Any]) -> str:
    """The report for a reader."""
    stalls_s, growths = result["stall_s"], result["growths"]
    if not stalls_s:
        return "no growth was measured"
    return (
        f"no step for {median(stalls_s):.2f} s (median; {min(stalls_s):.2f} to "
        f"{max(stalls_s):.2f}); a step took {median(g['usual_step_s'] for g in growths):.2f} s, "
        f"the slowest beside the new worker's start "
        f"{median(g['slowest_step_s'] for g in growths):.2f} s\n"
        f"steps done twice: {median(result['lost_steps']):g} (at most {max(result['lost_steps'])})"
        f"\nfrom the new node to the first step with it "
        f"{median(g['added_to_step_s'] for g in growths):.1f} s (median)"
    )
