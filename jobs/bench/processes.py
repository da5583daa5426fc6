"""The processes that one measurement starts, directly or not, and their certain end.

Ray's own shutdown ends the daemons; a worker whose raylet was killed belongs to nobody and trains
on for seconds. Reads Linux's /proc; where there is none this module finds nothing, and Ray's
shutdown has to do. Must not import ray, torch or elastic.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

_VARIABLE = "ELASTIC_BENCH_MEASUREMENT"


@dataclass(frozen=True)
class _Process:
    """A process as /proc shows it. Its start tells it from a later one of the same id."""

    pid: int
    parent_pid: int
    started_ticks: int


class Processes:
    """All processes started since this object was made, as far as they can be known.

    Two signs tell them, for each misses some: descent from this process, which an orphan loses, and
    a variable in the environment, which Ray's agents overwrite with their title.
    """

    def __init__(self) -> None:
        self._value = uuid.uuid4().hex
        self._others = set(_descendants())
        self._known: set[_Process] = set()

    @property
    def environment(self) -> dict[str, str]:
        """Variables that everything the measurement starts has to have."""
        return {_VARIABLE: self._value}

    def note(self) -> None:
        """Remember who is there. To be called before anything is killed that has children."""
        found = set(_descendants()) - self._others
        self._known |= found | set(_carrying(f"{_VARIABLE}={self._value}"))

    def kill(self, deadline_s: float = 60.0) -> None:
        """SIGKILL to every process of the measurement, until none runs.

        Raises RuntimeError when some outlive it.
        """
        until_s = time.monotonic() + deadline_s
        num_looks_in_vain = 0
        while num_looks_in_vain < 2:  # a process in the middle of its fork may escape one look
            self.note()
            running = [process for process in self._known if _runs(process)]
            num_looks_in_vain = 0 if running else num_looks_in_vain + 1
            for process in running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
            if running and time.monotonic() > until_s:
                raise RuntimeError(
                    f"processes {sorted(process.pid for process in running)} outlived SIGKILL for "
                    f"{deadline_s:.0f} s: end them by hand"
                )
            time.sleep(0.05)


def _descendants() -> list[_Process]:
    everyone = [process for pid in _pids() if (process := _look_at(pid)) is not None]
    found, generation = [], {os.getpid()}
    while generation:
        children = [process for process in everyone if process.parent_pid in generation]
        found += children
        generation = {process.pid for process in children}
    return found


def _carrying(variable: str) -> list[_Process]:
    found = []
    for pid in _pids():
        with contextlib.suppress(OSError):
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            process = _look_at(pid)
            if variable.encode() in variables and process is not None and pid != os.getpid():
                found.append(process)
    return found


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").glob("[0-9]*")]


def _look_at(pid: int) -> _Process | None:
    """The process, or None when it is gone."""
    try:
        fields = _stat(pid)
    except OSError:
        return None
    return _Process(pid=pid, parent_pid=int(fields[1]), started_ticks=int(fields[19]))


def _runs(process: _Process) -> bool:
    """Whether any of its threads can still do something."""
    try:
        fields = _stat(process.pid)
        num_threads = len(os.listdir(f"/proc/{process.pid}/task"))
    except OSError:
        return False
    if int(fields[19]) != process.started_ticks:
        return False
    # Threads may finish a system call after the first of them is a zombie: a file it creates.
    return fields[0] not in "ZX" or num_threads > 1


def _stat(pid: int) -> list[str]:
    # The name, the second field, may hold spaces and parentheses; what follows it does not.
    return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()
