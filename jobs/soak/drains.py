"""Drains in a row: each rank's node in turn is told to go, goes, and another one comes.

What has to hold every time: no step is lost, training stands still for two seconds at most, and the
node is free of the run before its deadline. Where a save takes longer than the node has, training
goes on two seconds after its deadline at the latest, from the checkpoint before.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from elastic.storage.ledger import LedgerEvent
from jobs.bench.cluster import LocalCluster, local_cluster
from jobs.soak.job import SoakJob

DEADLINE_S = 30
STANDSTILL_S = 2.0
LATE_S = 2.0
_FLAGS = (
    *("--model", "nano", "--global-batch", "12", "--micro-batch", "2", "--sequence-length", "64"),
    *("--save-every", "1000000", "--grow-interval", "1", "--steps", "100000000"),
    *("--num-workers", "1:3"),
)


def soak(
    count: int,
    seed: int,
    say: Callable[[str], None],
    *,
    deadline_s: int = DEADLINE_S,
    save_takes_s: float = 0.0,
) -> dict[str, Any]:
    """For each drain: steps lost, seconds from the order to leave to the next step, and seconds
    from the drain to the next step and to the end of the worker on that node."""
    rng = random.Random(seed)
    found: list[dict[str, Any]] = []
    with local_cluster(num_nodes=3, cpus_per_node=1, fast_health_checks=True) as cluster:
        runs = cluster.directory / "runs"
        job = SoakJob(cluster.address, runs, save_takes_s=save_takes_s)
        with job.going_on(*_FLAGS):
            job.wait_for("three workers", lambda: _is_whole(job))
            for number in range(count):
                time.sleep(rng.random())
                found.append(_drain(cluster, job, number % 3, deadline_s))
                say(f"{number + 1}/{count}: {found[-1]}")
            job.stop()
        failures = [f"{e.kind}: {e.reason}" for e in job.events("failure_decided", "reform_failed")]
    limits = _limits(deadline_s, save_takes_s)
    return {
        "seed": seed,
        "deadline_s": deadline_s,
        "save_takes_s": save_takes_s,
        "drains": found,
        "failures": [*_judge(found, limits), *failures],
    }


def _drain(cluster: LocalCluster, job: SoakJob, world_rank: int, deadline_s: int) -> dict[str, Any]:
    member = job.ranks()[world_rank]
    num_before = len(job.events("recovered"))
    begun_s = time.time()
    cluster.drain_node(member["node_id"], deadline_s)
    left: LedgerEvent = job.wait_for("re-form without it", lambda: _next(job, num_before))
    job.wait_for("end of its worker", lambda: not Path(f"/proc/{member['pid']}").exists())
    free_s = time.time() - begun_s
    ordered = job.events("leave_ordered", "left_unsaved")
    decided_s = max(event.time_s for event in ordered if event.time_s < left.time_s)
    cluster.remove_node(member["node_id"])
    cluster.add_node()
    job.wait_for("three workers again", lambda: _is_whole(job, num_before + 2))
    grown = job.events("recovered")[-1]
    return {
        "world_rank": world_rank,
        "lost_steps": left.data["lost_steps"] + grown.data["lost_steps"],
        "standstill_s": left.time_s - decided_s,
        "going_on_after_s": left.time_s - begun_s,
        "free_after_s": free_s,
    }


def _next(job: SoakJob, num_before: int) -> LedgerEvent | None:
    done = job.events("recovered")
    return done[num_before] if len(done) > num_before else None


def _is_whole(job: SoakJob, num_recovered: int = 0) -> bool:
    """All three train, after so many re-forms."""
    steps = [event.step for event in job.events("progress")]
    return (
        len(job.ranks()) == 3
        and len(job.events("recovered")) >= num_recovered
        and max(steps, default=0) > 0
    )


def _limits(deadline_s: float, save_takes_s: float) -> dict[str, float]:
    if save_takes_s >= deadline_s:
        return {"going_on_after_s": deadline_s + LATE_S, "free_after_s": deadline_s + LATE_S}
    standstill_s = save_takes_s + STANDSTILL_S
    return {"lost_steps": 0, "standstill_s": standstill_s, "free_after_s": deadline_s}


def _judge(found: list[dict[str, Any]], limits: dict[str, float]) -> list[str]:
    return [
        f"drain {number}: {name} is {one[name]:g}, at most {limit:g} allowed"
        for number, one in enumerate(found)
        for name, limit in limits.items()
        if one[name] > limit
    ]
