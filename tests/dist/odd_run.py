"""A run with every odd piece of state: model, optimizers, schedulers, averages, counters."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    ReduceLROnPlateau,
    SequentialLR,
)
from torch.optim.swa_utils import AveragedModel

from elastic.training.gradients import prepare_fsdp
from elastic.training.meta_device import materialize
from elastic.training.state import TrackedState
from tests.dist.small_run import GLOBAL_BATCH

THAWS_AT = 2
MOVES_AT = 3


class Counting(nn.Module):
    """Extra state: a python number and a tensor that are neither parameters nor buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: dict[str, Any] = {"calls": 0, "scale": torch.zeros(2, device="cpu")}

    def forward(self) -> None:
        self.memory["calls"] += 1
        self.memory["scale"] += 0.5

    def get_extra_state(self) -> Any:
        return self.memory

    def set_extra_state(self, state: Any) -> None:
        self.memory = state


class Odd(nn.Module):
    """M0: dims 7, 5, 3, 1 and 17, tied, frozen, never routed, without bias, split by columns."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Linear(4, 7), nn.Linear(7, 5, bias=False), nn.Linear(5, 3), nn.Linear(3, 1)]
        )
        self.norm = nn.LayerNorm(7)
        self.embedding = nn.Embedding(7, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.wide = nn.Linear(17, 1)
        self.columns = nn.Linear(12, 3, bias=False)
        self.late = nn.Linear(4, 1)
        self.late.requires_grad_(False)
        self.unused = nn.Linear(3, 5)
        self.statistics = nn.BatchNorm1d(3)
        self.counting = Counting()
        self.scale = nn.Parameter(torch.empty(1))
        self.register_buffer("seen", torch.empty((), dtype=torch.int64))
        self.register_buffer("mask", torch.empty(3, dtype=torch.bool))
        self.register_buffer("table", torch.empty(7), persistent=False)

    def reset_parameters(self) -> None:
        self.scale.fill_(1)
        self.seen.zero_()
        self.mask.copy_(torch.tensor([True, False, True]))
        self.table.copy_(table())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        self.counting()
        tokens = (x.abs() * 10).long() % 7
        said = self.head(self.embedding(tokens)).mean(1)
        hidden = self.norm(torch.tanh(self.layers[0](x)) + 0.1 * said) * self.table
        for layer in self.layers[1:3]:
            hidden = layer(torch.tanh(hidden))
        self.statistics(hidden.detach())
        self.mask.logical_not_()
        wide = self.wide(torch.cat([x, x, x, x, x[:, :1]], 1))
        wide = wide + self.columns(torch.cat([x, x, x], 1)).mean(1, keepdim=True)
        return self.layers[3](torch.tanh(hidden)) * self.scale + 0.1 * wide + self.late(x)


def table() -> torch.Tensor:
    return torch.arange(7.0).mul(0.3).cos()


class Counted(torch.optim.Optimizer):
    """Python numbers in the state of parameters, and state of its own in its state_dict."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})
        self.num_steps = 0
        self.largest = torch.zeros(())

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.num_steps += 1
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if parameter.grad is not None:
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                state["decay"] = 1.0 / (state["count"] + self.num_steps)
                state["clip"] = state.get("clip", torch.ones(())) * 0.5
                self.largest += state["decay"]
                parameter -= self.param_groups[0]["lr"] * state["decay"] * parameter.grad

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "num_steps": self.num_steps, "largest": self.largest}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.num_steps, self.largest = state_dict["num_steps"], state_dict["largest"]
        own = ("num_steps", "largest")
        super().load_state_dict({k: v for k, v in state_dict.items() if k not in own})


class Shadow:
    """An average of one's own, whose tensors are made at its first update."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.num_updates = 0

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        self.num_updates += 1
        for name, parameter in model.named_parameters():
            held = self.tensors.setdefault(name, parameter.detach().clone())
            held.lerp_(parameter.detach(), 0.2)

    def state_dict(self) -> dict[str, Any]:
        return {"tensors": self.tensors, "num_updates": self.num_updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensors, self.num_updates = state["tensors"], state["num_updates"]


class Warmth:
    """A schedule as an object, which a scheduler saves by what it holds."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, epoch: int) -> float:
        self.calls += 1
        return float(1 / (1 + 0.1 * epoch + 0.01 * self.calls))


