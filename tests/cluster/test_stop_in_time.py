"""SIGTERM, and SIGKILL three seconds later, whatever the run was doing: as `ray job stop` does."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic.dashboard.status import state_of
from elastic.storage.ledger import LedgerEvent
from tests.cluster.local_cluster import RAY, Job, LocalCluster, is_running, wait_for

GRACE_S = 3.0


def stopped(job: Job) -> LedgerEvent:
    """The run's last word after SIGTERM; SIGKILL comes when the grace period is over."""
    time_s = time.time()
    job.process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        job.process.wait(timeout=GRACE_S)
    if job.process.poll() is None:
        job.process.kill()
    job.process.wait()
    (event,) = job.events("run_stopped")
    assert event.time_s - time_s < GRACE_S
    assert "SIGTERM" in event.reason
    assert state_of(job.events(), silent_s=3600.0)[0] == "STOPPED"
    return event


def family(pid: int) -> Iterator[int]:
    """The process and all its descendants."""
    yield pid
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield from family(int(child))


def committed(job: Job) -> int:
    return max(event.step for event in job.events("checkpoint_committed"))


def nothing_left(pids: list[int]) -> None:
    wait_for("the end of all processes", lambda: not any(map(is_running, pids)), 30.0)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("children", marks=pytest.mark.thorough),
        "evaluation",
        pytest.param("long", marks=pytest.mark.thorough),
    ],
)
def test_what_was_trained_is_saved(three_nodes: LocalCluster, tmp_path: Path, kind: str):
    """B69: with loader processes, in an evaluation of a minute, in steps of six seconds."""
    module = "tests.cluster.departing"
    with Job(three_nodes, tmp_path, kind, "--kind", kind, module=module) as job:
        job.wait_for_event("started")
        if kind == "evaluation":
            wait_for("the evaluation", (tmp_path / f"{kind}.slow").exists)
        else:
            job.wait_for_event("progress", lambda event: event.step >= 2)
        pids = [pid for rank in job.ranks() for pid in family(rank["pid"])]
        if kind == "children":
            assert len(pids) >= 6, "two loader processes for each rank"
        event = stopped(job)
        assert event.step == committed(job) >= (3 if kind == "evaluation" else 2)
        nothing_left(pids)


@pytest.mark.thorough
@pytest.mark.timeout(120)
def test_a_save_under_way_is_no_hindrance(three_nodes: LocalCluster, tmp_path: Path):
    """Saves that take 10 s: what counts is the checkpoint before, and the run says so."""
    flags = ("--slow-s", "10", "--save-every", "1")
    with Job(three_nodes, tmp_path, "save", *flags, module="tests.cluster.departing") as job:
        job.wait_for_commit(3)
        (tmp_path / "save.slow").touch()
        job.wait_for_event("checkpoint_skipped")
        pids = [rank["pid"] for rank in job.ranks()]
        event = stopped(job)
        assert f"what counts is the checkpoint of step {committed(job)}" in event.reason
        nothing_left(pids)


@pytest.mark.timeout(120)
def test_a_group_that_still_starts_is_not_waited_for(three_nodes: LocalCluster, tmp_path: Path):
    with Job(three_nodes, tmp_path, "start", module="tests.cluster.departing") as job:
        job.wait_for_event("generation_planned")
        event = stopped(job)
        assert "had not yet begun" in event.reason or event.step == committed(job)
        wait_for("free slots", lambda: b"0.0/3.0 CPU" in asked(three_nodes), 60.0)


def asked(cluster: LocalCluster) -> bytes:
    command = [RAY, "status", "--address", cluster.address]
    return subprocess.run(command, capture_output=True, check=True).stdout
