"""Every scheduler and every optimizer that torch has: restored, they go on as if nothing were."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler, swa_utils
from torch.optim.lr_scheduler import LRScheduler

from elastic.training.gradients import prepare_fsdp
from elastic.training.state import TrackedState
from tests.dist.processes import run_ranks
from tests.dist.small_run import content, restore, save, shard, small, train

Optimizer = torch.optim.Optimizer


class Falling:
    """A schedule with a memory, which torch saves by its attributes."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, epoch: int) -> float:
        self.calls += 1
        return float(0.99**self.calls)


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, Falling()),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, Falling()),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4, 7]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, total_iters=6),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=6),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(o, 10)],
        milestones=[3],
    ),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=9),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 9),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o, 0.1, total_iters=6), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1, cooldown=1),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 3, scale_fn=Falling()),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3, 2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "SWALR": lambda o: swa_utils.SWALR(o, 0.05, anneal_epochs=8),
}


def test_no_scheduler_of_torch_is_left_out() -> None:
    modules = (lr_scheduler, swa_utils)
    there = {
        name
        for module in modules
        for name, kind in inspect.getmembers(module, inspect.isclass)
        if issubclass(kind, LRScheduler) and not name.endswith("LRScheduler")
    }
    assert there == SCHEDULERS.keys()


@pytest.mark.parametrize("tensor_lr", [False, True])
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_every_scheduler_of_torch(tmp_path: Path, kind: str, tensor_lr: bool) -> None:  # B52
    """What each update uses is what it would have used, from the first one after the resume."""

    def build() -> tuple[nn.Module, Optimizer, Any, TrackedState]:
        model = small(sharded=False)
        lr = torch.tensor(0.1) if tensor_lr else 0.1
        groups = [{"params": model.layers.parameters()}, {"params": [model.scale], "lr": 0.02}]
        optimizer = torch.optim.SGD(groups, lr=lr, momentum=0.9, foreach=False)
        scheduler = SCHEDULERS[kind](optimizer)
        tracked = TrackedState(model=model, optimizer=optimizer, scheduler=scheduler)
        return model, optimizer, scheduler, tracked

    def run(model: nn.Module, optimizer: Optimizer, scheduler: Any, steps: range) -> list[Any]:
        used = []

        def note(*_: Any) -> None:
            groups = optimizer.param_groups
            used.append([float(g[key]) for g in groups for key in ("lr", "momentum")])

        hook = optimizer.register_step_pre_hook(note)
        for step in steps:
            needed = (1.0,) if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else ()
            train(model, optimizer, range(step, step + 1), lambda of=needed: scheduler.step(*of))
        hook.remove()
        return used

    model, optimizer, scheduler, tracked = build()
    run(model, optimizer, scheduler, range(5))
    manifest, saved = save(tmp_path, "a", tracked), content(tracked)
    expected = run(model, optimizer, scheduler, range(5, 15))
    assert len({tuple(row) for row in expected}) > 1, "it schedules nothing"
    for _ in range(2):  # and what the resumed one saves is as good
        model, optimizer, scheduler, tracked = build()
        restore(tmp_path, "a", manifest, tracked)
        assert content(tracked) == saved
        manifest = save(tmp_path, "a", tracked)
    assert run(model, optimizer, scheduler, range(5, 15)) == expected


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "Adadelta": torch.optim.Adadelta,
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr_decay=0.1),
    "Adam": lambda params: torch.optim.Adam(params, amsgrad=True),
    "AdamW": torch.optim.AdamW,
    "Adamax": torch.optim.Adamax,
    "ASGD": lambda params: torch.optim.ASGD(params, t0=1),
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": lambda params: torch.optim.RMSprop(params, momentum=0.9, centered=True),
    "SGD": torch.optim.SGD,
}
# With sharded parameters torch itself cannot make a step of them.
UNSHARDED_ONLY = ("Adafactor", "LBFGS", "Muon", "Rprop", "SparseAdam")


def test_no_optimizer_of_torch_is_left_out() -> None:
    there = {
        name
        for name, kind in inspect.getmembers(torch.optim, inspect.isclass)
        if issubclass(kind, Optimizer) and kind is not Optimizer
    }
    assert there == OPTIMIZERS.keys() | {*UNSHARDED_ONLY}


def every_optimizer(
    rank: int, world_size: int, folder: Path, arrivals: dict[str, Any], leave: str
) -> dict[str, Any]:
    found = {}
    for name, make in OPTIMIZERS.items():
        model = small(sharded=False, seed=world_size)
        shard(model)  # in one, for speed
        prepare_fsdp(model)
        optimizer = make(model.parameters())
        tracked = TrackedState(model=model, optimizer=optimizer)
        if name in arrivals:
            restore(folder, f"{name}-{arrivals[name][2]}", arrivals[name][1], tracked)
        else:
            train(model, optimizer, range(2))
        manifest, held = save(folder, f"{name}-{leave}", tracked), content(tracked)
        found[name] = (held, manifest, leave, train(model, optimizer, range(2, 4)))
    return found


@pytest.mark.timeout(300)  # several groups, one after the other
def test_every_optimizer_of_torch_survives_a_resize(tmp_path: Path) -> None:  # B55 B47
    first = run_ranks(every_optimizer, 2, tmp_path, {}, "a", timeout_s=120)[0]
    here = first
    for size, leave in ((3, "b"), (1, "c"), (2, "d")):
        here = run_ranks(every_optimizer, size, tmp_path, here, leave, timeout_s=120)[0]
        for name, (held, _, _, losses) in here.items():
            assert held == first[name][0], f"{name} at {size}"
            torch.testing.assert_close(losses, first[name][3], rtol=1e-4, atol=1e-6, msg=name)
    for name, (_, _, _, losses) in here.items():
        assert losses == first[name][3], f"{name}: the same size again is the same to the bit"


@pytest.mark.parametrize("kind", UNSHARDED_ONLY)
def test_optimizers_that_want_whole_parameters(tmp_path: Path, kind: str) -> None:  # B55
    def build() -> tuple[nn.Module, Optimizer, TrackedState]:
        torch.manual_seed(0)
        model = nn.Embedding(5, 3, sparse=kind == "SparseAdam")
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1)
        return model, optimizer, TrackedState(model=model, optimizer=optimizer)

    def run(model: nn.Module, optimizer: Optimizer, steps: range) -> list[float]:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(indices) - targets).square().sum()
            loss.backward()
            return loss

        losses = []
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            indices = torch.randint(5, (4,), generator=generator)
            targets = torch.randn(4, 3, generator=generator)
            losses.append(float(optimizer.step(closure).detach()))
        return losses

    model, optimizer, tracked = build()
    run(model, optimizer, range(4))
    manifest, saved = save(tmp_path, "a", tracked), content(tracked)
    expected = run(model, optimizer, range(4, 8))
    model, optimizer, tracked = build()
    restore(tmp_path, "a", manifest, tracked)
    assert content(tracked) == saved
    assert run(model, optimizer, range(4, 8)) == expected
