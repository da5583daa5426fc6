"""Two tiers of disk and an archive under Ray: what a worker's death and a run's end leave where."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elastic.storage.archive import archive_of
from elastic.storage.filesystem import Filesystem
from elastic.storage.run_file import load_run_file
from elastic.storage.verification import verify
from tests.cluster.local_cluster import Job, LocalCluster

FLAGS = (
    *("--steps", "20", "--global-batch", "8", "--micro-batch", "2", "--model", "nano", "--quiet"),
    *("--sequence-length", "64", "--num-workers", "2", "--keep", "1", "--keep-every", "10"),
    *("--save-every", "10steps"),
)


@pytest.mark.thorough
@pytest.mark.timeout(120)
def test_a_worker_that_died_resumes_from_its_nodes_disk(
    one_node: LocalCluster, tmp_path: Path
) -> None:
    """The checkpoint's copy in storage has other bytes by then: nobody reads it."""
    local, pace = tmp_path / "nvme", tmp_path / "pace"
    tiers = ("--local", str(local), "--archive", str(tmp_path / "archive"))
    storage = tmp_path / "storage"
    pace.touch()
    with Job(one_node, storage, "run", *FLAGS, *tiers, pace=pace) as job:
        step = job.wait_for_commit(10).step
        for file in (storage / "run" / "checkpoints" / f"step-{step}").glob("__*.distcp"):
            file.write_bytes(bytes(file.stat().st_size))
        job.kill_rank(1)
        resumed = job.wait_for_event("resumed")
        pace.unlink()
        assert resumed.step == step
        job.wait()
        assert job.events("checkpoint_quarantined", "local_copy_damaged", "archive_failed") == []
    run_file = load_run_file(Filesystem.at(job.url))
    assert run_file is not None
    archive = archive_of(run_file)
    assert archive is not None
    assert [(one.step, one.result) for one in verify(archive.catalog)] == [
        (step, "good") for step in (0, 10, 20)
    ]
    assert [event.step for event in job.events("checkpoint_archived")] == [0, 10, 20]
    assert os.listdir(local) == []
