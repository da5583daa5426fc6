"""Layout: how a tensor lies over the ranks, told by the layout of the parameter it belongs to.

Saved beside optimizer state and averages, so that fresh ones on any mesh get tensors that their
next step can use. Must not import ray.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed import tensor as dtensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from elastic.storage.manifest import TensorInfo
from elastic.training.part import torch_dtype

__all__ = ["Named", "Templates", "layout_of", "make_like"]

Layout = dict[str, Any]
Named = tuple[list[str], torch.Tensor]


def layout_of(parameter: torch.Tensor, value: torch.Tensor, name: str) -> Layout:
    """What to tell `make_like`; empty when the value lies as its parameter does.

    Raises `ValueError` for state that no other number of ranks could take over: partial sums, and
    plain tensors that hold this rank's part only.
    """
    if not isinstance(parameter, DTensor):
        return {}
    if isinstance(value, DTensor):
        same = value.placements == parameter.placements and value.shape == parameter.shape
        return {} if same else {"shard": _shard_dims(parameter, value, name)}
    local, whole = parameter.to_local().shape, parameter.shape
    if value.ndim and value.shape == local != whole:
        raise ValueError(
            f"optimizer state {name!r} is a plain tensor of the shape of this rank's shard, "
            f"{tuple(local)} of {tuple(whole)}: expected a DTensor, as zeros_like(parameter) "
            "makes one, since no other number of ranks could take it over"
        )
    return {"plain": True} if value.ndim else {}


def make_like(
    parameter: torch.Tensor, info: TensorInfo, layout: Mapping[str, Any], *, on_host: bool
) -> torch.Tensor:
    """Zeros for one saved tensor of a parameter's state, placed for the parameter's next step.

    `on_host` puts a single number on the CPU, where an optimizer keeps its step count.
    """
    dtype, shape = torch_dtype(info.dtype), torch.Size(info.shape)
    like_parameter = shape == parameter.shape and not layout
    if like_parameter and not (on_host and not shape):
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    if isinstance(parameter, DTensor) and shape and "plain" not in layout:
        return dtensor.zeros(
            shape,
            dtype=dtype,
            device_mesh=parameter.device_mesh,
            placements=[_placed(p, layout.get("shard", [])) for p in parameter.placements],
        )
    device = torch.device("cpu") if on_host and not shape else parameter.device
    return torch.zeros(shape, dtype=dtype, device=device)


class Templates:
    """Parameters by name, as which other tensors may lie."""

    def __init__(self, parameters: Sequence[Named]) -> None:
        self.by_name = {name: p for names, p in parameters for name in names}
        self._by_layout = {_layout_key(p): names[0] for names, p in reversed(parameters)}

    def like(self, value: torch.Tensor, path: Sequence[Any]) -> str | None:
        """The name of the parameter as which `value` lies, as an average does; None without any.

        It is the one whose name ends the path, else one with the shape, mesh and placements of a
        sharded `value`. Raises `ValueError` for a copy of this rank's shard.
        """
        words = ".".join(map(str, path)).split(".")
        names = (".".join(words[start:]) for start in range(len(words)))
        name = next((name for name in names if name in self.by_name), None)
        if name is not None:
            parameter = self.by_name[name]
            if parameter.shape == value.shape:
                return name
            # A vector may have as many elements by chance; who averages shards has matrices too.
            if value.ndim > 1 and _is_own_shard(parameter, value):
                raise ValueError(
                    f"the tensor at {'.'.join(words)!r} has the shape of this rank's shard of "
                    f"{name!r}, {tuple(value.shape)} of {tuple(parameter.shape)}: expected a "
                    "DTensor, as parameter.detach().clone() makes one, since no other number of "
                    "ranks could take it over"
                )
        return self._by_layout.get(_layout_key(value)) if isinstance(value, DTensor) else None


def _is_own_shard(parameter: torch.Tensor, value: torch.Tensor) -> bool:
    if not isinstance(parameter, DTensor) or isinstance(value, DTensor):
        return False
    return value.shape == parameter.to_local().shape != parameter.shape


def _layout_key(tensor: torch.Tensor) -> Any:
    if not isinstance(tensor, DTensor):
        return None
    # The id stands for the mesh, whose own equality takes no account of this process's place in it.
    return id(tensor.device_mesh), tensor.placements, tensor.shape


def _shard_dims(parameter: DTensor, value: DTensor, name: str) -> list[list[int]]:
    """Pairs (dim of the parameter, dim of the value) that are split over the same mesh axis."""
    if value.device_mesh != parameter.device_mesh:
        raise ValueError(f"optimizer state {name!r} is on another mesh than its parameter")
    pairs = []
    for ours, theirs in zip(value.placements, parameter.placements, strict=True):
        if ours.is_replicate():
            continue
        if ours.is_partial() or not (_is_split(ours) and _is_split(theirs)):
            raise ValueError(
                f"optimizer state {name!r} has placements {value.placements} beside a parameter "
                f"with {parameter.placements}: expected it replicated, or split where the "
                "parameter is split; redistribute it before it is kept"
            )
        pairs.append([_dim(theirs), _dim(ours)])
    return pairs


def _placed(placement: Placement, pairs: list[list[int]]) -> Placement:
    if not _is_split(placement):
        return Replicate()
    dims = {pair[0]: pair[1] for pair in pairs}
    if _dim(placement) not in dims:
        return Replicate()
    dim = dims[_dim(placement)]
    if isinstance(placement, _StridedShard):
        return _StridedShard(dim, split_factor=placement.split_factor)
    return dtensor.Shard(dim)


def _is_split(placement: Placement) -> bool:
    return isinstance(placement, _StridedShard | dtensor.Shard)


def _dim(placement: Placement) -> int:
    return int(placement.dim)  # type: ignore[attr-defined]
