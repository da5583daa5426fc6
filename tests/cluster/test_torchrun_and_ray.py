"""One run that moves between launchers: begun under torchrun, gone on with under Ray, and back."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic.dashboard.status import read_status
from elastic.storage.filesystem import Filesystem
from elastic.storage.run_file import load_run_file
from tests.cluster.local_cluster import Job, LocalCluster, losses, worst_difference
from tests.dist.torchrun_job import (
    SMALL,
    committed,
    events,
    finished,
    kill_whole,
    summary,
    torchrun,
    wait_for,
)
from tests.dist.undisturbed import undisturbed


@pytest.mark.thorough
@pytest.mark.timeout(400)
def test_torchrun_on_2_killed_then_ray_on_3_then_torchrun_on_1(
    three_nodes: LocalCluster, tmp_path: Path
) -> None:
    flags = (*SMALL, "--save-every", "5", "--quiet")
    storage, run = ("--storage", str(tmp_path)), tmp_path / "moved"
    with torchrun(2, *flags, *storage, "--name", "moved", "--steps", "60") as process:
        wait_for(lambda: committed(run) >= 10, process)
        kill_whole(process)
    until_40 = (*flags, "--num-workers", "3", "--steps", "40")
    with Job(three_nodes, tmp_path, "moved", *until_40) as job:
        assert job.wait()["step"] == 40
    out = ("--name", "moved", "--steps", "60", "--json", f"{tmp_path}/moved.json")
    with torchrun(1, *flags, *storage, *out) as process:
        code, _, err = finished(process)
        assert code == 0, err
    moved = summary(tmp_path / "moved.json")
    whole = undisturbed(2, tmp_path, *flags, "--steps", "60")
    assert moved["world_sizes"] == [2, 3, 1]
    resumed = [event.step for event in events(run, "resumed")]
    assert resumed[0] >= 10 and resumed[1] == 40
    for key in ("losses", "grad_norms"):
        assert worst_difference(losses(moved, key), losses(whole, key)) <= 1e-9
    run_file = load_run_file(Filesystem.at(str(run)))
    assert run_file is not None
    assert read_status(Filesystem.at(str(run)), run_file, now_s=0.0).state == "FINISHED"
