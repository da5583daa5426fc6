"""Tracked state over ranks: capturing changes nothing, restoring fits any world size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel

from elastic.storage.checkpoints import Manifest
from elastic.training.foreign import load_weights
from elastic.training.gradients import prepare_fsdp
from elastic.training.state import TrackedState
from tests.dist.processes import run_ranks
from tests.dist.small_run import Small, backward, content, restore, save, shard, small, train

Arrival = tuple[str, Manifest] | None
Found = tuple[dict[str, Any], Manifest, list[float]]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def journey(
    rank: int, world_size: int, folder: Path, arrival: Arrival, leave: str, layout: str = "shard"
) -> Found:
    """Train three steps or arrive from a checkpoint, save, and train three steps more."""
    if layout == "hybrid":
        model = small(sharded=False, seed=world_size)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        prepare_fsdp(model)
    else:
        model = small(sharded=layout == "shard", seed=world_size)
    optimizer = adamw(model)
    tracked = TrackedState(model=model, optimizer=optimizer)
    if arrival is None:
        train(model, optimizer, range(3))
    else:
        restore(folder, *arrival, tracked)
    manifest = save(folder, leave, tracked)
    return content(tracked), manifest, train(model, optimizer, range(3, 6))


@pytest.mark.timeout(300)  # several groups, one after the other
def test_any_world_size_reads_what_any_other_wrote(tmp_path: Path) -> None:  # B40 B47
    first, manifest, losses = run_ranks(journey, 3, tmp_path, None, "a")[0]
    arrival = ("a", manifest)
    stops = [("b", 2, "shard"), ("c", 3, "shard"), ("d", 1, "shard"), ("e", 4, "hybrid")]
    for leave, world_size, layout in [*stops, ("f", 1, "plain"), ("g", 2, "shard")]:
        outcome = run_ranks(journey, world_size, tmp_path, arrival, leave, layout)
        found, manifest, again = outcome[0]
        assert found == first, f"{arrival[0]} to {leave}"
        torch.testing.assert_close(again, losses, rtol=1e-5, atol=0)
        arrival = (leave, manifest)


def captured_or_not(rank: int, world_size: int, capture: bool) -> list[Any]:
    """Losses and state of a run that is captured, or not, at every awkward moment."""
    model = small()
    optimizer = adamw(model)
    tracked = TrackedState(model=model, optimizer=optimizer)
    look: Callable[[], Any] = tracked.capture if capture else (lambda: None)
    look()  # before the first step: Adam's counter must not move
    assert not optimizer.state
    losses = train(model, optimizer, range(2), look)
    with torch.no_grad():
        model(torch.ones(2, 4))  # the root's parameters stay gathered
    look()
    losses.append(backward(model, 2))
    look()  # gradients are present
    optimizer.step()
    optimizer.zero_grad()
    return [*losses, *train(model, optimizer, range(3, 5), look), content(tracked)]


def test_capturing_changes_no_training() -> None:
    plain, looked_at = run_ranks(captured_or_not, 2, False), run_ranks(captured_or_not, 2, True)
    assert plain == looked_at


def with_gradients(rank: int, world_size: int, folder: Path) -> None:
    model = small()
    optimizer = adamw(model)
    tracked = TrackedState(model=model, optimizer=optimizer)
    backward(model, 0)
    early = save(folder, "before-first-step", tracked)
    assert not optimizer.state
    optimizer.step()
    backward(model, 1)  # gradients present when it is saved
    expected, manifest = content(tracked), save(folder, "with-gradients", tracked)
    assert any(name.endswith("exp_avg_sq") for name in expected)

    other = small(seed=5)
    other_optimizer = adamw(other)
    other_tracked = TrackedState(model=other, optimizer=other_optimizer)
    backward(other, 7)
    gradients = [p.grad.full_tensor() for p in other.parameters() if p.grad is not None]
    restore(folder, "with-gradients", manifest, other_tracked)
    assert content(other_tracked) == expected
    kept = [p.grad.full_tensor() for p in other.parameters() if p.grad is not None]
    assert all(map(torch.equal, kept, gradients))
    # And back: parameters without state in the checkpoint have none afterwards.
    restore(folder, "before-first-step", early, other_tracked)
    assert not other_optimizer.state
    other_optimizer.step()


def test_gradients_neither_hide_state_nor_are_touched(tmp_path: Path) -> None:  # B45 B44
    run_ranks(with_gradients, 2, tmp_path)


class Factored(torch.optim.Optimizer):
    """State with an int, a float, a 0-d tensor, and row and column factors of matrices."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            state["count"] = state.get("count", 0) + 1
            state["decay"] = 1.0 / state["count"]
            state["clip"] = state.get("clip", torch.ones(())) * 0.5
            if parameter.ndim == 2:
                square = parameter.grad.square() + 1e-8
                row, column = square.mean(1), square.mean(0)
                if isinstance(column, DTensor):
                    column = column.redistribute(placements=_replicated(column))
                    row = row.redistribute(placements=parameter.placements)
                state["row"] = state.get("row", 0) * 0.5 + row
                state["column"] = state.get("column", 0) * 0.5 + column
                scale = state["row"].sqrt().unsqueeze(1) * state["column"].sqrt().unsqueeze(0)
                update = 0.1 * parameter.grad / (scale.sqrt() + 1)
                if isinstance(update, DTensor):
                    update = update.redistribute(placements=parameter.placements)
                parameter -= update
            else:
                parameter -= 0.1 * parameter.grad * state["decay"]


