"""An observed run: the handle of a training function that is rehearsed, and what it gives away.

Behaves as `Run` does, but ends at the rehearsal's last step, can be held at a step to be killed
there, and notes on the way whatever may tell later why two runs part. Must not import ray.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from elastic.training.data import GlobalLoader
from elastic.training.rehearsal import digest, holdings
from elastic.training.rehearsal.notes import Notebook, as_data
from elastic.training.run import Run
from elastic.training.step import Step

# Later than the step asked for, for a loop of the user's own: it is seen only at its ends of steps.
_LOOKS = 2


class Enough(BaseException):
    """The rehearsal is over for this loop. Not an `Exception`: see `Reform`."""


class ObservedRun(Run):
    """A run that takes notes."""

    def __init__(
        self,
        *,
        function: Callable[..., None],
        notebook: Notebook,
        last_step: int,
        look_at: int,
        reached: Callable[[int], None],
        hold_at: int | None,
        held: Callable[[], None],
        **arguments: Any,
    ) -> None:
        """`look_at`: the step at whose start to look at all that the function holds. `hold_at`: the
        step at whose start to tell `held` and stand still."""
        super().__init__(**arguments)
        self._function = function
        self._notebook = notebook
        self._last_step = last_step
        self._look_at = look_at
        self._told_reached = reached
        self._hold_at = hold_at
        self._held = held
        self._objects: dict[str, Any] = {}
        self._optimizers: dict[str, Optimizer] = {}
        self._inputs: list[str] = []
        self._num_rows = 0

    # --- what the training function calls -----------------------------------------------------

    def track(self, **objects: Any) -> None:
        """See `Run.track`."""
        super().track(**objects)
        self._objects = objects
        modules = [value for value in objects.values() if isinstance(value, nn.Module)]
        for module in modules:
            self._watch(module)
        tracked = {name: value for name, value in objects.items() if isinstance(value, Optimizer)}
        known = {id(value) for value in tracked.values()}
        others = [
            value
            for value in gc.get_objects()
            if issubclass(type(value), Optimizer) and id(value) not in known
        ]
        self._optimizers = {**tracked, **{f"optimizer {i + 1}": o for i, o in enumerate(others)}}
        data = {"tracked": sorted(objects), "dtype": _narrowest_dtype(modules)}
        self._notebook.write("built", self.step, data)

    def steps(
        self,
        loader: GlobalLoader,
        until: int | None = None,
        *,
        until_samples: int | None = None,
        until_tokens: int | None = None,
    ) -> Iterator[Step]:
        """See `Run.steps`."""
        last = self._last_step if until is None else min(until, self._last_step)
        inner = super().steps(loader, last, until_samples=until_samples, until_tokens=until_tokens)
        with contextlib.closing(inner):  # type: ignore[type-var]
            for step in inner:
                self._begin(step.number, sys._getframe(1), [each.batch for each in step._batches])
                yield step
                self._finish(step.number)

    def end_step(self, *, samples: int, tokens: int = 0) -> None:
        """See `Run.end_step`."""
        super().end_step(samples=samples, tokens=tokens)
        # Such a loop logs nothing, and something must be compared.
        norm = self._norm_of_parameters()
        if self.world_rank == 0:
            self._reporter.add_row(self.step, {"parameter_norm": norm})
        self._finish(self.step)
        if self.step >= self._last_step:
            raise Enough
        self._begin(self.step + 1, sys._getframe(1), None)

    # --- notes ------------------------------------------------------------------------------------

    def _begin(self, step: int, frame: FrameType, batches: list[Any] | None) -> None:
        seen = {
            "random_streams": digest.of_random_streams(),
            "batches": None if batches is None else [digest.of_tree(batch) for batch in batches],
            "rates": dict(self._rates()),
        }
        self._notebook.write("begin", step, seen)
        if self._look_at <= step < self._look_at + _LOOKS:
            self._look(step, frame)
        if step == self._hold_at:
            self._held()
            while True:
                time.sleep(1.0)

    def _finish(self, step: int) -> None:
        self._notebook.write("finish", step, {"inputs": self._inputs, "num_rows": self._num_rows})
        self._inputs, self._num_rows = [], 0
        self._told_reached(step)

    def _look(self, step: int, frame: FrameType) -> None:
        found = holdings.Holdings(holdings.identities([self, *self._objects.values()]))
        for where, variables in holdings.frames_above(frame):
            found.add(where, variables)
        found.add(*holdings.module_variables(self._function))
        found.add("run.once", {k: v for k, v in self._kept.items() if k != "elastic.saver"})
        found.add_sought()
        self._notebook.write("holdings", step, as_data(found.leaves))
        captured = self._tracked("a rehearsal").capture()
        digests = {name: digest.of_tensor(tensor) for name, tensor in captured.tensors.items()}
        digests |= {name: digest.of_tree(plain) for name, plain in captured.plain.items()}
        self._notebook.write("tracked", step, digests)

    def _rates(self) -> Iterator[tuple[str, float]]:
        for name, optimizer in self._optimizers.items():
            for index, group in enumerate(optimizer.param_groups):
                place = name if len(optimizer.param_groups) == 1 else f"{name} group {index}"
                for key, value in group.items():
                    if key != "params" and (number := _number(value)) is not None:
                        yield f"{key} of {place}", number

    def _watch(self, module: nn.Module) -> None:
        # Not a bound method: a copy of the module copies its hooks, and would copy this run.
        note = self._note_inputs

        def watch(called: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            note([*inputs, named])

        module.register_forward_pre_hook(watch, with_kwargs=True)

    def _note_inputs(self, inputs: list[Any]) -> None:
        if self._reporter.phase != "evaluation":
            self._inputs.append(digest.of_tree(inputs))
            self._num_rows += digest.num_rows(inputs)

    @torch.no_grad()
    def _norm_of_parameters(self) -> float:
        total = 0.0
        for value in self._objects.values():
            if isinstance(value, nn.Module):
                for parameter in value.parameters():
                    norm: Any = torch.linalg.vector_norm(parameter, dtype=torch.float64)
                    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
                    total += float(norm) ** 2
        return float(total**0.5)


def _number(value: Any) -> float | None:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return float(value)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _narrowest_dtype(modules: list[nn.Module]) -> str:
    found = {
        parameter.dtype
        for module in modules
        for parameter in module.parameters()
        if parameter.dtype.is_floating_point
    }
    # By precision, not by size: bfloat16 is coarser than float16.
    coarsest = max(found, key=lambda dtype: torch.finfo(dtype).eps, default=None)
    return str(coarsest).removeprefix("torch.") if coarsest else ""
