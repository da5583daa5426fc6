"""`torchrun -m jobs.pretrain`, as a user runs it, and what its run directory says meanwhile."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from elastic.storage.checkpoints import Catalog
from elastic.storage.filesystem import Filesystem
from elastic.storage.ledger import LedgerEvent, read_ledger
from elastic.storage.run_file import load_run_file

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
        kill_whole(process)
        process.communicate()


def kill_whole(process: subprocess.Popen[str]) -> None:
    """SIGKILL to torchrun and to its ranks, which would outlive it."""
    ranks = ranks_of(process.pid)
    if process.poll() is None:
        process.kill()
    for rank in ranks.values():
        os.kill(rank, signal.SIGKILL)


def finished(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr, once it has ended."""
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


def wait_for(what: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Returns when it is so; fails when torchrun ends before."""
    until_s = time.monotonic() + AT_ONCE_S
    while not what():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until_s
        time.sleep(0.02)


def committed(run: Path) -> int:
    """The highest complete step, -1 if there is none."""
    fs = Filesystem.at(str(run))
    run_file = load_run_file(fs)
    found = None if run_file is None else Catalog(fs, run_file.run_id).highest()
    return -1 if found is None else found.step


def events(run: Path, kind: str) -> list[LedgerEvent]:
    """What the ledger holds of one kind."""
    return [event for event in read_ledger(Filesystem.at(str(run))) if event.kind == kind]


def summary(path: Path) -> dict[str, Any]:
    """What the job wrote there (`--json`)."""
    found: dict[str, Any] = json.loads(path.read_text())
    return found
