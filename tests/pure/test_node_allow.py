"""`elastic node allow`, and what `elastic status` says of nodes that are kept out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from elastic.dashboard.report import status_text
from elastic.policy.events import Record
from elastic.policy.strikes import StrikeRules, judge
from elastic.storage import lease, requests
from elastic.storage.ledger import read_ledger
from elastic.verbs import requests as asking
from tests.pure.test_cli import NOW_S, ARun, ask
from tests.pure.test_requests import FakeDriver, hold

BAD = "ab" * 28
OTHER = "abcd" * 14
ALLOWED = ("node_allowed", {"data": {"node_id": BAD, "node_ip": "10.0.0.3"}})


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ARun]:
    """Three strikes on one node, which is kept out for them, and one strike on another."""
    monkeypatch.setattr(asking, "POLL_S", 0.02)
    monkeypatch.setattr(lease, "BEAT_S", 0.05)
    with closing(ARun(tmp_path)) as made:
        made.event("run_started", 2000)
        ranks = [
            {"world_rank": 0, "node_id": OTHER, "node_ip": "10.0.0.2", "pid": 1},
            {"world_rank": 1, "node_id": BAD, "node_ip": "10.0.0.3", "pid": 2},
        ]
        for generation, rank in enumerate((1, 0, 1, 1)):
            ago_s = 1000.0 - 100 * generation
            group = {"ranks": ranks, "world_size": 2}
            made.event("generation_started", ago_s, generation=generation, data=group)
            made.event(
                "failure_decided",
                ago_s - 10,
                generation=generation,
                world_rank=rank,
                data={"cause": "cuda_error" if generation else "worker_killed"},
            )
        due = keep_out(made)
        made.event(due.kind, 680.0, reason=due.reason, data=due.data)
        yield made


def keep_out(run: ARun) -> Record:
    from elastic.dashboard.kept_out import strikes_told

    due = judge(strikes_told(read_ledger(run.fs)), StrikeRules(), NOW_S - 680, [BAD, OTHER])
    assert due is not None
    return due


# --- status --------------------------------------------------------------------------------------


def test_status_names_the_node_why_until_when_and_what_to_do(run: ARun) -> None:
    text = status_text(run.status())
    (line,) = [line for line in text.splitlines() if line.startswith("kept out")]
    assert line == (
        "kept out    node abababababab (10.0.0.3): 3 strikes in 5 min: cuda_error 2, "
        "worker_killed 1; "
        f"until 2027-01-15 08:48 UTC, or `elastic node allow {run.root} abababababab`"
    )


def test_status_in_json_has_every_strike(run: ARun) -> None:
    (found,) = run.status().kept_out
    assert (found.node_id, found.node_ip) == (BAD, "10.0.0.3")
    assert found.until_s == NOW_S - 690 + 3600
    assert [one["cause"] for one in found.strikes] == ["worker_killed", "cuda_error", "cuda_error"]
    assert [one["time_s"] for one in found.strikes] == [NOW_S - ago for ago in (990, 790, 690)]


def test_a_node_whose_time_is_over_is_not_named(run: ARun) -> None:
    assert run.status(now_s=NOW_S + 3600).kept_out == []
    assert "kept out" not in status_text(run.status(now_s=NOW_S + 3600))


# --- the verb, while somebody is at the run ------------------------------------------------------


def test_the_driver_is_asked_and_lets_it_in(run: ARun) -> None:
    with FakeDriver(run, ALLOWED):
        result = ask("node", "allow", run.root, BAD[:8])
    assert result.exit_code == 0, result.output
    assert result.stdout == "node abababababab (10.0.0.3) is let back in; 3 strikes forgotten\n"
    assert "taken" not in result.stderr, "there is nothing to wait for"
    assert run.status().kept_out == [] and requests.pending(run.fs) == []


def test_a_node_is_known_by_its_address_too(run: ARun) -> None:
    with FakeDriver(run, ALLOWED):
        result = ask("node", "allow", run.root, "10.0.0.3", "--json")
    assert json.loads(result.stdout) == {
        "node_id": BAD,
        "node_ip": "10.0.0.3",
        "was_kept_out": True,
        "num_strikes": 3,
    }


def test_nobody_answers_in_time(run: ARun) -> None:
    with FakeDriver(run, takes=False):
        result = ask("node", "allow", run.root, BAD, "--timeout", "0.3")
    assert result.exit_code == 1 and "nobody took the request" in result.stderr
    assert len(run.status().kept_out) == 1


@pytest.mark.parametrize("asked", ["10.9.9.9", "ff", ""])
def test_an_unknown_node_is_answered_with_those_that_are_known(run: ARun, asked: str) -> None:
    result = ask("node", "allow", run.root, asked)
    assert result.exit_code == 1
    assert f"no node {asked} is kept out of {run.root}" in result.stderr
    assert "node abababababab (10.0.0.3) (kept out)" in result.stderr
    assert "node abcdabcdabcd (10.0.0.2) (1 strike)" in result.stderr


def test_a_beginning_that_fits_two_nodes_is_refused(run: ARun) -> None:
    result = ask("node", "allow", run.root, "ab")
    assert result.exit_code == 1 and "ab is more than one node" in result.stderr
    assert len(run.status().kept_out) == 1


def test_no_such_run(tmp_path: Path) -> None:
    result = ask("node", "allow", tmp_path / "nowhere", "a")
    assert result.exit_code == 2 and "no such directory" in result.stderr


# --- and while nobody is -------------------------------------------------------------------------


def test_it_is_written_down_for_the_next_submission(run: ARun) -> None:
    run.event("run_failed", 100.0, reason="gave up after 300 s without enough workers")
    result = ask("node", "allow", run.root, BAD)
    assert result.exit_code == 0, result.output
    assert "is let back in, when the run is submitted again; 3 strikes forgotten" in result.stdout
    status = run.status()
    assert status.kept_out == [] and status.state == "FAILED"
    last = read_ledger(run.fs)[-1]
    assert last.kind == "node_allowed" and last.reason.startswith(
        "node abababababab (10.0.0.3): allow asked by "
    )
    _, holder = lease.read(run.fs)
    assert holder is not None and holder.released


def test_a_driver_that_is_gone_needs_not_answer_and_does_not_look_alive(run: ARun) -> None:
    hold(run, machine=lease._machine(), pid=2**22 + 1)
    before = run.status()
    result = ask("node", "allow", run.root, BAD)
    assert result.exit_code == 0, result.output
    after: Any = run.status()
    assert after.kept_out == []
    assert (after.state, after.last_word_age_s) == (before.state, before.last_word_age_s)
    assert after.state == "UNKNOWN"


def test_a_node_with_strikes_that_is_not_out_loses_them(run: ARun) -> None:
    result = ask("node", "allow", run.root, "10.0.0.2")
    assert result.exit_code == 0
    assert result.stdout == "node abcdabcdabcd (10.0.0.2) was not kept out; 1 strike forgotten\n"
    assert len(run.status().kept_out) == 1
