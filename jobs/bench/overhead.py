"""`bench overhead`: what a step costs more under the service than without it, saving off.

What the service does on the training thread is in the ratio. What it does beside it (the driver's
process, a thread that reports four times a second) runs during the bare loop's blocks as well, and
is not. Must not import torch or elastic: the loops are in `overhead_loop`, which the workers run.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from jobs.bench.cluster import local_cluster
from jobs.bench.engine_process import EngineProcess, engine_process, wait_for
from jobs.bench.events import EventLog
from jobs.bench.statistics import bootstrap_interval, paired_ratios

NUM_WORKERS, DEADLINE_S = 2, 300.0


@dataclass(frozen=True, kw_only=True)
class Bench:
    """`num_blocks` blocks of the service's steps, each between two of the bare loop's."""

    num_blocks: int
    # Short, so that whatever else the machine does weighs on neighbouring blocks alike.
    steps_per_block: int = 4

    def run(self, say: Callable[[str], None]) -> dict[str, Any]:
        """The report, ready for JSON.

        Raises MeasurementFailed when the run ends without its result.
        """
        say(
            f"{self.num_blocks} blocks of {self.steps_per_block} steps on {NUM_WORKERS} workers ..."
        )
        # The first block of each side warms caches and allocators up, and is thrown away.
        with local_cluster(
            num_nodes=1, cpus_per_node=NUM_WORKERS, fast_health_checks=True
        ) as cluster:
            plan = {
                "directory": str(cluster.directory),
                "address": cluster.address,
                "num_blocks": self.num_blocks + 1,
                "steps_per_block": self.steps_per_block,
                "num_workers": NUM_WORKERS,
            }
            with engine_process(
                "jobs.bench.overhead_loop", json.dumps(plan), directory=cluster.directory
            ) as process:
                served_s, bare_s = self._measure(process, cluster.directory, say)
        return report(served_s[1:], bare_s[1:])

    def _measure(
        self, process: EngineProcess, directory: Path, say: Callable[[str], None]
    ) -> tuple[list[float], list[float]]:
        log = EventLog(directory / "events.jsonl")
        num_bare, told = self.num_blocks + 2, 0
        while told < num_bare:
            told = min(told + max(10, self.num_blocks // 5), num_bare)
            enough = functools.partial(_has_blocks, log, told)
            wait_for(enough, process, DEADLINE_S, f"finish block {told} of {num_bare}")
            say(f"    {told} of {num_bare} blocks")
        return _step_s(log, "served"), _step_s(log, "bare")


def _has_blocks(log: EventLog, num_bare: int) -> bool:
    return len(_step_s(log, "bare")) >= num_bare


def _step_s(log: EventLog, side: str) -> list[float]:
    return [event["step_s"] for event in log.read() if event["event"] == side]


def report(served_s: list[float], bare_s: list[float]) -> dict[str, Any]:
    """The JSON of `bench overhead`, from the seconds per step of each block."""
    ratios = paired_ratios(served_s, bare_s)
    low, high = bootstrap_interval(ratios)
    return {
        "ratio_median": median(ratios),
        "ci95": [low, high],
        "blocks": [
            {"service_step_s": service, "bare_step_s": bare, "ratio": ratio}
            for service, bare, ratio in zip(served_s, bare_s, ratios, strict=False)
        ],
        "bare_step_s": median(bare_s),
        "service_step_s": median(served_s),
    }


def table(result: dict[str, Any]) -> str:
    """The report for a reader."""
    low, high = result["ci95"]
    return (
        f"step of the bare loop {result['bare_step_s'] * 1e3:.1f} ms, "
        f"of the service {result['service_step_s'] * 1e3:.1f} ms (medians of blocks)\n"
        f"ratio {result['ratio_median']:.4f}, 95 % interval {low:.4f} to {high:.4f} "
        f"over {len(result['blocks'])} blocks"
    )
