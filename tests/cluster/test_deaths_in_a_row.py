"""A second worker dies while the others re-form, and a third while those load."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from ray.train import RunConfig, ScalingConfig

from elastic import ElasticConfig, ElasticTrainer
from tests.cluster import functions, hanging
from tests.cluster.local_cluster import Fit, LocalCluster, wait_for

SLOW_S = 1.0


@pytest.mark.thorough
@pytest.mark.timeout(180)
def test_each_is_counted_once_and_no_two_generations_step_at_once(  # B84
    connected: LocalCluster, tmp_path: Path
):
    url = f"{tmp_path}/run"
    trainer = ElasticTrainer(
        hanging.slow_to_load,
        train_loop_config={"until": 60, "slow_s": SLOW_S, "url": url},
        scaling_config=ScalingConfig(
            num_workers=(1, 4),
            resources_per_worker={"CPU": 0.5},
            elastic_resize_monitor_interval_s=600.0,
        ),
        run_config=RunConfig(name="run", storage_path=str(tmp_path)),
        elastic_config=ElasticConfig(save_every=10, save_behind="wait"),
    )
    fit = Fit(trainer)
    events = fit.events
    wait_for("a commit", lambda: [e for e in events("checkpoint_committed") if e.step >= 10])
    pids = [one["pid"] for one in events("generation_started")[0].data["ranks"]]
    functions.kill(pids[0])
    wait_for("the decision", lambda: events("failure_decided"))
    functions.kill(pids[1])  # while the others re-form, or just after

    def loading() -> bool:
        last = events("generation_started")[-1]
        is_of_two = [one["pid"] for one in last.data["ranks"]] == pids[2:]
        return is_of_two and not [e for e in events("resumed") if e.generation == last.generation]

    wait_for("two that load", loading)
    functions.kill(pids[2])
    fit.join()

    died = events("worker_died")
    assert sorted(int(e.reason.split()[1]) for e in died) == sorted(pids[:3])  # each told once
    assert events("reform_failed") == [] and events("run_finished")
    assert [one["pid"] for one in events("generation_started")[-1].data["ranks"]] == pids[3:]
    steps: dict[int, list[tuple[float, float]]] = {}
    for file in Path(url).glob("steps-*"):
        for line in file.read_text().splitlines():
            generation, _, begun_s, ended_s = line.split()
            steps.setdefault(int(generation), []).append((float(begun_s), float(ended_s)))
    in_order = [steps[generation] for generation in sorted(steps)]
    for older, newer in itertools.pairwise(in_order):
        assert max(end for _, end in older) <= min(begin for begin, _ in newer)
