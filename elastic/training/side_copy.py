"""Side copy: copies off a CUDA device that run beside the next forward and backward.

Only the optimizer changes parameters and its own state, so their copies need to be complete no
sooner than its next step, which waits for them on the device. Untested: it needs a GPU. Must not
import ray.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

__all__ = ["FusedIntoBackward", "Pair", "SideCopy"]

Pair = tuple[torch.Tensor, torch.Tensor]
"""A place in host memory, and what is to be copied there."""


class FusedIntoBackward(ValueError):
    """The optimizer steps during the backward pass, which a copy beside it would not survive."""


class SideCopy:
    """One copy at a time, on streams of its own."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._events: list[tuple[torch.device, torch.cuda.Event]] = []
        self._hooks: list[Any] = []

    def follow(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Their steps wait for what has been begun; those of earlier ones no longer do.

        Raises `FusedIntoBackward` for one whose parameters are on a CUDA device.
        """
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for optimizer in optimizers:
            _refuse_fused(optimizer)
            self._hooks.append(optimizer.register_step_pre_hook(self._hold))

    @torch.no_grad()
    def begin(self, pairs: Sequence[Pair]) -> Callable[[], None]:
        """Begins to copy, after all that the current streams have been given so far.

        What it returns waits, in any thread, until the copies are complete.
        """
        events = []
        for device in {source.device for _, source in pairs}:
            stream = self._streams.setdefault(device, torch.cuda.Stream(device))
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                for copy, source in pairs:
                    if source.device == device:
                        copy.copy_(source, non_blocking=True)
                        source.record_stream(stream)  # freed meanwhile, its memory is not reused
            event = torch.cuda.Event()
            event.record(stream)
            events.append((device, event))
        self._events = events

        def wait() -> None:
            for _, event in events:
                event.synchronize()

        return wait

    def _hold(self, *_: object) -> None:
        """Lets the step begin when the copies are complete; the host goes on."""
        for device, event in self._events:
            torch.cuda.current_stream(device).wait_event(event)
        self._events = []


def _refuse_fused(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.is_cuda and getattr(parameter, "_post_accumulate_grad_hooks", None):
                raise FusedIntoBackward(
                    f"a parameter of {type(optimizer).__name__} has a hook that runs when its "
                    "gradient is complete, as an optimizer fused into the backward pass has: "
                    "expected parameters that only optimizer.step() changes, since they are saved "
                    "while the next backward runs. Step the optimizer after the backward pass"
                )
