"""A node whose network is cut: no connection is reset, and its workers live on the other side."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from jobs.bench.namespaces import namespaced_cluster
from jobs.bench.network import why_unavailable
from tests.cluster.local_cluster import Job, is_running, wait_for

FLAGS = (
    *("--steps", "1000000", "--global-batch", "12", "--micro-batch", "2", "--model", "nano"),
    *("--sequence-length", "64", "--save-every", "10", "--grow-interval", "1", "--quiet"),
)


@pytest.mark.thorough
@pytest.mark.timeout(240)
def test_survivors_go_on_and_the_lost_side_neither_publishes_nor_returns(  # B65
    tmp_path: Path,
):
    if problem := why_unavailable():
        assert "CI" not in os.environ, problem
        pytest.skip(problem)
    with (
        namespaced_cluster(num_nodes=3) as cluster,
        Job(cluster, tmp_path, "run", *FLAGS, "--num-workers", "1:3") as job,
    ):
        job.wait_for_commit(10)
        before = job.ranks()
        gone = before[0]  # which holds the store, too
        cluster.cut(gone["node_id"])
        recovered = job.wait_for_event("recovered")
        lost = job.wait_for_event("node_lost")
        assert recovered.data["new_world_size"] == 2 and job.events("reform_failed") == []
        assert recovered.time_s - lost.time_s < 5.0  # none is left to the collective's timeout
        kept = [one["pid"] for one in before if one is not gone]
        assert [one["pid"] for one in job.ranks()] == kept
        assert is_running(gone["pid"])  # it knows nothing of all that
        job.wait_for_commit(recovered.step + 20)

        cluster.heal(gone["node_id"])
        wait_for("the end of the worker that came back", lambda: not is_running(gone["pid"]))
        cluster.add_nodes(1)
        grown = job.wait_for_event("recovered", lambda event: event.time_s > recovered.time_s)
        assert grown.data["new_world_size"] == 3 and grown.data["lost_steps"] == 0
        job.wait_for_commit(grown.step + 10)
        generations = {event.step: event.generation for event in job.events("checkpoint_committed")}
        after = [generations[step] for step in sorted(generations) if step > recovered.step]
        assert after and 0 not in after  # nothing was published by the generation that was cut off
        assert len(job.events("generation_started")) == 3
