"""The promise: a run that loses workers and nodes has the losses of one that does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.local_cluster import Job, LocalCluster, losses, started, worst_difference

pytestmark = pytest.mark.timeout(300)

STEPS = 60
FLAGS = (
    *("--steps", str(STEPS), "--global-batch", "12", "--micro-batch", "2", "--model", "nano"),
    *("--sequence-length", "64", "--save-every", "10", "--save-behind", "wait", "--keep", "-1"),
    *("--grow-interval", "2", "--quiet"),
)


@pytest.fixture(scope="module")
def cluster():
    with started(num_nodes=3) as local:
        yield local


@pytest.mark.parametrize(
    ("optimizer", "dtype", "tolerance"), [("adamw", "float64", 1e-9), ("sgd", "float32", 1e-5)]
)
def test_losses_of_a_disturbed_run(
    cluster: LocalCluster, tmp_path: Path, optimizer: str, dtype: str, tolerance: float
):
    flags = (*FLAGS, "--optimizer", optimizer, "--dtype", dtype)
    with Job(cluster, tmp_path, "undisturbed", *flags, "--num-workers", "3") as reference:
        expected = reference.wait()
    with Job(cluster, tmp_path, "killed", *flags, "--num-workers", "3") as job:
        job.wait_for_commit(30)
        job.kill_rank(1)
        found = job.wait()
    assert found["restarts"] == 1 and found["world_sizes"] == [3, 3]
    assert losses(found) == losses(expected)  # the same size: not a bit differs
    assert losses(found, "grad_norms") == losses(expected, "grad_norms")
    assert job.digest(STEPS) == reference.digest(STEPS)
    with Job(cluster, tmp_path, "resized", *flags, "--num-workers", "2:3") as job:
        job.wait_for_commit(20)
        cluster.remove(job.ranks()[2]["node_id"])
        job.wait_for_event("recovered")
        cluster.add()
        found = job.wait()
    assert found["world_sizes"] == [3, 2, 3]
    assert worst_difference(losses(found), losses(expected)) <= tolerance
    norms = losses(found, "grad_norms"), losses(expected, "grad_norms")
    assert worst_difference(*norms) <= tolerance
