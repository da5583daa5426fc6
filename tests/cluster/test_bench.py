"""The benchmark's command: the shape of its JSON, and that nothing of it stays behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs.bench.site import measurement_directory
from tests.cluster.local_cluster import is_running

CHECKOUT = Path(__file__).resolve().parents[2]
# Tests run in a shell's background ignore Ctrl-C, and so would what they start.
BENCH = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("jobs.bench", run_name="__main__", alter_sys=True)
"""
PHASES = {"detect", "stop", "place", "start", "connect", "build", "load", "first_step"}


@pytest.fixture
def mark() -> Iterator[str]:
    """In the environment of all that a test starts; what carries it afterwards is a stray."""
    value = f"test-{uuid.uuid4().hex}"
    yield value
    for pid in carrying(value):
        os.kill(pid, signal.SIGKILL)


def carrying(mark: str) -> dict[int, str]:
    """Command lines of the processes, by id."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if f"BENCH_TEST={mark}".encode() in (entry / "environ").read_bytes():
                found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
    return found


def bench(mark: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", BENCH, *arguments],
        cwd=CHECKOUT,
        env={**os.environ, "BENCH_TEST": mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def directories() -> set[Path]:
    return set(Path("/tmp").glob("bench-*"))


@pytest.mark.thorough
def test_quick_recovery_writes_what_checks_rely_on(mark: str, tmp_path: Path) -> None:
    before = directories()
    path = tmp_path / "deeper" / "recovery.json"
    process = bench(
        mark,
        "recovery",
        "--fault",
        "worker",
        "--engines",
        "elastic",
        "--quick",
        "--json",
        str(path),
    )

    output, _ = process.communicate(timeout=110)

    assert process.returncode == 0, output
    result = json.loads(path.read_text())
    measured = result["engines"]["elastic"]
    assert (result["fault"], result["failures"]) == ("worker", [])
    assert result["median_ratio_to"] == {}
    assert len(measured["kill_to_step_s"]) == len(measured["lost_steps"]) == 1
    assert measured["kill_to_step_s"][0] > 0
    assert 0 <= measured["lost_steps"][0] <= 12
    (phases_s,) = measured["phases_s"]
    assert set(phases_s) >= PHASES
    assert sum(phases_s.values()) == pytest.approx(measured["kill_to_step_s"][0], abs=0.5)
    assert "elastic" in output
    assert carrying(mark) == {}
    assert directories() <= before


@pytest.mark.thorough
def test_quick_growth_writes_what_checks_rely_on(mark: str, tmp_path: Path) -> None:
    before = directories()
    path = tmp_path / "growth.json"
    process = bench(mark, "growth", "--quick", "--json", str(path))

    output, _ = process.communicate(timeout=110)

    assert process.returncode == 0, output
    result = json.loads(path.read_text())
    assert result["failures"] == []
    (stall_s,), (lost_steps,) = result["stall_s"], result["lost_steps"]
    assert 0 < stall_s < 60
    assert lost_steps >= 0
    assert result["growths"][0]["world_size"] == 3
    assert carrying(mark) == {}
    assert directories() <= before


@pytest.mark.thorough
def test_quick_preemption_writes_what_checks_rely_on(mark: str) -> None:
    before = directories()
    process = bench(mark, "preemption", "--engines", "elastic", "--quick", "--json")

    output, _ = process.communicate(timeout=180)

    assert process.returncode == 0, output
    result = json.loads(output[output.index("{\n") :])
    measured = result["engines"]["elastic"]
    assert (result["failures"], result["share_of_wasted_s"]) == ([], {})
    assert measured["wasted_steps"] == 0
    assert measured["wasted_s"] > 0
    (preemption,) = measured["preemptions"]
    assert 0 == preemption["noticed_s"] < preemption["lost_s"] < preemption["replaced_s"]
    changes = [still for still in measured["standstills"] if still["group_changed"]]
    assert [still["world_size"] for still in changes] == [2, 3]
    assert changes[0]["begun_s"] < preemption["lost_s"], "it left before it had to"
    assert carrying(mark) == {}
    assert directories() <= before


def test_a_measurement_ends_orphans_too_when_it_is_terminated() -> None:
    """A worker whose raylet was killed has no parent left that would end it."""
    orphans: list[int] = []
    before = directories()

    with pytest.raises(SystemExit):
        leave_an_orphan_and_be_terminated(orphans)

    assert [pid for pid in orphans if is_running(pid)] == []
    assert directories() <= before


def leave_an_orphan_and_be_terminated(orphans: list[int]) -> None:
    with measurement_directory():
        shell = ["sh", "-c", "sleep 60 >/dev/null 2>&1 & echo $!"]
        orphans.append(int(subprocess.run(shell, capture_output=True, check=True).stdout))
        assert is_running(orphans[0])
        os.kill(os.getpid(), signal.SIGTERM)
        pytest.fail("SIGTERM did not end the measurement")


def test_ctrl_c_leaves_neither_processes_nor_files(mark: str) -> None:
    before = directories()
    process = bench(mark, "recovery", "--engines", "ray-train", "--quick")
    deadline_s = time.monotonic() + 60
    while len(carrying(mark)) < 8:  # the daemons of some nodes are up
        assert time.monotonic() < deadline_s
        assert process.poll() is None
        time.sleep(0.1)

    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)

    assert process.returncode != 0, output
    assert carrying(mark) == {}
    assert directories() <= before


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["recovery", "--engines", "elastic,horovod"], "expected engines of"),
        (["recovery", "--repeats", "0"], "at least 1, found '0'"),
        (["recovery", "--fault", "node", "--engines", "torchrun"], "torchrun"),
        (["recovery", "--fault", "partition", "--engines", "elastic,torchrun"], "torchrun"),
        (["recovery", "--fault", "flood"], "flood"),
    ],
)
def test_bad_arguments_are_refused_before_anything_starts(
    mark: str, arguments: list[str], expected: str
) -> None:
    process = bench(mark, *arguments)

    output, _ = process.communicate(timeout=20)

    assert process.returncode == 2
    assert expected in output


def test_partition_without_iproute2_is_refused_before_anything_starts(
    mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")

    output, _ = (process := bench(mark, "recovery", "--fault", "partition")).communicate(timeout=20)

    assert process.returncode == 2
    assert "install iproute2 and run as root" in output
