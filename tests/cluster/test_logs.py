"""What ranks say on a real cluster: in the run directory, and where their end is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from click.testing import CliRunner
from ray.train import RunConfig, ScalingConfig

from elastic import ElasticConfig, ElasticTrainer, TrainingFailed
from elastic.cli import main
from elastic.storage.filesystem import Filesystem
from elastic.storage.ledger import LedgerEvent, read_ledger
from tests.cluster import functions
from tests.cluster.local_cluster import LocalCluster, wait_for

pytestmark = pytest.mark.timeout(180)

SECRET = "sk-5f0e-from-the-environment"
SAID = ["printed, and\\x1b[2J gone", "to stderr", "raw, without end"]


def fit(function: Callable[..., None], storage: Path) -> Any:
    return ElasticTrainer(
        function,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="run", storage_path=str(storage)),
        elastic_config=ElasticConfig(save_every="100steps", env_vars={"MY_TOKEN": SECRET}),
    ).fit()


def event(storage: Path, kind: str, rank: int) -> LedgerEvent:
    found = read_ledger(Filesystem.at(f"{storage}/run"))
    return next(event for event in found if event.kind == kind and event.world_rank == rank)


def ask(*arguments: object) -> str:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_a_killed_rank_has_its_last_word_where_its_death_is_told(
    connected: LocalCluster, tmp_path: Path
) -> None:
    fit(functions.speaks_and_dies, tmp_path)
    run = tmp_path / "run"
    assert event(tmp_path, "worker_died", 1).data["last_lines"][-3:] == SAID
    told = ask("events", run)
    assert all(f"    | {line}\n" in told for line in SAID)

    shown = ask("logs", run, "--generation", 0, "--rank", 1).splitlines()
    # Each line once, although Ray Train would have print write to a logger too.
    said = ["rank 1 of generation 0 begins", *SAID]
    assert [line for line in shown if "Warning" not in line] == [f"g0 rank1 | {s}" for s in said]
    newest = ask("logs", run)
    assert all(f"g1 rank{rank} | rank {rank} of generation 1 begins" in newest for rank in (0, 1))
    for path in (run / "logs").rglob("*.log"):
        assert SECRET not in path.read_text()

    # Ray's own log files go on to work.
    session = Path(ray._private.worker._global_node.get_logs_dir_path())
    wait_for(
        "what the workers have printed in Ray's own log files",
        lambda: all(
            any(said in path.read_bytes() for path in session.glob("worker-*.out"))
            for said in (b"rank 0 of generation 0 begins", b"rank 1 of generation 1 begins")
        ),
        timeout_s=5.0,
    )


def test_a_failed_rank_says_why_in_its_log_and_what_came_before_in_the_error(
    connected: LocalCluster, tmp_path: Path
) -> None:
    with pytest.raises(TrainingFailed) as caught:
        fit(functions.speaks_and_raises, tmp_path)
    text = str(caught.value)
    assert text.startswith("rank 1 raised ValueError: boom-3c")
    assert "last lines of rank 1:\n" in text and "    the loss looks odd\n" in text
    assert text.count("Traceback") == 1
    assert event(tmp_path, "rank_failed", 1).data["last_lines"][-1] == "the loss looks odd"

    lines = ask("logs", tmp_path / "run", "--rank", 1).splitlines()
    assert lines[-1] == "g0 rank1 | ValueError: boom-3c"
    assert "g0 rank1 | Traceback (most recent call last):" in lines
    assert "    | the loss looks odd" in ask("status", tmp_path / "run").splitlines()
    found = json.loads(ask("status", tmp_path / "run", "--json"))
    assert found["last_lines"]["world_rank"] == 1
