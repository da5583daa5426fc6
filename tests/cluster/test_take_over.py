"""The driver is killed, and within the same job another one takes the run over."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.train import RunConfig, ScalingConfig

from elastic import ElasticConfig, ElasticTrainer
from elastic.cluster.succession import MOST_TAKE_OVERS
from elastic.dashboard.status import read_status
from elastic.storage.filesystem import Filesystem
from elastic.storage.ledger import read_ledger
from elastic.storage.run_file import load_run_file
from tests.cluster.functions import plain, starts_a_program
from tests.cluster.leftovers import held_groups, living_actors, wait_until_nothing_is_left
from tests.cluster.local_cluster import (
    Fit,
    Job,
    LocalCluster,
    digest,
    is_running,
    losses,
    wait_for,
)
from tests.dist.undisturbed import undisturbed

STEPS = 60
FLAGS = (
    *("--steps", str(STEPS), "--global-batch", "12", "--micro-batch", "2", "--model", "nano"),
    *("--sequence-length", "64", "--save-every", "5", "--save-behind", "wait", "--keep", "-1"),
    *("--num-workers", "3", "--optimizer", "sgd", "--dtype", "float32", "--quiet"),
)


@pytest.mark.timeout(180)
def test_the_same_job_goes_on(connected: LocalCluster, tmp_path: Path):  # B73, B74
    expected = undisturbed(3, tmp_path, *FLAGS)
    pace = tmp_path / "pace"
    pace.touch()
    with Job(connected, tmp_path, "killed", *FLAGS, pace=pace) as job:
        job.wait_for_commit(10)
        old = job.ranks()
        killed_s = time.time()
        kill_driver(job, "UNKNOWN")
        recovered = job.wait_for_event("recovered")
        print(f"kill to first step {recovered.time_s - killed_s:.2f} s: {recovered.data}")
        assert not any(is_running(rank["pid"]) for rank in old)
        only_the_new_group_is_there()
        pace.unlink()
        found = job.wait()
    assert losses(found) == losses(expected)
    assert losses(found, "grad_norms") == losses(expected, "grad_norms")
    assert digest(job.url, STEPS) == digest(expected["run"], STEPS)
    told = job.events("driver_lost", "run_started", "driver_took_over", "run_finished")
    kinds = ["run_started", "driver_lost", "run_started", "driver_took_over", "run_finished"]
    assert [event.kind for event in told] == kinds
    assert "died" in told[1].reason and told[3].data["took_s"] > 0
    started = [event.generation for event in job.events("generation_started")]
    assert started == [0, 1], "a generation's number is never used again"
    phases: dict[str, float] = recovered.data["phases_s"]
    assert abs(recovered.time_s - killed_s - sum(phases.values())) < 1.0
    status = read(job)
    assert (status.state, status.restarts_by_cause) == ("FINISHED", {"driver": 1})
    assert status.submissions == 1
    wait_until_nothing_is_left()


@pytest.mark.thorough
@pytest.mark.timeout(120)
def test_one_that_is_killed_again_and_again_ends_the_run(
    connected: LocalCluster, tmp_path: Path
):  # B73, B74
    with Job(connected, tmp_path, "doomed", *FLAGS, "--max-failures", "-1") as job:
        for number in range(MOST_TAKE_OVERS + 1):
            wait_for("a driver", lambda n=number: len(job.events("run_started")) > n)
            kill_driver(job, "UNKNOWN", "FAILED")
        said = job.fails()
    assert f"the driver died {MOST_TAKE_OVERS + 1} times in a row" in said
    assert len(job.events("driver_took_over")) == MOST_TAKE_OVERS
    status = read(job)
    assert status.state == "FAILED" and "times in a row" in status.reason
    wait_until_nothing_is_left()


@pytest.mark.thorough
@pytest.mark.timeout(120)
def test_killed_after_success_it_has_succeeded(connected: LocalCluster, tmp_path: Path):  # B74
    with Job(connected, tmp_path, "done", *FLAGS) as job:
        job.wait_for_event("started")
        os.kill(job.process.pid, signal.SIGSTOP)  # it has not heard of the end before its driver's
        wait_for("the end", lambda: job.events("run_finished"))
        kill_driver(job, "FINISHED")
        os.kill(job.process.pid, signal.SIGCONT)
        assert job.wait()["step"] == STEPS
    assert job.events("driver_lost") == []
    assert read(job).state == "FINISHED"
    wait_until_nothing_is_left()


@pytest.mark.thorough
@pytest.mark.timeout(120)
def test_what_the_ranks_had_started_goes_too(connected: LocalCluster, tmp_path: Path):  # B73
    marks = tmp_path / "marks"
    marks.mkdir()
    fit = Fit(
        ElasticTrainer(
            starts_a_program,
            train_loop_config={"marks": str(marks)},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(name="run", storage_path=str(tmp_path)),
            elastic_config=ElasticConfig(save_every=20),
        )
    )
    wait_for("the first group", lambda: fit.events("started"))
    programs = [int(mark.name.split("-")[2]) for mark in marks.glob("0-*")]
    assert len(programs) == 2 and all(map(is_running, programs))
    os.kill(fit.events("run_started")[-1].data["pid"], signal.SIGKILL)
    wait_for("another driver's group", lambda: fit.events("recovered"))
    wait_for(
        "the end of what the old ranks had started", lambda: not any(map(is_running, programs))
    )
    fit.stop()  # it asks the driver that it was told of, which is the dead one
    fit.join()
    assert len(fit.events("run_stopped")) == 1
    wait_until_nothing_is_left()


@pytest.mark.timeout(120)
def test_a_process_that_leaves_the_cluster_launches_no_other(
    connected: LocalCluster, tmp_path: Path
):  # B73
    fit = Fit(
        ElasticTrainer(
            plain,
            train_loop_config={"until": 1_000_000},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(name="run", storage_path=str(tmp_path)),
            elastic_config=ElasticConfig(save_every=20),
        )
    )
    wait_for("a commit", lambda: fit.events("checkpoint_committed"))
    ray.shutdown()
    error = fit.failure()
    assert isinstance(error, RuntimeError) and "`ray.shutdown`" in str(error)
    ray.init(address=connected.address, log_to_driver=False)
    wait_until_nothing_is_left()
    ledger = read_ledger(Filesystem.at(str(tmp_path / "run")))
    assert [event.kind for event in ledger].count("run_started") == 1


def kill_driver(job: Job, *states: str) -> None:
    """And see that the run is at once in one of these states: not in that of one that goes on."""
    pid = job.events("run_started")[-1].data["pid"]
    os.kill(pid, signal.SIGKILL)
    wait_for("the end of the driver's process", lambda: not is_running(pid))
    wait_for(f"a state of {states}", lambda: read(job).state in states, 5.0)


def read(job: Job) -> Any:
    filesystem = Filesystem.at(job.url)
    return read_status(filesystem, load_run_file(filesystem), now_s=time.time())


def only_the_new_group_is_there() -> None:
    """Of the old driver no placement group holds a place, and no actor lives."""
    assert len(held_groups()) == 1
    names = sorted(actor["ActorClassName"] for actor in living_actors())
    assert names == [
        "DriverActor",
        *["NodeAgent"] * 3,
        "SynchronizationActor",
        *["_WatchedWorker"] * 3,
    ]