def _replicated(tensor: DTensor) -> list[Any]:
    from torch.distributed.tensor import Replicate

    return [Replicate()] * tensor.device_mesh.ndim


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05),
    "amsgrad": lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.01), amsgrad=True),
    "factored": Factored,
}


def every_optimizer(
    rank: int, world_size: int, folder: Path, arrivals: dict[str, Arrival], leave: str
) -> dict[str, Found]:
    found = {}
    for name, make in OPTIMIZERS.items():
        model = small(seed=world_size)
        optimizer = make(model.parameters())
        tracked = TrackedState(model=model, optimizer=optimizer)
        if name in arrivals:
            restore(folder, *arrivals[name], tracked)
        else:
            train(model, optimizer, range(2))
        for parameter, state in optimizer.state.items():
            assert "row" not in state or state["row"].placements == parameter.placements
        manifest = save(folder, f"{name}-{leave}", tracked)
        found[name] = (content(tracked), manifest, train(model, optimizer, range(2, 4)))
    return found


@pytest.mark.timeout(300)  # several groups, one after the other
def test_every_kind_of_optimizer_state_survives_a_resize(tmp_path: Path) -> None:  # B55
    first = run_ranks(every_optimizer, 2, tmp_path, {}, "a")[0]
    here, leave = first, "a"
    for world_size, after in [(1, "b"), (3, "c")]:
        arrivals = {name: (f"{name}-{leave}", here[name][1]) for name in here}
        here, leave = run_ranks(every_optimizer, world_size, tmp_path, arrivals, after)[0], after
        for name, (state, _, losses) in here.items():
            assert state == first[name][0], f"{name} at {world_size}"
            torch.testing.assert_close(losses, first[name][2], rtol=1e-4, atol=1e-6, msg=name)


class Routed(Small):
    """Its branch `unused` sees data only once it is routed."""

    routed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        return out + self.unused(x[:, :3]).mean(1, keepdim=True) if self.routed else out


def routed_late(rank: int, world_size: int, folder: Path, arrival: Arrival) -> Found:
    torch.manual_seed(world_size)
    model = Routed()
    shard(model, list(model.layers))
    prepare_fsdp(model)
    optimizer = adamw(model)
    tracked = TrackedState(model=model, optimizer=optimizer)
    if arrival is None:
        train(model, optimizer, range(4))
    else:
        restore(folder, *arrival, tracked)
    assert model.unused.weight not in optimizer.state
    manifest = save(folder, f"at-{world_size}", tracked)
    losses = train(model, optimizer, range(4, 6))
    model.routed = True
    losses += train(model, optimizer, range(6, 8))
    assert optimizer.state[model.unused.weight]["step"] == 2
    return content(tracked), manifest, losses


def test_a_branch_without_state_stays_without_until_it_is_routed(tmp_path: Path) -> None:  # B44
    _, manifest, losses = run_ranks(routed_late, 2, tmp_path, None)[0]
    _, _, again = run_ranks(routed_late, 3, tmp_path, ("at-2", manifest))[0]
    torch.testing.assert_close(again, losses, rtol=1e-5, atol=0)


class Language(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.emb = nn.Embedding(7, 5)
        self.head = nn.Linear(5, 7, bias=False)
        if tied:
            self.head.weight = self.emb.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.emb(x.abs().long() % 7)).mean(1)[:, :1]


def tied_or_not(
    rank: int, world_size: int, folder: Path, tied: bool, arrival: Arrival, leave: str
) -> Found:
    torch.manual_seed(world_size)
    model = shard(Language(tied))
    assert isinstance(model, Language)
    prepare_fsdp(model)
    optimizer = adamw(model)
    tracked = TrackedState(model=model, optimizer=optimizer)
    if arrival is None:
        train(model, optimizer, range(5))
    else:
        restore(folder, *arrival, tracked)
    assert (model.head.weight is model.emb.weight) == tied
    assert len(optimizer.state) == (1 if tied else 2)
    manifest = save(folder, leave, tracked)
    assert ("model.head.weight" in manifest.tensors) == (not tied)
    return content(tracked), manifest, train(model, optimizer, range(5, 7))


