"""Restoring in place, one process: the live objects are what the next save saves."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    MultiStepLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from elastic.training.checkpoint import StateMismatch, WriteFailed
from elastic.training.part import Mismatch
from elastic.training.state import TrackedState
from tests.dist.small_run import content, restore, save, small, train


def plain_small(seed: int = 0) -> nn.Module:
    return small(sharded=False, seed=seed)


def test_tensors_keep_their_memory_and_objects_their_identity(tmp_path: Path) -> None:  # B49
    model = plain_small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loose, counters = torch.arange(3.0), {"steps": 1, "inner": {"seen": [1]}, "mean": torch.ones(2)}
    tracked = TrackedState(model=model, optimizer=optimizer, loose=loose, counters=counters)
    train(model, optimizer, range(2))

    def addresses() -> list[int]:
        tensors = [*model.parameters(), *model.buffers(), loose, counters["mean"]]
        states = [t for state in optimizer.state.values() for t in state.values()]
        containers = [counters["inner"], counters["inner"]["seen"], *optimizer.param_groups]
        containers += list(optimizer.state.values())
        return [t.data_ptr() for t in [*tensors, *states]] + [id(c) for c in containers]

    expected, manifest, before = content(tracked), save(tmp_path, "a", tracked), addresses()
    train(model, optimizer, range(2, 4))
    loose += 1
    counters["mean"] += 1
    counters["inner"]["seen"] += [5, 6]
    counters["steps"], counters["new"] = 9, "x"
    restore(tmp_path, "a", manifest, tracked)
    assert content(tracked) == expected
    assert addresses() == before
    assert counters["inner"] == {"seen": [1]}
    assert list(counters) == ["steps", "inner", "mean"]


def test_plain_values_of_every_kind_survive_two_resumes(tmp_path: Path) -> None:  # B49
    def start() -> dict[str, Any]:
        return {"int": 0, "float": 0.0, "str": "", "list": [], "none": 1, "np": np.float32(0)}

    def work(counters: dict[str, Any]) -> None:
        counters["int"] += 1
        counters["float"] += 0.1
        counters["str"] += "s"
        counters["list"].append((counters["int"], {counters["int"]: None}))
        counters["none"] = None
        counters["np"] = np.float32(counters["np"] + np.float32(0.1))

    reference = start()
    live, manifest = start(), None
    for life in range(3):
        if manifest is not None:
            live = start()
            restore(tmp_path, f"{life - 1}", manifest, tracked := TrackedState(counters=live))
            assert live == reference
            assert type(live["np"]) is np.float32
        else:
            tracked = TrackedState(counters=live)
        work(reference)
        work(live)
        manifest = save(tmp_path, f"{life}", tracked)
    assert live == reference


@pytest.mark.parametrize("used", [False, True])
def test_a_scaler_is_restored_and_nothing_else_is_done(tmp_path: Path, used: bool) -> None:  # B50
    def scaler_after(steps: int) -> tuple[Any, nn.Module, torch.optim.Optimizer]:
        scaler = torch.amp.GradScaler("cpu", init_scale=128.0, growth_interval=4)
        model = plain_small()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for _ in range(steps):
            scaler.scale(model(torch.ones(2, 4)).sum() * 1e-3).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return scaler, model, optimizer

    scaler, model, optimizer = scaler_after(15)
    assert scaler.state_dict()["scale"] == 1024.0
    assert scaler.state_dict()["_growth_tracker"] == 3
    expected = scaler.state_dict()
    manifest = save(tmp_path, "a", TrackedState(model=model, optimizer=optimizer, scaler=scaler))
    other, model, optimizer = scaler_after(6 if used else 0)
    tracked = TrackedState(model=model, optimizer=optimizer, scaler=other)
    restore(tmp_path, "a", manifest, tracked)
    assert other.state_dict() == expected
    assert other.get_scale() == 1024.0


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "warm-up and cosine": lambda optimizer: SequentialLR(
        optimizer,
        [LinearLR(optimizer, 0.1, total_iters=3), CosineAnnealingLR(optimizer, 10)],
        milestones=[3],
    ),
    "milestones": lambda optimizer: MultiStepLR(optimizer, [2, 6], gamma=0.5),
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda epoch: 0.9**epoch),
}


@pytest.mark.parametrize("tensor_lr", [False, True])
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_the_next_update_uses_the_restored_schedule(  # B52
    tmp_path: Path, kind: str, tensor_lr: bool
) -> None:
    def build() -> tuple[Any, ...]:
        model = plain_small()
        lr = torch.tensor(0.1) if tensor_lr else 0.1
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, foreach=False)
        return model, optimizer, SCHEDULERS[kind](optimizer)

    def run(model: Any, optimizer: Any, scheduler: Any, steps: range) -> list[tuple[float, ...]]:
        used = []

        def note(*_: Any) -> None:
            group = optimizer.param_groups[0]
            used.append(tuple(float(group[key]) for key in ("lr", "weight_decay", "initial_lr")))

        hook = optimizer.register_step_pre_hook(note)
        for step in steps:
            optimizer.param_groups[0]["weight_decay"] = 0.01 * step
            train(model, optimizer, range(step, step + 1), scheduler.step)
        hook.remove()
        return used

    model, optimizer, scheduler = build()
    tracked = TrackedState(model=model, optimizer=optimizer, scheduler=scheduler)
    run(model, optimizer, scheduler, range(5))
    manifest, saved = save(tmp_path, "a", tracked), content(tracked)
    expected = run(model, optimizer, scheduler, range(5, 15))
    model, optimizer, scheduler = build()
    tracked = TrackedState(model=model, optimizer=optimizer, scheduler=scheduler)
    restore(tmp_path, "a", manifest, tracked)
    assert content(tracked) == saved
    assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor) == tensor_lr
    assert optimizer.param_groups[0]["weight_decay"] == pytest.approx(0.04)
    assert run(model, optimizer, scheduler, range(5, 15)) == expected


@pytest.mark.parametrize(("saved", "live"), [(0.25, torch.tensor(1.0)), (torch.tensor(0.25), 1.0)])
def test_a_setting_stays_the_tensor_or_the_number_it_is(  # B48 B52
    tmp_path: Path, saved: Any, live: Any
) -> None:
    model = plain_small()

    def tracked(lr: Any) -> TrackedState:
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, foreach=False)
        groups.append(optimizer.param_groups[0])
        return TrackedState(model=model, optimizer=optimizer)

    groups: list[dict[str, Any]] = []
    manifest = save(tmp_path, "a", tracked(saved))
    restore(tmp_path, "a", manifest, tracked(live))
    assert float(groups[1]["lr"]) == 0.25
    assert type(groups[1]["lr"]) is type(live)
    assert groups[1]["lr"] is live or not isinstance(live, torch.Tensor)


def test_a_plateau_scheduler_with_infinities_is_restored(tmp_path: Path) -> None:
    def build() -> tuple[Any, TrackedState]:
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        scheduler = ReduceLROnPlateau(optimizer)
        return scheduler, TrackedState(model=plain, optimizer=optimizer, scheduler=scheduler)

    plain = plain_small()
    scheduler, tracked = build()
    expected = copy.deepcopy(scheduler.state_dict())
    manifest = save(tmp_path, "a", tracked)
    scheduler, tracked = build()
    scheduler.step(1.0)
    restore(tmp_path, "a", manifest, tracked)
    assert scheduler.state_dict() == expected


def test_buffers_of_every_kind(tmp_path: Path) -> None:  # B54
    kinds = {
        "none": torch.zeros(()),
        "empty": torch.zeros(0, 3),
        "turned": torch.arange(6.0).reshape(2, 3).t(),
        "strided": torch.arange(8)[::2],
        "bool": torch.tensor([True, False, True]),
        "byte": torch.tensor([1, 255], dtype=torch.uint8),
        "half": torch.tensor([1 / 3], dtype=torch.bfloat16),
        "eighth": torch.tensor([0.5, 448.0]).to(torch.float8_e4m3fn),
        "complex": torch.tensor([1 + 2j]),
        "special": torch.tensor([float("nan"), float("inf"), -0.0]),
    }
    first, other = nn.Module(), nn.Module()
    for name, value in kinds.items():
        first.register_buffer(f"of_{name}", value)
        other.register_buffer(f"of_{name}", torch.zeros_like(value))
    manifest = save(tmp_path, "a", TrackedState(model=first))
    restore(tmp_path, "a", manifest, TrackedState(model=other))
    assert content(TrackedState(model=other)) == content(TrackedState(model=first))
    assert other.of_turned.stride() == kinds["turned"].stride()


class Remembering(nn.Module):
    """Extra state, as quantised layers have it: not a parameter, not a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.memory: dict[str, Any] = {"scale": torch.zeros(2), "calls": 0}

    def get_extra_state(self) -> Any:
        return self.memory

    def set_extra_state(self, state: Any) -> None:
        self.memory = state


