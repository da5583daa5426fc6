"""The fan-out: all that a run tells, handed to each of its loggers on a thread of the logger's own.

A logger that raises is let go with a warning. One that is slow holds nobody up: what it is told
waits in line, and is left out when the line is too long.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

from elastic.storage.filesystem import Filesystem
from elastic.storage.metrics import MetricsWriter
from elastic.training.loggers.logger import Logger

logger = logging.getLogger("elastic")

_MOST_WAITING = 100_000
_FLUSH_S = 1.0
_CLOSE_S = 5.0
_ANSWER = "answer"
_COSTS = ("old_world_size", "new_world_size", "lost_steps")


class FanOut:
    """Several loggers as one. Callable from any thread; raises nothing."""

    def __init__(self, loggers: Iterable[Logger]) -> None:
        self._lines = [_Line(one) for one in loggers]

    def rewind(self, step: int) -> None:
        """See `Logger`."""
        self._each("rewind", step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See `Logger`."""
        self._each("log", step, dict(values))

    def flush(self) -> None:
        """Waits a moment for each that has kept up so far."""
        until_s = time.monotonic() + _FLUSH_S
        for line in self._lines:
            line.flush(until_s)

    def close(self) -> None:
        """Waits some seconds for all together."""
        until_s = time.monotonic() + _CLOSE_S
        for line in self._lines:
            line.put("close")
        for line in self._lines:
            line.join(until_s)

    def heard(self, kind: str, step: int, reason: str, data: Mapping[str, Any]) -> None:
        """A word of the ledger: a restart that is over, or the failure of the run, is annotated."""
        if kind == "recovered":
            self._each("annotate", max(0, step), _restart_text(reason, data))
        elif kind == "run_failed":
            self._each("annotate", max(0, step), f"the run failed: {reason}")

    def _each(self, what: str, *arguments: Any) -> None:
        for line in self._lines:
            line.put(what, *arguments)


class FannedOutMetrics(MetricsWriter):
    """The metrics of a run, which its loggers are told as well."""

    def __init__(self, fs: Filesystem, loggers: FanOut) -> None:
        super().__init__(fs)
        self._loggers = loggers

    def start(self, generation: int, step: int, time_s: float) -> None:
        """As the base class says; loggers forget this step and later ones."""
        super().start(generation, step, time_s)
        self._loggers.rewind(step)

    def add(self, generation: int, step: int, time_s: float, values: Mapping[str, float]) -> None:
        """As the base class says."""
        super().add(generation, step, time_s, values)
        self._loggers.log(step, values)

    def flush(self) -> list[str]:
        """As the base class says."""
        written = super().flush()
        self._loggers.flush()
        return written


class _Line:
    """One logger, and what it has not been told yet."""

    def __init__(self, told: Logger) -> None:
        self._told = told
        self._waiting: queue.Queue[tuple[str, tuple[Any, ...]]] = queue.Queue(_MOST_WAITING)
        self._flushed = threading.Event()
        self._flushed.set()
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="elastic-logger", daemon=True)
        self._thread.start()

    def put(self, what: str, *arguments: Any) -> None:
        if self._is_over:
            return
        try:
            self._waiting.put_nowait((what, arguments))
        except queue.Full:
            self._end(f"is {_MOST_WAITING:,} words behind")

    def flush(self, until_s: float) -> None:
        has_kept_up, done = self._flushed.is_set(), threading.Event()
        self._flushed = done
        self.put("flush")
        self.put(_ANSWER, done.set)
        if has_kept_up and not self._is_over:
            done.wait(max(0.0, until_s - time.monotonic()))

    def join(self, until_s: float) -> None:
        self._thread.join(max(0.0, until_s - time.monotonic()))

    def _run(self) -> None:
        while not self._is_over:
            what, arguments = self._waiting.get()
            try:
                if what == _ANSWER:
                    arguments[0]()
                else:
                    getattr(self._told, what)(*arguments)
            except Exception as error:  # noqa: BLE001 - loggers are other people's code
                self._end(f"raised {type(error).__name__} in {what}: {error}")
            if what == "close":
                return

    def _end(self, why: str) -> None:
        self._is_over = True
        name = type(self._told).__name__
        logger.warning("the logger %s %s; it is told nothing more, the run goes on", name, why)


def _restart_text(reason: str, data: Mapping[str, Any]) -> str:
    took = data.get("phases_s")
    took_s = sum(took.values()) if isinstance(took, Mapping) else 0.0
    old, new, lost = (data.get(name) for name in _COSTS)
    steps = "step" if lost == 1 else "steps"
    return (
        f"restarted: {reason}. {old} -> {new} workers in {took_s:.1f} s, {lost} {steps} done again"
    )
