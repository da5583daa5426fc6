"""The site of one measurement: a directory, and an environment that marks all that starts there.

On the way out nothing is left of it, neither files nor processes. Must not import ray, torch or
elastic.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from jobs.bench.processes import Processes


@contextlib.contextmanager
def measurement_directory() -> Iterator[Path]:
    """A directory for one measurement; on the way out all that was started within is killed.

    For engines that need no cluster; a cluster has a directory of its own.
    """
    with sigterm_exits(), site() as (directory, _):
        yield directory


@contextlib.contextmanager
def site() -> Iterator[tuple[Path, Processes]]:
    """A directory and what is started for it; on the way out neither is left."""
    processes = Processes()
    # Ray puts sockets below it, and a socket's path may have 107 characters: a long TMPDIR would
    # not do.
    directory = tempfile.mkdtemp(prefix="bench-", dir="/tmp" if os.path.isdir("/tmp") else None)
    with contextlib.ExitStack() as undo:
        undo.callback(_remove, directory)
        undo.callback(processes.kill)
        undo.enter_context(environment({**processes.environment, "RAY_USAGE_STATS_ENABLED": "0"}))
        yield Path(directory), processes


def _remove(directory: str, deadline_s: float = 5.0) -> None:
    until_s = time.monotonic() + deadline_s
    while os.path.exists(directory) and time.monotonic() < until_s:
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def environment(changes: Mapping[str, str]) -> Iterator[None]:
    """This process's environment with `changes`, and afterwards what it was."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def sigterm_exits() -> Iterator[Callable[[], None]]:
    """SIGTERM becomes an exit that cleans up. Call what it gives after starting Ray nodes.

    Each of them puts a handler of its own in the place of ours, one that drains first.
    """
    before = signal.getsignal(signal.SIGTERM)

    def leave(signum: int, frame: object) -> None:
        raise SystemExit(128 + signum)

    def install() -> None:
        signal.signal(signal.SIGTERM, leave)

    install()
    try:
        yield install
    finally:
        signal.signal(signal.SIGTERM, before)
