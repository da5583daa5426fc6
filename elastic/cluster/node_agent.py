"""In a process of its own on each node of a run: looks at the run's processes there, and ends them.

What a worker cannot do for itself: tell of a process that is stopped, or end one and its children.
It also watches for notices that the node will be taken, and then has Ray drain it. Linux only in
part: elsewhere it ends processes, and their children are left. Must not import ray or torch before
there is a notice, so that it starts at once and holds little memory.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from elastic.cluster.notices.notice import Notice
from elastic.cluster.notices.sources import sources_of
from elastic.cluster.notices.watch import Watch

logger = logging.getLogger("elastic")

_NOTE_S = 1.0
_DUMP_S = 1.0
_GONE_S = 2.0
NO_STACKS = "no stacks"
"""What the text begins with where there are none."""


@dataclass(frozen=True, kw_only=True)
class ProcessLook:
    """A process as seen from outside."""

    state: str
    """Linux's letter, as T for stopped; empty when there is no such process."""
    stacks: str
    """Of it and its children, as py-spy tells them, or why there are none."""


@dataclass(frozen=True)
class _Process:
    """Its start tells it from a later one of the same id."""

    pid: int
    started_ticks: int


class NodeAgent:
    """One per node and run."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._families: dict[int, set[_Process]] = {}
        threading.Thread(target=self._keep_noting, name="elastic-families", daemon=True).start()

    def adopt(self, pids: Sequence[int]) -> None:
        """From now on know what children these processes of the run have."""
        with self._lock:
            for pid in pids:
                self._families.setdefault(pid, set())
        self._note()

    def look(self, pids: Sequence[int]) -> list[ProcessLook]:
        """Each process from outside, in the order asked for; harmless to those that run."""
        return [ProcessLook(state=_state(pid), stacks=_stacks(pid)) for pid in pids]

    def end(self, pids: Sequence[int]) -> list[int]:
        """SIGKILL to processes that were adopted and to all their children.

        Waits two seconds for their end at most; gives those that are still there.
        """
        self._note()
        with self._lock:
            doomed = set().union(*(self._families.pop(pid, set()) for pid in pids))
        for process in doomed:
            _kill(process)
        until_s = time.monotonic() + _GONE_S
        while (left := [one.pid for one in doomed if _runs(one)]) and time.monotonic() < until_s:
            time.sleep(0.01)
        return left

    def watch_notices(self, names: Sequence[str], node_id: str, address: str) -> None:
        """From now on have Ray drain this node when one of these sources says that it will go.

        `address` is that of the cluster's control store.
        """

        def drain(notice: Notice) -> None:
            from elastic.cluster.own_node import OwnNode

            logger.warning("node %s will be taken: %s", node_id[:12], notice.text)
            OwnNode(address, node_id).drain_at_last(notice, threading.Event())

        Watch(sources_of(names, node_id=node_id), drain)

    def _keep_noting(self) -> None:
        while True:
            time.sleep(_NOTE_S)
            self._note()

    def _note(self) -> None:
        """Take down who descends from whom, while the parents live to tell."""
        with self._lock:
            for pid, family in self._families.items():
                # Not by its number alone once it is known: that may be another process's by now.
                roots = [one.pid for one in family if _runs(one)] if family else [pid]
                for root in roots:
                    family |= set(_with_descendants(root))


def _with_descendants(pid: int) -> Iterator[_Process]:
    process = _look_up(pid)
    if process is None:
        return
    yield process
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                for child in (task / "children").read_text().split():
                    yield from _with_descendants(int(child))


def _look_up(pid: int) -> _Process | None:
    fields = _stat(pid)
    return _Process(pid, int(fields[19])) if fields else None


def _runs(process: _Process) -> bool:
    fields = _stat(process.pid)
    return bool(fields) and int(fields[19]) == process.started_ticks and fields[0] not in "ZX"


def _kill(process: _Process) -> None:
    if _runs(process):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


def _state(pid: int) -> str:
    fields = _stat(pid)
    return fields[0] if fields else ""


def _stat(pid: int) -> list[str]:
    try:
        # The name, the second field, may hold spaces and parentheses; what follows it does not.
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()
    except (OSError, IndexError):
        return []


def _stacks(pid: int) -> str:
    beside_python = Path(sys.executable).parent / "py-spy"
    program = str(beside_python) if beside_python.exists() else shutil.which("py-spy")
    if program is None:
        return f"{NO_STACKS}: py-spy, which ray[default] brings, is not installed on this node\n"
    own = _dump(program, pid)
    # One by one: with any child that is not Python, py-spy gives none at all.
    children = [_dump(program, one.pid) for one in _with_descendants(pid) if one.pid != pid]
    return "\n".join([own, *(dump for dump in children if not dump.startswith(NO_STACKS))])


def _dump(program: str, pid: int) -> str:
    # It must not pause the process: one that is stopped cannot be.
    command = [program, "dump", "--nonblocking", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DUMP_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{NO_STACKS}: {type(error).__name__}: {error}\n"
    if done.returncode != 0:
        first = next(iter(done.stderr.splitlines()), "")
        return f"{NO_STACKS}: py-spy ended with {done.returncode}: {first}\n"
    return done.stdout
