"""False alarms: a run that nothing happens to, beside processes that keep every core busy.

Ray's health checks are those of a local cluster, and the hang limit is a tenth of its default. Ray
gives its workers a low priority, so that the busy processes leave them a few percent of a core.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from jobs.bench.cluster import local_cluster
from jobs.report import summary
from jobs.soak.job import SoakJob

_FLAGS = (
    *("--model", "nano", "--global-batch", "32", "--micro-batch", "8", "--sequence-length", "128"),
    *("--save-every", "10s", "--hang-limit", "30s", "--steps", "100000000", "--num-workers", "1:3"),
)
_ALARMS = ("worker_died", "node_lost", "stall_seen", "failure_decided", "reform_failed")
_BURN = "while True: pass"


def soak(minutes: float, say: Callable[[str], None]) -> dict[str, Any]:
    """What was taken for a failure in so many minutes; `failures` is empty if nothing was."""
    with local_cluster(num_nodes=3, cpus_per_node=1, fast_health_checks=True) as cluster:
        job = SoakJob(cluster.address, cluster.directory / "runs")
        with job.going_on(*_FLAGS):
            job.wait_for("first save", lambda: job.events("checkpoint_committed"))
            with _every_core_busy():
                _watch(job, 60.0 * minutes, say)
            job.stop()
        alarms = job.events(*_ALARMS)
        told = summary(job.url)
    return {
        "minutes": minutes,
        "num_burners": os.cpu_count(),
        "steps": told["step"],
        "failures": [f"{event.kind}: {event.reason}" for event in alarms],
    }


def _watch(job: SoakJob, seconds: float, say: Callable[[str], None]) -> None:
    """Wait while the run goes on."""
    begun_s = told_s = time.monotonic()
    while time.monotonic() - begun_s < seconds:
        job.check_alive("its time was over")
        if time.monotonic() - told_s >= 60.0:
            told_s = time.monotonic()
            step = max((event.step for event in job.events()), default=-1)
            say(f"{told_s - begun_s:.0f} s, step {step}")
        time.sleep(1.0)


@contextlib.contextmanager
def _every_core_busy() -> Iterator[None]:
    burners = [subprocess.Popen([sys.executable, "-c", _BURN]) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()
