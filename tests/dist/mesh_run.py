"""A small model on any mesh: tensor-parallel where there is such a dimension, and sharded by FSDP2.

Dims 10, 5 and 1: uneven over 3 and 4 ranks, and smaller than the number of ranks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from elastic.policy.mesh import TENSOR, Mesh, MeshShape
from elastic.training import process_group
from elastic.training.clipping import clip_grad_norm_
from elastic.training.gradients import prepare_fsdp
from elastic.training.membership import Membership
from elastic.training.meshes import check_sharding, forget_meshes
from elastic.training.process_group import Groups
from elastic.training.run import Run

GLOBAL_BATCH = 12


@dataclass(frozen=True)
class Layout:
    """A mesh at a world size."""

    size: int
    mesh: Mesh

    @property
    def shape(self) -> MeshShape:
        return self.mesh.shape(self.size)

    def __str__(self) -> str:
        return str(self.shape)


LAYOUTS = [
    Layout(1, Mesh()),
    Layout(2, Mesh()),
    Layout(3, Mesh()),
    Layout(4, Mesh()),
    Layout(4, Mesh(shard=2)),
    Layout(4, Mesh(tensor=2)),
    Layout(2, Mesh(tensor=2)),
    Layout(4, Mesh(shard=1, tensor=2)),
]


class Model(nn.Module):
    """Two layers for tensor parallelism, and parameters that take no part in it."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 10)
        self.down = nn.Linear(10, 5)
        self.norm = nn.LayerNorm(5)
        self.head = nn.Linear(5, 1)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.down(torch.tanh(self.up(x))))
        return self.head(x) * self.scale


def spread(model: Model, mesh: DeviceMesh, data_mesh: DeviceMesh, shape: MeshShape) -> Model:
    """The model on the mesh, as a training function would put it there."""
    if TENSOR in shape.names:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, mesh[TENSOR], plan)
    for layer in (model.up, model.down, model.head):
        fully_shard(layer, mesh=data_mesh)
    fully_shard(model, mesh=data_mesh)
    prepare_fsdp(model)
    check_sharding(model, mesh, shape)
    return model


def built(groups: Groups, seed: int, dtype: torch.dtype = torch.float32) -> Model:
    """A model of this seed on the mesh of these groups."""
    torch.manual_seed(seed)
    shape = groups.shape
    return spread(Model().to(dtype), groups.mesh, groups.mesh[shape.data_names], shape)


@contextmanager
def generation(number: int, rank: int, layout: Layout, folder: str) -> Iterator[Groups]:
    """The process groups of a generation, as a worker makes and leaves them.

    `rank` is this process's rank in it, whatever it was before.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    server = process_group.open_store("127.0.0.1") if rank == 0 else None
    told = Path(folder, f"port-{number}")
    if server is not None:
        told.with_suffix(".part").write_text(str(server.port))
        told.with_suffix(".part").rename(told)
    while not told.exists():
        time.sleep(0.005)
    member = Membership(
        run_id="run",
        generation=number,
        world_rank=rank,
        world_size=layout.size,
        local_rank=rank,
        local_world_size=layout.size,
        node_rank=0,
        store_host="127.0.0.1",
        store_port=int(told.read_text()),
        resume_step=None,
    )
    yield process_group.connect(
        member, use_cuda=False, timeout_s=60.0, mesh=layout.mesh, server=server
    )
    dist.destroy_process_group()
    forget_meshes()


def data(step: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The global batch of a step: inputs and targets."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(GLOBAL_BATCH, 4, generator=generator, dtype=torch.float64)
    return inputs.to(dtype), inputs.sum(1, keepdim=True).to(dtype)


def backward(model: nn.Module, step: int, shape: MeshShape, rank: int) -> None:
    """Gradients of the mean loss of the global batch, of which each rank takes its share."""
    inputs, targets = data(step, next(model.parameters()).dtype)
    part, parts = shape.data_rank(rank), shape.data_size
    start, stop = GLOBAL_BATCH * part // parts, GLOBAL_BATCH * (part + 1) // parts
    loss = (model(inputs[start:stop]) - targets[start:stop]).square().sum() / GLOBAL_BATCH
    loss.backward()


class Points:
    """Map-style: item i is a vector that only i decides; every seventh has no valid label."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> dict[str, Any]:
        x = torch.randn(4, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
        label = -100 if index % 7 == 0 else index % 3
        return {"x": x, "labels": torch.tensor(label), "index": index}


def train_points(run: Run, mesh: Mesh, until: int) -> Iterator[tuple[int, list[int]]]:
    """A whole training in float64; after each step its number and this rank's samples."""
    shape = mesh.shape(run.world_size)
    model = spread(Model().to(torch.float64), run.mesh, run.data_mesh, shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    loader = run.loader(Points(), global_batch=10, micro_batch=2)
    for step in run.steps(loader, until=until):
        indices = []
        for batch in step:
            indices += batch["index"].tolist()
            is_valid = batch["labels"] != -100
            off = (model(batch["x"]).squeeze(1) - batch["labels"]) * is_valid
            loss = off.square().sum() / step.num_valid_tokens
            loss.backward()
            step.log(loss=loss, valid=is_valid.sum())
        step.grad_norm = clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        yield step.number, indices
