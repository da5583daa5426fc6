"""A tree of plain values with tensors at some leaves: split in two, and put together again.

Containers are dict, list and tuple; tensors leave a None behind and a slot that says where and
under which name. Must not import ray.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from elastic.storage.manifest import TensorInfo
from elastic.training.part import Restoration, torch_dtype

__all__ = ["Split", "at_path", "join", "merge", "split"]

Make = Callable[[Mapping[str, Any], TensorInfo], torch.Tensor | None]

_ABSENT = object()


@dataclass(kw_only=True)
class Split:
    """`plain` is a copy down to its leaves; `slots` are plain values too."""

    plain: Any
    slots: list[dict[str, Any]] = field(default_factory=list)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    def saved(self) -> dict[str, Any]:
        """What `join` and `aim` need again, as plain values."""
        return {"plain": self.plain, "slots": self.slots}


def split(value: Any, name: str = "", seen: dict[int, str] | None = None) -> Split:
    """Both halves of `value`; its tensors are called `<name>.<key>.<index>...`.

    A tensor that is in several places is kept once, under its first name; `seen`, names by id,
    extends that over several calls. Raises `ValueError` when two tensors would have the same name.
    """
    result = Split(plain=None)
    result.plain = _take(value, (), name, result, {} if seen is None else seen)
    return result


def _take(value: Any, path: tuple[Any, ...], name: str, result: Split, seen: dict[int, str]) -> Any:
    if isinstance(value, torch.Tensor):
        first = seen.setdefault(id(value), name)
        if name in result.tensors:
            raise ValueError(f"two tensors would both be called {name!r} in the checkpoint")
        if first == name:
            result.tensors[name] = value
        kind = "dtensor" if isinstance(value, DTensor) else value.device.type
        result.slots.append({"path": list(path), "name": first, "kind": kind})
        return None
    if isinstance(value, dict):
        copy = value.copy()
        for key, item in value.items():
            copy[key] = _take(item, (*path, key), _below(name, key), result, seen)
        return copy
    if type(value) in (list, tuple):
        items = [
            _take(item, (*path, index), _below(name, index), result, seen)
            for index, item in enumerate(value)
        ]
        return items if type(value) is list else tuple(items)
    return value


def join(saved: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Any:
    """The tree again, each tensor at the place it was taken from."""
    plain = saved["plain"]
    for slot in saved["slots"]:
        plain = _put(plain, slot["path"], tensors[slot["name"]])
    return plain


def _put(tree: Any, path: list[Any], leaf: Any) -> Any:
    if not path:
        return leaf
    if isinstance(tree, tuple):
        items = list(tree)
        items[path[0]] = _put(items[path[0]], path[1:], leaf)
        return tuple(items)
    tree[path[0]] = _put(tree[path[0]], path[1:], leaf)
    return tree


def at_path(tree: Any, path: list[Any]) -> Any:
    """What is at `path`, or None."""
    for key in path:
        try:
            tree = tree[key]
        except (KeyError, IndexError, TypeError):
            return None
    return tree


def aim(
    restoration: Restoration,
    live: Any,
    saved: Mapping[str, Any],
    infos: Mapping[str, TensorInfo],
    make: Make = lambda slot, info: None,
) -> None:
    """Add a target for each slot: the live tensor at its place, else what `make` gives, else one
    like the saved one, which must not have been sharded.
    """
    for slot in saved["slots"]:
        name, tensor = slot["name"], at_path(live, slot["path"])
        if name not in infos:
            raise ValueError(f"the checkpoint names a tensor {name!r} that it does not hold")
        if isinstance(tensor, torch.Tensor):
            restoration.aim(name, tensor, infos[name])
        elif name in restoration.targets:
            continue
        elif (made := make(slot, infos[name])) is not None:
            restoration.targets[name] = made
        elif slot["kind"] == "dtensor":
            restoration.refuse(name, "no sharded tensor to load into", "a sharded tensor")
        else:
            restoration.targets[name] = new_tensor(infos[name], slot["kind"])


def new_tensor(info: TensorInfo, device: str) -> torch.Tensor:
    """Zeros for a saved tensor that has no live counterpart, on `device` where there is one."""
    if device == "cuda" and not torch.cuda.is_available():
        device = "cpu"
    return torch.zeros(info.shape, dtype=torch_dtype(info.dtype), device=device)


def merge(live: Any, value: Any) -> Any:
    """`value`, with the live containers and arrays kept and filled wherever they can hold it.

    Whoever holds a reference to one of them sees the restored content, and the next save, which
    reads the live ones, saves what training changed since.
    """
    if type(live) is not type(value):
        return value
    if isinstance(live, dict):
        merged = {key: merge(live.get(key, _ABSENT), item) for key, item in value.items()}
        live.clear()
        live.update(merged)
        return live
    if isinstance(live, list):
        kept = live[: len(value)] + [_ABSENT] * (len(value) - len(live))
        live[:] = [merge(old, item) for old, item in zip(kept, value, strict=True)]
        return live
    if isinstance(live, tuple) and len(live) == len(value):
        return tuple(merge(old, item) for old, item in zip(live, value, strict=True))
    if isinstance(live, np.ndarray) and _fits(live, value):
        live[...] = value
        return live
    return value


def _fits(live: np.ndarray[Any, Any], value: np.ndarray[Any, Any]) -> bool:
    same = (live.shape, live.dtype) == (value.shape, value.dtype)
    return same and live.flags.writeable


def _below(name: str, key: Any) -> str:
    return f"{name}.{key}" if name else str(key)
