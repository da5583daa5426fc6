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

from elastic.storage.filesystem import Filesystem
from elastic.storage.ledger import LedgerEvent, read_ledger
from elastic.storage.requests import STOP, ask
from jobs.bench.cluster import local_cluster
from jobs.bench.engine_process import MeasurementFailed
from jobs.report import summary

_FLAGS = (
    *("--model", "nano", "--global-batch", "32", "--micro-batch", "8", "--sequence-length", "128"),
    *("--save-every", "10s", "--hang-limit", "30s", "--steps", "100000000", "--num-workers", "1:3"),
    *("--quiet", "--name", "run"),
)
_ALARMS = ("worker_died", "node_lost", "stall_seen", "failure_decided", "reform_failed")
_PATIENCE_S = 180.0
_BURN = "while True: pass"


def soak(minutes: float, say: Callable[[str], None]) -> dict[str, Any]:
    """What was taken for a failure in so many minutes; `failures` is empty if nothing was."""
    with local_cluster(num_nodes=3, cpus_per_node=1, fast_health_checks=True) as cluster:
        storage = cluster.directory / "runs"
        storage.mkdir()
        filesystem = Filesystem.at(str(storage / "run"))
        command = [sys.executable, "-m", "jobs.pretrain", *_FLAGS, "--storage", str(storage)]
        with (storage / "job.log").open("wb") as log:
            job = subprocess.Popen(
                command,
                env={**os.environ, "RAY_ADDRESS": cluster.address},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        with _ended(job):
            _wait_for_first_save(job, filesystem)
            with _every_core_busy():
                busy_s = _watch(job, filesystem, 60.0 * minutes, say)
            ask(filesystem, STOP, who="soak", time_s=time.time(), epoch=1)
            job.wait(_PATIENCE_S)
        alarms = [event for event in read_ledger(filesystem) if event.kind in _ALARMS]
        told = summary(filesystem.url)
    return {
        "busy_s": busy_s,
        "num_burners": os.cpu_count(),
        "steps": told["step"],
        "failures": [f"{event.kind}: {event.reason}" for event in alarms],
    }


def _wait_for_first_save(job: subprocess.Popen[bytes], filesystem: Filesystem) -> None:
    until_s = time.monotonic() + _PATIENCE_S
    while not any(event.kind == "checkpoint_committed" for event in _events(filesystem)):
        if job.poll() is not None or time.monotonic() > until_s:
            raise MeasurementFailed("the run did not begin")
        time.sleep(0.5)


def _events(filesystem: Filesystem) -> list[LedgerEvent]:
    return read_ledger(filesystem) if filesystem.exists("run.json") else []


def _watch(
    job: subprocess.Popen[bytes], filesystem: Filesystem, seconds: float, say: Callable[[str], None]
) -> float:
    """Wait while the run goes on; how long it did."""
    begun_s = told_s = time.monotonic()
    while time.monotonic() - begun_s < seconds:
        if job.poll() is not None:
            raise MeasurementFailed(f"the run ended by itself, with status {job.returncode}")
        if time.monotonic() - told_s >= 60.0:
            told_s = time.monotonic()
            steps = [event.step for event in read_ledger(filesystem)]
            say(f"{told_s - begun_s:.0f} s, step {max(steps, default=-1)}")
        time.sleep(1.0)
    return time.monotonic() - begun_s


@contextlib.contextmanager
def _every_core_busy() -> Iterator[None]:
    burners = [subprocess.Popen([sys.executable, "-c", _BURN]) for _ in range(os.cpu_count() or 1)]
    with contextlib.ExitStack() as stack:
        for burner in burners:
            stack.enter_context(_ended(burner))
        yield


@contextlib.contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    try:
        yield
    finally:
        process.kill()
        process.wait()
