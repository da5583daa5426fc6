"""A compilation is told as a phase of its own, and is over when it ends."""

from __future__ import annotations

import time

import torch

from elastic.training.compilation import Compilation


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
