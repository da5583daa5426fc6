"""Optimizer part: state and groups by parameter name, as the optimizer itself holds them.

Never through torch's own checkpoint helpers: they run a step to make state, which moves Adam's
counter, and give nothing at all while gradients are present. Must not import ray.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from elastic.storage.manifest import TensorInfo
from elastic.training import tree
from elastic.training.layout import Named, layout_of, make_like
from elastic.training.parameter_groups import Match, match_saved
from elastic.training.part import NOTHING, Captured, Restoration

__all__ = ["OptimizerPart"]

# How an update is computed, not what it computes: the live optimizer was built for its device.
_SWITCHES = {"foreach", "fused", "capturable", "differentiable", "param_names"}

SET_BY_OTHERS = ("param_groups.", "shared.", "own.")
"""How the names begin of what more than the optimizer's step may change: a tensor for the learning
rate is set by a scheduler."""

Parameters = Callable[[], Sequence[Named]]


class OptimizerPart:
    """State by parameter, and which parameters are in which group under which settings.

    `parameters` gives all that could be in a group with all their names. Whatever else the
    optimizer's own `state_dict` holds goes through its `load_state_dict`. With `is_scheduled`
    somebody knows the groups by their place, so that they must stand in the order saved.

    Raises `ValueError` for a parameter without a name: its state could not be told from another's.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Parameters,
        *,
        is_scheduled: bool = False,
    ) -> None:
        self._optimizer = optimizer
        self._named = parameters
        self._is_scheduled = is_scheduled
        self._built = list(optimizer.param_groups)
        self._built_names = self._group_names()

    def capture(self) -> Captured:
        captured = Captured()
        seen: dict[int, str] = {}
        groups = []
        built = {id(group): index for index, group in enumerate(self._built)}
        for index, names in enumerate(self._group_names()):
            group = self._optimizer.param_groups[index]
            halves = _add(captured, _settings(group), f"param_groups.{index}", seen)
            own = {"parameters": [name[0] for name in names], "built": built.get(id(group))}
            groups.append({**own, **halves})
        captured.plain = {"groups": groups, "built": [], "state": {}, "shared": {}}
        for group_names in self._built_names:
            captured.plain["built"].append([names[0] for names in group_names])
        for (name, *_), parameter in self._named():
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
        captured.plain["own"] = _add(captured, self._own_state(), "own", seen)
        return captured

    def prepare(self, plain: Any, saved: Mapping[str, TensorInfo]) -> Restoration:
        restoration = Restoration()
        parameters = self._by_name()
        match = match_saved(plain, self._group_names(), self._built_names, parameters.keys())
        restoration.mismatches += match.mismatches
        self._refuse_other_order(restoration, match)
        settings: dict[str, Mapping[str, Any]] = {}
        for here, there in match.pairs:
            group = plain["groups"][there]
            live = {} if here is None else self._groups(match)[here]
            tree.aim(restoration, live, group, saved)
            settings |= dict.fromkeys(group["parameters"], live or self._optimizer.defaults)
        grouped = {name for group in plain["groups"] for name in group["parameters"]}
        for name, halves in plain["state"].items():
            if name in parameters:
                group = settings.get(name, self._optimizer.defaults)
                self._aim_state(restoration, parameters[name], group, halves, saved)
            elif name not in grouped:
                restoration.refuse(name, NOTHING, "state of a parameter that is in no group")
        for key, halves in plain["shared"].items():
            tree.aim(restoration, self._optimizer.state.get(key), halves, saved)
        if "own" in plain:  # a checkpoint of an earlier release has none
            self._aim_own(restoration, plain["own"], saved)
        restoration.finish = lambda: self._finish(plain, match, restoration.targets)
        return restoration

    def _refuse_other_order(self, restoration: Restoration, match: Match) -> None:
        if match.is_regrouped or not self._is_scheduled:
            return
        if sorted(match.pairs) != sorted(match.pairs, key=lambda pair: pair[1]):
            found = "them in another order, and a scheduler that knows groups by their place"
            restoration.refuse("param_groups", "groups in the order they were saved in", found)

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

    def _aim_own(
        self, restoration: Restoration, halves: Mapping[str, Any], saved: Mapping[str, TensorInfo]
    ) -> None:
        live = self._own_state()
        tree.aim(restoration, live, halves, saved)
        for key in sorted(live.keys() ^ halves["plain"].keys(), key=str):
            here, there = ("state of its own", NOTHING)[:: 1 if key in live else -1]
            restoration.refuse(f"own.{key}", here, there)

    def _finish(
        self, plain: Mapping[str, Any], match: Match, tensors: Mapping[str, torch.Tensor]
    ) -> None:
        parameters = self._by_name()
        if match.is_regrouped:
            self._regroup(plain["groups"], match, parameters)
        for place, (here, there) in enumerate(match.pairs):
            group = self._optimizer.param_groups[place if match.is_regrouped else here or 0]
            for key, value in tree.join(plain["groups"][there], tensors).items():
                group[key] = _set(group.get(key), value)
        kept: set[Any] = {parameters[name] for name in plain["state"]} | plain["shared"].keys()
        for key in [key for key in self._optimizer.state if key not in kept]:
            del self._optimizer.state[key]
        for name, halves in plain["state"].items():
            tree.merge(self._optimizer.state[parameters[name]], tree.join(halves, tensors))
        for key, halves in plain["shared"].items():
            live = self._optimizer.state.get(key)
            self._optimizer.state[key] = tree.merge(live, tree.join(halves, tensors))
        if own := tree.join(plain["own"], tensors) if "own" in plain else {}:
            self._load_own(own)

    def _regroup(
        self, saved: list[dict[str, Any]], match: Match, parameters: Mapping[str, torch.Tensor]
    ) -> None:
        """Gives the saved groups their parameters; those there were stay the same objects."""
        groups = []
        for here, there in match.pairs:
            added = {**self._optimizer.defaults, "params": []}
            group = added if here is None else self._groups(match)[here]
            group["params"][:] = [parameters[name] for name in saved[there]["parameters"]]
            if any("param_names" in other for other in self._built):
                group["param_names"] = list(saved[there]["parameters"])
            groups.append(group)
        self._optimizer.param_groups[:] = groups

    def _groups(self, match: Match) -> list[dict[str, Any]]:
        """What the indices of live groups in a match stand for."""
        return self._built if match.is_regrouped else self._optimizer.param_groups

    def _load_own(self, own: Mapping[str, Any]) -> None:
        """Through load_state_dict, which would leave copies of groups and state, cast to the
        parameters' type, in place of those that were just restored.
        """
        state, groups = self._optimizer.state, self._optimizer.param_groups
        self._optimizer.load_state_dict({**self._state_dict(), **own})
        self._optimizer.state, self._optimizer.param_groups = state, groups

    def _own_state(self) -> dict[str, Any]:
        """What the optimizer's own state_dict holds beside what every optimizer's does."""
        method = type(self._optimizer).state_dict
        hooks = self._optimizer._optimizer_state_dict_post_hooks
        if method is torch.optim.Optimizer.state_dict and not hooks:
            return {}
        held = self._state_dict()
        return {key: held[key] for key in held if key not in ("state", "param_groups")}

    def _state_dict(self) -> dict[str, Any]:
        """As torch makes it, which it cannot where a parameter with state has left its group."""
        state = self._optimizer.state
        grouped = {id(p) for group in self._optimizer.param_groups for p in group["params"]}
        kept = {k: v for k, v in state.items() if id(k) in grouped or not _is_tensor(k)}
        self._optimizer.state = defaultdict(dict, kept)
        try:
            held: dict[str, Any] = self._optimizer.state_dict()
        finally:
            self._optimizer.state = state
        return held

    def _group_names(self) -> list[list[list[str]]]:
        """For each group all names of each of its parameters."""
        known = {id(parameter): names for names, parameter in self._named()}
        found: list[list[list[str]]] = []
        for index, group in enumerate(self._optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                if id(parameter) not in known:
                    raise ValueError(
                        f"parameter {place} of optimizer group {index}, of shape "
                        f"{tuple(parameter.shape)}, belongs to no tracked module: track its module "
                        "too, and build the optimizer after fully_shard"
                    )
            found.append([known[id(parameter)] for parameter in group["params"]])
        return found

    def _by_name(self) -> dict[str, torch.Tensor]:
        return {name: parameter for names, parameter in self._named() for name in names}

    def _shared_keys(self) -> list[Any]:
        """Keys of state that belongs to no parameter, as some optimizers keep it."""
        state: Mapping[Any, Any] = self._optimizer.state
        return [key for key in state if not _is_tensor(key)]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


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
