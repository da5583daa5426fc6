"""What people ask of a live run: reaches its driver and nobody else's, and is answered."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastic.cluster.driver_config import TakeOver
from elastic.cluster.inbox import Inbox
from elastic.cluster.inheritance import Inheritance
from elastic.policy import events as e
from elastic.policy.situation import Phase, Rules, Situation
from elastic.policy.transitions import decide
from elastic.storage import lease, requests
from elastic.storage.filesystem import Filesystem
from elastic.storage.ledger import LedgerEvent
from elastic.storage.requests import ALLOW, FAULT, SAVE, STOP
from elastic.verbs import requests as verbs
from tests.pure.test_cli import ARun, ask


@pytest.fixture(params=["local", "object"])
def fs(request: pytest.FixtureRequest, tmp_path: Path) -> Filesystem:
    is_local = request.param == "local"
    return Filesystem.at(str(tmp_path / "a [b] #") if is_local else f"memory://{uuid.uuid4().hex}")


# --- the files -----------------------------------------------------------------------------------


def test_requests_are_found_oldest_first_until_they_are_withdrawn(fs: Filesystem) -> None:
    assert requests.pending(fs) == []
    second = requests.ask(fs, SAVE, who="ann", time_s=2.0, epoch=3)
    first = requests.ask(fs, STOP, who="bob", time_s=1.0, epoch=3)
    assert requests.pending(fs) == [first, second]
    requests.withdraw(fs, first.id)
    requests.withdraw(fs, first.id)
    assert requests.pending(fs) == [second]


@pytest.mark.parametrize(
    ("text", "flaw"),
    [
        (b"", "cannot be read"),
        (b"[]", "cannot be read"),
        (b'{"kind": "stop"}', "cannot be read"),
        (b'{"format_version": 9, "kind": "stop"}', "format version 9"),
        (
            b'{"format_version": 1, "kind": "drop", "who": "a", "time_s": 1, "epoch": 1}',
            "expected stop, save, allow or fault, found 'drop'",
        ),
    ],
)
def test_a_damaged_request_says_what_is_wrong_with_it(
    fs: Filesystem, text: bytes, flaw: str
) -> None:
    fs.write_bytes(f"requests/{'a' * 32}.json", text)
    fs.write_bytes("requests/notes.txt", b"")
    (found,) = requests.pending(fs)
    assert flaw in found.flaw


# --- the driver's inbox --------------------------------------------------------------------------

NOTHING_INHERITED = Inheritance(None, [])


class Desk:
    """An inbox as the driver has it, and what came of it."""

    def __init__(
        self, fs: Filesystem, epoch: int, inheritance: Inheritance = NOTHING_INHERITED
    ) -> None:
        self.posted: list[e.Event] = []
        self.records: list[e.Record] = []
        self.allowed: list[tuple[str, str]] = []

        async def at_once(work: Callable[[], Any]) -> Any:
            return work()

        self.inbox = Inbox(
            fs,
            epoch,
            in_order=at_once,
            post=self.posted.append,
            allow=lambda *what: self.allowed.append(what),
            record=self.records.append,
            where=lambda: (4, 70),
            inheritance=inheritance,
        )

    def look(self) -> Desk:
        asyncio.run(self.inbox.look())
        return self


def test_a_request_becomes_an_event_is_recorded_and_removed(fs: Filesystem) -> None:
    stop = requests.ask(fs, STOP, who="ann on host", time_s=1.0, epoch=2)
    requests.ask(fs, SAVE, who="bob on host", time_s=2.0, epoch=2)
    desk = Desk(fs, 2).look().look()
    assert desk.posted == [
        e.StopRequested(reason="stop asked by ann on host"),
        e.SaveRequested(reason="save asked by bob on host"),
    ]
    assert [record.kind for record in desk.records] == ["request_taken"] * 2
    first = desk.records[0]
    assert (first.generation, first.step, first.reason) == (4, 70, "stop asked by ann on host")
    assert first.data == {"id": stop.id, "request": "stop"}
    assert requests.pending(fs) == []


def test_an_allow_names_its_node_and_who_asked(fs: Filesystem) -> None:
    requests.ask(fs, ALLOW, who="ann on host", time_s=1.0, epoch=2, node="a" * 56)
    desk = Desk(fs, 2).look()
    assert desk.allowed == [("a" * 56, "allow asked by ann on host")] and desk.posted == []
    assert [record.kind for record in desk.records] == ["request_taken"]


def test_a_stop_left_over_from_before_never_reaches_a_fresh_run(fs: Filesystem) -> None:
    requests.ask(fs, STOP, who="ann", time_s=time.time() + 1e6, epoch=1)
    desk = Desk(fs, 2).look()
    assert desk.posted == []
    (record,) = desk.records
    assert record.kind == "request_discarded"
    assert record.reason == "stop asked by ann: it was meant for an earlier submission of the run"
    assert requests.pending(fs) == []


def told(kind: str, **facts: Any) -> LedgerEvent:
    return LedgerEvent(life=0, seq=0, time_s=0.0, kind=kind, **facts)


def taken_over(*past: LedgerEvent) -> Inheritance:
    """What the driver of lease 2 has from that of lease 1, which told this."""
    began = told("run_started", data={"lease_epoch": 1})
    last = TakeOver(number=1, cause="it died", noticed_s=0.0, lives=frozenset({0}))
    return Inheritance(last, [began, *past])


def test_what_a_dead_driver_was_asked_for_its_successor_is_asked_for(fs: Filesystem) -> None:
    requests.ask(fs, STOP, who="ann", time_s=1.0, epoch=1)
    desk = Desk(fs, 2, taken_over()).look()
    assert desk.posted == [e.StopRequested(reason="stop asked by ann")]
    assert [record.kind for record in desk.records] == ["request_taken"]


def test_what_a_dead_driver_took_and_could_not_do_is_done(fs: Filesystem) -> None:
    stop = requests.ask(fs, STOP, who="ann", time_s=1.0, epoch=1)
    data = {"id": stop.id, "request": "stop"}
    past = [
        told("request_taken", reason="save asked by bob", data={"id": "b", "request": "save"}),
        told("checkpoint_committed", step=70),
        told("request_taken", reason="save asked by cid", data={"id": "c", "request": "save"}),
        told("request_taken", reason="stop asked by ann", data=data),
    ]
    desk = Desk(fs, 2, taken_over(*past)).look()
    assert desk.posted == [
        e.SaveRequested(reason="save asked by cid"),
        e.StopRequested(reason="stop asked by ann"),
    ]
    assert desk.records == [], "it was recorded when it was taken"
    assert requests.pending(fs) == []


def test_a_damaged_request_is_discarded_with_a_record(fs: Filesystem) -> None:
    fs.write_bytes(f"requests/{'b' * 32}.json", b"{")
    desk = Desk(fs, 2).look()
    assert desk.posted == [] and [r.kind for r in desk.records] == ["request_discarded"]
    assert requests.pending(fs) == []


def test_a_replaced_driver_leaves_alone_what_its_successor_is_asked(fs: Filesystem) -> None:
    requests.ask(fs, STOP, who="ann", time_s=1.0, epoch=3)
    desk = Desk(fs, 2).look()
    assert not desk.posted and not desk.records and len(requests.pending(fs)) == 1


def test_a_request_that_cannot_be_removed_is_taken_once(
    fs: Filesystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests.ask(fs, SAVE, who="ann", time_s=1.0, epoch=2)

    def denied(*_: object) -> None:
        raise PermissionError("read only")

    monkeypatch.setattr(Filesystem, "remove_tree", denied)
    desk = Desk(fs, 2).look().look()
    assert len(desk.posted) == 1 and len(desk.records) == 1


def test_storage_trouble_does_not_end_the_looking(
    fs: Filesystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests.ask(fs, STOP, who="ann", time_s=1.0, epoch=2)
    desk = Desk(fs, 2)
    with monkeypatch.context() as patch:
        patch.setattr(Filesystem, "list", lambda *_: (_ for _ in ()).throw(OSError("gone")))
        assert desk.look().posted == []
    assert len(desk.look().posted) == 1


def test_an_announced_fault_is_recorded_and_asks_for_nothing(fs: Filesystem) -> None:
    asked = requests.ask(fs, FAULT, who="soak", time_s=1.0, epoch=2)
    desk = Desk(fs, 2).look().look()
    assert (desk.posted, desk.allowed) == ([], [])
    (record,) = desk.records
    assert (record.kind, record.reason) == ("fault_announced", "fault asked by soak")
    assert record.data["id"] == asked.id
    assert requests.pending(fs) == []


def test_a_closed_inbox_takes_nothing(fs: Filesystem) -> None:
    requests.ask(fs, STOP, who="ann", time_s=1.0, epoch=2)
    desk = Desk(fs, 2)
    desk.inbox.close()
    assert desk.look().posted == [] and len(requests.pending(fs)) == 1


# --- what the policy makes of a save that is asked for -------------------------------------------


class Policy:
    def __init__(self, **situation: Any) -> None:
        running = Situation(phase=Phase.RUNNING, generation=4, world_size=2, step=70)
        self.now = replace(running, **situation)

    def __call__(self, event: e.Event) -> list[type[e.Command]]:
        decision = decide(Rules(min_workers=1, max_workers=2), self.now, event, 1.0)
        self.now = decision.situation
        return [type(command) for command in decision.commands]


ASKED = e.SaveRequested(reason="asked")


def test_a_running_group_is_ordered_to_save_and_goes_on() -> None:
    policy = Policy()
    assert policy(ASKED) == [e.OrderSave]
    assert policy.now.phase is Phase.RUNNING
    policy(e.Committed(step=70))  # begun before it was asked
    assert policy.now.save_asked_at == 70
    policy(e.Committed(step=71))
    assert policy.now.save_asked_at is None


@pytest.mark.parametrize("phase", [Phase.WAITING, Phase.LOOKING, Phase.STARTING, Phase.REFORMING])
def test_without_a_group_the_next_one_is_ordered(phase: Phase) -> None:
    policy = Policy(phase=phase, step=-1)
    assert policy(ASKED) == []
    policy(e.Committed(step=60))  # the one to resume was found: that is no save
    policy.now = replace(policy.now, phase=Phase.STARTING)
    assert policy(e.GroupStarted(generation=4, world_size=2)) == [e.OrderSave]
    policy(e.Committed(step=61))
    assert policy.now.save_asked_at is None


def test_a_group_that_dies_before_it_has_saved_owes_the_save_to_the_next() -> None:
    policy = Policy()
    policy(ASKED)
    policy(e.WorkerDied(generation=4, world_rank=0, node_lost=True, detail="gone"))
    policy.now = replace(policy.now, phase=Phase.STARTING, generation=5, deaths=())
    assert policy(e.GroupStarted(generation=5, world_size=1)) == [e.OrderSave]


def test_a_save_that_was_made_is_not_made_again() -> None:
    policy = Policy()
    policy(ASKED)
    policy(e.Committed(step=71))
    policy.now = replace(policy.now, phase=Phase.STARTING)
    assert policy(e.GroupStarted(generation=4, world_size=2)) == []


# --- the verbs -----------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ARun]:
    monkeypatch.setattr(verbs, "POLL_S", 0.02)
    monkeypatch.setattr(lease, "BEAT_S", 0.05)
    with closing(ARun(tmp_path)) as made:
        made.event("run_started", 90)
        yield made


class FakeDriver:
    """Holds the lease of a run and answers its requests with these ledger events."""

    def __init__(self, run: ARun, *answers: tuple[str, dict[str, Any]], takes: bool = True) -> None:
        self._run = run
        self._answers = answers
        self._takes = takes
        self._closed = threading.Event()

    def __enter__(self) -> FakeDriver:
        self.lease = lease.acquire(self._run.fs, "job 01000000 on a cluster")
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()
        self.lease.release()

    def _serve(self) -> None:
        desk = Desk(self._run.fs, self.lease.epoch)
        while self._takes and not self._closed.wait(0.02):
            desk.look()
            for record in desk.records:
                data = dict(record.data)
                self._run.event(
                    record.kind, 0, generation=1, step=70, reason=record.reason, data=data
                )
            if desk.records:
                for kind, facts in self._answers:
                    self._run.event(kind, 0, **facts)
                return


COMMITTED = ("checkpoint_committed", {"generation": 1, "step": 71})
STOPPED = ("run_stopped", {"generation": 1, "step": 71, "reason": "stop asked by somebody"})


def test_stop_waits_until_the_run_has_stopped(run: ARun) -> None:
    run.checkpoint(71)
    with FakeDriver(run, ("leave_ordered", {}), COMMITTED, STOPPED):
        result = ask("stop", run.root)
    assert result.exit_code == 0, result.output
    assert result.stdout == "stopped at step 71; submit it again under its name to resume\n"
    assert "asked process" in result.stderr and "job 01000000 on a cluster" in result.stderr
    assert "taken; waiting" in result.stderr and "checkpoint of step 71" in result.stderr
    assert list((run.root / "requests").iterdir()) == []


def test_a_run_that_finishes_first_was_stopped_well_enough(run: ARun) -> None:
    run.checkpoint(72)
    finished = ("run_finished", {"generation": 1, "step": 72, "reason": "all done"})
    with FakeDriver(run, finished):
        result = ask("stop", run.root, "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout) == {"outcome": "finished", "step": 72, "reason": "all done"}


def test_a_run_that_fails_instead_is_told_with_exit_code_1(run: ARun) -> None:
    with FakeDriver(run, ("run_failed", {"reason": "rank 1 raised ValueError: x\x1b[2J"})):
        result = ask("stop", run.root)
    assert result.exit_code == 1
    assert "the run failed instead: rank 1 raised ValueError: x\\x1b[2J" in result.stderr


def test_save_waits_for_a_commit_of_what_the_run_had_reached(run: ARun) -> None:
    older = ("checkpoint_committed", {"generation": 1, "step": 70})  # was in flight already
    with FakeDriver(run, older, ("checkpoint_skipped", {}), COMMITTED):
        result = ask("save", run.root)
    assert (result.exit_code, result.stdout) == (0, "saved step 71\n"), result.output


def test_a_save_that_a_younger_group_made_counts_from_where_it_resumed(run: ARun) -> None:
    younger = ("checkpoint_committed", {"generation": 2, "step": 61})
    with FakeDriver(run, ("failure_decided", {"reason": "rank 0 died"}), younger):
        result = ask("save", run.root, "--json")
    assert json.loads(result.stdout) == {"outcome": "saved", "step": 61, "reason": ""}
    assert "failure decided: rank 0 died" in result.stderr


@pytest.mark.parametrize("verb", ["stop", "save"])
def test_the_timeout_ends_the_waiting_with_exit_code_1(run: ARun, verb: str) -> None:
    with FakeDriver(run):
        result = ask(verb, run.root, "--timeout", "0.3")
    assert result.exit_code == 1
    assert "not done within 0.3 s; the run has taken the request" in result.stderr


def test_a_request_that_nobody_took_in_time_is_withdrawn(run: ARun) -> None:
    with FakeDriver(run, takes=False):
        result = ask("stop", run.root, "--timeout", "0.3")
    assert result.exit_code == 1 and "nobody took the request" in result.stderr
    assert requests.pending(run.fs) == []


@pytest.mark.parametrize("verb", ["stop", "save"])
def test_asking_a_run_that_nobody_is_at_is_an_error(run: ARun, verb: str) -> None:
    never = ask(verb, run.root)
    lease.acquire(run.fs, "somebody").release()
    run.event("run_stopped", 0, reason="stop asked by ann")
    released = ask(verb, run.root)
    for result in (never, released):
        assert result.exit_code == 2
        assert f"nobody is at the run {run.root}" in result.stderr
    assert "it is STARTING" in never.stderr and "STOPPED (stop asked by ann)" in released.stderr
    assert not (run.root / "requests").exists()


def hold(run: ARun, **facts: Any) -> None:
    """A lease whose owner says nothing more."""
    holder = {
        "owner": "x",
        "host": "elsewhere",
        "pid": 7,
        "machine": "",
        "what": "job 9",
        "since_s": 0.0,
        "beats": 3,
        "released": False,
        "format_version": 1,
    }
    run.fs.write_bytes("lease/000001.json", json.dumps({**holder, **facts}).encode())


def test_a_driver_that_is_seen_to_be_dead_is_not_asked(run: ARun) -> None:
    hold(run, machine=lease._machine(), pid=2**22 + 1)
    result = ask("stop", run.root)
    assert result.exit_code == 2
    assert "job 9" in result.stderr and "is gone without a word" in result.stderr
    assert not (run.root / "requests").exists()


def test_a_dead_drivers_successor_answers(run: ARun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not given up at once: within the same job another driver takes the run over."""
    seen_dead = threading.Semaphore(0)
    is_dead = lease.is_dead

    def look(holder: lease.Holder) -> bool:
        found = is_dead(holder)
        if found:
            seen_dead.release()
        return found

    monkeypatch.setattr(lease, "is_dead", look)
    hold(run)
    box: list[Any] = []
    asking = threading.Thread(target=lambda: box.append(ask("stop", run.root)))
    asking.start()
    while not requests.pending(run.fs):
        time.sleep(0.01)
    hold(run, machine=lease._machine(), pid=2**22 + 1)
    assert all(seen_dead.acquire(timeout=10.0) for _ in range(3))
    run.event("run_stopped", 0, reason="stop asked")
    asking.join()
    assert box[0].exit_code == 0, box[0].output


