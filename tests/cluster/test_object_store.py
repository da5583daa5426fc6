"""On a real S3 server: a worker is killed, and processes that do not find their bucket."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
import ray
import ray.train
from ray.train import Checkpoint, RunConfig, ScalingConfig

import elastic
from elastic import ElasticConfig, ElasticTrainer
from elastic.storage.access import StorageRefused
from elastic.storage.checkpoints import Catalog
from elastic.storage.filesystem import Filesystem
from elastic.storage.run_file import load_run_file
from tests.cluster import functions
from tests.cluster.local_cluster import Fit, LocalCluster, wait_for
from tests.s3_server import S3Server, s3_server

__all__ = ["s3_server"]

URL = "s3://bucket/runs/one"


@contextmanager
def joined(cluster: LocalCluster, environment: Mapping[str, str]) -> Iterator[None]:
    """A job whose processes find these variables, and this one its connection to the cluster."""
    ray.init(
        address=cluster.address,
        log_to_driver=False,
        runtime_env={"env_vars": dict(environment)},
    )
    try:
        yield
    finally:
        ray.shutdown()


def reports_once(run: elastic.Run) -> None:
    """A checkpoint of the function's own is given to Ray Train in the first generation."""
    for step in functions.steps(run, 1_000_000):
        if run.generation == 0 and step.number == 3:
            with tempfile.TemporaryDirectory() as folder:
                Path(folder, "own").write_text("mine")
                mine = Checkpoint.from_directory(folder) if run.world_rank == 0 else None
                ray.train.report({"step": step.number}, checkpoint=mine)


def trainer(function=functions.plain) -> ElasticTrainer:
    return ElasticTrainer(
        function,
        scaling_config=ScalingConfig(num_workers=(1, 3), elastic_resize_monitor_interval_s=1.0),
        run_config=RunConfig(name="one", storage_path="s3://bucket/runs"),
        elastic_config=ElasticConfig(save_every=5),
    )


@pytest.mark.thorough
@pytest.mark.timeout(180)
def test_a_worker_is_killed_and_the_run_goes_on(three_nodes: LocalCluster, s3_server: S3Server):
    with joined(three_nodes, s3_server.environment):
        fit = Fit(trainer(reports_once))
        events = fit.events
        wait_for("a commit", lambda: [e for e in events("checkpoint_committed") if e.step >= 10])
        functions.kill(events("generation_started")[0].data["ranks"][2]["pid"])
        wait_for("three again", lambda: events("generation_started")[2:])
        again = events("generation_started")[1]
        wait_for("a new commit", lambda: events("checkpoint_committed")[-1].generation >= 2)
        fit.stop()
        fit.join()
    assert again.data["world_size"] == 2 and again.step >= 10
    place = Filesystem.at(URL)
    run_file = load_run_file(place)
    assert run_file is not None
    catalog = Catalog(place, run_file.run_id)
    assert catalog.complete_steps() and catalog.verify_files(catalog.complete_steps()[-1]) == []
    folder = s3_server.folder / "runs/one"
    assert [path.read_text() for path in folder.glob("checkpoint_*/own")] == ["mine"]


@pytest.mark.thorough
def test_a_node_that_is_not_led_there_is_told_of(three_nodes: LocalCluster, s3_server: S3Server):
    """The script finds its bucket, and the node's processes do not."""
    astray = {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}
    with (
        joined(three_nodes, {**s3_server.environment, **astray}),
        pytest.raises(StorageRefused) as caught,
    ):
        trainer().fit()
    said = str(caught.value)
    assert said.startswith(f"cannot write to the run directory {URL} from the driver's process on ")
    assert "here AWS_ENDPOINT_URL is http://127.0.0.1:9" in said and "\n" not in said
    assert "before `ray start`" in said
