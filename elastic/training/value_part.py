"""Value parts: containers, single tensors, and anything that has state_dict and load_state_dict.

Must not import ray.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from elastic.storage.manifest import TensorInfo
from elastic.training import rng, tree
from elastic.training.layout import Named, Templates, make_like
from elastic.training.part import NOTHING, Captured, Restoration

__all__ = ["ContainerPart", "GeneratorPart", "HasStateDict", "StateDictPart", "TensorPart"]

Parameters = Callable[[], Sequence[Named]]


@runtime_checkable
class HasStateDict(Protocol):
    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


class _Tree:
    """What both kinds share: values at paths, and tensors that may lie as a parameter does."""

    def __init__(self, parameters: Parameters) -> None:
        self._parameters = parameters

    def captured(self, value: Any) -> Captured:
        halves = tree.split(value)
        shaped = [slot for slot in halves.slots if _at(value, slot["path"]).ndim]
        templates = Templates(self._parameters() if shaped else [])
        for slot in shaped:
            slot["like"] = templates.like(_at(value, slot["path"]), slot["path"])
        return Captured(tensors=halves.tensors, plain=halves.saved())

    def aim(
        self, restoration: Restoration, live: Any, plain: Any, saved: Mapping[str, TensorInfo]
    ) -> None:
        """An average that is made at its first update has no tensors yet when it is tracked."""
        parameters = Templates(self._parameters() if plain["slots"] else []).by_name

        def make(slot: Mapping[str, Any], info: TensorInfo) -> torch.Tensor | None:
            like = parameters.get(slot.get("like") or "")
            if like is None or tuple(like.shape) != tuple(info.shape):
                return None
            return make_like(like, info, {}, on_host=False)

        tree.aim(restoration, live, plain, saved, make)


class ContainerPart:
    """A dict or list, restored in place all the way down."""

    def __init__(self, container: dict[Any, Any] | list[Any], parameters: Parameters) -> None:
        self._container = container
        self._tree = _Tree(parameters)

    def capture(self) -> Captured:
        return self._tree.captured(self._container)

    def prepare(self, plain: Any, saved: Mapping[str, TensorInfo]) -> Restoration:
        restoration = Restoration()
        self._tree.aim(restoration, self._container, plain, saved)

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

    def __init__(self, stateful: HasStateDict, parameters: Parameters) -> None:
        self._stateful = stateful
        self._tree = _Tree(parameters)

    def capture(self) -> Captured:
        return self._tree.captured(self._stateful.state_dict())

    def prepare(self, plain: Any, saved: Mapping[str, TensorInfo]) -> Restoration:
        restoration = Restoration()
        # Where state_dict gives out the live tensors they are filled in place, and the call in
        # finish finds them as they should be; where it gives copies, that call is what restores.
        self._tree.aim(restoration, self._stateful.state_dict(), plain, saved)
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


class GeneratorPart:
    """A random generator: only that there is one, since its state is each rank's own."""

    def __init__(self, generator: rng.Generator) -> None:
        self._kind = type(generator).__name__

    def capture(self) -> Captured:
        return Captured(plain={"generator": self._kind})

    def prepare(self, plain: Any, saved: Mapping[str, TensorInfo]) -> Restoration:
        restoration = Restoration()
        found = plain.get("generator", "something else")
        if found != self._kind:
            restoration.refuse("", f"a {self._kind}", f"a {found}")
        return restoration


def _at(value: Any, path: list[Any]) -> torch.Tensor:
    tensor = tree.at_path(value, path)
    assert isinstance(tensor, torch.Tensor)
    return tensor
