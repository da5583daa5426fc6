"""Two nodes with two workers each: losing rank 0's node, and what every rank is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.train import RunConfig, ScalingConfig

from elastic import ElasticConfig, ElasticTrainer
from tests.cluster import functions
from tests.cluster.local_cluster import Fit, started, wait_for


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_the_node_of_rank_0_is_lost_and_comes_back(tmp_path: Path):  # B18, B65
    marks = tmp_path / "marks"
    marks.mkdir()
    with started(num_nodes=2, cpus_per_node=2) as cluster:
        ray.init(address=cluster.address, log_to_driver=False)
        trainer = ElasticTrainer(
            functions.tells_ranks,
            train_loop_config={"marks": str(marks), "until": 1_000_000},
            scaling_config=ScalingConfig(num_workers=(2, 4), elastic_resize_monitor_interval_s=1.0),
            run_config=RunConfig(name="run", storage_path=str(tmp_path)),
            elastic_config=ElasticConfig(save_every="20steps"),
        )
        fit = Fit(trainer)
        events = fit.events

        wait_for("a commit", lambda: [e for e in events("checkpoint_committed") if e.step >= 20])
        cluster.remove(events("generation_started")[0].data["ranks"][0]["node_id"])
        wait_for("the surviving two", lambda: events("recovered"))
        cluster.add(num_cpus=2)
        wait_for("all four again", lambda: len(events("recovered")) == 2)
        fit.stop()
        fit.join()
        started_as = events("generation_started")
        sizes = [e.data["world_size"] for e in started_as]
        assert sizes == [4, 2, 4]
        lost, grown = events("recovered")
        assert lost.data["lost_steps"] <= 40 and grown.data["lost_steps"] == 0
        resumed = [e.step for e in events("resumed")]
        assert all(step > 0 for step in resumed) and resumed == sorted(resumed)
    for event, size in zip(started_as, sizes, strict=True):
        generation = event.generation
        told = [
            json.loads((marks / f"{generation}-{rank}.json").read_text()) for rank in range(size)
        ]
        check_ranks(told, size)


def check_ranks(told: list[dict[str, Any]], size: int) -> None:
    """Run, environment, Ray Train and torch say the same, and two ranks a node are 0 and 1."""
    for rank, said in enumerate(told):
        assert said["world_rank"] == rank and said["world_size"] == size
        assert said["env"] == [str(rank), str(size), str(said["local_rank"])]
        assert said["ray"] == [rank, size, said["local_rank"]]
        assert said["dist"] == [rank, size]
        assert said["local_rank"] == rank % 2
