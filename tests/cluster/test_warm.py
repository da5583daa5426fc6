"""Warm re-form: survivors keep their processes, whoever dies, and the curve does not notice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cluster.local_cluster import Job, losses, started, wait_for, worst_difference

FLAGS = (
    *("--steps", "160", "--global-batch", "12", "--micro-batch", "4", "--model", "nano"),
    *("--sequence-length", "64", "--save-every", "10", "--save-behind", "wait", "--keep", "-1"),
    *("--dtype", "float64", "--grow-interval", "600", "--quiet"),
)


@pytest.mark.timeout(300)
def test_rank_after_rank_dies_and_the_rest_go_on(tmp_path: Path):  # B65, B70, B84
    with started(num_nodes=3) as cluster:
        with Job(cluster, tmp_path, "undisturbed", *FLAGS, "--num-workers", "3") as reference:
            expected = reference.wait()
        with Job(cluster, tmp_path, "struck", *FLAGS, "--num-workers", "1:3") as job:
            job.wait_for_commit(20)
            first = pids(job)
            job.kill_rank(1)
            wait_for("the first re-form", lambda: len(job.events("recovered")) == 1)
            second = pids(job)
            job.wait_for_commit(job.events("recovered")[0].step + 10)
            cluster.remove(job.ranks()[0]["node_id"])  # rank 0 and the store it holds
            wait_for("the second re-form", lambda: len(job.events("recovered")) == 2)
            third = pids(job)
            found = job.wait()
    assert second == [first[0], first[2]] and third == [second[1]]
    assert found["world_sizes"] == [3, 2, 1]
    assert worst_difference(losses(found), losses(expected)) <= 1e-9
    norms = losses(found, "grad_norms"), losses(expected, "grad_norms")
    assert worst_difference(*norms) <= 1e-9
    for event in job.events("recovered"):
        phases: dict[str, Any] = event.data["phases_s"]
        assert phases["start"] == 0.0 and phases["place"] == 0.0  # nothing was started
    assert job.events("reform_failed") == []


def pids(job: Job) -> list[int]:
    return [rank["pid"] for rank in job.ranks()]
