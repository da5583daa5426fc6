"""Two runs on one cluster at once, one of them where there are accelerators of two types."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ray.train import RunConfig, ScalingConfig

from elastic import ElasticConfig, ElasticTrainer
from elastic.storage.filesystem import Filesystem
from elastic.storage.ledger import read_ledger
from tests.cluster import functions
from tests.cluster.local_cluster import Job, LocalCluster, losses
from tests.dist.undisturbed import undisturbed

FLAGS = (
    *("--steps", "40", "--global-batch", "4", "--micro-batch", "2", "--model", "nano"),
    *("--sequence-length", "32", "--save-every", "5", "--save-behind", "wait", "--quiet"),
)


@pytest.mark.thorough
@pytest.mark.timeout(180)
def test_one_loses_a_worker_and_the_other_does_not_notice(
    connected: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    accelerators = []
    for kind in ("slow", "fast", "fast"):
        monkeypatch.setenv("RAY_OVERRIDE_LABELS", json.dumps({"ray.io/accelerator-type": kind}))
        accelerators.append(connected.add(num_cpus=0, resources={"accelerator": 1}))
    monkeypatch.delenv("RAY_OVERRIDE_LABELS")
    trainer = ElasticTrainer(
        functions.plain,
        train_loop_config={"until": 200},
        scaling_config=ScalingConfig(num_workers=(1, 3), resources_per_worker={"accelerator": 1}),
        run_config=RunConfig(name="accelerated", storage_path=str(tmp_path)),
        elastic_config=ElasticConfig(save_every="50steps"),
    )
    try:
        with Job(connected, tmp_path, "struck", *FLAGS, "--num-workers", "2") as struck:
            struck.wait_for_commit(5)
            struck.kill_rank(1)
            trainer.fit()
            found = struck.wait()
    finally:
        for node in accelerators:
            connected.remove(node.node_id)
    assert found["restarts"] == 1 and found["world_sizes"] == [2, 2]
    assert losses(found) == losses(undisturbed(2, tmp_path, *FLAGS))
    events = read_ledger(Filesystem.at(trainer.run_url))
    (group,) = [event for event in events if event.kind == "generation_started"]
    fast = {node.node_id for node in accelerators[1:]}
    assert {rank["node_id"] for rank in group.data["ranks"]} == fast, "not on the slow one too"
    assert [e.kind for e in events if e.kind in ("worker_died", "failure_decided")] == []
