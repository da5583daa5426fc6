"""`elastic logs`, and the last lines of a dead rank where its death is told."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from elastic.cli import main
from elastic.dashboard.run_watch import RunWatch
from elastic.dashboard.tail import Tail
from elastic.policy import events as e
from elastic.policy.situation import Phase, Rules, Situation, Then
from elastic.policy.transitions import decide
from elastic.storage import lease
from elastic.storage.filesystem import Filesystem
from elastic.storage.ledger import LedgerWriter
from elastic.storage.log_lines import LineSplitter, last_lines, readable
from elastic.storage.rank_logs import WrittenLog, log_path, segment_path
from tests.made_run import make_run


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make_run(tmp_path / "demo")
    return tmp_path / "demo"


def write(root: Path, generation: int, rank: int, data: bytes) -> None:
    path = root / log_path(generation, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(data)


def tell(root: Path, *kinds: str, life: int = 0, **facts: object) -> None:
    fs = Filesystem.at(str(root))
    ledger = LedgerWriter(fs, life, f"life{life}")
    for kind in kinds:
        ledger.append(kind, time_s=time.time(), **facts)  # type: ignore[arg-type]
    ledger.close()


def logs(root: Path, *options: object) -> Result:
    return CliRunner().invoke(main, ["logs", str(root), *map(str, options)])


@pytest.fixture
def two_generations(root: Path) -> Path:
    write(root, 0, 0, b"old\n")
    write(root, 9, 0, b"".join(b"a%d\n" % i for i in range(30)))
    write(root, 10, 0, b"zero one\nzero two\n")
    write(root, 10, 1, b"one\nbegun")
    write(root, 10, 10, b"ten\n")
    (root / "logs" / "notes").mkdir()
    (root / "logs" / "g10" / "rank01.log").write_bytes(b"no rank's\n")
    return root


# --- what is there -------------------------------------------------------------------------------


def test_newest_generation_rank_by_rank(two_generations: Path) -> None:
    found = logs(two_generations)
    assert found.exit_code == 0
    assert found.output.splitlines() == [
        "g10 rank0 | zero one",
        "g10 rank0 | zero two",
        "g10 rank1 | one",
        "g10 rank1 | begun",
        "g10 rank10 | ten",
    ]


def test_one_rank_one_generation_the_last_lines(two_generations: Path) -> None:
    assert logs(two_generations, "--rank", 1).output == "g10 rank1 | one\ng10 rank1 | begun\n"
    assert logs(two_generations, "--generation", 0).output == "g0 rank0 | old\n"
    last = logs(two_generations, "--generation", 9, "--lines", 2)
    assert last.output == "g9 rank0 | a28\ng9 rank0 | a29\n"
    assert logs(two_generations, "-n", 1, "--rank", 1).output == "g10 rank1 | begun\n"
    assert logs(two_generations, "-n", 0).output == ""
    assert len(logs(two_generations, "--generation", 9, "-n", 99).output.splitlines()) == 30


def test_json_is_an_object_a_line(two_generations: Path) -> None:
    write(two_generations, 10, 1, b"\x1b[2J \xff\n")
    found = [json.loads(line) for line in logs(two_generations, "--json").output.splitlines()]
    assert found[0] == {"generation": 10, "world_rank": 0, "line": "zero one"}
    assert found[3] == {"generation": 10, "world_rank": 1, "line": "begun\x1b[2J \\xff"}
    assert "\x1b" not in logs(two_generations, "--json").output


@pytest.mark.parametrize(
    ("options", "status", "said"),
    [
        (["--rank", 7], 2, "no log of rank 7 in generation 10: there are 0, 1, 10"),
        (["--generation", 5], 2, "no logs of generation 5: there are those of 0, 9, 10"),
        (["--generation", 5, "--follow"], 2, "no logs of generation 5"),
        (["--rank", -1], 2, "-1 is not in the range"),
    ],
)
def test_what_is_not_there_is_said(
    two_generations: Path, options: list[object], status: int, said: str
) -> None:
    found = logs(two_generations, *options)
    assert found.exit_code == status
    assert said in found.output


def test_a_run_without_logs_and_no_run(root: Path, tmp_path: Path) -> None:
    found = logs(root)
    assert found.exit_code == 1
    assert "has written anything yet" in found.output
    assert logs(tmp_path / "nothing").exit_code == 2


def test_reading_a_long_log_needs_little_memory_and_starts_fast(root: Path) -> None:
    line = b"x" * 99 + b"\n"
    write(root, 0, 0, line * 200_000)
    code = """