def test_extra_state_of_modules_is_kept(tmp_path: Path) -> None:
    module = nn.Sequential(Remembering())
    module[0].memory = {"scale": torch.ones(2) * 3, "calls": 7}
    manifest = save(tmp_path, "a", TrackedState(model=module))
    other = nn.Sequential(Remembering())
    restore(tmp_path, "a", manifest, TrackedState(model=other))
    assert other[0].memory["calls"] == 7
    assert torch.equal(other[0].memory["scale"], torch.ones(2) * 3)


def test_compiled_and_recomputed_modules_have_the_names_of_plain_ones(tmp_path: Path) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    wrapped = torch.compile(nn.Sequential(checkpoint_wrapper(nn.Linear(2, 3)), nn.ReLU()))
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    tracked = TrackedState(model=wrapped, optimizer=optimizer)
    assert sorted(tracked.capture().tensors) == ["model.0.bias", "model.0.weight"]
    manifest = save(tmp_path, "a", tracked)
    plain = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    restore(tmp_path, "a", manifest, TrackedState(model=plain, optimizer=optimizer))
    assert torch.equal(plain[0].weight, next(wrapped.parameters()))


class Wider(nn.Module):
    def __init__(self, shape: tuple[int, ...] = (3,), dtype: Any = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape, dtype=dtype))


