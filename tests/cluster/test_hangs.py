"""Ranks that stand still: found, told apart, ended, and the others go on. What is slow is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ray.train import RunConfig, ScalingConfig

import elastic
from elastic import ElasticConfig, ElasticTrainer, HangLimits
from elastic.storage.filesystem import Filesystem
from elastic.storage.ledger import LedgerEvent, read_ledger
from tests.cluster import hanging
from tests.cluster.local_cluster import LocalCluster, is_running, unaccounted_s

LIMIT_S = 3.0


def test_each_way_to_hang_is_told_and_ended(connected: LocalCluster, tmp_path: Path):  # B65, B70
    limits = HangLimits(step_s=LIMIT_S, storage_s=LIMIT_S, times_slowest=1.5)
    found = run(hanging.in_turn, tmp_path, limits, (1, 5), {"until": 45}, cpus=0.5)
    hangs = [event for event in found if event.kind == "hang_found"]
    assert [e.data["culprits"][0]["kind"] for e in hangs] == ["loop", "storage", "data", "stopped"]
    assert [len(e.data["culprits"]) for e in hangs] == [1, 1, 1, 1]
    assert [e.world_rank for e in hangs] == [4, 3, 2, 1]
    loop, storage, data, stopped = (event.reason for event in hangs)
    assert "hanging.py" in loop and "in spin" in loop
    assert "direct_file.py" in storage
    assert "loader processes: pid" in data
    assert "SIGSTOP" in stopped
    for event in hangs:
        files = sorted((tmp_path / "run" / event.data["stacks"]).iterdir())
        assert [file.name for file in files] == [f"rank{rank}.txt" for rank in range(len(files))]
        assert all("Thread" in file.read_text() for file in files)
        assert len(files) == event.world_rank + 1
    at_fault = tmp_path / "run" / hangs[3].data["stacks"] / "rank1.txt"
    assert "in_turn (" in at_fault.read_text()  # also of a process that is stopped
    decided = [event for event in found if event.kind == "failure_decided"]
    assert [e.data["cause"] for e in decided] == ["hang"] * 4
    assert [e.data["recovery"] for e in decided] == ["warm"] * 4
    assert [e for e in found if e.kind == "reform_failed"] == []
    assert all("diagnose" in e.data["phases_s"] for e in found if e.kind == "recovered")
    assert found[-1].kind == "run_finished"
    assert unaccounted_s(found) < 0.3
    assert not is_running(int((tmp_path / "run" / "child").read_text()))  # B70


@pytest.mark.thorough
@pytest.mark.timeout(180)
def test_slow_is_not_hung(connected: LocalCluster, tmp_path: Path):  # B82
    slow_s = LIMIT_S + 1.5
    mark = tmp_path / "mark"
    config = {"until": 10, "slow_s": slow_s, "mark": str(mark)}
    limits = HangLimits(step_s=LIMIT_S)
    found = run(hanging.slow_but_sound, tmp_path, limits, (1, 2), config)
    seen = [event for event in found if event.kind in ("stall_seen", "failure_decided")]
    assert [event.kind for event in seen] == ["stall_seen", "failure_decided"]
    took_s = seen[0].time_s - float(mark.read_text())
    assert LIMIT_S < took_s < 2 * LIMIT_S
    assert "rank 1 hung: its training thread stands still in forward-backward" in seen[1].reason
    loads = [event for event in found if event.kind == "recovered"]
    assert loads[0].data["phases_s"]["load"] > slow_s  # which was no reason to end anything
    assert found[-1].kind == "run_finished"


def run(
    function: Callable[[elastic.Run], None],
    storage: Path,
    hangs: HangLimits,
    workers: tuple[int, int],
    config: dict[str, Any],
    cpus: float = 1.0,
) -> list[LedgerEvent]:
    """What the ledger holds at the end of a run that has finished."""
    url = f"{storage}/run"
    ElasticTrainer(
        function,
        train_loop_config={**config, "url": url},
        scaling_config=ScalingConfig(
            num_workers=workers,
            resources_per_worker={"CPU": cpus},
            elastic_resize_monitor_interval_s=600.0,
        ),
        run_config=RunConfig(name="run", storage_path=str(storage)),
        elastic_config=ElasticConfig(save_every=hanging.SAVE_EVERY, hangs=hangs),
    ).fit()
    return read_ledger(Filesystem.at(url))
