"""What is above the driver goes: the job's supervisor, the cluster's head. Nothing of it stays.

And the same name, submitted again, resumes from storage alone.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.job_submission import JobSubmissionClient

from elastic.dashboard.status import read_status
from elastic.storage.checkpoints import Catalog
from elastic.storage.filesystem import Filesystem
from elastic.storage.ledger import LedgerEvent, read_ledger
from elastic.storage.run_file import load_run_file
from tests.cluster.leftovers import GONE_S, wait_until_nothing_is_left
from tests.cluster.local_cluster import ROOT, Job, LocalCluster, is_running, started, wait_for

FLAGS = (
    *("--global-batch", "4", "--micro-batch", "2", "--model", "nano", "--sequence-length", "32"),
    *("--save-every", "3", "--num-workers", "2", "--quiet"),
)
ENDLESS = ("--steps", "1000000")


@pytest.mark.thorough
@pytest.mark.timeout(180)
def test_the_jobs_supervisor_is_killed(one_node: LocalCluster, tmp_path: Path):  # B73, B74
    url = str(tmp_path / "demo")
    jobs = JobSubmissionClient(one_node.dashboard_url)

    def submit(*flags: str) -> None:
        words = [sys.executable, "-m", "jobs.pretrain", "--name", "demo", *FLAGS, *flags]
        jobs.submit_job(
            entrypoint=" ".join([*words, "--storage", str(tmp_path)]),
            runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}},
        )

    ray.init(address=one_node.address, log_to_driver=False)
    try:
        submit(*ENDLESS)
        wait_for("a commit", lambda: events(url, "checkpoint_committed", lambda e: e.step >= 3))
        (supervisor,) = [
            actor["Pid"]
            for actor in ray._private.state.actors().values()
            if actor["ActorClassName"] == "JobSupervisor" and actor["State"] == "ALIVE"
        ]
        os.kill(supervisor, signal.SIGKILL)
        began_s = time.monotonic()
        wait_until_nothing_is_left()
        wait_for("a state that is not that of a run", lambda: state(url) == "UNKNOWN", GONE_S)
        print(f"nothing was left, and it was told, after {time.monotonic() - began_s:.2f} s")
        newest = highest(url)
        submit("--steps", str(newest + 6))
        wait_for("the end", lambda: events(url, "run_finished"))
        assert events(url, "resumed")[-1].step == newest
        assert state(url) == "FINISHED"
        wait_until_nothing_is_left()
    finally:
        ray.shutdown()


@pytest.mark.thorough
@pytest.mark.timeout(180)
def test_the_head_is_killed(  # B73, B74, B75
    tmp_path: Path,
):
    with started(num_nodes=2) as old, Job(old, tmp_path, "run", *FLAGS, *ENDLESS) as job:
        job.wait_for_commit(3)
        ranks = [rank["pid"] for rank in job.ranks()]
        processes = [*ranks, job.events("run_started")[-1].data["pid"], job.process.pid]
        old.kill_head()
        killed_s = time.monotonic()
        wait_for("the end of the run", lambda: state(job.url) == "FAILED", GONE_S)
        print(f"the run had failed after {time.monotonic() - killed_s:.1f} s")
        newest, last = highest(job.url), job.events("generation_started")[-1].generation
        assert any(is_running(pid) for pid in ranks), "leftovers, that go on without a driver"
        resume_elsewhere(job.url, newest, last)
        left_s = GONE_S - (time.monotonic() - killed_s)
        assert "head of the Ray cluster does not answer any more" in job.fails(timeout_s=left_s)
        left_s = GONE_S - (time.monotonic() - killed_s)
        wait_for("its last process to go", lambda: not any(map(is_running, processes)), left_s)
        print(f"its last process was gone after {time.monotonic() - killed_s:.1f} s")
    assert state(job.url) == "FINISHED"
    catalog = catalog_of(job.url)
    assert catalog.highest().step == newest + 30
    after = [one for one in catalog.list() if one.complete and one.step > newest]
    assert after and all(one.generation > last for one in after)


def resume_elsewhere(url: str, newest: int, last_generation: int) -> None:
    storage, steps = Path(url).parent, newest + 30
    with (
        started(num_nodes=2) as other,
        Job(other, storage, "run", *FLAGS, "--steps", str(steps)) as job,
    ):
        job.wait()
        assert events(url, "resumed")[-1].step == newest
        assert job.events("generation_started")[-1].generation > last_generation


def events(
    url: str, kind: str, that: Callable[[LedgerEvent], bool] = lambda _: True
) -> list[LedgerEvent]:
    found = read_ledger(Filesystem.at(url)) if Path(url).is_dir() else []
    return [event for event in found if event.kind == kind and that(event)]


def state(url: str) -> Any:
    filesystem = Filesystem.at(url)
    return read_status(filesystem, load_run_file(filesystem), now_s=time.time()).state


def highest(url: str) -> int:
    return int(catalog_of(url).highest().step)


def catalog_of(url: str) -> Any:
    filesystem = Filesystem.at(url)
    return Catalog(filesystem, load_run_file(filesystem).run_id)
