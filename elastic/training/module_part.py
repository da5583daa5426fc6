"""Module part: parameters, persistent buffers and extra state of an nn.Module, sharded or not.

Must not import ray.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from elastic.storage.manifest import TensorInfo
from elastic.training import tree
from elastic.training.layout import Named
from elastic.training.meta_device import names_without_memory
from elastic.training.part import NOTHING, Captured, Restoration, shape_and_dtype

__all__ = ["ModulePart", "named_parameters", "reshard", "unwrap"]

_EXTRA = "_extra_state"
# Whether a module is compiled or recomputed is how it runs, not what it is: another resume may
# choose differently.
_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module"}


def unwrap(module: nn.Module) -> nn.Module:
    """The module that DistributedDataParallel holds, or the module itself."""
    return module.module if isinstance(module, DistributedDataParallel) else module


def reshard(modules: Iterable[nn.Module]) -> None:
    """Makes FSDP modules hold their sharded parameters, which are the ones an optimizer knows.

    After a forward without backward the root still holds gathered ones, which are other objects.
    """
    for root in modules:
        for module in root.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def named_parameters(module: nn.Module) -> list[Named]:
    """Each parameter once with all its names, in the order of the module. Reshard first."""
    found: dict[int, Named] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), ([], parameter))[0].append(_canonical(name))
    return list(found.values())


class ModulePart:
    """Tensors by their fully qualified names; one that has several names is saved once.

    Which parameters are frozen is kept as well, and restored, unless the module was built with
    others frozen than it was when it was saved: then the code has changed, and it counts. Raises
    `ValueError` for a module with tensors on the meta device.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        if names := names_without_memory(module):
            raise ValueError(
                f"{', '.join(names)} of {type(module).__name__} are on the meta device and have no "
                "memory to restore into: call elastic.materialize(model, device, seed=...) before "
                "it is tracked"
            )
        self._built_frozen = self._frozen()

    def capture(self) -> Captured:
        live, extra = self._live()
        captured = Captured(plain={"aliases": {}, "extra": {}})
        captured.plain["frozen"] = {"built": list(self._built_frozen), "now": self._frozen()}
        for names, tensor in live:
            captured.add(names[0], tensor)
            captured.plain["aliases"].update(dict.fromkeys(names[1:], names[0]))
        for name, value in extra.items():
            halves = tree.split(value, name)
            captured.plain["extra"][name] = halves.saved()
            for tensor_name, tensor in halves.tensors.items():
                captured.add(tensor_name, tensor)
        return captured

    def prepare(self, plain: Any, saved: Mapping[str, TensorInfo]) -> Restoration:
        restoration = Restoration()
        live, extra = self._live()
        for names, tensor in live:
            self._aim(restoration, names, tensor, plain["aliases"], saved)
        for name in sorted(extra.keys() ^ plain["extra"].keys()):
            here, there = ("extra state", NOTHING)[:: 1 if name in extra else -1]
            restoration.refuse(name, here, there)
        for name in extra.keys() & plain["extra"].keys():
            tree.aim(restoration, {}, _rooted(plain["extra"][name]), saved)
        for name in saved.keys() - restoration.targets.keys():
            found = f"{saved[name].dtype} of shape {tuple(saved[name].shape)}"
            restoration.refuse(name, self._why_absent(name, live), found)
        restoration.finish = lambda: self._finish(plain, restoration.targets)
        return restoration

    def _aim(
        self,
        restoration: Restoration,
        names: list[str],
        tensor: torch.Tensor,
        aliases: Mapping[str, str],
        saved: Mapping[str, TensorInfo],
    ) -> None:
        known = next((name for name in names if name in saved), None)
        if known is not None:
            restoration.aim(known, tensor, saved[known])
            return
        tied = next((aliases[name] for name in names if name in aliases), None)
        found = f"it tied to {tied!r}" if tied else NOTHING
        restoration.refuse(names[0], shape_and_dtype(tensor), found)

    def _why_absent(self, name: str, live: list[Named]) -> str:
        for names, _ in live:
            if name in names:
                others = [other for other in names if other != name]
                return f"it tied to {others[0]!r}, one tensor under both names"
        return NOTHING

    def _live(self) -> tuple[list[Named], dict[str, Any]]:
        """Each tensor once with all its names, and the extra state of submodules by name."""
        own = {id(t) for t in (*self._module.parameters(), *self._module.buffers())}
        by_id: dict[int, Named] = {}
        extra = {}
        for name, value in self._module.state_dict(keep_vars=True).items():
            name = _canonical(name)
            if name.rpartition(".")[2] == _EXTRA:
                extra[name] = value
            elif id(value) not in own:
                raise ValueError(
                    f"{name!r} in state_dict() of {type(self._module).__name__} is no parameter or "
                    "buffer of it, so that restoring it in place would change nothing: track it by "
                    "a name of its own, as an object with state_dict and load_state_dict"
                )
            else:
                by_id.setdefault(id(value), ([], value))[0].append(name)
        return list(by_id.values()), extra

    def _finish(self, plain: Any, tensors: Mapping[str, torch.Tensor]) -> None:
        self._set_extra(plain["extra"], tensors)
        # A checkpoint of an earlier release does not tell.
        frozen = plain.get("frozen")
        if frozen is not None and frozen["built"] == self._built_frozen:
            now = set(frozen["now"])
            for name, parameter in self._module.named_parameters():
                parameter.requires_grad_(_canonical(name) not in now)

    def _frozen(self) -> list[str]:
        return sorted(
            _canonical(name)
            for name, parameter in self._module.named_parameters()
            if not parameter.requires_grad
        )

    def _set_extra(self, extra: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        modules = {_canonical(name): module for name, module in self._module.named_modules()}
        for name, saved in extra.items():
            owner = modules[name.rpartition(".")[0]]
            owner.set_extra_state(tree.join(saved, tensors))


def _rooted(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Extra state has no live tensors to fill: set_extra_state takes what it is given."""
    return {**saved, "slots": [{**slot, "path": [None]} for slot in saved["slots"]]}


def _canonical(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
