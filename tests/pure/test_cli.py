"""The operator's command, asked about run directories as the driver leaves them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from elastic.cli import main
from elastic.dashboard.report import status_facts
from elastic.dashboard.status import STALE_AFTER_S, read_status, restarts_by_cause, state_of
from elastic.dashboard.text import age, plain, size, table, to_json
from elastic.policy.situation import FINAL, Phase
from elastic.storage import lease
from elastic.storage.checkpoints import Catalog, Manifest
from elastic.storage.filesystem import Filesystem
from elastic.storage.ledger import LedgerEvent, LedgerWriter
from elastic.storage.manifest import FileDigest
from elastic.storage.object_store import ObjectStore, forget_clients
from elastic.storage.run_file import RunFile, create_run_file

NOW_S = 1_800_000_000.0
SAVES = "every 41 s: stall 400 ms, MTBF 35 min from 3 failures in 1.8 h (prior 8 h)"


class ARun:
    """A run directory, written through the storage room as the driver writes it."""

    def __init__(self, root: Path, name: str = "demo") -> None:
        self.root = root / name
        self.fs = Filesystem.at(str(self.root))
        self.run_file: RunFile = create_run_file(
            self.fs,
            name=name,
            created_s=NOW_S - 100,
            seed=0,
            config={},
            identity={},
            operational={"until": 60},
            versions={},
        )
        self.ledger = LedgerWriter(self.fs, life=0, life_id="first")

    def close(self) -> None:
        self.ledger.close()

    def event(self, kind: str, ago_s: float, **facts: Any) -> None:
        self.ledger.append(kind, time_s=NOW_S - ago_s, **facts)

    def checkpoint(self, step: int, generation: int = 0) -> None:
        catalog = Catalog(self.fs, self.run_file.run_id)
        path = catalog.begin(step, generation, 0)
        self.fs.write_bytes(f"{path}/shard", b"x" * 1500)
        catalog.commit(
            Manifest(
                run_id=self.run_file.run_id,
                step=step,
                world_size=3,
                generation=generation,
                attempt=0,
                created_s=NOW_S,
                counters={},
                tensors={},
                files=[FileDigest(path="shard", bytes=1500, digest="sha256:00")],
            ),
            path,
        )

    def status(self, now_s: float = NOW_S) -> Any:
        return read_status(self.fs, self.run_file, now_s=now_s)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[ARun]:
    with closing(ARun(tmp_path)) as made:
        yield made


PAGE = "http://127.0.0.1:40123/runs/demo"


@pytest.fixture
def recovered(run: ARun) -> ARun:
    """Started on 3, lost a worker at step 33, went on with 2 from step 30."""
    urls = {"dashboard_url": "http://127.0.0.1:8265", "page_url": PAGE, "host": "node-7"}
    progress = {"loss": 3.25, "tokens_per_s": 600.0, "state": "RUNNING", "phase": "data"}
    ranks = [{"world_rank": rank, "node_ip": "127.0.0.1", "pid": 900 + rank} for rank in range(3)]
    run.event("run_started", 90, data={"name": "demo", **urls})
    run.event("generation_started", 80, generation=0, data={"world_size": 3, "ranks": ranks})
    run.event("checkpoint_committed", 50, generation=0, step=30, data={"bytes": 1500})
    run.checkpoint(30)
    run.event("progress", 45, generation=0, step=33, data={"loss": 4.5, "tokens_per_s": 900.0})
    run.event("worker_died", 44, generation=0, world_rank=1, reason="killed by SIGKILL")
    run.event("failure_decided", 44, reason="rank 1 died", data={"cause": "worker_died"})
    run.event("generation_started", 40, generation=1, data={"world_size": 2, "ranks": ranks[:2]})
    run.event("resumed", 39, generation=1, step=30)
    run.event("recovered", 38, generation=1, step=31, data={"lost_steps": 3})
    run.event("progress", 2, generation=1, step=41, data=progress)
    run.event("driver_heartbeat", 1)
    return run


def ask(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def answer(*arguments: object) -> Any:
    result = ask(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


# --- status --------------------------------------------------------------------------------------


def test_status_adds_up_what_happened(recovered: ARun) -> None:
    status = recovered.status()
    assert (status.name, status.state) == ("demo", "RUNNING")
    assert (status.generation, status.world_size, status.step, status.until) == (1, 2, 41, 60)
    assert (status.loss, status.tokens_per_s) == (3.25, 600.0)
    assert (status.checkpoint_step, status.checkpoint_age_s) == (30, 50)
    assert status.save_interval is None
    assert (status.restarts, status.restarts_by_cause) == (1, {"worker_died": 1})
    assert (status.lost_steps, status.submissions, status.last_word_age_s) == (3, 1, 1)
    assert status.dashboard_url == "http://127.0.0.1:8265"
    assert (status.page_url, status.page_host) == (PAGE, "node-7")
    assert [rank["pid"] for rank in status.ranks] == [900, 901]
    assert status.storage == str(recovered.root)


@pytest.mark.parametrize("last", ["run_finished", "run_stopped", "run_failed"])
def test_a_run_that_is_over_serves_no_page(recovered: ARun, last: str) -> None:
    recovered.event(last, 0, reason="the end")
    assert recovered.status().page_url is None
    lines = ask("status", recovered.root).output.splitlines()
    assert f"page        elastic dashboard --storage {recovered.root.parent}" in lines
    assert "workers     2 at the end (generation 1)" in lines  # whose pids are others' by now


def test_status_tells_the_newest_save_interval_and_why(run: ARun) -> None:
    run.event("save_interval", 60, reason="every 2 min: ...", data={"seconds": 120.0})
    run.event("save_interval", 50, reason=SAVES, data={"seconds": 41.0, "stall_s": 0.4})
    assert run.status().save_interval == {"seconds": 41.0, "why": SAVES}
    assert f"saves       {SAVES}\n" in ask("status", run.root).output
    assert answer("status", run.root)["save_interval"]["seconds"] == 41.0
    run.event("save_interval", 40, reason="every 20 steps: as asked for", data={"steps": 20})
    told = {"steps": 20, "why": "every 20 steps: as asked for"}
    assert run.status().save_interval == told
    assert "skipped" not in ask("status", run.root).output


def test_status_tells_how_many_saves_were_skipped(run: ARun) -> None:
    run.event("save_interval", 90, reason="every step: as asked for", data={"steps": 1})
    for step in range(1, 31):
        run.event(
            "checkpoint_skipped" if step % 3 else "checkpoint_committed", 80 - step, step=step
        )
    due = answer("status", run.root)["saves_due"]
    assert due["skipped_lately"] == 13 and due["last"] == 20 and due["skipped"] == 20
    told = (
        f"saves       every step: as asked for; skipped: 13 of the last 20 due, 20 of {due['due']}"
    )
    assert told in ask("status", run.root).output


def test_status_tells_of_snapshots_whether_there_are_any(run: ARun) -> None:
    """Without a word on them a run looks protected that never kept one."""

    def line(**now: object) -> str:
        if now:
            run.event("progress", 2, step=20, data={"snapshots": {"every": 5, **now}})
        lines = ask("status", run.root).output.splitlines()
        return next((text[12:] for text in lines if text.startswith("snapshots")), "")

    run.event("run_started", 60)
    assert "\nsnapshots" not in ask("status", run.root).output
    assert answer("status", run.root)["snapshots"] is None
    assert line(step=None, skipped=3, problem="") == "every 5 steps: none kept yet, 3 skipped"
    assert line(step=15, kept_s=NOW_S - 4).startswith("every 5 steps: the newest is of step 15, ")
    assert run.status().snapshots == {
        "every": 5,
        "step": 15,
        "kept_s": NOW_S - 4,
        "skipped": 0,
        "problem": "",
    }
    assert run.status().snapshot_age_s == 4.0
    assert line(step=15, problem="no room") == (
        "every 5 steps: the newest is of step 15; the last failed: no room"
    )
    run.event("run_stopped", 1)
    assert line().startswith("every 5 steps: the last was of step 15, and is gone with the run")
    run.event("run_started", 0)
    assert run.status().snapshots is None, "they have gone with the driver before"


def test_status_reads_well(recovered: ARun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic.cli.time.time", lambda: NOW_S)
    result = ask("status", recovered.root)
    assert result.exit_code == 0
    assert result.output.splitlines() == [
        "run         demo",
        "state       RUNNING (data)",
        "workers     2 (generation 1, pids 900 901)",
        "step        41 of 60, 600 tokens/s",
        "loss        3.2500",
        "checkpoint  step 30, 50 s ago",
        "saves       -",
        "restarts    1 (worker_died 1), 3 steps lost",
        "goodput     38.4 % of 198 slot-seconds; start up 54.5 %, re-form: wait 7.1 %",
        f"storage     {recovered.root}",
        f"page        {PAGE} on node-7",
        "Ray         http://127.0.0.1:8265",
        "last word   1 s ago",
    ]


def test_status_json_has_every_field(recovered: ARun) -> None:
    found = answer("status", recovered.root)
    assert found["step"] == 41
    assert set(found) == set(type(recovered.status()).__dataclass_fields__)


def test_a_run_that_has_not_spoken_yet_has_a_status(run: ARun) -> None:
    status = run.status()
    assert (status.state, status.step, status.loss, status.submissions) == (
        "UNKNOWN",  # created 100 s ago
        None,
        None,
        0,
    )
    assert run.status(now_s=NOW_S - 95).state == "STARTING"
    assert ask("status", run.root).exit_code == 0


def test_a_loss_that_is_no_number_stays_valid_json(run: ARun) -> None:
    run.event("progress", 1, step=5, data={"loss": float("nan")})
    assert answer("status", run.root)["loss"] is None
    assert "nan" in ask("status", run.root).output


def test_submitting_again_is_told_apart_from_restarts(recovered: ARun) -> None:
    with closing(LedgerWriter(recovered.fs, life=1, life_id="second")) as second:
        second.append("run_started", time_s=NOW_S)
    status = recovered.status()
    assert (status.submissions, status.restarts, status.state) == (2, 1, "STARTING")
    assert "submitted again 1x" in ask("status", recovered.root).output


# --- state: worth as much as the driver's last word ----------------------------------------------


def events(*kinds: str | tuple[str, dict[str, Any]]) -> list[LedgerEvent]:
    made = []
    for seq, kind in enumerate(kinds):
        name, facts = kind if isinstance(kind, tuple) else (kind, {})
        made.append(LedgerEvent(life=0, seq=seq, time_s=NOW_S, kind=name, **facts))
    return made


@pytest.mark.parametrize(
    ("kinds", "state"),
    [
        ([], "STARTING"),
        (["run_started"], "STARTING"),
        (["run_started", "waiting"], "WAITING"),
        (["run_started", "waiting", "generation_started"], "STARTING"),
        (["generation_started", "resumed"], "RUNNING"),
        (["generation_started", "progress", "checkpoint_committed"], "RUNNING"),
        (["progress", "worker_died", "failure_decided"], "STARTING"),
        (["progress", "node_lost", "failure_decided", "waiting"], "WAITING"),
        (["progress", "run_finished"], "FINISHED"),
        (["progress", "failure_decided", "run_failed"], "FAILED"),
        (["progress", "leave_ordered", "generation_ended", "run_stopped"], "STOPPED"),
        (["run_stopped", "run_started"], "STARTING"),
    ],
)
def test_the_state_follows_the_events(kinds: list[str], state: str) -> None:
    assert state_of(events(*kinds), silent_s=0)[0] == state


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase not in FINAL])
def test_each_phase_that_a_progress_event_tells_has_its_state(phase: Phase) -> None:
    told = events(("progress", {"data": {"state": str(phase)}}))
    expected = {
        "LOOKING": "STARTING",
        "REFORMING": "STARTING",
        "HOLDING": "WAITING",
        "GATHERING": "RUNNING",
        "LEAVING": "RUNNING",
    }
    expected |= {"STOPPING": "STARTING"}
    assert state_of(told, silent_s=0)[0] == expected.get(phase, phase)


def test_progress_told_while_waiting_keeps_the_reason() -> None:
    told = events(("waiting", {"reason": "why"}), ("progress", {"data": {"state": "WAITING"}}))
    assert state_of(told, silent_s=0) == ("WAITING", "why")


def test_the_reason_is_that_of_the_state() -> None:
    told = events(("waiting", {"reason": "1 of 2 workers"}))
    assert state_of(told, silent_s=0) == ("WAITING", "1 of 2 workers")
    told += events("generation_started", "progress")
    assert state_of(told, silent_s=0) == ("RUNNING", "")


@pytest.mark.parametrize("kind", ["run_started", "waiting", "progress", "failure_decided"])
def test_a_silent_driver_is_not_believed_to_run(kind: str) -> None:  # the kind of B65, B74
    told = events((kind, {"reason": "why"}))
    assert state_of(told, silent_s=STALE_AFTER_S)[0] != "UNKNOWN"
    state, reason = state_of(told, silent_s=300)
    assert state == "UNKNOWN"
    assert reason.startswith("no word for 5 min")
    assert "why" in reason


@pytest.mark.parametrize("kind", ["run_finished", "run_failed", "run_stopped"])
def test_a_final_state_stays_final_however_old(kind: str) -> None:  # the kind of B74
    assert state_of(events("progress", kind), silent_s=1e9)[0] != "UNKNOWN"


def test_restarts_are_counted_by_cause() -> None:
    def failed(cause: str, then: str = "restart") -> tuple[str, dict[str, Any]]:
        return ("failure_decided", {"data": {"cause": cause, "then": then}})

    told = events(
        "generation_started",
        failed("node_lost"),
        "generation_started",
        "leave_ordered",
        "generation_ended",
        "generation_started",
        failed("node_lost"),
        "drain_noticed",
        "leave_ordered",
        "generation_started",
        failed("user_exception", then="fail"),
        "run_failed",
    )
    assert restarts_by_cause(told) == {"drain": 1, "growth": 1, "node_lost": 2}


def test_a_take_over_is_a_restart_and_no_submission(run: ARun) -> None:  # B74
    for number, took in enumerate(({}, {"take_over": 1})):
        with closing(LedgerWriter(run.fs, life=number + 1, life_id="driver")) as ledger:
            if took:
                ledger.append("driver_lost", time_s=NOW_S - 3, reason="the driver died: SIGKILL")
            ledger.append("run_started", time_s=NOW_S - 2, data=took)
            if took:
                ledger.append("driver_took_over", time_s=NOW_S - 1, data=took)
    status = run.status()
    assert (status.submissions, status.restarts_by_cause) == (1, {"driver": 1})
    assert (status.state, status.reason) == ("STARTING", "the driver died: SIGKILL")


def test_a_driver_seen_to_be_gone_does_not_run(recovered: ARun) -> None:  # B74
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pid = process.pid
    held = lease.acquire(recovered.fs, "job 1 on a cluster")
    assert recovered.status().state == "RUNNING"
    path = recovered.root / "lease/000001.json"
    held._closed.set()
    held._thread.join()
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pid": pid}))
    status = recovered.status()
    assert status.state == "UNKNOWN"
    assert re.fullmatch(
        rf"its driver is gone, process {pid} on .*\(job 1 on a cluster\).*; the last was "
        "RUNNING",
        status.reason,
    ), status.reason
    assert answer("runs", "--storage", recovered.root.parent)[0]["state"] == "UNKNOWN"
    recovered.event("run_finished", 0, generation=1, step=60)
    assert recovered.status().state == "FINISHED", "what is over stays so, whatever dies then"


def test_leaving_in_order_to_stop_is_no_restart() -> None:
    told = events("leave_ordered", "generation_ended", "run_stopped", "run_started")
    assert restarts_by_cause([*told, *events("generation_started")]) == {}


# --- events --------------------------------------------------------------------------------------


def test_events_are_told_without_the_noise(recovered: ARun) -> None:
    lines = ask("events", recovered.root).output.splitlines()
    assert lines[0].split() == ["TIME", "(UTC)", "EVENT", "GENERATION", "STEP", "RANK", "DETAIL"]
    assert [line.split()[2] for line in lines[1:]] == [
        "run_started",
        "generation_started",
        "checkpoint_committed",
        "worker_died",
        "failure_decided",
        "generation_started",
        "resumed",
        "recovered",
    ]
    assert "killed by SIGKILL" in lines[4]
    assert "cause=worker_died" in lines[5]


def test_events_can_be_chosen(recovered: ARun) -> None:
    def kinds(*options: str) -> list[str]:
        return [event["kind"] for event in answer("events", recovered.root, *options)]

    assert kinds().count("driver_heartbeat") == 1
    assert kinds("--kind", "resumed", "--kind", "progress") == ["progress", "resumed", "progress"]
    assert kinds("--last", "1") == ["driver_heartbeat"]
    assert "driver_heartbeat" in ask("events", recovered.root, "--all").output
    assert ask("events", recovered.root, "--kind", "nothing").output == "no such events\n"


def test_an_event_in_json_is_the_event(recovered: ARun) -> None:
    (event,) = answer("events", recovered.root, "--kind", "worker_died")
    assert event == {
        "life": 0,
        "seq": 4,
        "time_s": NOW_S - 44,
        "kind": "worker_died",
        "generation": 0,
        "step": -1,
        "world_rank": 1,
        "reason": "killed by SIGKILL",
        "data": {},
    }


def test_what_a_run_recorded_cannot_repaint_the_terminal(run: ARun) -> None:
    run.event("rank_failed", 1, reason="boom\x1b[2J\nrow two\u202e")
    lines = ask("events", run.root).output.splitlines()
    assert len(lines) == 2
    assert "boom\\x1b[2J\\nrow two\\u202e" in lines[1]


def test_a_torn_ledger_is_read_as_far_as_it_goes(recovered: ARun) -> None:
    (file,) = (recovered.root / "ledger").iterdir()
    whole = answer("events", recovered.root)
    file.write_bytes(file.read_bytes()[:-5])
    assert answer("events", recovered.root) == whole[:-1]


# --- checkpoints ---------------------------------------------------------------------------------


def test_checkpoints_in_json_have_exactly_the_fields_that_were_promised(run: ARun) -> None:
    run.checkpoint(30)
    path = run.root / "checkpoints" / "step-30"
    num_bytes = sum(file.stat().st_size for file in path.iterdir())
    assert answer("checkpoints", "list", run.root) == [
        {
            "step": 30,
            "complete": True,
            "bytes": num_bytes,
            "world_size": 3,
            "generation": 0,
            "path": "checkpoints/step-30",
            "reason": "",
            "suspect": "",
        }
    ]


def test_checkpoints_are_in_the_order_of_their_numbers(run: ARun) -> None:  # B16
    for step in (900, 1000, 0):
        run.checkpoint(step)
    for stray in ("step-0000950", "step-1e3", "step_x"):
        (run.root / "checkpoints" / stray).mkdir()
    found = answer("checkpoints", "list", run.root)
    assert [one["step"] for one in found] == [0, 900, 1000]
    assert run.status().checkpoint_step == 1000


def test_a_checkpoint_that_lacks_a_part_is_listed_with_what_is_wrong(run: ARun) -> None:  # B10 B15
    run.checkpoint(10)
    run.checkpoint(20)
    (run.root / "checkpoints" / "step-20" / "shard").unlink()
    first, second = answer("checkpoints", "list", run.root)
    assert first["complete"]
    assert not second["complete"]
    assert "shard" in second["reason"]
    assert run.status().checkpoint_step == 10
    lines = ask("checkpoints", "list", run.root).output.splitlines()
    assert lines[1].split()[:2] == ["10", "yes"]
    assert lines[2].split()[:2] == ["20", "no"]
    assert second["reason"] in lines[2]


def test_status_tells_of_checkpoints_that_do_not_count(run: ARun) -> None:
    for step in (10, 20, 30):
        run.checkpoint(step)
        run.event("checkpoint_committed", 60, step=step)
    assert run.status().checkpoint_note == ""
    for step in (20, 30):
        (run.root / "checkpoints" / f"step-{step}" / "shard").unlink()
        facts = {"problem": "shard is missing", "resumed_step": 10}
        run.event("checkpoint_passed_by", 50, step=step, reason="shard is missing", data=facts)
    told = "step 10, 60 s ago; step 30 (and 1 before it) was passed by: shard is missing"
    assert run.status().checkpoint_age_s == 60
    assert status_facts(run.status())["checkpoint"] == told
    run.checkpoint(40)
    assert run.status().checkpoint_note == ""  # what came after it is saved
    catalog = Catalog(run.fs, run.run_file.run_id)
    for step in (10, 20, 30, 40):
        run.event("checkpoint_quarantined", 40, step=step, reason="bad")
        catalog.quarantine(step, "bad")
    found = status_facts(run.status())["checkpoint"]
    assert found.startswith("none complete; 3 were committed, 3 of them are in quarantine: see")


def test_status_says_what_a_start_waits_for(run: ARun) -> None:
    run.event("run_started", 9)
    run.event("checkpoint_awaited", 8, step=50, reason="step-50: looking again for 35 s")
    assert (run.status().state, run.status().reason) == (
        "STARTING",
        "step-50: looking again for 35 s",
    )


def test_a_run_without_checkpoints_says_so(run: ARun) -> None:
    assert answer("checkpoints", "list", run.root) == []
    assert ask("checkpoints", "list", run.root).output == "no checkpoints\n"


# --- RUN that is none ----------------------------------------------------------------------------

VERBS = [["status"], ["events"], ["checkpoints", "list"]]


@pytest.fixture(params=VERBS, ids=" ".join)
def verb(request: pytest.FixtureRequest) -> list[str]:
    return request.param


def refusal(*arguments: object) -> str:
    result = ask(*arguments)
    assert result.exit_code == 2
    assert isinstance(result.exception, SystemExit), "a traceback"
    assert result.stdout == ""
    return result.stderr


def test_a_run_that_is_not_there(verb: list[str], tmp_path: Path) -> None:
    said = refusal(*verb, tmp_path / "nowhere")
    assert "looked for the file run.json in it, but there is no such directory" in said
    assert not (tmp_path / "nowhere").exists()


def test_a_file_instead_of_a_run(verb: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "it is a file" in refusal(*verb, tmp_path / "file")


def test_the_storage_instead_of_a_run_in_it(verb: list[str], run: ARun) -> None:
    said = refusal(*verb, run.root.parent)
    assert f"it holds the runs demo. Give one of them: {run.root}" in said


def test_another_directory(verb: list[str], tmp_path: Path) -> None:
    assert "found nothing" in refusal(*verb, tmp_path)
    (tmp_path / "thesis.tex").write_text("")
    assert "found thesis.tex" in refusal(*verb, tmp_path)


def test_a_garbled_run_file(verb: list[str], run: ARun) -> None:
    (run.root / "run.json").write_text("{")
    assert "run.json" in refusal(*verb, run.root)


def test_a_run_of_a_newer_version_is_refused_by_number(verb: list[str], run: ARun) -> None:
    file = run.root / "run.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format_version": 99}))
    assert "99" in refusal(*verb, run.root)


def test_an_unreadable_storage(verb: list[str], run: ARun, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object) -> None:
        raise PermissionError("not yours")

    monkeypatch.setattr(Filesystem, "read_bytes", denied)
    assert "PermissionError: not yours" in refusal(*verb, run.root)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("nosuch://bucket/run", "nosuch://bucket/run"),
        ("s3://user:secret@bucket/run", "s3://***@bucket/run"),
    ],
)
def test_a_url_that_cannot_be_used(verb: list[str], url: str, shown: str) -> None:
    said = refusal(*verb, url)
    assert said.startswith(f"Error: cannot read {shown}: ")
    assert "Check that this machine can reach" not in said
    assert "secret" not in said


def test_a_store_whose_package_is_missing_names_the_extra(
    verb: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object, **__: object) -> None:
        raise ImportError("its package is not here")

    monkeypatch.setattr("fsspec.filesystem", missing)
    for scheme in ("s3", "gs"):
        forget_clients(scheme)
    for scheme, extra in (("s3", "s3"), ("gs", "gcs")):
        said = refusal(*verb, f"{scheme}://bucket/run")
        assert f"pip install 'elastic-ray[{extra}]' (in a checkout -e '.[{extra}]')" in said


def test_a_bucket_that_there_is_not(verb: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """An object store lists nothing there, as it does for a prefix without objects."""
    storage = f"memory://{uuid.uuid4().hex}"
    assert f"but there is no bucket {storage}" in refusal(*verb, f"{storage}/run")
    said = refusal("runs", "--storage", f"{storage}/runs")
    assert f"no storage at {storage}/runs: there is no bucket {storage}" in said
    Filesystem.at(storage).write_bytes("else", b"")
    assert "found nothing" in refusal(*verb, f"{storage}/run")
    assert ask("runs", "--storage", f"{storage}/runs").exit_code == 0

    def denied(*_: object) -> None:
        raise PermissionError("not yours")

    monkeypatch.setattr(ObjectStore, "entry", denied)
    assert Filesystem.at(f"{storage}/run").missing_bucket() is None


@pytest.mark.parametrize(
    "arguments",
    [["nonsense"], ["status"], ["events", "x", "--last", "0"], ["checkpoints", "drop", "x"]],
    ids=" ".join,
)
def test_wrong_usage_is_told(arguments: list[str]) -> None:
    assert "Usage" in refusal(*arguments)


def test_a_relative_path_and_a_trailing_slash_are_fine(
    run: ARun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.root.parent)
    assert answer("status", "demo/")["name"] == "demo"


def test_odd_characters_in_a_path_are_just_characters(tmp_path: Path) -> None:  # B62
    with closing(ARun(tmp_path / "a [b] %20 #é", name="run 1")) as odd:
        odd.checkpoint(3)
        (listed,) = answer("checkpoints", "list", odd.root)
    assert listed["complete"]


# --- the command itself --------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [[], ["status"], ["events"], ["checkpoints", "list"]])
def test_help_helps(arguments: list[str]) -> None:
    result = ask(*arguments, "--help")
    assert result.exit_code == 0
    assert "Usage" in result.output
    assert "RUN" in result.output


def test_the_command_as_a_process_starts_fast_and_without_traceback(run: ARun) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "elastic"]
    good = subprocess.run(
        [*command, "status", run.root, "--json"], capture_output=True, text=True, check=False
    )
    assert good.returncode == 0
    assert json.loads(good.stdout)["name"] == "demo"
    loaded = {line.split("|")[-1].strip() for line in good.stderr.splitlines()}
    assert not loaded & {"ray", "torch"}
    bad = subprocess.run(
        [*command[:1], *command[3:], "status", "/nowhere"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert bad.returncode == 2
    assert bad.stderr.startswith("Error: no run at /nowhere")


# --- words ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.4, "0 s"), (89, "89 s"), (300, "5 min"), (7200, "2 h"), (200_000, "2 days")],
)
def test_ages(seconds: float, said: str) -> None:
    assert age(seconds) == said


@pytest.mark.parametrize(
    ("num_bytes", "said"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1500, "1.5 kB"),
        (2_000_000, "2.0 MB"),
        (3 * 10**15, "3000.0 TB"),
    ],
)
def test_sizes(num_bytes: int, said: str) -> None:
    assert size(num_bytes) == said


def test_a_table_is_aligned() -> None:
    assert table(["N", "WHAT"], [["5", "a"], ["10", "\t"]], right="N") == [
        " N  WHAT",
        " 5  a",
        "10  \\t",
    ]


def test_plain_text_keeps_letters_of_every_language() -> None:
    assert plain("Größe 数\x00\x7f") == "Größe 数\\x00\\x7f"


def test_json_is_strict() -> None:
    assert json.loads(to_json({"a": [float("inf"), 1.5], "b": (1,)})) == {
        "a": [None, 1.5],
        "b": [1],
    }


def test_a_long_traceback_does_not_fill_the_terminal(run: ARun) -> None:
    run.event("rank_failed", 12, reason="boom", data={"traceback": "x" * 5000})
    line = ask("events", run.root).output.splitlines()[-1]
    assert len(line) < 400 and line.endswith(" ...")
    assert answer("events", run.root)[-1]["data"]["traceback"] == "x" * 5000


def test_a_failure_that_is_over_is_not_the_reason_any_more(recovered: ARun) -> None:
    recovered.event("recovered", 9, generation=1, step=32, reason="rank 1 died")
    assert recovered.status().reason == ""
