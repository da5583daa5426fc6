"""A share: the pieces of the tracked tensors that one rank writes, so that all ranks' shares
together hold every piece once.

Each rank works out its own without asking the others. Must not import ray.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

__all__ = ["Key", "Piece", "share_of"]

Key = tuple[str, torch.Size]
"""A piece by its tensor's name and its offsets in it, the same on every rank that holds it."""


@dataclass(frozen=True, slots=True)
class Piece:
    """This rank's part of the tensor `name`, whose whole has `size`.

    Holds no mesh and no process group, so that a save in flight keeps no generation alive.
    """

    name: str
    dtype: torch.dtype
    size: torch.Size
    chunk: ChunkStorageMetadata
    is_sharded: bool

    @property
    def key(self) -> Key:
        return self.name, self.chunk.offsets

    def write_item(self) -> WriteItem:
        """As DCP's planner would have made it."""
        return WriteItem(
            index=MetadataIndex(self.name, self.chunk.offsets),
            type=WriteItemType.SHARD if self.is_sharded else WriteItemType.TENSOR,
            tensor_data=TensorWriteData(
                chunk=self.chunk, properties=TensorProperties(dtype=self.dtype), size=self.size
            ),
        )


@torch.no_grad()
def share_of(
    tensors: Mapping[str, torch.Tensor], rank: int, spares: Collection[Key] = ()
) -> tuple[list[Piece], list[torch.Tensor], frozenset[Key]]:
    """The pieces that are this rank's to write, the live memory of each, and what it leaves out.

    What is not sharded is rank 0's alone: chosen item by item, the mean and the variance of a norm
    could come from two ranks that do not agree. Of a part that several ranks of a mesh hold alike
    one of them writes it, in turn; of `spares` others do. Raises `ValueError` for a tensor that
    cannot be kept.
    """
    layouts: dict[Any, _Layout] = {}
    turns: dict[Any, _Turns] = {}
    pieces, sources, left_out = [], [], set()
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            # Asking costs more than copying a small tensor, and moments lie as their parameters
            # do. The id stands for the mesh, whose own equality takes no account of this
            # process's place in it.
            place = (id(tensor.device_mesh), tensor.placements, tensor.shape)
            layout = layouts.get(place)
            if layout is None:
                layout = layouts[place] = _Layout.of(tensor, turns)
            local = tensor.to_local()
            chunk, is_ours = layout.chunk, layout.is_ours(tensor)
        else:
            local = tensor.detach()
            zeros = torch.Size([0] * local.dim())
            chunk, is_ours = ChunkStorageMetadata(offsets=zeros, sizes=local.shape), rank == 0
        if not is_ours or chunk is None:
            continue
        if (key := (name, chunk.offsets)) in spares:
            left_out.add(key)
            continue
        _check(name, local)
        is_sharded = isinstance(tensor, DTensor)
        pieces.append(Piece(name, local.dtype, tensor.shape, chunk, is_sharded))
        sources.append(local)
    return pieces, sources, frozenset(left_out)


class _Turns:
    """Whose turn it is among the ranks that hold the same parts: who has the fewest bytes so far.

    All of them hold the same tensors in the same order, and so come to the same answer.
    """

    def __init__(self, num_holders: int, own_index: int) -> None:
        self._bytes = [0] * num_holders
        self._own_index = own_index

    def is_ours(self, tensor_bytes: int) -> bool:
        index = self._bytes.index(min(self._bytes))
        self._bytes[index] += tensor_bytes
        return index == self._own_index


class _Layout:
    """How tensors of one shape, mesh and placements lie, as this rank sees them."""

    def __init__(self, chunk: ChunkStorageMetadata | None, turns: _Turns | None) -> None:
        self.chunk = chunk
        self._turns = turns

    @classmethod
    def of(cls, tensor: DTensor, turns: dict[Any, _Turns]) -> _Layout:
        mesh = tensor.device_mesh
        coordinate = mesh.get_coordinate()
        if coordinate is None:  # a mesh may leave this rank out
            return cls(None, None)
        alike = _dims_alike(tensor)
        key = (id(mesh), alike)
        if key not in turns:
            turns[key] = _turns(mesh, coordinate, alike)
        apart = [place for dim, place in enumerate(coordinate) if dim not in alike]
        return cls(_chunk(tensor, is_first=not any(apart)), turns[key])

    def is_ours(self, tensor: DTensor) -> bool:
        """To be asked once for each tensor, in order."""
        if self._turns is None:
            return False
        return self._turns.is_ours(math.prod(tensor.shape) * tensor.dtype.itemsize)


def _dims_alike(tensor: DTensor) -> tuple[int, ...]:
    """The dimensions of the mesh along which all ranks hold the same."""
    return tuple(
        dim
        for dim, placement in enumerate(tensor.placements)
        if placement.is_replicate() or placement.is_partial()
    )


def _turns(mesh: DeviceMesh, coordinate: Sequence[int], alike: tuple[int, ...]) -> _Turns:
    num_holders, own_index = 1, 0
    for dim in alike:
        num_holders *= mesh.size(dim)
        own_index = own_index * mesh.size(dim) + coordinate[dim]
    return _Turns(num_holders, own_index)


def _chunk(tensor: DTensor, *, is_first: bool) -> ChunkStorageMetadata | None:
    """None where nothing is left for this rank; of an empty tensor the first part is noted."""
    chunk: ChunkStorageMetadata = tensor.__create_chunk_list__()[0]
    is_empty = not math.prod(tensor.shape)
    return chunk if math.prod(chunk.sizes) or (is_empty and is_first) else None


def _check(name: str, local: torch.Tensor) -> None:
    if local.layout != torch.strided or local.is_meta or local.is_quantized:
        raise ValueError(
            f"{name!r} is a tensor that cannot be kept ({local.layout}, {local.device}, "
            f"{local.dtype}): expected a dense one with memory of its own"
        )
