"""A run without Ray: real torchrun, ranks that die and come back, another size, refusals."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from elastic.dashboard.status import read_status
from elastic.storage.checkpoints import Catalog
from elastic.storage.filesystem import Filesystem
from elastic.storage.lease import acquire
from elastic.storage.ledger import LedgerEvent, read_ledger
from elastic.storage.run_file import load_run_file
from elastic.training import process_group
from elastic.training.torchrun import GroupNotMet, Place, meet, run_standalone
from elastic.versions import UnsupportedVersion

ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    *("--model", "nano", "--dtype", "float64", "--data", str(ROOT / "jobs")),
    *("--global-batch", "6", "--micro-batch", "2", "--sequence-length", "16"),
)
AT_ONCE_S = 90.0


@contextmanager
def torchrun(size: int, *flags: str, restarts: int = 3) -> Iterator[subprocess.Popen[str]]:
    """`torchrun -m jobs.pretrain` as a user starts it, gone when the block is left."""
    command = [
        *(str(Path(sys.executable).with_name("torchrun")), "--nnodes", "1"),
        *("--nproc-per-node", str(size), "--max-restarts", str(restarts)),
        *("-m", "jobs.pretrain", *flags),
    ]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            for rank in ranks_of(process.pid).values():
                os.kill(rank, signal.SIGKILL)
        process.communicate()


def finished(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=AT_ONCE_S)
    return process.returncode, out, err


def ranks_of(agent: int) -> dict[int, int]:
    """Pids of the ranks that this torchrun has started and that live, by rank."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            status = (entry / "stat").read_text().rpartition(")")[2].split()
            if status[1] == str(agent) and status[0] != "Z":
                variables = (entry / "environ").read_bytes().split(b"\0")
                found[int(dict(v.split(b"=", 1) for v in variables if b"=" in v)[b"RANK"])] = int(
                    entry.name
                )
        except (OSError, KeyError, IndexError, ValueError):
            continue
    return found


def wait_for(what: Callable[[], bool]) -> None:
    until_s = time.monotonic() + AT_ONCE_S
    while not what():
        assert time.monotonic() < until_s
        time.sleep(0.02)


def committed(run: Path) -> int:
    """The highest complete step, -1 if there is none."""
    fs = Filesystem.at(str(run))
    run_file = load_run_file(fs)
    found = None if run_file is None else Catalog(fs, run_file.run_id).highest()
    return -1 if found is None else found.step


def events(run: Path, kind: str) -> list[LedgerEvent]:
    return [event for event in read_ledger(Filesystem.at(str(run))) if event.kind == kind]


