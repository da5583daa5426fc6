"""Tracked state: the objects whose content a checkpoint holds, read and restored in place.

Capturing changes nothing that training could notice. Must not import ray, and knows no files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from elastic.storage.manifest import TensorInfo
from elastic.training import rng
from elastic.training.host_memory import growth_bytes
from elastic.training.layout import Named
from elastic.training.module_part import ModulePart, named_parameters, reshard, unwrap
from elastic.training.optimizer_part import SET_BY_OTHERS, OptimizerPart
from elastic.training.part import (
    NOTHING,
    Captured,
    Mismatch,
    Part,
    Restoration,
    StateMismatch,
    describe,
)
from elastic.training.value_part import (
    ContainerPart,
    GeneratorPart,
    HasStateDict,
    StateDictPart,
    TensorPart,
)

__all__ = ["Captured", "Mismatch", "StateMismatch", "TrackedState", "describe"]

Read = Callable[[dict[str, torch.Tensor]], None]


class TrackedState:
    """Objects by name: modules, optimizers, dicts, lists, tensors, anything with a state_dict, and
    generators, which become random streams of this rank.

    Tensors go by `<name>.<fqn>` for a module, `<name>.<parameter>.<key>` for an optimizer,
    `<name>.<path>` otherwise. The parameters of the module tracked as `model` go by their own
    names in an optimizer, those of another module by `<module>.<fqn>`. Raises `ValueError` for an
    object of another kind, and for an optimizer with a parameter that no tracked module has.
    """

    def __init__(self, **objects: Any) -> None:
        self._modules = {
            name: unwrap(value) for name, value in objects.items() if isinstance(value, nn.Module)
        }
        self._loose = {
            name: value for name, value in objects.items() if isinstance(value, torch.Tensor)
        }
        self.optimizers = [
            value for value in objects.values() if isinstance(value, torch.optim.Optimizer)
        ]
        rng.follow({n: v for n, v in objects.items() if isinstance(v, rng.Generator)})
        reshard(self._modules.values())
        # A scheduler has one value for each group of its optimizer, in a list.
        scheduled = [id(getattr(value, "optimizer", None)) for value in objects.values()]
        self._parts = {
            name: self._part(name, value, is_scheduled=id(value) in scheduled)
            for name, value in objects.items()
        }

    def capture(self) -> Captured:
        """What a checkpoint of this moment holds. The tensors are the live ones: copy them before
        training goes on.

        Raises `ValueError` for state that could not be restored from what would be saved.
        """
        reshard(self._modules.values())
        captured = Captured()
        stepped = {id(p) for o in self.optimizers for g in o.param_groups for p in g["params"]}
        for name, part in self._parts.items():
            share = part.capture()
            captured.plain[name] = share.plain
            is_optimizer = isinstance(part, OptimizerPart)
            for rest, tensor in share.tensors.items():
                whole = _whole(name, rest)
                captured.add(whole, tensor)
                if id(tensor) in stepped or (is_optimizer and not rest.startswith(SET_BY_OTHERS)):
                    captured.stepped.add(whole)
        return captured

    def changeable(self) -> list[torch.Tensor]:
        """Tensors that a forward pass may change: buffers, and tensors tracked by themselves."""
        buffers = [buffer for module in self._modules.values() for buffer in module.buffers()]
        return [*buffers, *self._loose.values()]

    def expected_growth_bytes(self) -> int:
        """What optimizers that have made no step yet will add on this rank."""
        return growth_bytes(self.optimizers)[0]

    @torch.no_grad()
    def restore(
        self, plain: Mapping[str, Any], saved: Mapping[str, TensorInfo], read: Read
    ) -> None:
        """Makes the live objects what they were when `plain` was captured.

        `saved` tells every tensor that `read` can give; `read` is called once and fills the
        tensors it is handed. Objects stay the same objects, tensors keep their memory where there
        is one to keep. Raises `StateMismatch` before anything has changed.
        """
        reshard(self._modules.values())
        restorations = self._prepare(plain, saved)
        mismatches = [
            Mismatch(name=_whole(name, found.name), expected=found.expected, found=found.found)
            for name, restoration in restorations.items()
            for found in restoration.mismatches
        ]
        mismatches += [
            Mismatch(name=name, expected=NOTHING, found="a tracked object")
            for name in plain.keys() - self._parts.keys()
        ]
        mismatches += [
            Mismatch(name=name, expected="a tracked object", found=NOTHING)
            for name in self._parts.keys() - plain.keys()
        ]
        if mismatches:
            raise StateMismatch(sorted(mismatches, key=lambda found: found.name))
        read(
            {
                _whole(name, rest): tensor
                for name, restoration in restorations.items()
                for rest, tensor in restoration.targets.items()
            }
        )
        for restoration in restorations.values():
            restoration.finish()

    def _prepare(
        self, plain: Mapping[str, Any], saved: Mapping[str, TensorInfo]
    ) -> dict[str, Restoration]:
        shares: dict[str, dict[str, TensorInfo]] = {name: {} for name in self._parts}
        for whole, info in saved.items():
            name, _, rest = whole.partition(".")
            shares.setdefault(name, {})[rest] = info
        return {
            name: part.prepare(plain[name], shares[name])
            for name, part in self._parts.items()
            if name in plain
        }

    def _part(self, name: str, value: Any, *, is_scheduled: bool) -> Part:
        if name in self._modules:
            return ModulePart(self._modules[name])
        if isinstance(value, torch.optim.Optimizer):
            return OptimizerPart(value, self._parameters, is_scheduled=is_scheduled)
        if isinstance(value, torch.Tensor):
            return TensorPart(value)
        if isinstance(value, rng.Generator):
            return GeneratorPart(value)
        if isinstance(value, dict | list):
            return ContainerPart(value, self._parameters)
        if isinstance(value, HasStateDict):
            return StateDictPart(value, self._parameters)
        raise ValueError(
            f"{name!r} is a {type(value).__name__}, which cannot be restored in place: expected a "
            "module, an optimizer, a dict, a list, a tensor, a random generator, or an object with "
            "state_dict and load_state_dict. Put a number or a text into a dict"
        )

    def _parameters(self) -> list[Named]:
        """All that an optimizer may hold, each once with all its names."""
        found: dict[int, Named] = {id(t): ([name], t) for name, t in self._loose.items()}
        for key, module in self._modules.items():
            prefix = "" if key == "model" else f"{key}."
            for names, parameter in named_parameters(module):
                own = found.setdefault(id(parameter), ([], parameter))[0]
                own.extend(prefix + name for name in names)
        return list(found.values())


def _whole(name: str, rest: str) -> str:
    return f"{name}.{rest}" if rest else name