class Other(Wider):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Parameter(torch.ones(2))


def with_optimizer(module: nn.Module, **settings: Any) -> TrackedState:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, **settings)
    return TrackedState(model=module, optimizer=optimizer)


MISMATCHES: dict[str, tuple[Callable[[], TrackedState], Callable[[], TrackedState], str]] = {
    "shape": (
        lambda: TrackedState(model=Wider()),
        lambda: TrackedState(model=Wider((4,))),
        "model.weight: expected float32 of shape (4,), found float32 of shape (3,)",
    ),
    "dtype": (
        lambda: TrackedState(model=Wider()),
        lambda: TrackedState(model=Wider(dtype=torch.bfloat16)),
        "model.weight: expected bfloat16 of shape (3,), found float32 of shape (3,)",
    ),
    "missing": (
        lambda: TrackedState(model=Wider()),
        lambda: TrackedState(model=Other()),
        "model.more: expected float32 of shape (2,), found nothing of that name",
    ),
    "extra": (
        lambda: TrackedState(model=Other()),
        lambda: TrackedState(model=Wider()),
        "model.more: expected nothing of that name, found float32 of shape (2,)",
    ),
    "object": (
        lambda: TrackedState(model=Wider(), ema=Wider()),
        lambda: TrackedState(model=Wider()),
        "ema: expected nothing of that name, found a tracked object",
    ),
    "optimizer parameter": (
        lambda: with_optimizer(Wider()),
        lambda: with_optimizer(Other()),
        "optimizer.more: expected a parameter of group 0, found nothing of that name",
    ),
    "container": (
        lambda: TrackedState(counters={"a": 1}),
        lambda: TrackedState(counters=[1]),
        "counters: expected a list, found a dict",
    ),
}


@pytest.mark.parametrize("kind", MISMATCHES)
def test_what_does_not_fit_is_named_and_nothing_changes(tmp_path: Path, kind: str) -> None:
    make_saved, make_live, message = MISMATCHES[kind]
    manifest = save(tmp_path, "a", make_saved())
    live = make_live()
    before = content(live)
    with pytest.raises(StateMismatch, match=re.escape(message)):
        restore(tmp_path, "a", manifest, live)
    assert content(live) == before


def test_state_of_another_shape_in_a_stepped_optimizer_is_named(tmp_path: Path) -> None:
    class Vague(torch.optim.SGD):
        width = 2

        def step(self, closure: Any = None) -> None:
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["sketch"] = torch.zeros(self.width)

    model = Wider()
    optimizer = Vague(model.parameters(), lr=0.1)
    tracked = TrackedState(model=model, optimizer=optimizer)
    optimizer.step()
    manifest = save(tmp_path, "a", tracked)
    optimizer.width = 5
    optimizer.step()
    message = "optimizer.weight.sketch: expected float32 of shape (5,), found float32 of shape (2,)"
    with pytest.raises(StateMismatch, match=re.escape(message)):
        restore(tmp_path, "a", manifest, tracked)


def test_what_cannot_be_restored_is_refused_when_it_is_tracked() -> None:
    with pytest.raises(ValueError, match="'steps' is a int"):
        TrackedState(steps=3)
    model, stranger = Wider(), Wider()
    optimizer = torch.optim.SGD([*model.parameters(), *stranger.parameters()], lr=0.1)
    with pytest.raises(ValueError, match=r"parameter 1 of optimizer group 0.*no tracked module"):
        TrackedState(model=model, optimizer=optimizer)


def test_state_that_is_not_plain_is_refused_by_its_path(tmp_path: Path) -> None:
    tracked = TrackedState(counters={"deep": [{"file": object()}]})
    with pytest.raises(WriteFailed, match=r"plain\.tracked\.counters.*deep\[0\]\.file"):
        save(tmp_path, "a", tracked)


def test_a_module_without_memory_is_refused(tmp_path: Path) -> None:
    manifest = save(tmp_path, "a", TrackedState(model=Wider()))
    with torch.device("meta"):
        empty = Wider()
    with pytest.raises(ValueError, match="meta device"):
        restore(tmp_path, "a", manifest, TrackedState(model=empty))


def test_a_mismatch_survives_pickling() -> None:
    error = StateMismatch([Mismatch(name="a", expected="b", found="c")])
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.mismatches) == (str(error), error.mismatches)
