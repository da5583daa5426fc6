"""A node that goes without closing a connection, as a machine does whose network is cut.

Here it is stopped as a whole: its kernel keeps every connection open, and nothing ever comes.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.cluster.local_cluster import Job, LocalCluster, is_running, wait_for

FLAGS = (
    *("--steps", "1000000", "--global-batch", "12", "--micro-batch", "2", "--model", "nano"),
    *("--sequence-length", "64", "--save-every", "10", "--grow-interval", "600", "--quiet"),
)


@pytest.mark.thorough
@pytest.mark.timeout(180)
def test_survivors_are_woken_and_what_comes_back_is_ended(
    three_nodes: LocalCluster, tmp_path: Path
):
    with Job(three_nodes, tmp_path, "run", *FLAGS, "--num-workers", "2:3") as job:
        job.wait_for_commit(10)
        before = job.ranks()
        gone = before[0]  # which holds the store, too
        raylet = three_nodes.raylet(gone["node_id"])
        stopped = [gone["pid"], raylet.pid]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        try:
            wait_for("the re-form", lambda: len(job.events("recovered")) == 1, timeout_s=30.0)
            lost = job.wait_for_event("node_lost")
            recovered = job.wait_for_event("recovered")
            assert [e.reason for e in job.events("reform_failed")] == []
            pids = [one["pid"] for one in before]
            assert [one["pid"] for one in job.ranks()] == [p for p in pids if p != gone["pid"]]
            # 0.5 s until they are woken; without it they would wait half an hour.
            assert recovered.time_s - lost.time_s < 5.0
            newest = job.events("checkpoint_committed")[-1].step
        finally:
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)
        wait_for("the end of the raylet that came back", lambda: raylet.poll() is not None)
        wait_for("the end of its worker", lambda: not is_running(gone["pid"]))
        job.wait_for_commit(newest + 10)  # the others were not disturbed
        assert len(job.events("generation_started")) == 2
    three_nodes.remove(gone["node_id"])
    three_nodes.add()
