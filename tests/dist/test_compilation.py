"""A compilation is told as a phase of its own, and is over when it ends."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from elastic.training.compilation import Compilation
from elastic.training.reporter import Reporter


def test_torch_compile_is_seen_while_it_works():
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))  # as a user's code imports it
    compilation = Compilation()
    compilation.listen()
    compilation.listen()  # again and again, with each heartbeat
    seen: list[float | None] = []

    def backend(module: torch.fx.GraphModule, inputs: list[torch.Tensor]):
        seen.append(compilation.since_s)
        return module

    torch.compile(lambda x: x * 2, backend=backend)(torch.ones(2))
    assert len(seen) == 1 and seen[0] is not None and seen[0] <= time.monotonic()
    assert compilation.since_s is None
    compilation.close()
    torch.compile(lambda x: x * 3, backend=backend)(torch.ones(3))
    assert seen[1:] == [None]  # nobody listens any more


class Listener:
    """What a rank tells its driver."""

    def __init__(self) -> None:
        self.phases: list[str] = []

    def notify(self, kind: str, data: Mapping[str, Any]) -> None:
        self.phases.append(data["phase"])


def test_the_phase_that_people_are_told_of_is_the_compilation():
    listener = Listener()
    reporter = Reporter(listener)
    reporter.phase = "first step"
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
    reporter._compilation.listen()  # else with the next heartbeat

    def backend(module: torch.fx.GraphModule, inputs: list[torch.Tensor]):
        reporter.flush()
        return module

    torch.compile(lambda x: x * 5, backend=backend)(torch.ones(5))
    reporter.close()
    assert "compile" in listener.phases and listener.phases[-1] == "first step"
