"""An exception of a training function: told by its first cause, and the group ends at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig

from elastic import ElasticConfig, ElasticTrainer, TrainingFailed
from elastic.storage.filesystem import Filesystem
from elastic.storage.ledger import read_ledger
from tests.cluster import functions
from tests.cluster.local_cluster import LocalCluster, wait_for

pytestmark = pytest.mark.timeout(180)


def trainer(
    function: Callable[..., None], storage: Path, workers: Any = 3, **options: Any
) -> ElasticTrainer:
    failures = options.pop("max_failures", 0)
    config = options.pop("config", {})
    return ElasticTrainer(
        function,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(
            name="run",
            storage_path=str(storage),
            failure_config=FailureConfig(max_failures=failures),
        ),
        elastic_config=ElasticConfig(save_every="10steps", **options),
    )


def events(storage: Path) -> list[Any]:
    return read_ledger(Filesystem.at(f"{storage}/run"))


@pytest.mark.parametrize(
    ("function", "retries"),
    [
        pytest.param(functions.boom_beside_a_collective, 1, marks=pytest.mark.thorough),
        (functions.boom_told_late, 0),
    ],
)
def test_headline_names_the_rank_at_fault(  # B79, B81
    connected: LocalCluster, tmp_path: Path, function: Callable[..., None], retries: int
):
    with pytest.raises(TrainingFailed) as caught:
        trainer(function, tmp_path, collective_timeout_s=300.0, max_failures=retries).fit()
    first = str(caught.value).splitlines()[0]
    assert first.startswith("rank 2 raised ValueError: boom-7f")
    assert "functions.py" in str(caught.value)  # where, for the person who has to mend it
    found = events(tmp_path)
    started_s = next(e.time_s for e in found if e.kind == "started")
    decided_s = next(e.time_s for e in found if e.kind == "failure_decided")
    assert decided_s - started_s < 10.0  # not the 300 s that the collective would wait
    assert found[-1].kind == "run_failed"
    assert time.time() - decided_s < 20.0 * (retries + 1)
    kinds = [event.kind for event in found]  # retried as often as granted
    assert kinds.count("generation_started") == kinds.count("failure_decided") == retries + 1


def test_result_is_ray_trains_and_nothing_is_left(connected: LocalCluster, tmp_path: Path):
    from ray.util.placement_group import placement_group_table

    result = trainer(functions.plain, tmp_path, config={"until": 25}).fit()
    assert result.error is None and result.path == f"{tmp_path}/run"
    assert result.metrics["step"] == 25 and result.metrics["loss"] > 0
    assert Path(result.checkpoint.path).name == "step-25"

    left = [g for g in placement_group_table().values() if g["state"] in ("CREATED", "PENDING")]
    assert left == []
    ours = ("DriverActor", "NodeAgent", "_WatchedWorker", "SynchronizationActor")
    wait_for(
        "the end of all actors",
        lambda: (
            not [
                actor
                for actor in ray._private.state.actors().values()
                if actor["ActorClassName"] in ours and actor["State"] != "DEAD"
            ]
        ),
    )
    deadline_s = time.monotonic() + 20
    while ray.available_resources().get("CPU", 0) < 3 and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert ray.available_resources()["CPU"] == 3
