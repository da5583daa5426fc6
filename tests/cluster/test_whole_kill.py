"""All workers killed at once, again and again, at random moments around saves."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from functools import partial
from pathlib import Path

import pytest

from elastic.storage.ledger import LedgerEvent
from tests.cluster.local_cluster import Job, started, wait_for

NUM_KILLS = 2
NUM_KILLS_THOROUGH = 20
FLAGS = (
    *("--steps", "100000", "--global-batch", "4", "--micro-batch", "2", "--model", "nano"),
    *("--sequence-length", "32", "--save-every", "3", "--num-workers", "2", "--quiet"),
)


@pytest.mark.timeout(600)
def test_recovery_is_always_from_a_complete_checkpoint(tmp_path: Path, is_thorough: bool):  # B10
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    num_kills = NUM_KILLS_THOROUGH if is_thorough else NUM_KILLS
    rng = random.Random(seed)
    with started(num_nodes=2) as cluster, Job(cluster, tmp_path, "run", *FLAGS) as job:
        for kill in range(num_kills):
            wait_for(f"a commit of generation {kill}", partial(committed_in_newest, job, kill))
            time.sleep(rng.random() * 0.3)  # anywhere within the next saves
            for rank in job.ranks():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank["pid"], signal.SIGKILL)
        wait_for("the last recovery", lambda: len(job.events("resumed")) == num_kills)
        assert job.process.poll() is None, job.log()
        judge(job.events(), num_kills)


def committed_in_newest(job: Job, generation: int) -> list[LedgerEvent]:
    """Commits of the newest generation beyond the one it began with."""
    begun = job.events("started", "resumed")
    assert job.process.poll() is None, job.log()
    if len(begun) <= generation:
        return []
    since = begun[-1]
    return [
        event
        for event in job.events("checkpoint_committed")
        if event.generation == since.generation and event.step > since.step
    ]


def judge(found: list[LedgerEvent], num_kills: int) -> None:
    committed: set[int] = set()
    newest = 0
    for event in found:
        if event.kind == "checkpoint_committed":
            committed.add(event.step)
            newest = event.step
        if event.kind == "resumed":
            assert event.step in committed and event.step > 0
            # The newest that was told, or one whose telling the kill has cut short.
            assert event.step >= newest
        assert event.kind not in ("checkpoint_quarantined", "run_failed", "start_failed")
    assert sum(event.kind == "failure_decided" for event in found) == num_kills
