"""Telling the driver how this rank is getting on, off the training thread."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch

from elastic.training.compilation import Compilation
from elastic.training.coordinator import Coordinator

_INTERVAL_S = 0.25
_MOST_PER_S = 400.0


class Reporter:
    """Sends a heartbeat (phase, step and, of rank 0, metrics) four times a second, and when asked.

    The training thread only writes attributes and appends rows, which costs it nothing. In a large
    group each rank speaks more seldom: the driver hears all of them.
    """

    def __init__(self, coordinator: Coordinator, *, world_size: int = 1) -> None:
        self._coordinator = coordinator
        self._interval_s = max(_INTERVAL_S, world_size / _MOST_PER_S)
        self._lock = threading.Lock()
        self._rows: list[dict[str, Any]] = []
        self._closed = threading.Event()
        self._phase = ("build", time.monotonic())
        self._slowest_s: dict[str, float] = {}
        self._compilation = Compilation()
        self.step = -1
        """The last finished step."""
        self.counters: dict[str, int] = {}
        self.num_bytes = 0
        """What this rank's saves and loads move."""
        self.save_begun_s: float | None = None
        """Since when a save is on its way, monotonic; None without one."""
        self._thread = threading.Thread(target=self._run, name="elastic-reporter", daemon=True)
        self._thread.start()

    @property
    def phase(self) -> str:
        """What this rank is doing: build, load, first batch, data, first step, forward-backward,
        optimizer, save, evaluation or end."""
        return self._phase[0]

    @phase.setter
    def phase(self, phase: str) -> None:
        before, since_s = self._phase
        now_s = time.monotonic()
        self._phase = (phase, now_s)
        if now_s - since_s > self._slowest_s.get(before, 0.0):
            self._slowest_s[before] = now_s - since_s

    def moves(self, num_bytes: int) -> None:
        """Tell how much the save or load that begins will move, of this rank."""
        self.num_bytes = num_bytes

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Have the optimizer's steps be a phase of their own."""

        def before(*_: object) -> None:
            if self.phase == "forward-backward":
                self.phase = "optimizer"

        def after(*_: object) -> None:
            if self.phase == "optimizer":
                self.phase = "forward-backward"

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)

    def add_row(self, step: int, values: dict[str, float]) -> None:
        """Queue the metrics of one finished step."""
        with self._lock:
            self._rows.append({"step": step, "time_s": time.time(), "values": values})

    def flush(self) -> None:
        """Send now what there is. Callable from any thread."""
        with self._lock:
            rows, self._rows = self._rows, []
            heartbeat = self._heartbeat()
            self._coordinator.notify(
                "progress",
                {
                    "heartbeat": heartbeat,
                    "phase": heartbeat["phase"],
                    "step": self.step,
                    "counters": self.counters,
                    "rows": rows,
                },
            )

    def _heartbeat(self) -> dict[str, Any]:
        """See `elastic.policy.hangs.Heartbeat`."""
        now_s = time.monotonic()
        phase, since_s = self._phase
        compiling_s = self._compilation.since_s
        if compiling_s is not None:
            phase, since_s = "compile", compiling_s
        save_begun_s = self.save_begun_s
        return {
            "phase": phase,
            "age_s": now_s - since_s,
            "slowest_s": dict(self._slowest_s),
            "num_bytes": self.num_bytes,
            "save_age_s": None if save_begun_s is None else now_s - save_begun_s,
        }

    def close(self) -> None:
        """Send the rest and end the thread."""
        self._closed.set()
        self._thread.join(timeout=5.0)
        self._compilation.close()
        self.flush()

    def _run(self) -> None:
        while not self._closed.wait(self._interval_s):
            self._compilation.listen()
            self.flush()