def summary(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.mark.timeout(240)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_then_another_size(tmp_path: Path, victim: int) -> None:
    flags = (*SMALL, "--storage", f"{tmp_path}/runs", "--save-every", "5")
    run = tmp_path / "runs/broken"
    with torchrun(2, *flags, "--name", "broken", "--steps", "60") as process:
        wait_for(lambda: committed(run) >= 10)
        os.kill(ranks_of(process.pid)[victim], signal.SIGKILL)
        code, out, err = finished(process)
    assert code == 0, err
    assert out.count("step 60: loss") == 1  # the summary, by rank 0 alone
    assert "restarts 1" in out
    assert len(events(run, "run_started")) == 2
    (recovered,) = events(run, "recovered")
    (resumed,) = events(run, "resumed")
    assert resumed.step >= 10 and recovered.data["lost_steps"] >= 0
    status = read_status(Filesystem.at(str(run)), load(run), now_s=time.time())
    assert (status.state, status.restarts, status.step) == ("FINISHED", 1, 60)

    goes_on = (*flags, "--name", "broken", "--steps", "70", "--json", f"{tmp_path}/broken.json")
    whole = (*flags, "--name", "whole", "--steps", "70", "--json", f"{tmp_path}/whole.json")
    with torchrun(1, *goes_on, "--quiet") as one, torchrun(2, *whole, "--quiet") as two:
        ended = [finished(process) for process in (one, two)]
    assert [code for code, _, _ in ended] == [0, 0], "".join(err for _, _, err in ended)
    broken, undisturbed = (summary(tmp_path / f"{name}.json") for name in ("broken", "whole"))
    assert broken["world_sizes"] == [2, 2, 1]
    for name in ("losses", "grad_norms"):
        assert broken[name].keys() == undisturbed[name].keys() == {str(n) for n in range(1, 71)}
        for step, value in undisturbed[name].items():
            assert broken[name][step] == pytest.approx(value, rel=1e-9, abs=0)


def load(run: Path) -> Any:
    found = load_run_file(Filesystem.at(str(run)))
    assert found is not None
    return found


def test_sigterm_saves_and_stops_and_a_run_of_another_kind_is_refused(tmp_path: Path) -> None:
    flags = (*SMALL, "--storage", f"{tmp_path}/runs", "--name", "run")
    run = tmp_path / "runs/run"
    with torchrun(2, *flags, "--steps", "100000", "--save-every", "100000") as process:
        wait_for(lambda: committed(run) == 0)
        process.terminate()
        _, out, err = finished(process)
    assert "Traceback" not in "\n".join(line for line in err.splitlines() if "jobs" in line)
    (stopped,) = events(run, "run_stopped")
    assert stopped.step > 0 and committed(run) == stopped.step
    assert f"STOPPED   step {stopped.step}/" in out
    before = {path for path in run.rglob("*") if "lease" not in path.parts}

    with torchrun(2, *flags, "--lr", "3", restarts=1) as process:
        code, out, err = finished(process)
    assert code != 0 and err.count("was begun with another configuration: lr:") == 1, err
    assert "pretrain.py" not in err  # no traceback of ours
    assert {path for path in run.rglob("*") if "lease" not in path.parts} == before


def test_a_run_that_is_held_is_told_once(tmp_path: Path) -> None:
    run = tmp_path / "runs/run"
    lease = acquire(Filesystem.at(str(run)), "a test")
    flags = (*SMALL, "--storage", f"{tmp_path}/runs", "--name", "run")
    with torchrun(2, *flags, restarts=1) as process:
        code, _, err = finished(process)
    lease.release()
    assert code != 0 and err.count("is held by") == 1 and "(a test)" in err, err
    assert [path.name for path in run.iterdir()] == ["lease"]


@pytest.mark.parametrize(
    "flags, told",
    [
        (("--name", "run", "--steps", "0"), "--steps must be at least 1"),
        (("--name", "run", "--global-batch", "1"), "less than one sample to each of 2 workers"),
        (("--name", "run", "--no-such-flag"), "unrecognized arguments"),
        ((), "give --name"),
    ],
)
def test_bad_input_ends_every_rank_before_anything(
    tmp_path: Path, flags: tuple[str, ...], told: str
) -> None:
    with torchrun(2, "--storage", f"{tmp_path}/runs", *SMALL, *flags, restarts=0) as process:
        code, _, err = finished(process)
    assert code != 0 and err.count(told) == 1, err
    assert "exitcode  : 2" in err and "exitcode  : 1" not in err
    assert not (tmp_path / "runs").exists()


def test_another_torch_is_refused_before_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.12.1")
    storage = tmp_path / "runs"
    with pytest.raises(UnsupportedVersion, match=r"torch 2\.12\.1 is installed"):
        run_standalone(lambda run: None, name="run", storage_path=str(storage), place=PLACE)
    assert not storage.exists()


# --- the place ----------------------------------------------------------------------------------

PLACE = Place(
    job="job",
    restarts=1,
    max_restarts=3,
    world_rank=0,
    world_size=3,
    local_rank=0,
    local_world_size=3,
    host="127.0.0.1",
    port=1,
    has_agents_store=True,
)


def test_no_place_without_torchrun() -> None:
    assert Place.read({"RANK": "0", "WORLD_SIZE": "2"}) is None


def test_ranks_meet_beside_what_an_older_attempt_left() -> None:
    server = process_group.open_store("127.0.0.1")
    for rank in (1, 2):
        server.set(f"here/{rank}", "left")
    server.set("attempt-1-left/in/1", "left")

    def attempt(rank: int) -> str:
        store = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
        mine = meet(store, dataclasses.replace(PLACE, world_rank=rank), timeout_s=20.0)
        if rank == 0:
            mine.set("word", "to all")
        return bytes(mine.get("word")).decode()

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(attempt, (1, 2, 0))) == ["to all"] * 3


def test_ranks_that_do_not_come_are_named() -> None:
    with pytest.raises(GroupNotMet, match=r"ranks \[1, 2\] of 3"):
        meet(process_group.open_store("127.0.0.1"), PLACE, timeout_s=0.1)
