"""Two submissions of one name at once, also through two clusters: there is never a second writer.

Real clusters, real jobs. The second one comes at a random moment of the first one's start. Every
time one of the two must give way, and say who holds the run.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from elastic.storage.filesystem import Filesystem
from elastic.storage.ledger import LedgerEvent, read_ledger
from jobs.bench.cluster import LocalCluster, local_cluster

_LATEST_S = 6.0
"""By then the first one has the run."""
_PATIENCE_S = 120.0
_HOLDER = re.compile(r"^.*is held by process \d+ on \S+ \(job \w+ on the Ray cluster at .*$", re.M)
_FLAGS = (
    *("--model", "nano", "--global-batch", "2", "--micro-batch", "2", "--sequence-length", "32"),
    *("--num-workers", "1", "--steps", "1000000", "--save-every", "1000000", "--quiet"),
)


def soak(count: int, seed: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Per round: when the second one came, through how many clusters, who lost and what it said."""
    rng = random.Random(seed)
    rounds = []
    with _cluster() as first, _cluster() as second:
        for number in range(count):
            pair = (first, second) if number % 2 == 0 else (first, first)
            found = _Round(pair, first.directory / f"round-{number}").play(rng.random() * _LATEST_S)
            rounds.append(found)
            say(f"round {number + 1}/{count}: {found}")
    failures = [f"round {n + 1}: {p}" for n, one in enumerate(rounds) for p in one["problems"]]
    return {"count": count, "seed": seed, "rounds": rounds, "failures": failures}


def _cluster() -> contextlib.AbstractContextManager[LocalCluster]:
    return local_cluster(num_nodes=1, cpus_per_node=1, fast_health_checks=True)


class _Round:
    def __init__(self, clusters: tuple[LocalCluster, LocalCluster], storage: Path) -> None:
        self._clusters = clusters
        self._storage = storage
        storage.mkdir()

    def play(self, offset_s: float) -> dict[str, Any]:
        problems: list[str] = []
        with self._job(0) as one:
            time.sleep(offset_s)
            with self._job(1) as other:
                said = ""
                pair = [one, other]
                try:
                    loser = _first_to_end(pair)
                    said = self._log(pair.index(loser)).read_text(errors="replace")
                    winner = pair[1 - pair.index(loser)]
                    problems += _judge_loser(loser, said)
                    self._wait_for_steps(winner)
                    winner.send_signal(signal.SIGTERM)
                    if winner.wait(_PATIENCE_S) != 0:
                        problems.append(f"the winner ended with status {winner.returncode}")
                except (TimeoutError, subprocess.TimeoutExpired) as error:
                    problems.append(str(error))
        problems += _judge_ledger(self._events())
        held = _HOLDER.search(said)
        return {
            "offset_s": round(offset_s, 3),
            "clusters": len(set(self._clusters)),
            "loser_said": held[0] if held else "",
            "problems": problems,
        }

    @contextlib.contextmanager
    def _job(self, number: int) -> Iterator[subprocess.Popen[bytes]]:
        command = [sys.executable, "-m", "jobs.pretrain", "--name", "run", *_FLAGS]
        with self._log(number).open("wb") as log:
            process = subprocess.Popen(
                [*command, "--storage", str(self._storage)],
                env={**os.environ, "RAY_ADDRESS": self._clusters[number].address},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def _log(self, number: int) -> Path:
        return self._storage / f"job-{number}.log"

    def _events(self) -> list[LedgerEvent]:
        return read_ledger(Filesystem.at(str(self._storage / "run")))

    def _wait_for_steps(self, winner: subprocess.Popen[bytes]) -> None:
        until_s = time.monotonic() + _PATIENCE_S
        while not any(event.kind == "started" for event in self._events()):
            if winner.poll() is not None:
                raise TimeoutError(f"the winner ended with status {winner.returncode} at once")
            if time.monotonic() > until_s:
                raise TimeoutError(f"the winner made no step in {_PATIENCE_S:g} s")
            time.sleep(0.1)


def _first_to_end(pair: list[subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
    until_s = time.monotonic() + _PATIENCE_S
    while time.monotonic() < until_s:
        for process in pair:
            if process.poll() is not None:
                return process
        time.sleep(0.05)
    raise TimeoutError(f"neither of the two gave way in {_PATIENCE_S:g} s")


def _judge_loser(loser: subprocess.Popen[bytes], said: str) -> list[str]:
    problems = []
    if loser.returncode != 1:
        problems.append(f"the loser ended with status {loser.returncode}, not 1")
    if _HOLDER.search(said) is None:
        problems.append(f"the loser did not say who holds the run: {said[-500:]}")
    return problems


def _judge_ledger(events: list[LedgerEvent]) -> list[str]:
    """One driver has written, and the run ended as it was asked to."""
    problems = []
    lives = {event.life for event in events}
    starts = sum(event.kind == "run_started" for event in events)
    if len(lives) != 1 or starts != 1:
        problems.append(f"{len(lives)} drivers have written, {starts} have begun the run")
    if not any(event.kind == "run_stopped" for event in events):
        problems.append("the run did not stop as asked")
    return problems
