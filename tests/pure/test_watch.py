"""`elastic watch`: the run on one screen of any size, with nothing in it that a terminal obeys."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from rich.console import Console

from elastic.dashboard.run_picture import RunReader
from elastic.dashboard.screen import frame
from elastic.dashboard.text import plain
from tests.pure.test_cli import NOW_S, ARun, ask
from tests.pure.test_prometheus import killed_at_12

EVIL = "boom [bold red]x[/] \x1b[2J\x1b]0;title\x07 \u202e[link=file:///etc]here"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[ARun]:
    with closing(ARun(tmp_path)) as made:
        killed_at_12(made)
        yield made


def shown(run: ARun, width: int = 100, height: int | None = None, note: str = "") -> list[str]:
    """The lines of a frame, on a terminal that shows colours."""
    picture = RunReader(run.fs).picture(run.run_file, now_s=NOW_S)
    console = Console(width=width, height=height, force_terminal=True, color_system=None)
    made = frame(picture, now_s=NOW_S, width=width, height=height, note=note)
    with console.capture() as captured:
        console.print(made)
    return [line.rstrip() for line in captured.get().splitlines()]


def at_large(run: ARun) -> None:
    """More of everything than any screen has room for."""
    ranks = [{"world_rank": i, "node_ip": f"10.0.0.{i}", "pid": 4000 + i} for i in range(64)]
    for number in range(40):
        data = {"bytes": 1_500_000_000, "stall_s": 0.04, "duration_s": 2.2}
        run.event("checkpoint_committed", 30, generation=1, step=20 + number, data=data)
        failure = {"cause": "hang", "then": "restart"}
        run.event("failure_decided", 20, generation=1 + number, reason=EVIL, data=failure)
        group = {"world_size": 64, "ranks": ranks}
        run.event("generation_started", 20, generation=2 + number, data=group)
        run.event("recovered", 19, generation=2 + number, step=60, reason=EVIL * 5)


# --- the frame -----------------------------------------------------------------------------------


def test_it_tells_what_the_other_reports_tell(run: ARun) -> None:
    lines = shown(run, width=140)
    assert "state       RUNNING (data)" in lines
    assert "step        20 of 60, 640 tokens/s" in lines
    assert "restarts    1 (worker_killed 1), 2 steps lost" in lines
    assert "saves       every 20 s: ..." in lines
    assert (
        "tries left  exceptions none granted, failures in a row 4 of 5, "
        "the same worker_killed 1 of 2" in lines
    )
    status = ask("status", run.root).output.splitlines()
    goodput = next(line for line in status if line.startswith("goodput"))
    assert goodput in lines


def test_b88_the_restart_stands_there_with_cause_size_and_lost_steps(run: ARun) -> None:
    (row,) = [line.split() for line in shown(run) if "worker_killed  " in line]
    assert row[:6] == ["1", "62", "s", "worker_killed", "12", "2"]


def test_a_run_that_has_said_nothing_is_shown_too(tmp_path: Path) -> None:
    with closing(ARun(tmp_path, "young")) as young:
        lines = shown(young)
    assert any(line.startswith("state       UNKNOWN: no word for 2 min") for line in lines)
    assert "restarts: none" in lines


@pytest.mark.parametrize("size", [(80, 24), (140, 45), (60, 18), (200, 60), (80, 100)])
def test_it_fits_the_screen(run: ARun, size: tuple[int, int]) -> None:
    width, height = size
    at_large(run)
    lines = shown(run, width, height, note="q quits")
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    assert lines[-1] == "q quits"
    assert any(line.startswith("restarts, ") and "more not shown" in line for line in lines)
    assert any("hang" in line for line in lines[10:])


def test_on_80_by_24_there_is_a_bit_of_everything(run: ARun) -> None:
    at_large(run)
    run.checkpoint(59)
    text = "\n".join(shown(run, 80, 24))
    for word in ("RUNNING", "goodput", "tries left", "REASON", "10.0.0.1", "committed", "removed"):
        assert word in text  # of the checkpoints that were committed, one is there


def test_what_a_run_recorded_is_neither_markup_nor_control(tmp_path: Path) -> None:
    """B92: a name, a reason and an address that would repaint the screen or hide their text."""
    with closing(ARun(tmp_path, "a[red]b")) as run:
        killed_at_12(run)
        failure = {"cause": EVIL, "then": "restart"}
        run.event("failure_decided", 20, generation=1, reason=EVIL, data=failure)
        rank = {"world_rank": 0, "node_ip": EVIL, "pid": 1}
        group = {"world_size": 1, "ranks": [rank]}
        run.event("generation_started", 19, generation=2, data=group)
        run.event("checkpoint_failed", 18, generation=2, step=20, reason=EVIL)
        text = "\n".join(shown(run, width=400, note=EVIL))
    assert text.count(plain(EVIL)) >= 5
    assert "a[red]b" in text
    assert all(character.isprintable() or character == "\n" for character in text)


# --- the verb ------------------------------------------------------------------------------------


def test_once_prints_one_frame(run: ARun) -> None:
    for flags in (["--once"], []):  # to a pipe it is one frame in any case
        result = ask("watch", run.root, *flags)
        assert result.exit_code == 0, result.output
        assert result.output.count("\ntries left  ") == 1


def test_json_once_is_one_object(run: ARun) -> None:
    result = ask("watch", run.root, "--json", "--once")
    (line,) = result.output.splitlines()
    told = json.loads(line)
    assert told["restarts_by_cause"] == {"worker_killed": 1}
    assert told["tries_left"][0]["budget"] == "exceptions"


def test_a_run_that_is_not_there_is_told_in_a_sentence(tmp_path: Path) -> None:
    result = ask("watch", tmp_path)
    assert result.exit_code == 2 and "no run at" in result.output


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "elastic", "watch", *map(str, arguments)]


def test_json_tells_each_change_once_and_ends_with_the_run(run: ARun) -> None:
    watching = subprocess.Popen(command(run.root, "--json"), stdout=subprocess.PIPE, text=True)
    assert watching.stdout is not None
    with watching, watching.stdout:
        first = json.loads(watching.stdout.readline())
        run.event("run_stopped", 0, step=21, reason="asked for")
        second = json.loads(watching.stdout.readline())
        assert watching.stdout.read() == ""
        assert watching.wait(30) == 0
    assert (first["step"], second["step"], second["state"]) == (20, 21, "STOPPED")


@pytest.mark.parametrize("key", ["q", "Ctrl-C"])
def test_it_shows_what_comes_and_leaves_the_terminal_as_it_was(run: ARun, key: str) -> None:
    mother, child = pty.openpty()
    sizes = {"COLUMNS": "80", "LINES": "24", "TERM": "xterm"}
    watching = subprocess.Popen(
        command(run.root),
        stdin=child,
        stdout=child,
        stderr=child,
        env=os.environ | sizes,
    )
    os.close(child)
    with watching:
        read_until(mother, b"last word")
        run.event("run_failed", 0, step=20, reason="the disk is full")
        read_until(mother, b"the disk is full")
        if key == "q":
            os.write(mother, b"q")
        else:
            watching.send_signal(signal.SIGINT)  # as the terminal would
        left = read_until(mother, b"\x1b[?1049l")  # back from the alternate screen
        assert b"Traceback" not in left
        assert watching.wait(30) == 0
    os.close(mother)


def read_until(descriptor: int, wanted: bytes) -> bytes:
    found = b""
    until_s = time.monotonic() + 60
    while wanted not in found:
        assert time.monotonic() < until_s, found
        if select.select([descriptor], [], [], 1.0)[0]:
            found += os.read(descriptor, 65536)
    return found
