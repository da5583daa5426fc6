"""A small odd-shaped run for tests of state: dims 7, 5, 3, 1, sharded or not, and its digest."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from elastic.storage.checkpoints import FileDigest, Manifest
from elastic.storage.filesystem import Filesystem
from elastic.training.checkpoint import AsyncSaver, Restored, describe, load
from elastic.training.gradients import prepare_fsdp
from elastic.training.jsonable import dumps
from elastic.training.state import TrackedState

GLOBAL_BATCH = 12


class Small(nn.Module):
    """A layer per width, one without bias, a norm, a (1,) parameter and buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Linear(4, 7), nn.Linear(7, 5, bias=False), nn.Linear(5, 3), nn.Linear(3, 1)]
        )
        self.norm = nn.LayerNorm(7)
        self.scale = nn.Parameter(torch.ones(1))
        self.unused = nn.Linear(3, 5)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.arange(3.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        x = self.norm(torch.tanh(self.layers[0](x)))
        for layer in self.layers[1:]:
            x = layer(torch.tanh(x))
        return x * self.scale


def shard(model: nn.Module, layers: Sequence[nn.Module] = ()) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def small(*, sharded: bool = True, seed: int = 0) -> Small:
    torch.manual_seed(seed)
    model = Small()
    if sharded:
        shard(model, list(model.layers))
        prepare_fsdp(model)
    return model


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, *rest: Callable[[], Any]
) -> list[float]:
    """Losses of the whole global batch at each step; the same at every world size."""
    losses = []
    for step in steps:
        loss = backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
        for call in rest:
            call()
        losses.append(loss)
    return losses


def backward(model: nn.Module, step: int) -> float:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(GLOBAL_BATCH, 4, generator=generator)
    targets = inputs.sum(1, keepdim=True)
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    start, stop = GLOBAL_BATCH * rank // size, GLOBAL_BATCH * (rank + 1) // size
    loss = (model(inputs[start:stop]) - targets[start:stop]).square().sum() / GLOBAL_BATCH
    loss.backward()
    total = loss.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(total)
    return total.item()


def content(tracked: TrackedState) -> dict[str, Any]:
    """Everything tracked, whole and comparable with ==, whatever the world size."""
    captured = tracked.capture()
    found: dict[str, Any] = {name: whole(tensor) for name, tensor in captured.tensors.items()}
    found["plain"] = dumps(_without_layout(captured.plain))
    return found


def _without_layout(value: Any) -> Any:
    """Whether a tensor was sharded when it was saved is no part of the state itself."""
    if isinstance(value, dict):
        left_out = ("kind", "layout", "like")
        return {k: _without_layout(v) for k, v in value.items() if k not in left_out}
    return [_without_layout(item) for item in value] if isinstance(value, list) else value


def whole(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], str]:
    full = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().contiguous()
    data = full.flatten().view(torch.uint8).numpy().tobytes() if full.numel() else b""
    return str(full.dtype), tuple(full.shape), hashlib.sha256(data).hexdigest()


def save(
    folder: Path,
    path: str,
    tracked: TrackedState,
    *,
    saver: AsyncSaver | None = None,
    plain: dict[str, Any] | None = None,
    rank_plain: dict[str, Any] | None = None,
) -> Manifest:
    """A finished save and its manifest, as the driver would make it from all ranks' reports."""
    captured = tracked.capture()
    handle = (saver or AsyncSaver(save_group())).save(
        Filesystem.at(str(folder)),
        path,
        captured.tensors,
        plain={"tracked": captured.plain, **(plain or {})},
        rank_plain=rank_plain or {},
        rank=dist.get_rank() if dist.is_initialized() else 0,
    )
    return manifest_of(handle.files(60), describe(captured.tensors))


def save_group() -> dist.ProcessGroup | None:
    return dist.new_group(backend="gloo") if dist.is_initialized() else None


def manifest_of(files: list[FileDigest], tensors: dict[str, Any] | None = None) -> Manifest:
    everyone: list[Any] = [files]
    if dist.is_initialized():
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, files)
    return Manifest(
        run_id="run",
        step=1,
        world_size=len(everyone),
        generation=0,
        attempt=1,
        created_s=0.0,
        counters={},
        tensors=tensors or {},
        files=[file for rank in everyone for file in rank],
    )


def restore(folder: Path, path: str, manifest: Manifest, tracked: TrackedState) -> Restored:
    group = dist.group.WORLD if dist.is_initialized() else None
    return load(Filesystem.at(str(folder)), path, manifest, tracked, group)
