"""What Ray Train's own functions and configurations promise still holds after a warm re-form."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import ray.train
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig

import elastic
from elastic import ElasticConfig, ElasticTrainer
from tests.cluster import functions
from tests.cluster.local_cluster import Fit, LocalCluster, wait_for

# Every field that Ray Train has, and what becomes of it: a new one must be put here.
HONOURED = {
    "FailureConfig": {"max_failures"},
    "CheckpointConfig": {"num_to_keep"},
    "RunConfig": {
        *("name", "storage_path", "failure_config", "checkpoint_config", "callbacks"),
        *("worker_runtime_env", "logging_config"),
    },
    "ScalingConfig": {
        *("num_workers", "use_gpu", "resources_per_worker", "placement_strategy"),
        *("accelerator_type", "label_selector", "elastic_resize_monitor_interval_s"),
    },
}
REFUSED = {
    "FailureConfig": {
        *("controller_failure_limit", "max_preemption_failures"),
        *("relax_collectives_on_preemption", "preemption_grace_s"),
    },
    "CheckpointConfig": {"checkpoint_score_attribute"},
    "RunConfig": {"storage_filesystem"},
    "ScalingConfig": {"use_tpu"},
}
WITHOUT_MEANING = {  # without a refused one, or refused by Ray itself
    "FailureConfig": {"fail_fast"},
    "CheckpointConfig": {"checkpoint_score_order", "checkpoint_frequency", "checkpoint_at_end"},
    "RunConfig": {"sync_config", "verbose", "stop", "progress_reporter", "log_to_file"},
    "ScalingConfig": {"topology", "trainer_resources"},
}


@pytest.mark.parametrize("kind", [FailureConfig, CheckpointConfig, RunConfig, ScalingConfig])
def test_no_field_is_passed_over(kind: type):
    known = [table[kind.__name__] for table in (HONOURED, REFUSED, WITHOUT_MEANING)]
    assert {field.name for field in dataclasses.fields(kind)} == set().union(*known)


class Collected(ray.train.UserCallback):
    """Writes down what is reported, in the driver."""

    def __init__(self, path: str) -> None:
        self._path = path

    def after_report(self, run_context: Any, metrics: list[Any], checkpoint: Any) -> None:
        with Path(self._path).open("a") as file:
            file.write(json.dumps(metrics) + "\n")


def reports(run: elastic.Run) -> None:
    """Each step all ranks report, so that who is left when one dies waits in a report."""
    resumed = ray.train.get_checkpoint()
    context = ray.train.get_context()
    for step in functions.steps(run, run.config["until"]):
        told = {
            "step": step.number,
            "rank": context.get_world_rank(),
            "size": context.get_world_size(),
            "generation": run.generation,
            "resumed": None if resumed is None else Path(resumed.path).name,
            "name": context.get_experiment_name(),
        }
        ray.train.report(told)


@pytest.mark.timeout(180)
def test_reports_ranks_and_checkpoint_after_shrink_and_growth(
    connected: LocalCluster, tmp_path: Path
):
    told = tmp_path / "told"
    trainer = ElasticTrainer(
        reports,
        train_loop_config={"until": 1_000_000},
        scaling_config=ScalingConfig(num_workers=(1, 3), elastic_resize_monitor_interval_s=1.0),
        run_config=RunConfig(
            name="run", storage_path=str(tmp_path), callbacks=[Collected(str(told))]
        ),
        elastic_config=ElasticConfig(save_every=5),
    )
    fit = Fit(trainer)
    events = fit.events

    def rows() -> list[list[dict[str, Any]]]:
        return [json.loads(line) for line in told.read_text().splitlines()] if told.exists() else []

    def reported(generation: int) -> list[list[dict[str, Any]]]:
        return [row for row in rows() if row[0]["generation"] == generation]

    wait_for("a commit", lambda: [e for e in events("checkpoint_committed") if e.step >= 10])
    functions.kill(events("generation_started")[0].data["ranks"][2]["pid"])
    wait_for("reports of those left", lambda: len(reported(1)) > 5)
    wait_for("reports of all three again", lambda: len(reported(2)) > 5)
    fit.stop()
    fit.join()
    assert events("reform_failed") == []
    for generation, size in ((0, 3), (1, 2), (2, 3)):
        resumed = events("generation_started")[generation].step
        for row in reported(generation):
            assert [one["rank"] for one in row] == list(range(size))
            assert {one["size"] for one in row} == {size}
            assert len({one["step"] for one in row}) == 1  # those of one step are put together
            assert {one["name"] for one in row} == {"run"}
            name = None if generation == 0 else f"step-{resumed}"
            assert {one["resumed"] for one in row} == {name}
