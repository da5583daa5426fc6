"""Optimizer part: state and groups by parameter name, as the optimizer itself holds them.

Never through torch's own checkpoint helpers: they run a step to make state, which moves Adam's
counter, and give nothing at all while gradients are present. Must not import ray.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from elastic.storage.manifest import TensorInfo
from elastic.training import tree
from elastic.training.layout import layout_of, make_like
from elastic.training.parameter_groups import match_groups
from elastic.training.part import Captured, Restoration

__all__ = ["OptimizerPart"]

# How an update is computed, not what it computes: the live optimizer was built for its device.
_SWITCHES = {"foreach", "fused", "capturable", "differentiable", "param_names"}

Names = Callable[[], Mapping[int, list[str]]]


class OptimizerPart:
    """State of the parameters that have some, and the settings of every group.

    `names` gives all names of each parameter by its id. Raises `ValueError` for a parameter that
    has none, since its state could not be told from another's.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, names: Names) -> None:
        self._optimizer = optimizer
        self._names = names
        self._group_names()

    def capture(self) -> Captured:
        captured = Captured()
        seen: dict[int, str] = {}
        groups = []
        for index, names in enumerate(self._group_names()):
            settings = _settings(self._optimizer.param_groups[index])
            halves = _add(captured, settings, f"param_groups.{index}", seen)
            groups.append({"parameters": [name[0] for name in names], **halves})
        captured.plain = {"groups": groups, "state": {}, "shared": {}}
        for name, parameter in self._parameters(first_name_only=True).items():
            # get, since indexing the defaultdict would make an empty state.
            state = self._optimizer.state.get(parameter)
            if state:
                captured.plain["state"][name] = halves = _add(captured, state, name, seen)
                for slot in halves["slots"]:
                    value = captured.tensors[slot["name"]]
                    slot["layout"] = layout_of(parameter, value, slot["name"])
        for key in self._shared_keys():
            halves = _add(captured, self._optimizer.state[key], f"shared.{key}", seen)
            captured.plain["shared"][key] = halves
        return captured

    def prepare(self, plain: Any, saved: Mapping[str, TensorInfo]) -> Restoration:
        restoration = Restoration()
        names = self._group_names()
        matched = match_groups([group["parameters"] for group in plain["groups"]], names)
        restoration.mismatches += matched.mismatches
        for here, there in matched.pairs:
            live = self._optimizer.param_groups[here]
            tree.aim(restoration, live, plain["groups"][there], saved)
        parameters, groups = self._parameters(), self._groups()
        for name, halves in plain["state"].items():
            if name in parameters:
                parameter = parameters[name]
                self._aim_state(restoration, parameter, groups[id(parameter)], halves, saved)
        for key, halves in plain["shared"].items():
            tree.aim(restoration, self._optimizer.state.get(key), halves, saved)
        restoration.finish = lambda: self._finish(plain, matched.pairs, restoration.targets)
        return restoration

    def _aim_state(
        self,
        restoration: Restoration,
        parameter: torch.Tensor,
        group: Mapping[str, Any],
        halves: Mapping[str, Any],
        saved: Mapping[str, TensorInfo],
    ) -> None:
        state = self._optimizer.state.get(parameter)
        steps_on_host = not (group.get("capturable") or group.get("fused"))
        for slot in halves["slots"]:
            name, live = slot["name"], tree.at_path(state, slot["path"])
            if isinstance(live, torch.Tensor):
                restoration.aim(name, live, saved[name])
                continue
            on_host = steps_on_host and slot["path"] == ["step"]
            if name not in restoration.targets:
                restoration.targets[name] = make_like(
                    parameter, saved[name], slot["layout"], on_host=on_host
                )

    def _finish(
        self,
        plain: Mapping[str, Any],
        pairs: list[tuple[int, int]],
        tensors: Mapping[str, torch.Tensor],
    ) -> None:
        for here, there in pairs:
            group = self._optimizer.param_groups[here]
            for key, value in tree.join(plain["groups"][there], tensors).items():
                group[key] = _set(group.get(key), value)
        parameters = self._parameters()
        kept: set[Any] = {parameters[name] for name in plain["state"]} | plain["shared"].keys()
        for key in [key for key in self._optimizer.state if key not in kept]:
            del self._optimizer.state[key]
        for name, halves in plain["state"].items():
            tree.merge(self._optimizer.state[parameters[name]], tree.join(halves, tensors))
        for key, halves in plain["shared"].items():
            live = self._optimizer.state.get(key)
            self._optimizer.state[key] = tree.merge(live, tree.join(halves, tensors))

    def _group_names(self) -> list[list[list[str]]]:
        """For each group all names of each of its parameters."""
        names = self._names()
        found: list[list[list[str]]] = []
        for index, group in enumerate(self._optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                if id(parameter) not in names:
                    raise ValueError(
                        f"parameter {place} of optimizer group {index}, of shape "
                        f"{tuple(parameter.shape)}, belongs to no tracked module: track its module "
                        "too, and build the optimizer after fully_shard"
                    )
            found.append([names[id(parameter)] for parameter in group["params"]])
        return found

    def _parameters(self, *, first_name_only: bool = False) -> dict[str, torch.Tensor]:
        names = self._names()
        return {
            name: parameter
            for group in self._optimizer.param_groups
            for parameter in group["params"]
            for name in (names[id(parameter)][:1] if first_name_only else names[id(parameter)])
        }

    def _groups(self) -> dict[int, dict[str, Any]]:
        """The group of each parameter, by the parameter's id."""
        return {
            id(parameter): group
            for group in self._optimizer.param_groups
            for parameter in group["params"]
        }

    def _shared_keys(self) -> list[Any]:
        """Keys of state that belongs to no parameter, as some optimizers keep it."""
        state: Mapping[Any, Any] = self._optimizer.state
        return [key for key in state if not isinstance(key, torch.Tensor)]


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: group[key] for key in group if key != "params" and key not in _SWITCHES}


def _add(captured: Captured, value: Any, name: str, seen: dict[int, str]) -> dict[str, Any]:
    halves = tree.split(value, name, seen)
    for tensor_name, tensor in halves.tensors.items():
        captured.add(tensor_name, tensor)
    return halves.saved()


def _set(live: Any, value: Any) -> Any:
    """The live setting with the saved value: a tensor stays a tensor, a number a number."""
    if isinstance(live, torch.Tensor) and not isinstance(value, torch.Tensor):
        return live.fill_(value)
    if isinstance(value, torch.Tensor) and isinstance(live, float | int):
        return value.item()
    return tree.merge(live, value)
