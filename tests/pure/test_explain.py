"""`elastic explain`: every restart with its cause and cost, and one of them as a story."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from elastic.cli import main
from elastic.dashboard.explanation import next_steps, restart_text
from elastic.dashboard.restarts import Restart, restarts_of, totals
from elastic.dashboard.status import restarts_by_cause
from elastic.dashboard.tries_left import tries_left
from elastic.policy.budgets import Failure, as_recorded
from elastic.policy.causes import Cause
from elastic.storage.ledger import LedgerEvent, LedgerWriter
from tests.format_fixture import DISK, FIXTURES, expected_of, unpacked
from tests.made_run import BORN_S, fingerprint, make_run

NOW_S = BORN_S + 7200
RULES = {
    "max_failures": 3,
    "max_failures_without_progress": 5,
    "max_failures_by_cause": {"hang": 1},
}
PHASES_S = {"diagnose": 0.0, "connect": 0.25, "load": 1.5, "first_step": 0.75, "wait": 0.5}
NODE = "6cea90ab4862032e6a9e0fd72e59e169188340b40d1532c2f6cd806c"


def word(kind: str, at_s: float = 0.0, **facts: Any) -> LedgerEvent:
    return LedgerEvent(**{"life": 0, "seq": 0, "time_s": BORN_S + at_s, "kind": kind, **facts})


def begun(**rules: Any) -> list[LedgerEvent]:
    ranks = [{"world_rank": rank, "node_ip": "127.0.0.1", "pid": 90 + rank} for rank in range(3)]
    return [
        word("run_started", data={"name": "demo", "rules": {**RULES, **rules}}),
        word("generation_planned", 1, generation=0, data={"world_size": 3}),
        word("generation_started", 2, generation=0, data={"world_size": 3, "ranks": ranks}),
        word("started", 3, generation=0, step=0),
        word("progress", 10, generation=0, step=33, data={"state": "RUNNING"}),
        word("checkpoint_committed", 11, generation=0, step=30),
    ]


def decided(at_s: float, cause: str = "worker_killed", **facts: Any) -> LedgerEvent:
    """The group of three is decided to have failed, at step 33 unless told otherwise."""
    data = {"cause": cause, "then": "restart", "recovery": "warm", "world_size": 3}
    data |= {"evidence": "", "cause_text": "rank 1 died: SIGKILL", **facts.pop("data", {})}
    told = {"generation": 0, "step": 33, "world_rank": 1, "reason": "rank 1 died: SIGKILL"}
    return word("failure_decided", at_s, data=data, **{**told, **facts})


def stands(at_s: float, generation: int, size: int) -> list[LedgerEvent]:
    return [
        word("generation_started", at_s, generation=generation, data={"world_size": size}),
        word("resumed", at_s + 1, generation=generation, step=30),
    ]


def recovered(at_s: float, generation: int, reason: str = "", **data: Any) -> LedgerEvent:
    facts = {"lost_steps": 3, "old_world_size": 3, "new_world_size": 2, "phases_s": PHASES_S}
    return word(
        "recovered", at_s, generation=generation, step=31, reason=reason, data={**facts, **data}
    )


def killed() -> list[LedgerEvent]:
    """A rank is killed; two go on from step 30."""
    died = {"last_lines": ["loss 4.2", "loss 4.1"], "node_id": NODE, "node_ip": "192.0.2.2"}
    kept_out = {"node_id": NODE, "node_ip": "192.0.2.2", "until_s": BORN_S + 3600, "strikes": []}
    return [
        word("worker_died", 20, generation=0, step=33, world_rank=1, reason="SIGKILL", data=died),
        decided(20.5),
        word("node_kept_out", 20.5, reason="node 6cea90ab4862: 2 strikes", data=kept_out),
        word("generation_planned", 20.5, generation=1, reason="re-forming as generation 1"),
        *stands(21, 1, 2),
        recovered(23.5, 1, "rank 1 died: SIGKILL"),
    ]


def grown() -> list[LedgerEvent]:
    return [
        word("growth_planned", 60, generation=1, reason="starting 1 workers"),
        word("leave_ordered", 70, generation=1, step=87, reason="growing from 2 to 3 workers"),
        *stands(71, 2, 3),
        replace(
            recovered(72, 2, "growing from 2 to 3 workers"),
            data={"lost_steps": 0, "old_world_size": 2, "new_world_size": 3},
        ),
    ]


def told(*events: LedgerEvent) -> list[Restart]:
    return restarts_of([*begun(), *events])


def write(root: Path, events: Sequence[LedgerEvent]) -> Path:
    """A run directory with these events in its ledger."""
    fs = make_run(root).fs
    for life in sorted({event.life for event in events}):
        with closing(LedgerWriter(fs, life, f"life{life}")) as ledger:
            for event in events:
                facts = {k: v for k, v in vars(event).items() if k not in ("life", "seq", "kind")}
                if event.life == life:
                    ledger.append(event.kind, **facts)
    return root


def ask(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["explain", *map(str, arguments)])


def said(*arguments: object) -> str:
    result = ask(*arguments)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(autouse=True)
def at_night(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic.verbs.explain.time.time", lambda: NOW_S)


# --- the table -----------------------------------------------------------------------------------


def test_the_table_tells_each_restart_and_what_all_cost(tmp_path: Path) -> None:
    first, second = killed(), grown()
    first[-1] = replace(first[-1], reason="the 1st", data={**first[-1].data, "source": "memory"})
    second[-1] = replace(second[-1], reason="growing")
    root = write(tmp_path / "demo", [*begun(), *first, *second])
    assert said(root).splitlines() == [
        "N  WHEN (UTC)           AGO  CAUSE          STEP  LOST  FROM    SECONDS  WORKERS  REASON",
        "1  2027-01-15 08:00:20  2 h  worker_killed    33     3  memory      3.0  3 -> 2   the 1st",
        "2  2027-01-15 08:01:10  2 h  growth           87     0  -           2.0  2 -> 3   growing",
        "",
        "by cause    growth 1, worker_killed 1",
        "lost        3 steps done again, and 5.0 s without a step",
        "tries left  exceptions         3 of 3 left  0 used, never given back",
        "            hang               1 of 1 left  0 used, given back by the next new checkpoint",
        "            failures in a row  5 of 5 left  0 used, given back by the next new checkpoint",
        "",
        f"One of them with its evidence: elastic explain {root} --restart 2",
    ]


def test_json_gives_the_same_facts_and_changes_nothing(tmp_path: Path) -> None:
    root = write(tmp_path / "demo", [*begun(), *killed(), *grown()])
    before = fingerprint(root)
    found = json.loads(said(root, "--json"))
    first, second = found["restarts"]
    assert "events" not in first
    assert (first["causes"], first["step"], first["lost_steps"]) == (["worker_killed"], 33, 3)
    assert (first["took_s"], first["phases_s"]) == (3.0, PHASES_S)
    assert (second["old_world_size"], second["new_world_size"]) == (2, 3)
    assert found["totals"] == {
        "by_cause": {"growth": 1, "worker_killed": 1},
        "lost_steps": 3,
        "took_s": 5.0,
    }
    assert [one["budget"] for one in found["tries_left"]] == [
        "exceptions",
        "hang",
        "failures in a row",
    ]
    one = json.loads(said(root, "--restart", 1, "--json"))
    assert {key: one[key] for key in first} == first
    assert one["events"][0]["data"]["last_lines"] == ["loss 4.2", "loss 4.1"]
    assert f"elastic logs {root} --rank 1 --generation 0" in one["next"]
    assert fingerprint(root) == before


def test_a_run_without_restarts_says_so(tmp_path: Path) -> None:
    root = write(tmp_path / "demo", begun())
    assert said(root).startswith("no restarts\ntries left  exceptions")
    result = ask(root, "--restart", 1)
    assert result.exit_code == 2
    assert f"no restart 1 of {root}: there is none" in result.output


def test_what_is_asked_for_must_be_there(tmp_path: Path) -> None:
    root = write(tmp_path / "demo", [*begun(), *killed()])
    result = ask(root, "--restart", 2)
    assert (result.exit_code, "there are 1 to 1" in result.output) == (2, True)
    assert ask(root, "--restart", 0).exit_code == 2
    assert ask(tmp_path / "none").exit_code == 2


# --- what is one restart, and whose words are whose ----------------------------------------------


def test_a_drain_noticed_before_the_first_new_step_is_the_next_restart() -> None:
    """The notice comes while the group that was just formed still waits for its first step."""
    first = killed()
    notice = word("drain_noticed", 22, generation=1, reason="node b", data={"world_ranks": [0]})
    leave = word("leave_ordered", 22, generation=1, reason="leaving node b")
    again = [*stands(30, 2, 1), recovered(31, 2, "leaving node b", lost_steps=0)]
    found = told(*first[:-1], notice, leave, first[-1], *again)
    assert [one.causes for one in found] == [["worker_killed"], ["drain"]]
    assert (found[1].generation, found[1].new_generation) == (1, 2)
    assert [event.kind for event in found[1].events][:2] == ["drain_noticed", "leave_ordered"]


def test_a_failure_on_the_way_to_the_new_step_is_of_the_same_restart() -> None:
    first = killed()
    second = decided(22, "hang", generation=1, step=33, data={"world_size": 2})
    found = told(*first[:-1], second, *stands(40, 2, 2), recovered(42, 2, "the 2nd"))
    assert [(one.causes, one.new_generation) for one in found] == [(["worker_killed", "hang"], 2)]
    assert (found[0].old_world_size, found[0].reason) == (3, "the 2nd")


def test_a_checkpoint_that_was_passed_by_is_in_the_story() -> None:
    facts = {"problem": "state.json is missing", "resumed_step": 20}
    why = "it was committed and is not complete: state.json is missing"
    passed_by = word("checkpoint_passed_by", 21, generation=1, step=30, reason=why, data=facts)
    events = [*begun(), decided(20), passed_by, *stands(22, 1, 2), recovered(24, 1)]
    (one,) = restarts_of(events)
    told = restart_text(one, 1, None, run="run", now_s=NOW_S)
    assert f"checkpoint passed by: {why}" in told


def test_a_node_that_is_left_without_a_save_is_a_drain() -> None:
    """A save under way that ends in time: nothing but the notice and the next generation."""
    notice = word("drain_noticed", 15, generation=0, reason="node b")
    planned = word("generation_planned", 16, generation=1)
    (one,) = told(notice, planned, *stands(17, 1, 2), recovered(18, 1))
    assert (one.causes, one.generation, one.new_generation) == (["drain"], 0, 1)
    unsaved = word("left_unsaved", 16, generation=0, step=33)
    (one,) = told(unsaved, *stands(17, 1, 2), recovered(18, 1))
    assert one.causes == ["drain"]


def test_the_death_of_the_driver_is_one_restart_however_often_it_is_told() -> None:
    lost = word("driver_lost", 20, life=1, generation=0, reason="the driver died")
    again = word("run_started", 21, life=1, data={"take_over": 1})
    over = word("driver_took_over", 21, life=1, data={"took_s": 4.0})
    after = [replace(one, life=1) for one in (*stands(22, 1, 3), recovered(23, 1))]
    (one,) = told(lost, again, over, *after)
    assert (one.causes, one.step, one.outcome) == (["driver"], 33, "recovered")


def test_a_driver_that_dies_on_the_way_to_the_new_step_is_of_the_same_restart() -> None:
    first = killed()
    lost = word("driver_lost", 22, life=1, generation=1, reason="the driver died")
    again = word("run_started", 22, life=1, data={"take_over": 1})
    after = [replace(one, life=1) for one in (*stands(30, 2, 2), recovered(31, 2))]
    (one,) = told(*first[:-1], lost, again, *after)
    assert (one.causes, one.new_generation) == (["worker_killed", "driver"], 2)


def test_the_failure_that_ended_the_run_is_the_last(tmp_path: Path) -> None:
    raised = word("rank_failed", 29, generation=1, world_rank=1, reason="boom")
    gave_up = decided(30, "user_exception", reason="boom (granted: 0)", data={"then": "fail"})
    ends = word("run_failed", 31, generation=1, step=33, reason="given up")
    found = told(*killed(), raised, gave_up, ends)
    assert [one.outcome for one in found] == ["recovered", "failed"]
    assert (found[1].causes, found[1].reason, found[1].took_s) == (
        ["user_exception"],
        "given up",
        None,
    )
    root = write(tmp_path / "demo", [*begun(), *killed(), *found[1].events])
    assert "[the run failed] given up" in said(root)
    story = said(root, "--restart", 2)
    assert "decided: user_exception, give up: boom (granted: 0)\n" in story
    assert "submit the run again" in story


def test_a_run_that_never_found_room_tells_of_that() -> None:
    waits = word("waiting", 5, reason="1 of 2 workers")
    (one,) = restarts_of([*begun()[:1], waits, word("run_failed", 9, reason="no room in time")])
    assert (one.causes, one.outcome, one.reason) == (["capacity"], "failed", "no room in time")
    failed = word("start_failed", 5, data={"cause": "start_up"})
    (one,) = restarts_of([*begun()[:1], failed, word("run_failed", 9)])
    assert one.causes == ["start_up"]


@pytest.mark.parametrize("end", ["run_stopped", "run_finished"])
def test_a_group_that_leaves_for_good_is_no_restart(end: str) -> None:
    asked = word("request_taken", 15, generation=0, data={"request": "stop"})
    leave = word("leave_ordered", 16, generation=0, reason="stop asked")
    assert told(asked, leave, word(end, 17)) == []
    (under_way,) = told(asked, leave)
    assert (under_way.causes, under_way.outcome) == (["stop"], "under way")


def test_a_failure_that_is_followed_by_another_submission_is_kept() -> None:
    again = word("run_started", 50, life=1, data={"rules": RULES})
    (one,) = told(decided(20), again, word("generation_started", 51, life=1, generation=1))
    assert (one.outcome, one.causes) == ("submitted again", ["worker_killed"])


def test_a_launcher_tells_of_the_failure_before_it_starts_again() -> None:
    """As `elastic.training.book` writes under torchrun: no phases, so the clock has to do."""
    failed = word("failure_decided", 20, life=1, data={"cause": "launcher restart"})
    again = word("run_started", 21, life=1, data={"under": "torchrun"})
    after = [replace(one, life=1) for one in stands(22, 1, 3)]
    done = word("recovered", 24, life=1, generation=1, step=31, data={"new_world_size": 3})
    (one,) = told(failed, again, *after, done)
    assert (one.causes, one.took_s, one.old_world_size) == (["launcher restart"], 4.0, 3)


def test_signs_that_came_to_nothing_are_left_out() -> None:
    stall = word("stall_seen", 12, generation=0, reason="stands still")
    passed = word("stall_passed", 13, generation=0)
    planned = word("growth_planned", 14, generation=0)
    failed = word("growth_failed", 15, generation=0)
    (one,) = told(stall, passed, planned, failed, *killed())
    assert next(event.kind for event in one.events) == "worker_died"


def test_causes_add_up_to_those_of_the_status() -> None:
    late = [replace(one, time_s=one.time_s + 100) for one in killed()]
    late = [replace(one, generation=one.generation + 2) for one in late]
    events = [*begun(), *killed(), *grown(), *late]
    assert totals(restarts_of(events)).by_cause == restarts_by_cause(events)


# --- the story -----------------------------------------------------------------------------------


def test_the_story_of_a_killed_rank(tmp_path: Path) -> None:
    root = write(tmp_path / "demo", [*begun(), *killed(), *grown()])
    assert said(root, "--restart", 1).splitlines()[:-4] == [
        "restart     1 of 2: worker_killed",
        "outcome     recovered in 3.0 s",
        "when        2027-01-15 08:00:20 UTC, 2 h ago",
        "where       generation 0, step 33, rank 1",
        "workers     3 -> 2",
        "lost        3 finished steps, done again from step 30",
        "reason      rank 1 died: SIGKILL",
        "",
        "What happened (UTC)",
        "  08:00:20.000  rank 1 died: SIGKILL",
        "      | it wrote last:",
        "      |   loss 4.2",
        "      |   loss 4.1",
        "  08:00:20.500  decided: worker_killed, restart warm (of rank 1)",
        "  08:00:20.500  node kept out: node 6cea90ab4862: 2 strikes",
        "  08:00:20.500  re-forming as generation 1",
        "  08:00:21.000  generation 1 stands with 2 workers",
        "  08:00:22.000  all ranks hold the state of step 30",
        "  08:00:23.500  step 31 is the first new one",
        "",
        "Where the time went",
        "  connect     0.250 s",
        "  load        1.500 s",
        "  first_step  0.750 s",
        "  wait        0.500 s",
        "  together    3.000 s",
        "",
        "Look at",
        f"  logs    {root}/logs/g0/",
        "",
        "Next",
        "  Look at dmesg on its node: the kernel's memory killer gives no words.",
        f"  elastic logs {root} --rank 1 --generation 0",
        f"  elastic node allow {root} 6cea90ab4862   (once it is sound)",
    ]


def test_a_hang_tells_where_everybody_stood(tmp_path: Path) -> None:
    stall = word("stall_seen", 15, generation=0, reason="no rank has moved for 300 s")
    places = {"places": [f"rank {rank} in all_reduce" for rank in range(20)]}
    hang = word("hang_found", 16, generation=0, data={**places, "stacks": "stacks/g0-1"})
    evidence = {"evidence": "no rank has moved"}
    events = [stall, hang, decided(16, "hang", data=evidence), *killed()[2:]]
    root = write(tmp_path / "demo", [*begun(), *events])
    story = said(root, "--restart", 1)
    assert "08:00:15.000  seen: no rank has moved for 300 s" in story
    assert (
        "| rank 7 in all_reduce\n      | and 12 more ranks\n      | stacks in stacks/g0-1/" in story
    )
    assert f"  stacks  {root}/stacks/g0-1/\n" in story
    assert "decided: hang, restart warm: rank 1 died: SIGKILL\n      | no rank has moved\n" in story
    assert "  Look at the stacks that were kept in the run directory.\n" in story


@pytest.mark.parametrize(
    ("cause", "said", "advised"),
    [
        ("storage", "rank 0 raised StorageFull: 3 saves in a row have failed", "free room in it"),
        ("storage", "rank 0 raised OSError: [Errno 28] No space left on device", "free room in it"),
        ("storage", "rank 0 raised CheckpointSuspect: the loss of step 41 is nan", "learning rate"),
        ("user_exception", "rank 0 raised LossNotFinite: the loss of step 41", "learning rate"),
        ("storage", "rank 0 raised SaveFailed: Permission denied", "its credentials"),
    ],
)
def test_what_is_advised_depends_on_what_was_said(cause: str, said: str, advised: str) -> None:
    (one,) = told(*begun(), decided(20, cause, reason=said), *stands(22, 1, 3), recovered(25, 1))
    (advice, *_) = next_steps(one, "/runs/demo")
    assert advised in advice
    assert ("credentials" in advice) == (advised == "its credentials")


def test_a_drain_tells_how_long_there_was(tmp_path: Path) -> None:
    data = {"world_ranks": [4, 5], "remaining_s": 30.0, "predicted": "a save takes 2 s"}
    notice = word("drain_noticed", 15, generation=0, reason="node b", data=data)
    leave = word("leave_ordered", 16, generation=0, reason="leaving node b")
    root = write(tmp_path / "demo", [*begun(), notice, leave, *stands(17, 1, 2), recovered(18, 1)])
    wanted = "a node is to be left: node b; gone in 30.0 s; rank 4, 5 lives there; a save takes 2 s"
    assert wanted in said(root, "--restart", 1)


def test_of_a_thousand_victims_three_are_told_and_the_culprit_with_its_traceback() -> None:
    lost = {"is_victim": True, "traceback": "boring", "last_lines": ["boring"]}
    victims = [
        word("rank_failed", 15, generation=0, world_rank=rank, reason="reset by peer", data=lost)
        for rank in range(1000)
    ]
    trace = "Traceback:\n  deep\n  File a\n    train()\n  File b\n    raise\nValueError: boom"
    data = {"is_victim": False, "traceback": trace, "last_lines": ["odd"]}
    guilty = word(
        "rank_failed", 16, generation=0, world_rank=7, reason="ValueError: boom", data=data
    )
    (one,) = told(*victims, guilty, decided(16, "user_exception"))
    story = restart_text(one, 1, None, run="/runs/demo", now_s=NOW_S)
    assert story.count("lost a peer: reset by peer") == 3
    assert "and 997 more of: a rank lost a peer" in story
    assert "boring" not in story
    assert "rank 7 raised: ValueError: boom\n      |     train()\n" in story
    assert "      | ValueError: boom\n      | it wrote last:\n      |   odd\n" in story
    assert "Traceback:" not in story
    assert "outcome     no new step so far" in story


def test_nothing_that_was_recorded_reaches_the_terminal_unescaped(tmp_path: Path) -> None:
    evil = "\x07gone\x1b[2J\r\x08"
    data = {"cause": evil, "then": evil, "evidence": evil, "recovery": evil}
    died = {"last_lines": [evil], "node_id": evil}
    events = [
        word("worker_died", 20, world_rank=1, reason=evil, data=died),
        word("rank_failed", 20, world_rank=1, reason=evil, data={"traceback": evil}),
        word("drain_noticed", 20, reason=evil, data={"world_ranks": [evil], "predicted": evil}),
        word("hang_found", 20, reason=evil, data={"places": [evil], "stacks": evil}),
        decided(20, reason=evil, data=data),
        word("node_kept_out", 20, reason=evil, data=died),
        recovered(23, 1, evil, phases_s={evil: 1.0}),
    ]
    root = write(tmp_path / "demo", [*begun(max_failures_by_cause={evil: 3}), *events])
    for shown in (said(root), said(root, "--restart", 1)):
        assert "gone" in shown
        assert all(char.isprintable() for line in shown.split("\n") for char in line)


# --- tries left ----------------------------------------------------------------------------------


def counted(at_s: float, cause: Cause, committed_step: int = 30, text: str = "") -> LedgerEvent:
    failure = Failure(cause=cause, step=33, text=text, headline="h")
    return decided(at_s, str(cause), data={"counted": as_recorded(failure, committed_step)})


def left(events: Sequence[LedgerEvent]) -> dict[str, int | None]:
    found = tries_left(events)
    assert found is not None
    return {one.budget: one.left for one in found}


def test_what_is_left_is_what_the_driver_would_grant() -> None:
    failures = [counted(20, Cause.USER_EXCEPTION, text="boom"), counted(21, Cause.HANG)]
    events = [*begun(), *failures, counted(22, Cause.NODE_LOST), counted(23, Cause.HOST_MEMORY)]
    assert left(events) == {
        "exceptions": 2,
        "hang": 0,
        "host_memory": 1,
        "failures in a row": 3,
        "the same host_memory": 1,
    }
    saved = word("checkpoint_committed", 30, step=60)
    assert left([*events, saved]) == {"exceptions": 2, "hang": 1, "failures in a row": 5}


def test_no_limit_is_told_as_such(tmp_path: Path) -> None:
    events = begun(max_failures=-1)
    assert left(events)["exceptions"] is None
    assert "exceptions         no limit     0 used" in said(write(tmp_path / "demo", events))


def test_of_a_run_that_has_ended_the_tries_are_those_of_its_end() -> None:
    ended = [*begun(), counted(20, Cause.DATA), word("run_failed", 21)]
    assert left(ended)["exceptions"] == 2
    again = word("run_started", 30, life=1, data={"rules": RULES})
    assert left([*ended, again])["exceptions"] == 3


def test_rules_that_were_not_recorded_are_not_made_up(tmp_path: Path) -> None:
    events = [word("run_started", data={"name": "demo"}), *begun()[1:], *killed()]
    assert tries_left(events) is None
    root = write(tmp_path / "demo", events)
    assert "tries left  not recorded: an older version wrote this run" in said(root)
    assert json.loads(said(root, "--json"))["tries_left"] is None


# --- older and damaged ledgers -------------------------------------------------------------------


def full() -> list[LedgerEvent]:
    hang = {"places": ["rank 0 in data"], "stacks": "stacks/g2-1", "culprits": []}
    ends = decided(100, "hang", generation=2, data={"then": "fail", "evidence": "e"})
    return [
        *begun(),
        word("drain_noticed", 12, generation=0, data={"world_ranks": [1], "remaining_s": 3.0}),
        *killed(),
        word("driver_took_over", 40, data={"took_s": 1.0}),
        *grown(),
        word("rank_failed", 99, generation=2, world_rank=1, data={"traceback": "x"}),
        word("hang_found", 99, generation=2, data=hang),
        replace(ends, data={**ends.data, "counted": as_recorded(_FAILURE, 30)}),
        word("run_failed", 101, generation=2),
    ]


_FAILURE = Failure(cause=Cause.HANG, step=33, text="t", headline="h")


def answers(root: Path) -> None:
    """Every view of the run, none of which may crash."""
    found = json.loads(said(root, "--json"))
    said(root)
    for one in found["restarts"]:
        said(root, "--restart", one["number"])
        said(root, "--restart", one["number"], "--json")


@pytest.mark.parametrize("fixture", FIXTURES, ids=lambda path: path.name)
def test_a_run_of_each_format_is_explained(fixture: Path, tmp_path: Path) -> None:
    root = unpacked(fixture, tmp_path)
    answers(root)
    causes = expected_of(fixture)[DISK]["status"]["restarts_by_cause"]
    assert json.loads(said(root, "--json"))["totals"]["by_cause"] == causes


@pytest.mark.parametrize("missing", range(len(full())))
def test_any_one_event_may_be_missing(missing: int, tmp_path: Path) -> None:
    events = full()
    del events[missing]
    answers(write(tmp_path / "demo", events))


@pytest.mark.parametrize(
    "junk",
    [None, "x", -1, True, 1e400, 10**400, [], [None, 3], {}, {"a": None}],
    ids=lambda junk: repr(junk)[:9],
)
def test_facts_of_any_kind_are_taken_for_none(junk: Any, tmp_path: Path) -> None:
    events = [replace(one, data=dict.fromkeys(one.data, junk)) for one in full()]
    answers(write(tmp_path / "whole", events))
    nested = [
        replace(one, data={**one.data, "rules": {"max_failures": junk}, "phases_s": {"a": junk}})
        for one in full()
    ]
    answers(write(tmp_path / "nested", nested))


def test_events_without_facts_or_in_no_calendar_are_told(tmp_path: Path) -> None:
    bare = [LedgerEvent(life=0, seq=0, time_s=1e18, kind=one.kind) for one in full()]
    root = write(tmp_path / "demo", bare)
    answers(root)
    assert "  1e+18 s  a rank died\n" in said(root, "--restart", 1)


def test_a_restart_of_which_only_the_end_is_left_is_unknown() -> None:
    (one,) = restarts_of([recovered(20, 1, "why")])
    assert (one.causes, one.generation, one.reason) == (["unknown"], 0, "why")
