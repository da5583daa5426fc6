"""What `ElasticTrainer` refuses before any worker starts, and how it waits for workers."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig

from elastic import ElasticConfig, ElasticTrainer, Mesh, TrainingFailed
from elastic.storage.filesystem import Filesystem
from elastic.storage.ledger import read_ledger
from tests.cluster import functions
from tests.cluster.local_cluster import Fit, LocalCluster, wait_for

PAIRS = Mesh(tensor=2)


def make(function: Any = functions.plain, storage: str = "/tmp/elastic-refused", **options: Any):
    run = options.pop("run_config", RunConfig(name="run", storage_path=storage))
    return ElasticTrainer(function, run_config=run, **options)


def test_function_in_rays_style_is_explained():
    def train_func(config: dict[str, Any]) -> None:
        raise AssertionError("never called")

    with pytest.raises(TypeError, match=r"run: elastic.Run.*train_func\(config\).*run.track"):
        make(train_func)
    with pytest.raises(TypeError, match="one argument"):
        make(lambda: None)


def test_function_that_cannot_be_pickled():
    lock = threading.Lock()

    def train(run: Any) -> None:
        lock.acquire()

    with pytest.raises(TypeError, match=r"cannot be sent to the workers.*run\.once"):
        make(train)


@pytest.mark.parametrize("workers", [0, (3, 2), (0, 2)])
def test_impossible_sizes(workers: Any):
    with pytest.raises(ValueError, match="workers"):
        make(scaling_config=ScalingConfig(num_workers=workers))


def test_sizes_that_no_mesh_can_have():
    with pytest.raises(ValueError, match=r"from 3 to 3 .* groups of 2: the next is 4"):
        make(scaling_config=ScalingConfig(num_workers=3), elastic_config=ElasticConfig(mesh=PAIRS))


def test_the_autoscaler_is_asked_for_no_worker_that_no_mesh_uses():
    trainer = make(
        scaling_config=ScalingConfig(num_workers=(1, 5)), elastic_config=ElasticConfig(mesh=PAIRS)
    )
    assert trainer.scaling_config.num_workers == (1, 4)


@pytest.mark.parametrize("notices", ["azure", ["aws", "file:relative"]])
def test_a_source_of_notices_that_there_is_not(notices: Any):
    with pytest.raises(ValueError, match="notices come from auto"):
        ElasticConfig(notices=notices)


@pytest.mark.parametrize(
    "options",
    [
        {"max_preemption_failures": 3},
        {"controller_failure_limit": 3},
        {"relax_collectives_on_preemption": True},
    ],
)
def test_fields_of_failure_config_are_refused_by_name(options: dict[str, Any]):
    run = RunConfig(name="r", storage_path="/tmp/x", failure_config=FailureConfig(**options))
    with pytest.raises(ValueError, match=next(iter(options))):
        make(run_config=run)


def test_scores_of_checkpoints_are_refused_by_name():
    scored = CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="loss")
    run = RunConfig(name="r", storage_path="/tmp/x", checkpoint_config=scored)
    with pytest.raises(ValueError, match="checkpoint_score_attribute"):
        make(run_config=run)


@pytest.mark.parametrize("name", ["datasets", "validation_config", "dataset_config"])
def test_what_a_torch_trainer_takes_and_this_cannot_keep(name: str):
    with pytest.raises(ValueError, match=rf"ElasticTrainer\({name}=\.\.\.\) is not supported"):
        make(**{name: {"train": object()}})


@pytest.mark.parametrize("name", ["a/b", "..", "a\0b"])
def test_names_that_would_leave_the_storage(name: str):
    with pytest.raises(ValueError, match="path component"):
        make(run_config=RunConfig(name=name, storage_path="/tmp/x"))


def test_relative_storage():
    with pytest.raises(ValueError, match="absolute"):
        make(storage="runs")


def test_more_workers_than_there_are_is_told_and_ends_at_the_deadline(
    connected: LocalCluster, tmp_path: Path
):
    """B72: a request that no node can meet is told with what is missing, and ends."""
    trainer = make(
        storage=str(tmp_path),
        scaling_config=ScalingConfig(num_workers=(5, 6)),
        elastic_config=ElasticConfig(wait_for_capacity_s=3.0),
    )
    with pytest.raises(TrainingFailed) as caught:
        trainer.fit()
    said = str(caught.value)
    assert "3 of at least 5 workers can run now" in said
    assert "each worker needs CPU 1" in said and "gave up after 3 s" in said
    waiting = [e for e in read_ledger(Filesystem.at(trainer.run_url)) if e.kind == "waiting"]
    assert len(waiting) >= 1 and "up to 3 s" in waiting[0].reason


def test_a_node_that_comes_within_the_deadline_starts_the_run(
    connected: LocalCluster, tmp_path: Path
):
    """B72: what is missing is told meanwhile."""
    trainer = make(
        storage=str(tmp_path),
        train_loop_config={"until": 5},
        scaling_config=ScalingConfig(num_workers=4),
        elastic_config=ElasticConfig(wait_for_capacity_s=90.0),
    )
    fit = Fit(trainer)
    waiting = wait_for("the wait", lambda: fit.events("waiting"))
    assert "3 of at least 4 workers can run now" in waiting[0].reason
    assert "autoscaler is asked for 4" in waiting[0].reason
    node = connected.add()
    try:
        wait_for("the start", lambda: fit.events("started"))
        fit.join()
    finally:
        connected.remove(node.node_id)
