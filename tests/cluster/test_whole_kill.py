"""All workers killed at once, again and again, at random moments around saves."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.train import RunConfig, ScalingConfig

from elastic import ElasticConfig, ElasticTrainer
from elastic.storage.filesystem import Filesystem
from elastic.storage.ledger import LedgerEvent, read_ledger
from tests.cluster import functions
from tests.cluster.local_cluster import started, wait_for

NUM_KILLS = 20


@pytest.mark.timeout(600)
def test_recovery_is_always_from_a_complete_checkpoint(tmp_path: Path):  # B10
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    with started(num_nodes=2) as cluster:
        ray.init(address=cluster.address, log_to_driver=False)
        trainer = ElasticTrainer(
            functions.plain,
            train_loop_config={"until": 100_000},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(name="run", storage_path=str(tmp_path)),
            elastic_config=ElasticConfig(save_every="3steps"),
        )
        outcome: list[Any] = []

        def fit() -> None:
            try:
                outcome.append(trainer.fit())
            except BaseException as error:  # noqa: BLE001 - told below
                outcome.append(error)

        threading.Thread(target=fit, daemon=True).start()

        def events() -> list[LedgerEvent]:
            assert not outcome, outcome
            return (
                read_ledger(Filesystem.at(trainer.run_url))
                if tmp_path.joinpath("run").exists()
                else []
            )

        def committed_since_start() -> list[LedgerEvent]:
            """The commits of a generation whose first save is done."""
            found = events()
            begun = [e for e in found if e.kind in ("started", "resumed")]
            if len(begun) < kill + 1:
                return []
            since = begun[-1]
            return [
                e
                for e in found
                if e.kind == "checkpoint_committed"
                and e.generation == since.generation
                and e.step > since.step
            ]

        for kill in range(NUM_KILLS):
            wait_for(f"a commit of generation {kill}", committed_since_start)
            time.sleep(rng.random() * 0.3)  # anywhere within the next saves
            ranks = [e for e in events() if e.kind == "generation_started"][-1].data["ranks"]
            for rank in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank["pid"], signal.SIGKILL)
        wait_for(
            "the last recovery", lambda: sum(e.kind == "resumed" for e in events()) == NUM_KILLS
        )
        judge(events())


def judge(found: list[LedgerEvent]) -> None:
    committed: set[int] = set()
    for event in found:
        if event.kind == "checkpoint_committed":
            committed.add(event.step)
            highest = event.step
        if event.kind == "resumed":
            assert event.step in committed and event.step > 0
            # The newest that was told, or one whose telling the kill has cut short.
            assert event.step >= highest
        assert event.kind not in ("checkpoint_quarantined", "run_failed", "start_failed")
    assert sum(e.kind == "failure_decided" for e in found) == NUM_KILLS
