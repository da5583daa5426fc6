"""The driver's hold on a run, without a cluster: going back on submission, and letting go."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from elastic.cluster import succession, whereabouts
from elastic.cluster.claimed_run import ClaimedRun
from elastic.cluster.driver import Driver
from elastic.cluster.driver_config import DriverConfig, TakeOver
from elastic.cluster.recovery import Recovery
from elastic.cluster.trainer import NOT_BEGUN
from elastic.policy.budgets import Budgets, Failure, as_recorded
from elastic.policy.causes import Cause
from elastic.policy.events import Record
from elastic.policy.retention import Retention
from elastic.policy.situation import Rules
from elastic.storage import lease
from elastic.storage.archive import ArchiveUnusable
from elastic.storage.claim import RunSpec
from elastic.storage.filesystem import Filesystem
from elastic.storage.ledger import read_ledger
from elastic.storage.rollback import RollbackRefused
from jobs.report import progress_line
from tests.pure.test_cli import ARun


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ARun]:
    monkeypatch.setattr(whereabouts, "in_words", lambda: "job 1 on a cluster")
    monkeypatch.setattr(whereabouts, "in_fields", lambda: {"pid": 7})
    with closing(ARun(tmp_path)) as made:
        made.event("run_started", 50, generation=3)
        for step in (0, 20, 30):
            made.checkpoint(step)
        yield made


def config(run: ARun, **more: Any) -> DriverConfig:
    more = {"spec": RunSpec(name="demo", seed=0, accepted=["seed"]), **more}
    return DriverConfig(
        run_url=str(run.root),
        rules=Rules(min_workers=1, max_workers=2),
        keep=Retention(),
        resources_per_worker={"CPU": 1.0},
        **more,
    )


def test_what_failures_have_used_up_survives_the_driver_until_the_run_has_ended(run: ARun) -> None:
    failure = Failure(cause=Cause.DATA, step=30, text="sample # is broken")
    told = {"cause": "data", "then": "restart", "counted": as_recorded(failure, 30)}
    run.event("failure_decided", 60, generation=4, data=told)
    run.event("size_infeasible", 61, generation=5, data={"ran_out": [2], "tried": [3]})
    claimed = ClaimedRun(config(run))
    found = claimed.situation(7.0)
    claimed.close()
    assert found.generation == 5 and found.since_s == 7.0
    assert found.budgets == Budgets().count(failure, 30)
    assert found.fitting.infeasible == {1, 2}
    run.event("run_failed", 62)
    again = ClaimedRun(config(run))
    assert again.situation(8.0).budgets == Budgets()
    again.close()


def test_a_submission_from_a_step_goes_back_first(run: ARun) -> None:
    claimed = ClaimedRun(config(run, from_step=20))
    claimed.record_start(Recovery())
    assert claimed.catalog.complete_steps() == [0, 20]
    assert claimed.last_generation() == 3
    claimed.close()
    told = [(e.life, e.kind, e.step) for e in read_ledger(run.fs)]
    assert (1, "rolled_back", 20) in told and (1, "run_started", -1) in told
    aside = [one for one in claimed.catalog.list() if "rolled back to step 20" in one.reason]
    assert [one.step for one in aside] == [30]


def test_a_step_that_cannot_be_gone_back_to_lets_go_of_the_run(run: ARun) -> None:
    with pytest.raises(RollbackRefused, match="steps 0, 20, 30"):
        ClaimedRun(config(run, from_step=25))
    assert lease.read(run.fs)[1].released
    again = ClaimedRun(config(run))
    assert again.catalog.complete_steps() == [0, 20, 30]
    again.close()


def test_an_archive_that_takes_nothing_lets_go_of_the_run(run: ARun, tmp_path: Path) -> None:
    (tmp_path / "cold").write_text("no directory")
    operational = {"archive": str(tmp_path / "cold" / "demo"), "keep_every": 20}
    spec = RunSpec(name="demo", seed=0, accepted=["seed"], operational=operational)
    with pytest.raises(ArchiveUnusable, match="cold/demo takes nothing"):
        ClaimedRun(config(run, spec=spec))
    assert lease.read(run.fs)[1].released
    assert issubclass(ArchiveUnusable, NOT_BEGUN), "told in few words"
    before = TakeOver(number=1, cause="it died", noticed_s=0.0, lives=frozenset())
    ClaimedRun(config(run, spec=spec, take_over=before)).close()


def test_who_submitted_it_is_warned_once_of_what_does_not_end_the_run(
    run: ARun, capsys: pytest.CaptureFixture[str]
) -> None:
    claimed = ClaimedRun(config(run))
    assert claimed.told()["warnings"] == []
    claimed.record(Record(kind="archive_failed", step=40, reason="OSError: full"))
    claimed.record(Record(kind="checkpoint_passed_by", step=30, reason="shard is missing"))
    claimed.record(Record(kind="checkpoint_removed", step=0, reason="retention"))
    waiting = succession.Succession(run.fs, config(run), lambda asked: None)
    for _ in range(2):
        waiting._warn(dict(claimed.told()))
    claimed.close()
    assert capsys.readouterr().err.splitlines() == [
        "elastic: archive failed, step 40: OSError: full",
        "elastic: checkpoint passed by, step 30: shard is missing",
    ]


def test_a_driver_that_waits_for_the_lease_has_a_status(run: ARun) -> None:
    status = Driver(config(run), None).status()  # type: ignore[arg-type]
    assert status["reason"] == "claiming the run" and status["step"] == -1
    assert "checkpoint -" in progress_line(status, 10)
    assert Filesystem.at(str(run.root)).list("lease") == []
