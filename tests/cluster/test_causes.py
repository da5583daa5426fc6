"""Causes and budgets on a real cluster: a bug that comes again, a size that does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elastic import TrainingFailed
from elastic.cluster import capacity
from tests.cluster import functions
from tests.cluster.local_cluster import LocalCluster
from tests.cluster.test_first_cause import events, trainer

pytestmark = pytest.mark.timeout(180)


def test_a_bug_that_comes_again_at_its_step_ends_the_run_with_a_report(
    connected: LocalCluster, tmp_path: Path
):
    made = trainer(functions.boom_at_a_step, tmp_path, max_failures=5, config={"step": 17})
    with pytest.raises(TrainingFailed) as caught:
        made.fit()
    said = str(caught.value).splitlines()[0]
    assert said.startswith("rank 1 raised ValueError: bad sample")
    assert "user_exception for the 2nd time after step 17" in said
    decided = [one for one in events(tmp_path) if one.kind == "failure_decided"]
    assert [one.data["cause"] for one in decided] == ["user_exception", "user_exception"]
    assert decided[0].data["evidence"].startswith("ValueError: bad sample")


@pytest.mark.thorough
def test_a_size_that_runs_out_of_cuda_memory_is_left_for_another(
    connected: LocalCluster, tmp_path: Path
):
    made = trainer(functions.too_large_for, tmp_path, workers=(1, 3), config={"size": 3})
    made.fit()
    found = events(tmp_path)
    (ruled_out,) = [one for one in found if one.kind == "size_infeasible"]
    assert ruled_out.data["ran_out"] == [3]
    sizes = [one.data["world_size"] for one in found if one.kind == "generation_started"]
    assert sizes == [3, 2] and found[-1].kind == "run_finished"


class Table:
    """A node table that cannot be read a number of times."""

    def __init__(self, num_failures: int, nodes: list[dict[str, Any]]) -> None:
        self.num_left, self.nodes = num_failures, nodes

    def __call__(self) -> list[dict[str, Any]]:
        self.num_left -= 1
        if self.num_left >= 0:
            raise RuntimeError("GCS server is dead")
        return self.nodes


def test_a_node_is_not_lost_because_a_table_could_not_be_read(monkeypatch: Any):  # B87
    monkeypatch.setattr(capacity, "_READ_AGAIN_S", 0.0)
    gone = Table(3, [])
    assert not capacity.node_answers("a", read=gone) and gone.num_left == -1
    assert capacity.node_answers("a", read=Table(99, []))
