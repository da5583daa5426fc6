"""A checkpoint that trains into losses that are no numbers is passed by, within one submission."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ray.train import RunConfig, ScalingConfig

from elastic import ElasticConfig, ElasticTrainer, TrainingFailed
from elastic.storage.filesystem import Filesystem
from elastic.storage.ledger import LedgerEvent, read_ledger
from tests.cluster import functions
from tests.cluster.local_cluster import LocalCluster


def trainer(folder: Path, until: int, spoilt: dict[int, list[int]]) -> ElasticTrainer:
    path = folder / "spoilt.json"
    path.write_text(json.dumps(spoilt))
    return ElasticTrainer(
        functions.spoilt_from,
        train_loop_config={"until": until, "spoilt": str(path)},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="run", storage_path=str(folder)),
        elastic_config=ElasticConfig(save_every=10, save_behind="wait"),
    )


def told(folder: Path) -> list[LedgerEvent]:
    return read_ledger(Filesystem.at(f"{folder}/run"))


def steps_of(events: list[LedgerEvent], *kinds: str) -> list[tuple[str, int]]:
    return [(event.kind, event.step) for event in events if event.kind in kinds]


@pytest.mark.thorough
def test_the_group_steps_back_and_ends_where_that_does_not_help(
    connected: LocalCluster, tmp_path: Path
):
    trainer(tmp_path, 20, {}).fit()
    trainer(tmp_path, 30, {20: [22]}).fit()
    events = told(tmp_path)
    assert steps_of(events, "resumed", "checkpoint_suspect", "run_finished") == [
        ("run_finished", 20),
        ("resumed", 20),
        ("checkpoint_suspect", 20),
        ("resumed", 10),
        ("run_finished", 30),
    ]
    (failure,) = (event for event in events if event.kind == "failure_decided")
    assert (failure.data["cause"], failure.data["then"]) == ("storage", "restart")
    assert "the loss of step 22 is nan, 2 steps after" in failure.reason

    with pytest.raises(TrainingFailed, match="the bytes are not the cause"):
        trainer(tmp_path, 40, {30: [31], 20: [31]}).fit()
    events = told(tmp_path)
    assert steps_of(events, "checkpoint_suspect", "checkpoint_trusted")[1:] == [
        ("checkpoint_suspect", 30),
        ("checkpoint_trusted", 30),
    ]
    assert events[-1].kind == "run_failed"
