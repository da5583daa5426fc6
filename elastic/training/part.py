"""A part: one tracked object's share of a checkpoint, and what it takes to put that share back.

Parts name their tensors relative to themselves; the tracked state puts their own name before. Must
not import ray.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from elastic.storage.manifest import TensorInfo

__all__ = [
    "Captured",
    "Mismatch",
    "Part",
    "Restoration",
    "StateMismatch",
    "describe",
    "shape_and_dtype",
    "torch_dtype",
]

NOTHING = "nothing of that name"


@dataclass(kw_only=True)
class Captured:
    """Live tensors by name, not copies, and the plain rest, which shares no container with it."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    plain: dict[str, Any] = field(default_factory=dict)
    stepped: set[str] = field(default_factory=set)
    """Names of the tensors that only a step of a tracked optimizer changes."""

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Raises `ValueError` when two tensors would have one name in the checkpoint."""
        if name in self.tensors:
            raise ValueError(
                f"two tensors would both be called {name!r} in the checkpoint: rename one of them"
            )
        self.tensors[name] = tensor


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """One tensor or object that the checkpoint and the live state disagree on."""

    name: str
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.name}: expected {self.expected}, found {self.found}"


class StateMismatch(Exception):
    """The checkpoint does not fit what is tracked, which says nothing about its bytes.

    Nothing was changed on the ranks that saw it.
    """

    def __init__(self, mismatches: Iterable[Mismatch]) -> None:
        self.mismatches = tuple(mismatches)
        super().__init__(self.mismatches)

    def __str__(self) -> str:
        shown = "; ".join(map(str, self.mismatches[:8]))
        more = f"; and {len(self.mismatches) - 8} more" if len(self.mismatches) > 8 else ""
        return (
            f"the checkpoint does not fit the tracked objects (expected: live, found: checkpoint). "
            f"{shown}{more}. Track the objects that were saved, or resume under another name"
        )


@dataclass(kw_only=True)
class Restoration:
    """Tensors to fill from the checkpoint, by their names there; then `finish` puts all in place.

    Until `finish` is called only the content of live tensors has changed.
    """

    targets: dict[str, torch.Tensor] = field(default_factory=dict)
    mismatches: list[Mismatch] = field(default_factory=list)
    finish: Callable[[], None] = lambda: None
    taken: set[int] = field(default_factory=set)

    def aim(self, name: str, live: torch.Tensor, saved: TensorInfo) -> None:
        """Fill `live` with the saved tensor of that name, or note why it cannot hold it.

        One tensor cannot take two saved ones: the second gets memory of its own.
        """
        if name in self.targets:
            return
        if live.is_meta:
            raise ValueError(
                f"{name!r} is on the meta device and has no memory to restore into: "
                "call to_empty(device=...) before it is tracked"
            )
        expected, found = shape_and_dtype(live), f"{saved.dtype} of shape {tuple(saved.shape)}"
        if expected != found:
            self.mismatches.append(Mismatch(name=name, expected=expected, found=found))
        if id(live) in self.taken:
            live = torch.zeros_like(live)
        self.taken.add(id(live))
        self.targets[name] = live

    def refuse(self, name: str, expected: str, found: str) -> None:
        self.mismatches.append(Mismatch(name=name, expected=expected, found=found))


class Part(Protocol):
    """What the tracked state asks of each object."""

    def capture(self) -> Captured: ...

    def prepare(self, plain: Any, saved: Mapping[str, TensorInfo]) -> Restoration:
        """How to restore from what `capture` gave when it was saved; changes nothing yet."""


def describe(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorInfo]:
    """Global shape and dtype of each tensor, for the manifest."""
    return {
        name: TensorInfo(shape=list(tensor.shape), dtype=_dtype_name(tensor.dtype))
        for name, tensor in tensors.items()
    }


def shape_and_dtype(tensor: torch.Tensor) -> str:
    return f"{_dtype_name(tensor.dtype)} of shape {tuple(tensor.shape)}"


def torch_dtype(name: str) -> torch.dtype:
    """The dtype that `describe` names so. Raises `ValueError`."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no dtype {name!r}")
    return dtype


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
