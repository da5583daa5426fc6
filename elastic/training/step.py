"""One optimizer step as the training function sees it: its micro-batches, and what it logs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from elastic.training.data import MicroBatch


class Step:
    """This rank's share of one optimizer step. Iterate over it for the micro-batches.

    Every rank gets the same number of micro-batches, the last of them padding where a rank's share
    is smaller: run them like the others, they weigh nothing.
    """

    def __init__(
        self,
        *,
        number: int,
        batches: Sequence[MicroBatch],
        num_valid_tokens: Callable[[], int],
        device: torch.device,
        between: Callable[[], None] | None = None,
    ) -> None:
        self._between = between
        self.number = number
        """Which optimizer step this is, counted from 1 over the whole run."""
        self._batches = batches
        self._num_valid_tokens = num_valid_tokens
        self._device = device
        self._sums: dict[str, torch.Tensor] = {}
        self._values: dict[str, float | torch.Tensor] = {}

    def __iter__(self) -> Iterator[Any]:
        for index, batch in enumerate(self._batches):
            if index and self._between is not None:
                self._between()
            yield batch.batch

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def num_valid_tokens(self) -> int:
        """Valid tokens in the whole global batch, over all ranks: divide a summed loss by it."""
        return self._num_valid_tokens()

    def every(self, num_steps: int) -> bool:
        """Whether the step's number is a multiple of `num_steps`."""
        return self.number % num_steps == 0

    def log(self, **values: torch.Tensor | float) -> None:
        """Add to metrics that are summed over the micro-batches and the ranks, once for each
        tensor-parallel group.

        All ranks must log the same names. Nothing is read off the device here.
        """
        for name, value in values.items():
            if isinstance(value, DTensor):
                value = value.full_tensor()
            tensor = torch.as_tensor(value, device=self._device).detach().to(torch.float64)
            held = self._sums.get(name)
            self._sums[name] = tensor if held is None else held + tensor

    def record(self, **values: torch.Tensor | float) -> None:
        """Set metrics that are not summed, as rank 0 sees them, such as a learning rate."""
        for name, value in values.items():
            if isinstance(value, DTensor):
                value = value.full_tensor()
            self._values[name] = value.detach() if isinstance(value, torch.Tensor) else value

    @property
    def grad_norm(self) -> float | torch.Tensor | None:
        """The gradient norm that the training function has recorded, if it has."""
        return self._values.get("grad_norm")

    @grad_norm.setter
    def grad_norm(self, value: torch.Tensor | float) -> None:
        self.record(grad_norm=value)

    def metrics(self, group: dist.ProcessGroup, *, is_counted: bool = True) -> PendingMetrics:
        """Start summing what was logged over the ranks that are counted, without waiting for it."""
        sums = self._sums if is_counted else {n: torch.zeros_like(v) for n, v in self._sums.items()}
        return PendingMetrics(sums, self._values, group)


class PendingMetrics:
    """Metrics of one step on their way; `read` waits for them."""

    def __init__(
        self,
        sums: dict[str, torch.Tensor],
        values: dict[str, float | torch.Tensor],
        group: dist.ProcessGroup,
    ) -> None:
        self._names = sorted(sums)
        self._values = values
        self._vector = None
        self._work = None
        if self._names:
            self._vector = torch.stack([sums[name].reshape(()) for name in self._names])
            # On CUDA the default group sums on the device, so that nothing waits for the step.
            over = dist.group.WORLD if self._vector.is_cuda else group
            self._work = dist.all_reduce(self._vector, group=over, async_op=True)

    def read(self) -> dict[str, float]:
        """The metrics by name."""
        found: dict[str, float] = {name: float(value) for name, value in self._values.items()}
        if self._work is not None and self._vector is not None:
            self._work.wait()
            found.update(zip(self._names, self._vector.tolist(), strict=True))
        return found
