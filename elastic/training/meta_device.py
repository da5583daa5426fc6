"""The meta device: a module that was built there, its memory and its first values.

Nothing of such a module is real until it is sharded, so no rank ever holds all of it. Must not
import ray.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from elastic.training import rng

__all__ = ["materialize", "names_without_memory"]

# As torch's own modules call what sets their first values.
_OWN_FUNCTIONS = ("reset_parameters", "_reset_parameters")


def names_without_memory(module: nn.Module) -> list[str]:
    """Parameters and buffers on the meta device, those too that no checkpoint holds."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    return [name for name, tensor in tensors if tensor.is_meta]


def materialize(
    module: nn.Module,
    device: torch.device | str,
    *,
    seed: int,
    init: Callable[[nn.Module], Any] | None = None,
) -> None:
    """Gives a module built on the meta device memory on `device`, and its first values.

    Call it after `fully_shard`, before the optimizer is made, on all ranks. Each submodule sets its
    values in its `reset_parameters`, where it has one; then `init(submodule)` is called for those
    that have tensors of their own. Both see whole tensors, never shards, a submodule at a time,
    and draw from streams that `seed` and the submodule's name decide: the first values are the
    same at any world size and on any mesh. Names that shared a tensor still share it, submodules
    that lack nothing are left as they are, and so are the random streams of the process.

    Raises `ValueError` naming every tensor that was given no value, as buffers are that a
    checkpoint does not hold and nobody fills.
    """
    places = _places(module)
    empty = [place for place in places if place.tensor.is_meta]
    shared = _shared(places)
    module._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device))
    for first, *others in shared:
        for other in others:
            # One parameter under two names has become two, as with to_empty.
            other.tensor = first.tensor
    with torch.no_grad(), _streams_left_alone():
        for place in empty:
            _mark(place.tensor)
        without = {id(place.tensor): place.name for place in empty}
        for name, submodule in reversed(list(module.named_modules())):
            _set_values(name, submodule, empty, without, seed, init)
    if without:
        names = ", ".join(sorted(without.values()))
        raise ValueError(
            f"no value was set for {names} of {type(module).__name__}, built "
            "on the meta device: let reset_parameters of the module that has it fill it, or pass "
            "init=, a function that is called with each submodule"
        )


@dataclass(eq=False)
class _Place:
    """Where a module keeps one tensor; other places may keep the same one."""

    name: str
    owner: nn.Module
    key: str

    @property
    def tensor(self) -> torch.Tensor:
        tensor: torch.Tensor = self._kept()[self.key]
        return tensor

    @tensor.setter
    def tensor(self, tensor: torch.Tensor) -> None:
        self._kept()[self.key] = tensor

    def _kept(self) -> dict[str, Any]:
        is_parameter = self.key in self.owner._parameters
        return self.owner._parameters if is_parameter else self.owner._buffers


def _places(module: nn.Module) -> list[_Place]:
    return [
        _Place(f"{prefix}.{key}" if prefix else key, owner, key)
        for prefix, owner in module.named_modules()
        for key, tensor in (*owner._parameters.items(), *owner._buffers.items())
        if tensor is not None
    ]


def _shared(places: list[_Place]) -> list[list[_Place]]:
    by_id: dict[int, list[_Place]] = {}
    for place in places:
        by_id.setdefault(id(place.tensor), []).append(place)
    return [group for group in by_id.values() if len(group) > 1]


def _set_values(
    name: str,
    submodule: nn.Module,
    empty: list[_Place],
    without: dict[int, str],
    seed: int,
    init: Callable[[nn.Module], Any] | None,
) -> None:
    """Lets one submodule set its values; takes the tensors that have one from `without`, by id."""
    own = [place for place in empty if place.owner is submodule]
    # Its function may set what its children have too, as that of an attention layer does.
    below = [place for place in empty if place.name.startswith(f"{name}." if name else "")]
    function = next((f for f in _OWN_FUNCTIONS if callable(getattr(submodule, f, None))), None)
    if function is not None and below:
        with _whole(below, own, without):
            _begin_stream(seed, name, function)
            getattr(submodule, function)()
    if init is not None and own:
        with _whole(own, own, without):
            _begin_stream(seed, name, "init")
            init(submodule)


@contextlib.contextmanager
def _whole(places: list[_Place], own: list[_Place], without: dict[int, str]) -> Iterator[None]:
    """Within it these places hold whole tensors; after it their shards have the same values."""
    held = [(place, place.tensor) for place in places]
    wholes: dict[int, torch.Tensor] = {}
    for place, tensor in held:
        if isinstance(tensor, DTensor):
            if id(tensor) not in wholes:
                wholes[id(tensor)] = _whole_of(tensor, place in own and id(tensor) in without)
            place.tensor = wholes[id(tensor)]
    try:
        yield
    finally:
        for place, tensor in held:
            full = place.tensor.detach()
            if not _is_marked(full):
                without.pop(id(tensor), None)
            if isinstance(tensor, DTensor):
                place.tensor = tensor
                _fill(tensor, full)


def _whole_of(sharded: DTensor, is_without_value: bool) -> torch.Tensor:
    if is_without_value:
        local = sharded.to_local()
        whole = torch.empty(sharded.shape, dtype=local.dtype, device=local.device)
        _mark(whole)
    else:
        whole = sharded.full_tensor()
    if isinstance(sharded, nn.Parameter):
        return nn.Parameter(whole, requires_grad=sharded.requires_grad)
    return whole


def _fill(sharded: DTensor, full: torch.Tensor) -> None:
    # Every rank has the whole, so that nobody has to send anything.
    mine = distribute_tensor(full, sharded.device_mesh, sharded.placements, src_data_rank=None)
    sharded.to_local().copy_(mine.to_local())


def _mark(tensor: torch.Tensor) -> None:
    """Fills it with what no module would choose for a value."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if local.dtype.is_floating_point or local.dtype.is_complex:
        local.fill_(float("nan"))
    elif local.dtype != torch.bool:
        local.fill_(torch.iinfo(local.dtype).max)


def _is_marked(tensor: torch.Tensor) -> bool:
    if not tensor.numel() or tensor.dtype == torch.bool:
        return False
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return bool(tensor.isnan().any())
    return bool((tensor == torch.iinfo(tensor.dtype).max).all())


@contextlib.contextmanager
def _streams_left_alone() -> Iterator[None]:
    before = rng.capture()
    try:
        yield
    finally:
        rng.restore(before)


def _begin_stream(seed: int, name: str, function: str) -> None:
    digest = hashlib.sha256(f"elastic first values\n{seed}\n{name}\n{function}".encode()).digest()
    number = int.from_bytes(digest[:8], "little") >> 1
    random.seed(number)
    np.random.seed(number & 0xFFFFFFFF)
    torch.manual_seed(number)