@pytest.mark.parametrize("tied", [True, False])
def test_tied_tensors_are_saved_once_and_stay_tied(tmp_path: Path, tied: bool) -> None:  # B42
    first, manifest, losses = run_ranks(tied_or_not, 2, tmp_path, tied, None, "a")[0]
    found, _, again = run_ranks(tied_or_not, 3, tmp_path, tied, ("a", manifest), "b")[0]
    assert found == first
    torch.testing.assert_close(again, losses, rtol=1e-5, atol=0)


def averaged(rank: int, world_size: int, folder: Path, arrival: Arrival) -> Found:
    """Two averages: torch's wrapper around a module that is sharded, and a sharded copy."""
    model = small(seed=world_size)
    average = AveragedModel(small(sharded=False), avg_fn=lambda old, new, _: old * 0.9 + new * 0.1)
    inner = average.module
    shard(inner, list(inner.layers))
    copy = small(seed=8)
    optimizer = adamw(model)
    tracked = TrackedState(model=model, optimizer=optimizer, ema=average, copy=copy)

    def update() -> None:
        average.update_parameters(model)
        with torch.no_grad():
            for ours, theirs in zip(copy.parameters(), model.parameters(), strict=True):
                ours.lerp_(theirs, 0.1)

    if arrival is None:
        train(model, optimizer, range(3), update)
    else:
        restore(folder, *arrival, tracked)
    manifest, found = save(folder, f"at-{world_size}", tracked), content(tracked)
    train(model, optimizer, range(3, 5), update)
    return found, manifest, [p.full_tensor().sum().item() for p in average.module.parameters()]


def test_averages_are_resharded_like_parameters(tmp_path: Path) -> None:  # B51
    first, manifest, sums = run_ranks(averaged, 3, tmp_path, None)[0]
    found, _, again = run_ranks(averaged, 2, tmp_path, ("at-3", manifest))[0]
    assert found == first
    torch.testing.assert_close(again, sums, rtol=1e-4, atol=1e-5)


def averaged_lazily(rank: int, world_size: int, folder: Path, arrival: Arrival) -> Found:
    """Averages in a tracked list and dict, which have no tensors before their first update."""
    model = small(seed=world_size)
    optimizer = adamw(model)
    averages: dict[str, Any] = {"list": [], "by name": {}}
    tracked = TrackedState(model=model, optimizer=optimizer, averages=averages)

    @torch.no_grad()
    def update() -> None:
        if not averages["list"]:
            averages["list"] = [p.detach().clone() for p in model.parameters()]
            averages["by name"] = {n: p.detach() * 0 for n, p in model.named_parameters()}
        names = averages["by name"]
        for mine, (name, parameter) in zip(averages["list"], model.named_parameters(), strict=True):
            mine.lerp_(parameter, 0.1)
            names[name].lerp_(parameter, 0.2)

    if arrival is None:
        train(model, optimizer, range(3), update)
    else:
        restore(folder, *arrival, tracked)
    for mine, parameter in zip(averages["list"], model.parameters(), strict=True):
        assert isinstance(mine, DTensor) and mine.placements == parameter.placements
    manifest, found = save(folder, f"at-{world_size}", tracked), content(tracked)
    train(model, optimizer, range(3, 5), update)
    return found, manifest, [float(t.full_tensor().sum()) for t in averages["by name"].values()]


def test_averages_that_are_made_at_their_first_update_are_resharded(tmp_path: Path) -> None:
    """B51 B47: a sharded tensor beside sharded parameters, also where there was none to fill."""
    first, manifest, sums = run_ranks(averaged_lazily, 3, tmp_path, None)[0]
    found, _, again = run_ranks(averaged_lazily, 2, tmp_path, ("at-3", manifest))[0]
    assert found == first
    torch.testing.assert_close(again, sums, rtol=1e-4, atol=1e-5)


def averages_of_shards(rank: int, world_size: int) -> None:
    model = small()
    shards = {n: p.to_local().clone() for n, p in model.named_parameters()}  # type: ignore[attr-defined]
    tracked = TrackedState(model=model, ema={"shadow": shards})
    with pytest.raises(ValueError, match=r"shape of this rank's shard of 'layers\.0\.weight'"):
        tracked.capture()


