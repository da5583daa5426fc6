"""Value parts: containers, single tensors, and anything that has state_dict and load_state_dict.

Must not import ray.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch

from elastic.storage.manifest import TensorInfo
from elastic.training import tree
from elastic.training.part import NOTHING, Captured, Restoration

__all__ = ["ContainerPart", "HasStateDict", "StateDictPart", "TensorPart"]


@runtime_checkable
class HasStateDict(Protocol):
    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


class ContainerPart:
    """A dict or list, restored in place all the way down."""

    def __init__(self, container: dict[Any, Any] | list[Any]) -> None:
        self._container = container

    def capture(self) -> Captured:
        return _captured(self._container)

    def prepare(self, plain: Any, saved: Mapping[str, TensorInfo]) -> Restoration:
        restoration = Restoration()
        tree.aim(restoration, self._container, plain, saved)

        def finish() -> None:
            value = tree.join(plain, restoration.targets)
            merged = tree.merge(self._container, value)
            assert merged is self._container, f"{type(value)} into {type(self._container)}"

        restoration.finish = finish
        if type(plain["plain"]) is not type(self._container):
            found = type(plain["plain"]).__name__
            restoration.refuse("", f"a {type(self._container).__name__}", f"a {found}")
        return restoration


class StateDictPart:
    """A scheduler, a GradScaler, a metric: whatever its own state_dict says."""

    def __init__(self, stateful: HasStateDict) -> None:
        self._stateful = stateful

    def capture(self) -> Captured:
        return _captured(self._stateful.state_dict())

    def prepare(self, plain: Any, saved: Mapping[str, TensorInfo]) -> Restoration:
        restoration = Restoration()
        # Where state_dict gives out the live tensors they are filled in place, and the call in
        # finish finds them as they should be; where it gives copies, that call is what restores.
        tree.aim(restoration, self._stateful.state_dict(), plain, saved)
        restoration.finish = lambda: self._finish(tree.join(plain, restoration.targets))
        return restoration

    def _finish(self, state: Any) -> None:
        self._stateful.load_state_dict(state)


class TensorPart:
    """A tensor by itself."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def capture(self) -> Captured:
        return Captured(tensors={"": self._tensor})

    def prepare(self, plain: Any, saved: Mapping[str, TensorInfo]) -> Restoration:
        restoration = Restoration()
        if "" in saved:
            restoration.aim("", self._tensor, saved[""])
        else:
            restoration.refuse("", "a tensor", NOTHING)
        return restoration


def _captured(value: Any) -> Captured:
    halves = tree.split(value)
    return Captured(tensors=halves.tensors, plain=halves.saved())
