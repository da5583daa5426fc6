"""A tensor-parallel run on a cluster: whole groups at any time, one worker waits, and the curve."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from ray.train import RunConfig, ScalingConfig

import elastic
from elastic import ElasticConfig, ElasticTrainer, Mesh
from elastic.cluster.ray_internals import GroupMember
from elastic.cluster.survivors import to_end
from elastic.storage.filesystem import Filesystem
from elastic.storage.metrics import current_metrics
from tests.cluster import functions
from tests.cluster.local_cluster import Fit, LocalCluster, is_running, wait_for, worst_difference
from tests.dist import test_mesh_run
from tests.dist.mesh_run import Layout, train_points

UNTIL = 60
PAIRS = Mesh(tensor=2)


def in_pairs(run: elastic.Run) -> None:
    """Slow enough for what is done to it, until there is a file that says otherwise."""
    hurry = Path(run.config["hurry"])
    for _ in train_points(run, PAIRS, UNTIL):
        if not hurry.exists():
            time.sleep(0.2)


def member(rank: int, node_id: str) -> GroupMember:
    return GroupMember(
        world_rank=rank,
        world_size=5,
        local_rank=0,
        local_world_size=1,
        node_rank=0,
        node_id=node_id,
        node_ip="127.0.0.1",
        pid=100 + rank,
    )


def test_one_too_many_is_let_go_before_its_end_can_pass_for_a_death():
    there = [member(rank, node) for rank, node in enumerate("aabbb")]
    gone, leaving = {("b", 103)}, []
    assert to_end(gone, leaving, Mesh(shard=3), there) == {1, 3}
    assert gone == {("b", 103), ("a", 101)} and leaving == [there[1]]
    assert to_end(gone, leaving, Mesh(), there) == {1, 3} and len(leaving) == 1


@pytest.mark.thorough
@pytest.mark.timeout(240)
def test_a_tensor_parallel_run_loses_a_worker_and_grows_by_a_whole_group(
    connected: LocalCluster, tmp_path: Path
):
    one = test_mesh_run.Recipe(root=f"{tmp_path}/one", layout=Layout(1, Mesh()), until=UNTIL)
    test_mesh_run.run(one)
    hurry = tmp_path / "hurry"
    trainer = ElasticTrainer(
        in_pairs,
        train_loop_config={"hurry": str(hurry)},
        scaling_config=ScalingConfig(
            num_workers=(1, 5),
            resources_per_worker={"CPU": 0.5},
            elastic_resize_monitor_interval_s=1.0,
        ),
        run_config=RunConfig(name="run", storage_path=str(tmp_path)),
        elastic_config=ElasticConfig(save_every=10, save_behind="wait", mesh=PAIRS),
    )
    fit = Fit(trainer)
    events = fit.events
    wait_for("a commit", lambda: [e for e in events("checkpoint_committed") if e.step >= 10])
    before = [rank["pid"] for rank in events("generation_started")[0].data["ranks"]]
    functions.kill(before[1])
    wait_for("the re-form", lambda: len(events("recovered")) == 1)
    pair = [rank["pid"] for rank in events("generation_started")[1].data["ranks"]]
    (waits,) = {before[0], before[2], before[3]} - {*pair}
    wait_for("the end of the one too many", lambda: not is_running(waits))
    wait_for("the growth", lambda: len(events("recovered")) == 2)
    hurry.touch()
    fit.join()

    started = events("generation_started")
    assert [e.data["world_size"] for e in started] == [4, 2, 4]
    assert {*pair} < {*before} and {*pair} < {rank["pid"] for rank in started[2].data["ranks"]}
    planned = [e.reason for e in events("generation_planned")]
    assert "1 of 3 wait: the workers are laid out as tensor-parallel groups of 2" in planned[1]
    assert len(events("worker_died")) == 1 and events("reform_failed") == []
    steps = current_metrics(Filesystem.at(trainer.run_url))
    for name in ("loss", "grad_norm"):
        found = [steps[step][name] for step in range(1, UNTIL + 1)]
        assert worst_difference(found, test_mesh_run.curve(one.root, name)) <= 1e-9