def test_a_driver_elsewhere_that_stands_still_is_given_up(
    run: ARun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verbs, "GONE_S", 0.3)
    hold(run)
    result = ask("stop", run.root)
    assert result.exit_code == 2 and "is gone without a word" in result.stderr
    assert requests.pending(run.fs) == [], "it would stop the next submission"


def test_a_driver_that_leaves_without_an_answer_is_told(run: ARun) -> None:
    driver = FakeDriver(run, takes=False)
    with driver:
        threading.Timer(0.2, driver.lease.release).start()
        result = ask("save", run.root, "--timeout", "30")
    assert result.exit_code == 2


def test_a_request_that_the_next_submission_discards_is_told(run: ARun) -> None:
    first = lease.acquire(run.fs, "first")
    box: list[Any] = []
    asking = threading.Thread(target=lambda: box.append(ask("stop", run.root)))
    asking.start()
    while not requests.pending(run.fs):
        time.sleep(0.01)
    second = lease.acquire(run.fs, "second", stale_s=0.0)
    (record,) = Desk(run.fs, second.epoch).look().records
    run.event(record.kind, 0, reason=record.reason, data=dict(record.data))
    asking.join()
    assert box[0].exit_code == 1
    assert "it was meant for an earlier submission" in box[0].stderr
    first.release()
    second.release()


def test_a_run_directory_that_cannot_be_written_is_told(
    run: ARun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*_: object) -> None:
        raise PermissionError("read only")

    with FakeDriver(run, takes=False):
        monkeypatch.setattr(verbs.requests, "ask", lambda *_, **__: denied())
        result = ask("stop", run.root)
    assert result.exit_code == 2 and "needs leave to write there" in result.stderr


@pytest.mark.parametrize("verb", ["stop", "save"])
def test_no_such_run(verb: str, tmp_path: Path) -> None:
    result = ask(verb, tmp_path / "nowhere")
    assert result.exit_code == 2 and "no such directory" in result.stderr
