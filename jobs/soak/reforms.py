"""Re-forms in one run, many in a row: what the surviving process gains by each, and the curve.

A worker is killed again and again; each time the other one goes on alone, and a new one joins it:
two re-forms, both of which the same process lives through. Memory is the process's proportional
set size, which counts pages shared with others by their share.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs.bench.cluster import local_cluster
from jobs.report import summary
from jobs.soak.job import PATIENCE_S, SoakFailed, SoakJob

_WARM_UP = 10
"""Re-forms after which gains count: caches fill in the first ones."""
_SETTLED_STEPS = 3
_FLAGS = (
    *("--model", "nano", "--global-batch", "32", "--micro-batch", "8", "--sequence-length", "128"),
    *("--dtype", "float64", "--lr", "1e-4", "--save-every", "10", "--grow-interval", "0.2"),
    *("--node-strikes", "0"),  # it is always the same one that is struck
)


@dataclass(frozen=True)
class Usage:
    """What a process holds."""

    memory_bytes: int
    threads: int
    descriptors: int
    sockets: int

    @classmethod
    def of(cls, pid: int) -> Usage:
        """Raises `OSError` when there is no such process."""
        root = Path(f"/proc/{pid}")
        memory = next(
            int(line.split()[1]) * 1024
            for line in (root / "smaps_rollup").read_text().splitlines()
            if line.startswith("Pss:")
        )
        targets = []
        for entry in (root / "fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                targets.append(os.readlink(entry))
        return cls(
            memory_bytes=memory,
            threads=len(list((root / "task").iterdir())),
            descriptors=len(targets),
            sockets=sum(target.startswith("socket:") for target in targets),
        )


def soak(count: int, seed: int, say: Callable[[str], None]) -> dict[str, Any]:
    """What the survivor held after each pair of re-forms, what it gained by each, and the curve."""
    with local_cluster(num_nodes=2, cpus_per_node=1, fast_health_checks=True) as cluster:
        run = SoakJob(cluster.address, cluster.directory / "struck")
        with run.going_on(*_FLAGS, "--num-workers", "1:2", "--steps", "1000000"):
            usages = _strike(run, count, random.Random(seed), say)
            run.stop()
        struck = summary(run.url)
        say(f"the undisturbed run of {struck['step']} steps")
        reference = SoakJob(cluster.address, cluster.directory / "undisturbed")
        with reference.going_on(*_FLAGS, "--num-workers", "2", "--steps", str(struck["step"])):
            reference.wait_for_end(15 * PATIENCE_S)
        drift = _drift(struck["losses"], summary(reference.url)["losses"])
    return judge(usages, struck, drift, seed)


def judge(usages: list[Usage], struck: dict[str, Any], drift: float, seed: int) -> dict[str, Any]:
    """The soak's result. `usages` are those after each pair of re-forms."""
    late = usages[min(_WARM_UP // 2, len(usages) - 2) :]
    num_reforms = 2 * (len(late) - 1)
    gains = {
        name: (getattr(late[-1], name) - getattr(late[0], name)) / num_reforms
        for name in ("memory_bytes", "threads", "descriptors", "sockets")
    }
    limits = {"memory_bytes": float(1 << 20), "threads": 0.0, "descriptors": 0.0, "sockets": 0.0}
    failures = [
        f"{gain:g} {name} gained per re-form, at most {limits[name]:g} allowed"
        for name, gain in gains.items()
        if gain > limits[name]
    ]
    if not drift <= 1e-9:
        failures.append(f"losses differ by {drift:g} from the undisturbed run's, 1e-9 allowed")
    return {
        "reforms": struck["restarts"],
        "steps": struck["step"],
        "lost_steps": struck["lost_steps"],
        "gained_per_reform": gains,
        "worst_relative_loss_difference": drift,
        "usages": [vars(usage) for usage in usages],
        "seed": seed,
        "failures": failures,
    }


def _strike(
    job: SoakJob, count: int, rng: random.Random, say: Callable[[str], None]
) -> list[Usage]:
    job.wait_for("both workers", lambda: len(job.ranks()) == 2 and _has_settled(job, 0))
    survivor = job.ranks()[0]["pid"]
    usages = [Usage.of(survivor)]
    for number in range(0, count, 2):
        job.announce_fault()
        time.sleep(rng.random() * 0.5)  # anywhere between two saves
        victim = next(rank for rank in job.ranks() if rank["pid"] != survivor)
        os.kill(victim["pid"], signal.SIGKILL)
        job.wait_for("two re-forms", lambda done=number + 2: _has_settled(job, done))
        if survivor not in [rank["pid"] for rank in job.ranks()]:
            last = [f"{event.kind}: {event.reason}" for event in job.events()[-8:]]
            raise SoakFailed(f"process {survivor} did not survive: {last}")
        usages.append(Usage.of(survivor))
        say(f"{number + 2}/{count} re-forms: {usages[-1]}")
    return usages


def _has_settled(job: SoakJob, reforms: int) -> bool:
    """So many re-forms are over, the group is whole, and has gone on for some steps."""
    done = job.events("recovered")
    if len(done) != reforms or len(job.ranks()) != 2:
        return False
    since = done[-1].step if done else 0
    saved = max((event.step for event in job.events("checkpoint_committed")), default=-1)
    return saved >= since + _SETTLED_STEPS


def _drift(found: dict[str, float], expected: dict[str, float]) -> float:
    """The largest relative difference; infinite when a step is missing on either side."""
    if found.keys() != expected.keys():
        return float("inf")
    return max(abs(found[step] - value) / abs(value) for step, value in expected.items())