def test_averages_of_a_ranks_own_shards_are_refused() -> None:  # B51
    """They would be saved from rank 0 alone, and given to every rank."""
    run_ranks(averages_of_shards, 2)


def wide(rank: int, world_size: int, folder: Path, full: Manifest) -> tuple[Manifest, Any, Any]:
    """A (1, 17) weight from a full state, by both ways there are, and saved sharded."""
    model = shard(nn.Linear(17, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    tracked = TrackedState(model=model, optimizer=optimizer)
    load_weights(str(folder / "full"), tracked, dist.group.WORLD)
    imported = content(TrackedState(model=model))
    restore(folder, "full", full, tracked)
    return save(folder, f"at-{world_size}", tracked), imported, content(tracked)


@pytest.mark.timeout(120)
def test_one_row_goes_from_full_to_sharded_and_back(tmp_path: Path) -> None:  # B41
    model = nn.Linear(17, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    tracked = TrackedState(model=model, optimizer=optimizer)
    model(torch.ones(2, 17)).sum().backward()
    optimizer.step()
    full, expected = save(tmp_path, "full", tracked), content(tracked)
    for size in (1, 2, 3):
        manifest, imported, held = run_ranks(wide, size, tmp_path, full)[-1]
        assert imported == content(TrackedState(model=model))
        assert held == expected
        other = nn.Linear(17, 1)
        optimizer = torch.optim.AdamW(other.parameters())
        tracked = TrackedState(model=other, optimizer=optimizer)
        restore(tmp_path, f"at-{size}", manifest, tracked)
        assert content(tracked) == expected


def grouped(rank: int, world_size: int, folder: Path, arrival: Arrival) -> Found:
    model = small(seed=world_size)
    norms = [model.norm.weight, model.norm.bias, model.scale]
    others = [p for p in model.parameters() if all(p is not norm for norm in norms)]
    lr = torch.tensor(0.03)
    first = {"params": others, "lr": lr, "weight_decay": 0.1}
    second = {"params": norms, "lr": 0.02, "weight_decay": 0.0, "betas": (0.8, 0.9)}
    empty: dict[str, Any] = {"params": [], "lr": 0.5}
    if arrival is None:
        groups = [first, empty, second]
    else:
        first["params"] = others[::-1]
        groups = [{**second, "lr": 9.0, "betas": (0.1, 0.2)}, {**first}, {**empty, "lr": 1.0}]
    optimizer = torch.optim.AdamW(groups, foreach=False)
    tracked = TrackedState(model=model, optimizer=optimizer)
    if arrival is None:
        train(model, optimizer, range(2))
        lr.fill_(0.015)
        optimizer.param_groups[2]["lr"] = 0.07
    else:
        lr.fill_(7)
        restore(folder, *arrival, tracked)
    manifest = save(folder, f"at-{world_size}", tracked)
    by_size = sorted(optimizer.param_groups, key=lambda group: len(group["params"]))
    fields = ("lr", "betas", "weight_decay", "eps")
    settings = {len(group["params"]): [str(group[field]) for field in fields] for group in by_size}
    assert by_size[-1]["lr"] is lr
    return settings, manifest, train(model, optimizer, range(2, 4))


def test_groups_are_matched_by_their_parameters(tmp_path: Path) -> None:  # B48
    settings, manifest, losses = run_ranks(grouped, 2, tmp_path, None)[0]
    again, _, after = run_ranks(grouped, 3, tmp_path, ("at-2", manifest))[0]
    assert again == settings
    torch.testing.assert_close(after, losses, rtol=1e-5, atol=0)


def summed_gradients(rank: int, world_size: int) -> list[float]:
    model = small()
    assert prepare_fsdp(model) == sum(isinstance(m, FSDPModule) for m in model.modules())
    backward(model, 0)
    return [p.grad.full_tensor().sum().item() for p in model.parameters() if p.grad is not None]


def test_gradients_are_those_of_one_machine_at_every_size() -> None:
    one, three = run_ranks(summed_gradients, 1)[0], run_ranks(summed_gradients, 3)[0]
    torch.testing.assert_close(three, one, rtol=1e-5, atol=1e-6)


def mismatched_on_one_rank(rank: int, world_size: int, folder: Path) -> str:
    model = small()
    manifest = save(folder, "a", TrackedState(model=model))
    other = small(seed=3)
    objects: dict[str, Any] = {"extra": {}} if rank == 1 else {}
    with pytest.raises(Exception, match="extra: expected a tracked object") as caught:
        restore(folder, "a", manifest, TrackedState(model=other, **objects))
    return type(caught.value).__name__


def test_a_mismatch_on_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    assert run_ranks(mismatched_on_one_rank, 2, tmp_path) == ["StateMismatch"] * 2