class OddRun:
    """All of it, built as a training function would build it, and how it trains."""

    def __init__(self, *, seed: int = 0) -> None:
        self.model = sharded_odd(seed)
        model = self.model
        norms = [model.norm.weight, model.norm.bias, *model.statistics.parameters()]
        hidden = [*model.layers[0].parameters(), *model.layers[1].parameters()]
        hidden += [*model.layers[2].parameters(), *model.unused.parameters(), model.columns.weight]
        lr = torch.tensor(0.01)
        groups = [{"params": hidden, "lr": lr}, {"params": []}, {"params": norms, "lr": 0.02}]
        self.adamw = torch.optim.AdamW(groups, weight_decay=0.1, foreach=False)
        self.momentum = torch.optim.SGD(model.embedding.parameters(), lr=0.05, momentum=0.9)
        self.sgd = torch.optim.SGD(model.layers[3].parameters(), lr=0.05)
        self.adagrad = torch.optim.Adagrad(model.wide.parameters(), lr=0.05)
        self.counted = Counted([model.scale])
        self.schedulers: dict[str, Any] = {
            "decay": ExponentialLR(self.adamw, 0.9),
            "phases": SequentialLR(
                self.momentum,
                [LinearLR(self.momentum, 0.1, total_iters=3), CosineAnnealingLR(self.momentum, 9)],
                milestones=[3],
            ),
            "warmth": LambdaLR(self.counted, Warmth()),
        }
        self.plateau = ReduceLROnPlateau(self.adagrad, patience=0)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
        self.average = AveragedModel(model_on_meta(), avg_fn=lambda old, new, _: old.lerp(new, 0.1))
        shard_odd(self.average.module)
        materialize(self.average, "cpu", seed=seed)
        self.shadow = Shadow()
        self.counters: dict[str, Any] = {"step": 0, "seen": [], "best": np.float64("inf")}
        self.temperature = torch.ones(3)

    def tracked(self) -> TrackedState:
        return TrackedState(
            model=self.model,
            **self.optimizers(),
            **self.schedulers,
            plateau=self.plateau,
            scaler=self.scaler,
            average=self.average,
            shadow=self.shadow,
            counters=self.counters,
            temperature=self.temperature,
        )

    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        names = ("adamw", "momentum", "sgd", "adagrad", "counted")
        return {name: getattr(self, name) for name in names}

    def train(self, steps: range) -> list[float]:
        return [self._step(step) for step in steps]

    def _step(self, step: int) -> float:
        if step == THAWS_AT:
            self.model.late.requires_grad_(True)
            added = {"params": list(self.model.late.parameters()), "lr": 0.03, "betas": (0.8, 0.9)}
            self.adamw.add_param_group(added)
        if step == MOVES_AT:
            groups = self.adamw.param_groups
            groups[1]["params"].append(groups[0]["params"].pop(0))
        loss = self._backward(step)
        for optimizer in self.optimizers().values():
            self.scaler.step(optimizer)
        self.scaler.update()
        for optimizer in self.optimizers().values():
            optimizer.zero_grad()
        for scheduler in self.schedulers.values():
            scheduler.step()
        self.plateau.step(round(loss, 2))
        self.average.update_parameters(self.model)
        self.shadow.update(self.model)
        self.temperature *= 0.9
        self.counters["step"] += 1
        self.counters["seen"].append((step, self.counters["step"]))
        self.counters["best"] = np.minimum(self.counters["best"], round(loss, 1))
        return loss

    def _backward(self, step: int) -> float:
        inputs = torch.randn(GLOBAL_BATCH, 4, generator=torch.Generator().manual_seed(step))
        rank, size = dist.get_rank(), dist.get_world_size()
        mine = inputs[GLOBAL_BATCH * rank // size : GLOBAL_BATCH * (rank + 1) // size]
        errors = (self.model(mine) - mine.sum(1, keepdim=True)).square()
        loss = errors.sum() / GLOBAL_BATCH
        self.scaler.scale(loss).backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return float(total)


def model_on_meta() -> Odd:
    with torch.device("meta"):
        return Odd()


def sharded_odd(seed: int) -> Odd:
    model = shard_odd(model_on_meta())
    materialize(model, "cpu", seed=seed)
    return model


def shard_odd(model: Odd) -> Odd:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    for layer in [*model.layers, model.late, model.wide]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model.columns, mesh=mesh, shard_placement_fn=lambda _: Shard(1))
    fully_shard(model, mesh=mesh)
    prepare_fsdp(model)
    return model


def check_alive(run: OddRun) -> None:
    """What a restored run must be, beside holding the same values."""
    model = run.model
    assert model.head.weight is model.embedding.weight
    assert len(run.momentum.state) == 1
    assert all(p.requires_grad for p in model.parameters())
    sizes = [len(group["params"]) for group in run.adamw.param_groups]
    assert sizes == [7, 1, 4, 2]
    assert model.unused.weight not in run.adamw.state
    for name, tensor in run.shadow.tensors.items():
        assert isinstance(tensor, DTensor), name
    assert torch.equal(model.table, table())
    tensors = [*model.parameters(), *model.buffers(), *run.average.parameters()]
    assert not any(bool(_local(tensor).isnan().any()) for tensor in tensors)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
