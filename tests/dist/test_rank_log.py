"""The rank log: all that a process writes is in it, whatever ends the process, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from elastic.storage.filesystem import Filesystem
from elastic.storage.rank_logs import LOGS

ROOT = Path(__file__).resolve().parents[2]

BEGIN = """
import ctypes, faulthandler, os, signal, subprocess, sys, time, warnings
from elastic.storage.filesystem import Filesystem
from elastic.storage.rank_logs import WrittenLog
from elastic.training.rank_log import RankLog
fs = Filesystem.at(sys.argv[1])
log = RankLog(fs)
libc = ctypes.CDLL(None)
"""


def start(storage: str | Path, body: str, env=None, **options) -> subprocess.Popen[str]:
    # With this set, neither Python nor C would hold back anything.
    env = {k: v for k, v in {**os.environ, **(env or {})}.items() if k != "PYTHONUNBUFFERED"}
    return subprocess.Popen(
        [sys.executable, "-c", BEGIN + textwrap.dedent(body), str(storage)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        **options,
    )


def finish(process: subprocess.Popen[str], status: int = 0) -> tuple[str, str]:
    out, err = process.communicate(timeout=60)
    assert process.returncode == status, (process.returncode, out, err)
    return out, err


def written(storage: Path, generation: int, rank: int) -> str:
    return (storage / LOGS / f"g{generation}" / f"rank{rank}.log").read_text()


def wait_until(condition, timeout_s: float = 20.0) -> float:
    """Seconds that it took."""
    begun_s = time.monotonic()
    while not condition():
        assert time.monotonic() - begun_s < timeout_s, "timed out"
        time.sleep(0.02)
    return time.monotonic() - begun_s


def test_everything_before_a_sigkill_is_in_the_file(tmp_path: Path) -> None:
    process = start(
        tmp_path,
        """
        log.switch(3, 1)
        print("from print")
        print("to stderr", file=sys.stderr)
        warnings.warn("a warning")
        os.write(2, b"raw to 2\\n")
        libc.puts(b"from C")
        libc.dprintf(2, b"from C to 2\\n")
        subprocess.run(["sh", "-c", "echo from a child; echo its stderr >&2"], check=True)
        for i in range(20_000):
            print(f"line {i}")
        os.kill(os.getpid(), signal.SIGKILL)
        """,
    )
    finish(process, -signal.SIGKILL)
    lines = written(tmp_path, 3, 1).splitlines()
    for line in ("from print", "to stderr", "raw to 2", "from C", "from C to 2"):
        assert lines.count(line) == 1, line
    assert any("UserWarning: a warning" in line for line in lines)
    assert lines.index("from a child") < lines.index("its stderr") < lines.index("line 0")
    assert lines[-20_000:] == [f"line {i}" for i in range(20_000)]


def test_a_line_that_was_only_begun_is_there_within_two_seconds(tmp_path: Path) -> None:
    body = """
        log.switch(0, 0)
        print("a prompt without end ", end="")
        libc.printf(b"and one of C")
        sys.stdin.read()
        """
    process = start(tmp_path, body, stdin=subprocess.PIPE)
    path = tmp_path / "logs" / "g0" / "rank0.log"
    wait_until(path.exists)
    expected = "a prompt without end and one of C"
    assert wait_until(lambda: path.read_text() == expected) < 2.0
    os.kill(process.pid, signal.SIGKILL)
    finish(process, -signal.SIGKILL)


def test_switching_generations_and_back(tmp_path: Path) -> None:
    out, err = finish(
        start(
            tmp_path,
            """
            print("before")
            at_first = len(os.listdir("/proc/self/fd"))
            log.switch(0, 2)
            print("in g0")
            descriptors = len(os.listdir("/proc/self/fd"))
            log.switch(1, 0)
            print("in g1")
            libc.puts(b"C in g1")
            for generation in range(2, 6):
                log.switch(generation, 0)
            assert len(os.listdir("/proc/self/fd")) == descriptors
            print(log.last_lines())
            log.restore()
            assert len(os.listdir("/proc/self/fd")) == at_first
            print("after")
            print("after on stderr", file=sys.stderr)
            log.restore()
            """,
        )
    )
    assert written(tmp_path, 0, 2) == "in g0\n"
    assert sorted(written(tmp_path, 1, 0).splitlines()) == ["C in g1", "in g1"]
    assert written(tmp_path, 5, 0) == "[]\n"
    # Ray's own files go on to have everything, in order.
    assert out.splitlines() == ["before", "in g0", "in g1", "C in g1", "[]", "after"]
    assert err == "after on stderr\n"


def test_the_copy_follows_while_the_process_lives(tmp_path: Path) -> None:
    process = start(
        tmp_path,
        """
        log.switch(0, 0)
        os.write(2, b"said\\n")
        sys.stdin.read()
        """,
        stdin=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "said\n"
    finish(process)


def test_a_normal_exit_loses_nothing_either(tmp_path: Path) -> None:
    out, _ = finish(start(tmp_path, 'log.switch(0, 0)\nprint("the last", end="")'))
    assert out == written(tmp_path, 0, 0) == "the last"


def test_a_log_that_is_there_is_added_to(tmp_path: Path) -> None:
    said = [
        finish(start(tmp_path, f'log.switch(0, 0)\nprint("{word}")\nprint(log.last_lines())'))[0]
        for word in ("one", "two")
    ]
    assert said == ["one\n['one']\n", "two\n['two']\n"]
    assert written(tmp_path, 0, 0) == "".join(said)


def test_nobody_at_the_original_end_is_no_matter(tmp_path: Path) -> None:
    process = start(
        tmp_path,
        """
        log.switch(0, 0)
        print("one")
        log.keep()
        sys.stdin.readline()
        print("two")
        log.keep()
        os._exit(0)
        """,
        stdin=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stdin is not None
    assert process.stdout.readline() == "one\n"
    process.stdout.close()
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.wait(timeout=60) == 0
    assert written(tmp_path, 0, 0) == "one\ntwo\n"


def test_a_crash_leaves_its_stacks_without_values(tmp_path: Path) -> None:
    process = start(
        tmp_path,
        """
        import resource
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no file of it where the tests were begun
        def crash(token):
            ctypes.string_at(0)
        log.switch(0, 0)
        crash("sk-very-secret")
        """,
        env={"MY_TOKEN": "sk-from-the-environment"},
    )
    finish(process, -signal.SIGSEGV)
    text = written(tmp_path, 0, 0)
    assert "Fatal Python error: Segmentation fault" in text
    assert "in crash" in text
    assert "secret" not in text and "sk-" not in text


def test_last_lines_are_few_and_safe(tmp_path: Path) -> None:
    out, _ = finish(
        start(
            tmp_path,
            """
            log.switch(0, 0)
            print("x" * 3_000_000)
            for i in range(100):
                print("line", i)
            print("\\x1b[2Jcleared", end="")
            lines = log.last_lines()
            log.keep()
            assert lines == WrittenLog(fs, 0, 0).last_lines()
            print()
            log.restore()
            print(lines)
            """,
        )
    )
    lines = eval(out.splitlines()[-1])
    assert lines == [f"line {i}" for i in range(81, 100)] + ["\\x1b[2Jcleared"]


def test_a_log_that_cannot_be_opened_ends_no_run(tmp_path: Path) -> None:
    (tmp_path / LOGS).write_text("a file where the folder should be")
    out, err = finish(start(tmp_path, 'log.switch(0, 0)\nprint("goes on")'))
    assert out == "goes on\n"
    assert "no rank log" in err


def test_a_child_that_is_forked_during_a_flush_can_flush_and_exit(tmp_path: Path) -> None:
    finish(
        start(
            tmp_path,
            """
            import threading
            from elastic.training import output_buffers
            log.switch(0, 0)
            held = threading.Event()
            def hold():
                with output_buffers._flushing, log._pump._changed:
                    held.set()
                    time.sleep(0.3)
            threading.Thread(target=hold).start()
            held.wait()
            if os.fork() == 0:
                signal.alarm(20)
                output_buffers.flush()
                print("child")
                sys.exit(0)
            assert os.wait()[1] == 0
            print("parent")
            """,
        )
    )
    assert written(tmp_path, 0, 0) == "child\nparent\n"


@pytest.mark.parametrize("num_lines", [3, 200_000])
def test_an_object_store_has_it_in_segments(num_lines: int) -> None:
    out, _ = finish(
        start(
            "memory://bucket/runs/demo",
            f"""
            log.switch(4, 7)
            for i in range({num_lines}):
                print("line", i)
            deadline_s = time.monotonic() + 2.0
            written = WrittenLog(fs, 4, 7)
            expected = b"".join(b"line %d\\n" % i for i in range({num_lines}))
            while written.size() < len(expected) and time.monotonic() < deadline_s:
                time.sleep(0.05)
            found = b""
            while piece := written.read(len(found), 100_000):
                found += piece
            print("late")
            log.keep()
            late = written.last_lines()
            log.restore()
            starts = [int(entry.name) for entry in fs.list("logs/g4/rank7.log")]
            assert found == expected
            assert late[-2:] == ["line {num_lines - 1}", "late"], late
            assert starts == [i * 1024 * 1024 for i in range(len(starts))]
            print(len(starts))
            """,
        )
    )
    assert int(out.splitlines()[-1]) == (1 if num_lines == 3 else 3)


def test_storage_that_fails_is_told_once_and_tried_again() -> None:
    out, _ = finish(
        start(
            "memory://bucket/runs/demo",
            """
            def broken(path, data):
                raise OSError("no network")
            log.switch(0, 0)
            works, fs.store.write_bytes = fs.store.write_bytes, broken
            print("one")
            for _ in range(3):
                log.keep()
            fs.store.write_bytes = works
            log.keep()
            log.restore()
            print(WrittenLog(fs, 0, 0).last_lines())
            """,
        )
    )
    lines = eval(out.splitlines()[-1])
    assert lines[0] == "one"
    assert len([line for line in lines if "no network" in line]) == 1


def test_logs_are_local_files_on_a_disk(tmp_path: Path) -> None:
    finish(start(tmp_path / "a [b] %20", 'log.switch(0, 0)\nprint("here")'))  # B62
    assert Filesystem.at(str(tmp_path / "a [b] %20")).read_bytes("logs/g0/rank0.log") == b"here\n"
