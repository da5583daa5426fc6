"""An announced fault, without a cluster: the failure that follows is marked, and no other."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from elastic.cluster import whereabouts
from elastic.cluster.claimed_run import ClaimedRun
from elastic.cluster.injections import ANNOUNCED, EXPIRES_S, Injections
from elastic.policy.events import Record
from elastic.storage.ledger import read_ledger
from tests.cluster.test_claimed_run import config
from tests.pure.test_cli import ARun

ANNOUNCEMENT = Record(kind=ANNOUNCED, reason="fault asked by soak")
FAILURE = Record(kind="failure_decided", generation=0, data={"cause": "worker_killed"})


def marks(*told: tuple[float, Record]) -> list[bool]:
    """Of each failure, whether it is marked."""
    heard = Injections()
    passed = [heard.marked(record, time_s) for time_s, record in told]
    return [one.data.get("injected") is True for one in passed if one.kind == FAILURE.kind]


def test_one_announcement_marks_one_failure() -> None:
    assert marks((0.0, FAILURE)) == [False]
    assert marks((0.0, ANNOUNCEMENT), (5.0, FAILURE), (6.0, FAILURE)) == [True, False]


def test_a_fault_that_did_not_strike_marks_nothing_later() -> None:
    assert marks((0.0, ANNOUNCEMENT), (EXPIRES_S + 1, FAILURE), (EXPIRES_S + 2, FAILURE)) == [
        False,
        False,
    ]


def test_ledger_and_save_interval_hear_of_the_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whereabouts, "in_words", lambda: "job 1 on a cluster")
    monkeypatch.setattr(whereabouts, "in_fields", lambda: {"pid": 7})
    with closing(ARun(tmp_path)) as run:
        claimed = ClaimedRun(config(run))
        claimed.record(ANNOUNCEMENT)
        claimed.record(FAILURE)
        claimed.close()
        (failure,) = [e for e in read_ledger(run.fs) if e.kind == "failure_decided"]
    assert failure.data == {"cause": "worker_killed", "injected": True}
