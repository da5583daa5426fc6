"""What a rank says of itself when its group stands still, also on a machine that has no time."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from elastic.policy.culprits import find_culprits
from elastic.training.inspection import TrainingThread, inspect

NUM_OTHERS = 8
"""Processes that want the same processor: each gets a ninth of it, a share that looks like rest."""


@pytest.mark.parametrize("kind", ["loop", "blocked"])
def test_a_loop_is_told_from_a_wait_where_others_take_the_processor(kind: str):
    end = threading.Event()

    def loop() -> None:
        while not end.is_set():
            pass

    with crowded_processor(), started({"loop": loop, "blocked": end.wait}[kind], end) as thread:
        (found,) = find_culprits([inspect(thread, 0, "forward-backward")])
    assert found.kind == kind
    assert "test_inspection.py" in found.text


@contextmanager
def crowded_processor() -> Iterator[None]:
    """This thread, and those it starts, share one processor with others that never rest."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    command = [sys.executable, "-S", "-c", "print(flush=True)\nwhile True: pass"]
    with ExitStack() as stack:
        stack.callback(os.sched_setaffinity, 0, allowed)
        others = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(NUM_OTHERS)]
        for other in others:
            stack.enter_context(other)
            stack.callback(other.kill)
        for other in others:
            assert other.stdout is not None and other.stdout.readline()  # it is at it
        yield


@contextmanager
def started(function: Callable[[], object], end: threading.Event) -> Iterator[TrainingThread]:
    """A thread that is inside the function until `end` is set."""
    found: list[TrainingThread] = []
    begun = threading.Event()

    def run() -> None:
        found.append(TrainingThread.current())
        begun.set()
        function()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert begun.wait(30)
        yield found[0]
    finally:
        end.set()
        thread.join()
