"""Which parameters are frozen, and which are in which group of an optimizer, is state as well."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR

from elastic.training.checkpoint import StateMismatch
from elastic.training.state import TrackedState
from tests.dist.small_run import Small, content, restore, save, small, train


class Built:
    """A model whose last layers are frozen, and an optimizer with groups of the others."""

    def __init__(self, frozen: int = 2, *, named: bool = False) -> None:
        self.model = small(sharded=False)
        for layer in self.model.layers[4 - frozen :]:
            layer.requires_grad_(False)
        head, *rest = self.model.layers[: 4 - frozen]
        groups = [of(head, 0.01, named), {"params": [], "lr": 0.5}, of(nn.ModuleList(rest), 0.02)]
        if named:
            groups = groups[:1]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.8, 0.9))
        self.tracked = TrackedState(model=self.model, optimizer=self.optimizer)

    def thaw(self, number: int, lr: float) -> None:
        layer = self.model.layers[number]
        layer.requires_grad_(True)
        self.optimizer.add_param_group(of(layer, lr))

    def train(self, *steps: int) -> list[float]:
        return train(self.model, self.optimizer, range(*steps))

    @property
    def names(self) -> list[list[str]]:
        names = {id(p): name for name, p in self.model.named_parameters()}
        return [[names[id(p)] for p in group["params"]] for group in self.optimizer.param_groups]


def of(module: nn.Module, lr: float, named: bool = False) -> dict[str, Any]:
    return {"params": list(module.named_parameters() if named else module.parameters()), "lr": lr}


def test_groups_that_training_changed_come_back(tmp_path: Path) -> None:  # B48
    run = Built()
    run.train(0, 2)
    early = save(tmp_path, "early", run.tracked)
    other = Built()
    restore(tmp_path, "early", early, other.tracked)
    unchanged = other.train(2, 4)
    run.thaw(2, 0.03)
    groups = run.optimizer.param_groups
    groups[1]["params"].append(groups[0]["params"].pop())
    groups[1]["betas"] = (0.5, 0.6)
    run.train(2, 4)
    del groups[2]  # frozen again, and its moments kept
    run.train(4, 5)
    manifest, expected, names = save(tmp_path, "a", run.tracked), content(run.tracked), run.names
    other = Built()
    held = other.optimizer.param_groups
    built = list(held)
    restore(tmp_path, "a", manifest, other.tracked)
    assert content(other.tracked) == expected
    assert other.names == names == [["layers.0.weight"], ["layers.0.bias"], names[2]]
    assert other.optimizer.param_groups is held
    assert [group is was for group, was in zip(held, built, strict=True)] == [True, True, False]
    frozen = [name for name, p in other.model.named_parameters() if not p.requires_grad]
    assert frozen == ["layers.3.weight", "layers.3.bias"]
    kept = other.optimizer.state[other.model.layers[1].weight]
    assert kept["step"] == 4
    manifest = save(tmp_path, "b", other.tracked)  # and once more
    third = Built()
    restore(tmp_path, "b", manifest, third.tracked)
    assert content(third.tracked) == expected
    assert third.train(5, 7) == other.train(5, 7) == run.train(5, 7)
    third.model.zero_grad()
    restore(tmp_path, "early", early, third.tracked)  # and to before all of that
    assert third.names == [["layers.0.weight", "layers.0.bias"], [], ["layers.1.weight"]]
    assert third.train(2, 4) == unchanged


def test_a_parameter_that_joins_without_ever_having_been_in_a_group(tmp_path: Path) -> None:
    run = Built(named=True)
    run.train(0, 1)
    layer = run.model.layers[2]
    layer.requires_grad_(True)
    run.optimizer.add_param_group(of(layer, 0.1, named=True))
    run.train(1, 2)
    manifest = save(tmp_path, "a", run.tracked)
    other = Built(named=True)
    restore(tmp_path, "a", manifest, other.tracked)
    assert other.names == run.names
    assert len(other.optimizer.param_groups[1]["param_names"]) == 2
    assert other.train(2, 4) == run.train(2, 4)


def test_code_that_groups_or_freezes_otherwise_counts(tmp_path: Path) -> None:
    """Where the code has changed, what training did under the old one says nothing."""
    run = Built()
    run.train(0, 1)
    run.model.layers[3].requires_grad_(True)
    manifest = save(tmp_path, "a", run.tracked)
    other = Built()
    other.model.layers[0].requires_grad_(False)
    tracked = TrackedState(model=other.model, optimizer=other.optimizer)
    restore(tmp_path, "a", manifest, tracked)
    frozen = {name for name, p in other.model.named_parameters() if not p.requires_grad}
    assert {name.rpartition(".")[0] for name in frozen} == {"layers.0", "layers.2", "layers.3"}
    with pytest.raises(StateMismatch, match=r"optimizer\.layers\.2\.bias: expected a parameter of"):
        restore(tmp_path, "a", manifest, Built(frozen=1).tracked)


def with_groups(*lists: list[str], scheduled: bool = False) -> Callable[[], TrackedState]:
    def make() -> TrackedState:
        model = Small()
        by_name = dict(model.named_parameters())
        groups = [
            {"params": [by_name[name] for name in names], "lr": 0.1 * (place + 1)}
            for place, names in enumerate(lists)
        ]
        optimizer = torch.optim.SGD(groups)
        scheduler = {"scheduler": ExponentialLR(optimizer, 0.9)} if scheduled else {}
        return TrackedState(model=model, optimizer=optimizer, **scheduler)

    return make


A, B = ["scale", "norm.weight"], ["norm.bias"]


@pytest.mark.parametrize(
    ("saved", "live", "message"),
    [
        (with_groups(A, B), with_groups([*A, *B]), "expected groups of 3 parameters, found groups"),
        (with_groups([*A, *B]), with_groups(A, B), "norm.bias: expected it in group 1, found it"),
        (with_groups(A, [], B), with_groups(A, B), "expected 0 empty groups, found 1"),
        (
            with_groups(A, B, scheduled=True),
            with_groups(B, A, scheduled=True),
            "found them in another order, and a scheduler that knows groups by their place",
        ),
    ],
)
def test_groups_that_cannot_be_told_apart_are_refused(  # B48 B52
    tmp_path: Path,
    saved: Callable[[], TrackedState],
    live: Callable[[], TrackedState],
    message: str,
) -> None:
    manifest = save(tmp_path, "a", saved())
    with pytest.raises(StateMismatch, match=re.escape(message)):
        restore(tmp_path, "a", manifest, live())


class Paced(torch.optim.AdamW):
    """Keeps a number and a tensor beside the state of parameters, and says so."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.01)
        self.pace: dict[str, Any] = {"number": 0, "mean": torch.zeros(2)}

    def step(self, closure: Any = None) -> Any:
        self.pace["number"] += 1
        self.pace["mean"] += 0.5
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "pace": self.pace}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.pace = state_dict["pace"]
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "pace"})


