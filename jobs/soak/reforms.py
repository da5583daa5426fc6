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
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic.storage.filesystem import Filesystem
from elastic.storage.ledger import LedgerEvent, read_ledger
from elastic.storage.requests import STOP, ask
from jobs.bench.cluster import LocalCluster, local_cluster
from jobs.report import summary

_PATIENCE_S = 120.0
_WARM_UP = 10
"""Re-forms after which gains count: caches fill in the first ones."""
_SETTLED_STEPS = 3
_FLAGS = (
    *("--model", "nano", "--global-batch", "32", "--micro-batch", "8", "--sequence-length", "128"),
    *("--dtype", "float64", "--lr", "1e-4", "--save-every", "10", "--grow-interval", "1"),
    *("--quiet", "--name", "run"),
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
        run = _Run(cluster, cluster.directory / "struck")
        with run.going_on("--num-workers", "1:2", "--steps", "1000000"):
            usages = run.strike(count, random.Random(seed), say)
            ask(run.filesystem, STOP, who="soak", time_s=time.time(), epoch=1)
            run.wait_for_end()
        struck = summary(run.url)
        say(f"the undisturbed run of {struck['step']} steps")
        reference = _Run(cluster, cluster.directory / "undisturbed")
        with reference.going_on("--num-workers", "2", "--steps", str(struck["step"])):
            reference.wait_for_end(15 * _PATIENCE_S)
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


class _Run:
    def __init__(self, cluster: LocalCluster, storage: Path) -> None:
        self._cluster = cluster
        self._storage = storage
        self._process: subprocess.Popen[bytes] | None = None
        storage.mkdir()
        self.url = str(storage / "run")

    @property
    def filesystem(self) -> Filesystem:
        return Filesystem.at(self.url)

    @contextlib.contextmanager
    def going_on(self, *flags: str) -> Iterator[None]:
        command = [sys.executable, "-m", "jobs.pretrain", *_FLAGS, *flags]
        with (self._storage / "job.log").open("wb") as log:
            self._process = subprocess.Popen(
                [*command, "--storage", str(self._storage)],
                env={**os.environ, "RAY_ADDRESS": self._cluster.address},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            yield
        finally:
            self._process.kill()
            self._process.wait()

    def strike(self, count: int, rng: random.Random, say: Callable[[str], None]) -> list[Usage]:
        self._wait_for("both workers", lambda: len(self._ranks()) == 2 and self._has_settled(0))
        survivor = self._ranks()[0]["pid"]
        usages = [Usage.of(survivor)]
        for number in range(0, count, 2):
            time.sleep(rng.random() * 0.5)  # anywhere between two saves
            victim = next(rank for rank in self._ranks() if rank["pid"] != survivor)
            os.kill(victim["pid"], signal.SIGKILL)
            self._wait_for("two re-forms", lambda done=number + 2: self._has_settled(done))
            if survivor not in [rank["pid"] for rank in self._ranks()]:
                raise RuntimeError(f"process {survivor} did not survive: {self._reasons()}")
            usages.append(Usage.of(survivor))
            say(f"{number + 2}/{count} re-forms: {usages[-1]}")
        return usages

    def wait_for_end(self, patience_s: float = _PATIENCE_S) -> None:
        assert self._process is not None
        status = self._process.wait(patience_s)
        if status != 0:
            raise RuntimeError(f"the run ended with status {status}: {self._log()}")

    def _has_settled(self, reforms: int) -> bool:
        """So many re-forms are over, the group is whole, and has gone on for some steps."""
        events = self._events()
        done = [event for event in events if event.kind == "recovered"]
        if len(done) != reforms or len(self._ranks()) != 2:
            return False
        since = done[-1].step if done else 0
        saved = max((e.step for e in events if e.kind == "checkpoint_committed"), default=-1)
        return saved >= since + _SETTLED_STEPS

    def _wait_for(self, what: str, condition: Callable[[], bool]) -> None:
        until_s = time.monotonic() + _PATIENCE_S
        while not condition():
            assert self._process is not None
            if self._process.poll() is not None:
                raise RuntimeError(f"the run ended before {what}: {self._log()}")
            if time.monotonic() > until_s:
                raise TimeoutError(f"no {what} within {_PATIENCE_S:g} s: {self._reasons()}")
            time.sleep(0.2)

    def _events(self) -> list[LedgerEvent]:
        return read_ledger(self.filesystem) if Path(self.url).is_dir() else []

    def _ranks(self) -> list[dict[str, Any]]:
        started = [event for event in self._events() if event.kind == "generation_started"]
        ranks: list[dict[str, Any]] = started[-1].data["ranks"] if started else []
        return ranks

    def _reasons(self) -> list[str]:
        return [f"{event.kind}: {event.reason}" for event in self._events()[-8:]]

    def _log(self) -> str:
        return (self._storage / "job.log").read_text(errors="replace")[-2000:]


def _drift(found: dict[str, float], expected: dict[str, float]) -> float:
    """The largest relative difference; infinite when a step is missing on either side."""
    if found.keys() != expected.keys():
        return float("inf")
    return max(abs(found[step] - value) / abs(value) for step, value in expected.items())