import resource, sys
from elastic.cli import main
try:
    main(["logs", sys.argv[1], *sys.argv[2:]])
finally:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, file=sys.stderr)
    print(*sorted({"ray", "torch"} & set(sys.modules)), file=sys.stderr)
"""
    used_mb = []
    for options in (["-n", "1"], []):
        found = subprocess.run(
            [sys.executable, "-c", code, str(root), *options],
            capture_output=True,
            text=True,
            check=True,
        )
        peak, loaded = found.stderr.splitlines()
        used_mb.append(int(peak))
        assert loaded == ""
    assert len(found.stdout.splitlines()) == 200_000
    assert used_mb[1] - used_mb[0] < 15


def test_a_pipe_that_nobody_reads_is_no_fault_of_the_run(root: Path) -> None:
    write(root, 0, 0, b"line\n" * 200_000)
    command = f"{sys.executable} -m elastic logs '{root}' | head -1"
    found = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert (found.stdout, found.stderr) == ("g0 rank0 | line\n", "")


# --- following -----------------------------------------------------------------------------------


class Following:
    """`elastic logs --follow` in a thread."""

    def __init__(self, root: Path, *options: object) -> None:
        self.result: Result | None = None
        self._root, self._options = root, options
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self.result = logs(self._root, "--follow", *self._options)

    def end(self, timeout_s: float = 10.0) -> Result:
        self._thread.join(timeout_s)
        assert self.result is not None, "still following"
        return self.result

    def goes_on(self) -> bool:
        time.sleep(1.0)
        return self.result is None


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic.verbs.logs._POLL_S", 0.05)


@pytest.mark.usefixtures("quick")
def test_follow_goes_through_generations_until_the_run_ends(root: Path) -> None:
    tell(root, "run_started", "generation_started", "started", generation=0)
    write(root, 0, 0, b"".join(b"early %d\n" % i for i in range(30)))
    following = Following(root)
    assert following.goes_on()
    write(root, 0, 0, b"half a ")
    time.sleep(0.3)
    write(root, 0, 0, b"line\nlast words")
    write(root, 1, 1, b"next generation\n")
    assert following.goes_on()
    write(root, 1, 0, b"late rank\n")
    tell(root, "run_finished", life=1, reason="all ranks finished")
    found = following.end()
    assert found.exit_code == 0
    lines = found.stdout.splitlines()
    assert lines[:20] == [f"g0 rank0 | early {i}" for i in range(10, 30)]
    assert lines[20] == "g0 rank0 | half a line"
    assert sorted(lines[21:]) == [
        "g0 rank0 | last words",
        "g1 rank0 | late rank",
        "g1 rank1 | next generation",
    ]
    assert "FINISHED: all ranks finished" in found.stderr


@pytest.mark.usefixtures("quick")
def test_follow_waits_for_the_first_rank(root: Path) -> None:
    tell(root, "run_started")
    following = Following(root)
    assert following.goes_on()
    write(root, 0, 0, b"first\n")
    tell(root, "run_failed", life=1, reason="boom")
    found = following.end()
    assert found.stdout == "g0 rank0 | first\n"
    assert "FAILED: boom" in found.stderr


@pytest.mark.usefixtures("quick")
def test_following_one_generation_ends_with_it(two_generations: Path) -> None:
    tell(two_generations, "run_started")
    following = Following(two_generations, "--generation", 9, "-n", 1)
    found = following.end()
    assert found.stdout == "g9 rank0 | a29\n"
    assert "that generation is over" in found.stderr


def test_a_run_whose_driver_is_gone_is_not_followed_for_ever(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = lease.acquire(Filesystem.at(str(root)), "a test")
    tell(root, "run_started", "started", generation=0)
    watch = RunWatch(Filesystem.at(str(root)), stale_s=0.2)
    assert watch.end() is None
    held._closed.set()  # the driver is killed: its lease stands still
    held._thread.join()
    wait_for(lambda: watch.end() is not None)
    end = watch.end()
    assert end is not None and end[0] == "UNKNOWN" and "driver is gone" in end[1]
    monkeypatch.setattr("elastic.verbs.logs.RunWatch", lambda fs: RunWatch(fs, stale_s=0.2))
    found = Following(root).end()
    assert found.exit_code == 1
    assert "nobody drives it" in found.output


def test_a_held_lease_that_beats_is_a_run_that_goes_on(root: Path) -> None:
    fs = Filesystem.at(str(root))
    tell(root, "run_started", "run_finished")
    held = lease.acquire(fs, "a test")  # submitted again, and its driver has not spoken yet
    assert RunWatch(fs).end() is None
    held.release()
    assert RunWatch(fs).end() == ("FINISHED", "")


def wait_for(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.02)


def test_a_progress_bar_is_seen_while_it_runs_and_once_when_it_is_done(root: Path) -> None:
    write(root, 0, 0, b"\r 10%")
    tail = Tail(Filesystem.at(str(root)))
    assert list(tail.read()) == []
    write(root, 0, 0, b"\r 20%\r 30%")
    assert [readable(line.raw) for line in tail.read()] == [" 20%"]
    write(root, 0, 0, b"\r100%\r\ndone\n")
    assert [readable(line.raw) for line in tail.read()] == ["100%", "done"]
    assert logs(root).output == "g0 rank0 | 100%\ng0 rank0 | done\n"


def test_a_line_begun_in_an_older_generation_is_not_held_back_for_ever(root: Path) -> None:
    write(root, 0, 0, b"begun")
    tail = Tail(Filesystem.at(str(root)))
    assert list(tail.read()) == []
    write(root, 1, 0, b"newer\n")
    assert [line.raw for line in tail.read()] == [b"begun", b"newer"]


# --- lines ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        (b"plain", "plain"),
        ("Größe 数".encode(), "Größe 数"),
        (b"\x1b[2J\x1b]0;title\x07", "\\x1b[2J\\x1b]0;title\\x07"),
        (b"a\tb", "a       b"),
        (b"\xff\xc3", "\\xff\\xc3"),
        ("\u202egnp.exe \x9b2J".encode(), "\\u202egnp.exe \\x9b2J"),
        (b"dos line\r", "dos line"),
        (b"10%\r20%\r30%", "30%"),
        (b"", ""),
    ],
)
def test_nothing_reaches_a_terminal_that_could_drive_it(raw: bytes, shown: str) -> None:
    assert readable(raw) == shown


def test_last_lines_are_at_most_twenty_and_four_kilobytes() -> None:
    many = b"".join(b"%d\n" % i for i in range(100))
    assert last_lines(many, is_whole=True) == [str(i) for i in range(80, 100)]
    assert last_lines(b"", is_whole=True) == []
    assert last_lines(b"cut off\nwhole\n", is_whole=False) == ["whole"]
    assert last_lines(b"\n\n", is_whole=True) == ["", ""]
    long = last_lines(b"a" * 3000 + b"\n" + b"b" * 3000 + b"\n", is_whole=True)
    assert long == ["b" * 3000]
    for raw in (b"\x1b" * 9000, "数".encode() * 9000, b"y" * 9000):
        (one,) = last_lines(raw, is_whole=True)
        assert one.startswith("...") and one[-1] in "b数y"
        assert 3900 < len(one.encode()) <= 4000


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_lines_are_put_together_from_any_pieces(size: int) -> None:
    text = b"one\n\ntwo three\r\nfour\nfive"
    splitter = LineSplitter()
    lines: list[bytes] = []
    for start in range(0, len(text), size):
        lines += splitter.feed(text[start : start + size])
    lines += splitter.rest()
    assert [readable(line) for line in lines] == ["one", "", "two three", "four", "five"]


def test_output_without_line_ends_does_not_pile_up() -> None:
    splitter = LineSplitter()
    assert sum(len(line) for _ in range(100) for line in splitter.feed(b"x" * 5000)) > 400_000


# --- where it lies -------------------------------------------------------------------------------


def segments(sizes: list[int]) -> tuple[Filesystem, bytes]:
    fs = Filesystem.at("memory://bucket/logs-verb")
    fs.remove_tree("logs")
    whole = b"".join(b"line %d\n" % i for i in range(50_000))
    start = 0
    for size in sizes:
        fs.write_bytes(segment_path(2, 0, start), whole[start : start + size])
        start += size
    return fs, whole[:start]


@pytest.fixture(params=["file", "segments"])
def written(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[WrittenLog, bytes]:
    fs, whole = segments([100_000, 200_000, 1])
    if request.param == "file":
        fs = Filesystem.at(str(tmp_path))
        fs.write_bytes(log_path(2, 0), whole)
    return WrittenLog(fs, 2, 0), whole


def test_a_log_is_read_the_same_wherever_it_lies(written: tuple[WrittenLog, bytes]) -> None:
    log, whole = written
    assert log.size() == len(whole) == 300_001
    found = b""
    while piece := log.read(len(found), 7000):
        found += piece
    assert found == whole
    assert log.read(len(whole), 10) == log.read(len(whole) + 5, 10) == b""
    for num_lines in (0, 1, 2, 1000, 20_000, 60_000):
        expected = whole.splitlines(keepends=True)
        kept = b"".join(expected[len(expected) - min(num_lines, len(expected)) :])
        assert whole[log.start_of_last(num_lines) :] == kept
    assert log.last_lines() == [line.decode() for line in whole.splitlines()[-20:]]


def test_segments_are_a_log_to_the_verb(root: Path) -> None:
    fs, _ = segments([9, 12])
    fs.write_bytes("run.json", (root / "run.json").read_bytes())
    found = CliRunner().invoke(main, ["logs", fs.url, "--json"])
    assert [json.loads(line)["line"] for line in found.output.splitlines()] == [
        "line 0",
        "line 1",
        "line 2",
    ]


def test_no_such_log_is_empty(tmp_path: Path) -> None:
    log = WrittenLog(Filesystem.at(str(tmp_path)), 0, 0)
    assert (log.size(), log.read(0, 10), log.start_of_last(5), log.last_lines()) == (0, b"", 0, [])


# --- where a death is told -----------------------------------------------------------------------

RUNNING = Situation(phase=Phase.RUNNING, generation=4, world_size=2)
RULES = Rules(min_workers=1, max_workers=2)


@pytest.mark.parametrize(
    ("event", "kind"),
    [
        (e.WorkerDied(world_rank=1, node_lost=False, detail="", last_lines=("x",)), "worker_died"),
        (e.WorkerDied(world_rank=1, node_lost=True, detail="", last_lines=("x",)), "node_lost"),
        (
            e.RankFailed(
                error=e.RankError(
                    world_rank=1, type_name="ValueError", message="boom", last_lines=("x",)
                )
            ),
            "rank_failed",
        ),
    ],
)
def test_the_record_of_a_death_and_the_end_it_brings_have_the_last_lines(
    event: e.Event, kind: str
) -> None:
    decision = decide(RULES, RUNNING, event, 1.0)
    (record,) = [c for c in decision.commands if isinstance(c, e.Record) and c.kind == kind]
    assert record.data["last_lines"] == ["x"]
    failing = replace(decision.situation, then=Then.FAIL)
    end = decide(RULES, failing, e.GroupStopped(generation=4), 2.0).commands[-1]
    assert isinstance(end, e.End)
    assert (end.cause_rank, end.last_lines) == (1, ("x",))


def death(root: Path, *after: str, life: int = 0) -> None:
    fs = Filesystem.at(str(root))
    ledger = LedgerWriter(fs, life, f"death{life}")
    now_s = time.time()
    victim = {"is_victim": True, "last_lines": ["of the victim"]}
    own = {"last_lines": ["said before", "\x1b[2J"]}
    ledger.append("started", time_s=now_s, generation=3)
    ledger.append("rank_failed", time_s=now_s, generation=3, world_rank=0, data=victim)
    ledger.append("worker_died", time_s=now_s, generation=3, world_rank=1, data=own)
    ledger.append("failure_decided", time_s=now_s, generation=3, world_rank=1, data={})
    for kind in after:
        ledger.append(kind, time_s=now_s, generation=4)
    ledger.close()


def test_status_and_events_show_what_the_rank_at_fault_said_last(root: Path) -> None:
    death(root, "run_failed")
    shown = CliRunner().invoke(main, ["status", str(root)]).output.splitlines()
    assert shown[-3:] == [
        "last lines of rank 1 of generation 3:",
        "    | said before",
        "    | \\x1b[2J",
    ]
    found = json.loads(CliRunner().invoke(main, ["status", str(root), "--json"]).output)
    assert found["last_lines"] == {
        "generation": 3,
        "world_rank": 1,
        "lines": ["said before", "\x1b[2J"],
    }
    told = CliRunner().invoke(main, ["events", str(root)]).output
    lines = told.splitlines()
    at = next(i for i, line in enumerate(lines) if "worker_died" in line)
    assert lines[at + 1 : at + 3] == ["    | said before", "    | \\x1b[2J"]
    assert "failure_decided" in lines[at + 3]
    assert "of the victim" not in told


@pytest.mark.parametrize("after", [["resumed"], ["started"], ["run_started"]])
def test_status_forgets_last_lines_once_the_run_goes_on(root: Path, after: list[str]) -> None:
    death(root, *after)
    found = json.loads(CliRunner().invoke(main, ["status", str(root), "--json"]).output)
    assert found["last_lines"] is None
    assert "said before" in CliRunner().invoke(main, ["events", str(root)]).output