def test_what_an_optimizer_keeps_for_itself_comes_back(tmp_path: Path) -> None:  # B55
    """Through its own load_state_dict, which casts float32 moments to a bfloat16 parameter's."""

    def build() -> tuple[nn.Module, Paced, TrackedState]:
        torch.manual_seed(1)
        model = nn.Linear(3, 2).bfloat16()
        optimizer = Paced(model.parameters())
        return model, optimizer, TrackedState(model=model, optimizer=optimizer)

    model, optimizer, tracked = build()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for state in optimizer.state.values():
        state["exp_avg"] = torch.full(state["exp_avg"].shape, 1 / 3)  # float32
    manifest, expected = save(tmp_path, "a", tracked), content(tracked)
    model, optimizer, tracked = build()
    groups, state = optimizer.param_groups, optimizer.state
    restore(tmp_path, "a", manifest, tracked)
    assert optimizer.pace["number"] == 1
    assert optimizer.pace["mean"].tolist() == [0.5, 0.5]
    assert content(tracked) == expected
    assert optimizer.param_groups is groups and optimizer.state is state
    assert state[model.weight]["exp_avg"].dtype == torch.float32
    plain = torch.optim.AdamW(model.parameters())
    with pytest.raises(StateMismatch, match=r"optimizer\.own\.pace: expected nothing of that name"):
        restore(tmp_path, "a", manifest, TrackedState(model=model, optimizer=plain))
