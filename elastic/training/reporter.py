"""Telling the driver how this rank is getting on, off the training thread."""

from __future__ import annotations

import threading
import time
from typing import Any

from elastic.training.coordinator import Coordinator


class Reporter:
    """Sends phase, step and (rank 0) metrics every `interval_s`, and when asked to.

    The training thread only writes attributes and appends rows, which costs it nothing.
    """

    def __init__(self, coordinator: Coordinator, *, interval_s: float = 0.25) -> None:
        self._coordinator = coordinator
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._rows: list[dict[str, Any]] = []
        self._closed = threading.Event()
        self.phase = "build"
        """What this rank is doing: build, load, data, forward-backward, save, evaluation, end."""
        self.step = -1
        """The last finished step."""
        self.counters: dict[str, int] = {}
        self._thread = threading.Thread(target=self._run, name="elastic-reporter", daemon=True)
        self._thread.start()

    def add_row(self, step: int, values: dict[str, float]) -> None:
        """Queue the metrics of one finished step."""
        with self._lock:
            self._rows.append({"step": step, "time_s": time.time(), "values": values})

    def flush(self) -> None:
        """Send now what there is. Callable from any thread."""
        with self._lock:
            rows, self._rows = self._rows, []
            self._coordinator.notify(
                "progress",
                {
                    "phase": self.phase,
                    "step": self.step,
                    "counters": self.counters,
                    "rows": rows,
                },
            )

    def close(self) -> None:
        """Send the rest and end the thread."""
        self._closed.set()
        self._thread.join(timeout=5.0)
        self.flush()

    def _run(self) -> None:
        while not self._closed.wait(self._interval_s):
            self.flush()
