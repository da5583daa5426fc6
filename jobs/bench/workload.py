"""The model, the data and the optimizer that every engine trains: one decoder-shaped stack on
made-up tokens.

What differs between engines is who forms the group, saves and loads; that is theirs, and not here.
Must not import ray or elastic.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

NUM_CLASSES, LENGTH, GLOBAL_BATCH = 512, 16, 12
# Float32: the parameter, and the two moments that AdamW keeps of it.
STATE_BYTES_PER_PARAMETER = 3 * 4
BULK_WIDTH, BULK_ROWS = 1024, 4096


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        change: torch.Tensor = self.narrow(nn.functional.gelu(self.widen(self.norm(x))))
        return x + change


class Bulk(nn.Module):
    """A parameter that no token passes through: it is held, stepped, saved and loaded as any other,
    and is never gathered, so that a model with gigabytes of state still takes short steps.
    """

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_rows, BULK_WIDTH, device="meta"))
        self._gradient: torch.Tensor | None = None

    @torch.no_grad()
    def fill(self) -> None:
        """Make this rank's shard, once the parameter is sharded: the whole is in no memory."""
        self.to_empty(device="cpu")
        self.weight.fill_(0.01)

    def give_gradient(self) -> None:
        if self._gradient is None:
            self._gradient = torch.full_like(self.weight, 1e-3)
        self.weight.grad = self._gradient


class Model(nn.Module):
    """Token ids `[batch, length]` in, logits `[batch, length, NUM_CLASSES]` out.

    `state_bytes` is what model and optimizer hold in all, over all ranks, to the nearest 12 KB; a
    number below that of the blocks adds nothing to them.
    """

    def __init__(self, width: int, num_blocks: int, state_bytes: int = 0) -> None:
        super().__init__()
        self.embed = nn.Embedding(NUM_CLASSES, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.head = nn.Linear(width, NUM_CLASSES)
        num_parameters = sum(parameter.numel() for parameter in self.parameters())
        missing = state_bytes // STATE_BYTES_PER_PARAMETER - num_parameters
        self.bulk = nn.ModuleList(Bulk(rows) for rows in _rows(max(0, missing) // BULK_WIDTH))

    def bulks(self) -> list[Bulk]:
        return [bulk for bulk in self.bulk if isinstance(bulk, Bulk)]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits


def _rows(num_rows: int) -> list[int]:
    """In pieces of at most BULK_ROWS, for one huge tensor is no model's."""
    full, rest = divmod(num_rows, BULK_ROWS)
    return [BULK_ROWS] * full + [rest] * (rest > 0)


def build_model(
    mesh: DeviceMesh, *, width: int = 256, num_blocks: int = 4, state_bytes: int = 0
) -> Model:
    """The model with the same weights in every run, sharded block by block over `mesh`."""
    torch.manual_seed(0)
    model = Model(width, num_blocks, state_bytes)
    for block in [*model.blocks, *model.bulk]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for bulk in model.bulks():
        bulk.fill()
    return model


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def backward(model: Model, loss: torch.Tensor) -> None:
    """Gradients of the loss, and those of the bulk, which has no part in it."""
    loss.backward()
    for bulk in model.bulks():
        bulk.give_gradient()


def loss_sum(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits: torch.Tensor = model(batch["input_ids"])
    return nn.functional.cross_entropy(
        logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum"
    )


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """`num_samples` samples, each a function of its index alone."""

    def __init__(self, num_samples: int = 4096) -> None:
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(LENGTH + 1) * 31 + index * 7) % NUM_CLASSES
        return {"input_ids": tokens[:-1], "labels": tokens[1:]}


def batch_of(samples: Samples, step: int, rank: int, world_size: int) -> dict[str, torch.Tensor]:
    """This rank's share of the global batch of `step`, for loops that have no loader of ours."""
    share = GLOBAL_BATCH // world_size
    first = step * GLOBAL_BATCH + rank * share
    batch: dict[str, torch.Tensor] = torch.utils.data.default_collate(
        [samples[(first + i) % len(samples)] for i in range(share)]
    )
    return batch


def train_step(
    model: Model, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]
) -> None:
    """One optimizer step as a rival does it: the loss is this rank's mean, FSDP2 averages."""
    backward(model, loss_sum(model, batch) / batch["labels"].numel())
    optimizer.step()
    optimizer.zero_grad()


class AppState(Stateful):
    """Model, optimizer and step as the rivals give them to DCP, which loads them in place."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer, self.step = model, optimizer, 0

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.step = state["step"]
