"""Staging: copies of live tensors in host memory that the process keeps from save to save.

The copy is all that a save costs the training step, and fresh memory would cost more than the copy:
every page of it has to be made first. So the memory belongs to the process and outlives models
and process groups. Must not import ray.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.tensor import DTensor

__all__ = ["HostStager", "StagedShard"]

_ALIGNMENT_BYTES = 64


class StagedShard:
    """A copy of this rank's part of a tensor, as DCP's planner takes it.

    Holds no mesh and no process group, so that a save in flight keeps no generation alive.
    """

    def __init__(self, local: torch.Tensor, chunk: ChunkStorageMetadata, size: torch.Size) -> None:
        self.local = local
        self._chunk = chunk
        self._size = size

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        data = TensorWriteData(
            chunk=self._chunk,
            properties=TensorProperties(dtype=self.local.dtype),
            size=self._size,
        )
        index = MetadataIndex(fqn, self._chunk.offsets)
        return [WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data)]


class HostStager(AsyncStager):
    """Copies into one block of host memory, which the next call overwrites.

    A problem does not raise where only one rank would see it: `problem` tells it, nothing is
    staged, and the save is to fail with it on every rank.
    """

    _synchronize_after_execute = False

    def __init__(self) -> None:
        self._block = np.empty(0, dtype=np.uint8)
        self.problem = ""
        self.staged_bytes = 0

    def stage(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Copies of `state_dict["tensors"]`, by tracked object and then by the name below it."""
        self.problem = ""
        try:
            return self._stage(state_dict["tensors"])
        except Exception as error:  # noqa: BLE001 - every rank is to hear of it, see above
            self.problem = f"{type(error).__name__}: {error}"
            return {}

    def synchronize_staging(self) -> None:
        """Nothing to wait for: `stage` returns when the copies are complete."""

    def close(self) -> None:
        """Gives the memory back."""
        self._block = np.empty(0, dtype=np.uint8)

    @torch.no_grad()
    def _stage(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        here = {name: tensor for name, tensor in tensors.items() if _is_here(tensor)}
        sources = [_local(name, tensor) for name, tensor in here.items()]
        copies = self._room(sources)
        _copy_to_host(copies, sources)
        staged: dict[str, Any] = {}
        chunks: dict[Any, ChunkStorageMetadata] = {}
        for (name, tensor), copy in zip(here.items(), copies, strict=True):
            owner, _, rest = name.partition(".")
            value = _as_shard(tensor, copy, chunks)
            if rest:
                staged.setdefault(owner, {})[rest] = value
            else:
                staged[owner] = value
        return staged

    def _room(self, sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Places in the block for tensors like these, each its own storage of its own size."""
        starts = [0]
        for source in sources:
            size = -(-source.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
            starts.append(starts[-1] + size)
        self.staged_bytes = starts.pop()
        if self._block.nbytes < self.staged_bytes:
            self._block = np.empty(0, dtype=np.uint8)  # freed first: two would not fit
            self._block = _host_block(self.staged_bytes)
        return [
            _view(self._block[start : start + source.nbytes], source)
            for start, source in zip(starts, sources, strict=True)
        ]


def _is_here(tensor: torch.Tensor) -> bool:
    """Whether this rank holds a part at all: a mesh may leave it out."""
    return not isinstance(tensor, DTensor) or tensor.device_mesh.get_coordinate() is not None


def _local(name: str, tensor: torch.Tensor) -> torch.Tensor:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
    if local.layout != torch.strided or local.is_meta or local.is_quantized:
        raise ValueError(
            f"{name!r} is a tensor that cannot be kept ({local.layout}, {local.device}, "
            f"{local.dtype}): expected a dense one with memory of its own"
        )
    return local


def _view(room: np.ndarray[Any, Any], like: torch.Tensor) -> torch.Tensor:
    if like.numel() == 0:
        return torch.empty(like.shape, dtype=like.dtype)
    # Through numpy, not by slicing a tensor: torch.save writes the whole storage of what it gets.
    return torch.from_numpy(room).view(like.dtype).view(like.shape)


def _as_shard(
    tensor: torch.Tensor, copy: torch.Tensor, chunks: dict[Any, ChunkStorageMetadata]
) -> Any:
    if not isinstance(tensor, DTensor):
        return copy
    # Asking costs more than copying a small tensor, and moments lie as their parameters do. The
    # id stands for the mesh, whose own equality takes no account of this process's place in it.
    key = (id(tensor.device_mesh), tensor.placements, tensor.shape)
    if key not in chunks:
        chunks[key] = tensor.__create_chunk_list__()[0]
    return StagedShard(copy, chunks[key], tensor.shape)


def _copy_to_host(copies: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Complete when it returns, also for sources on a CUDA device."""
    for copy, source in zip(copies, sources, strict=True):
        copy.copy_(source, non_blocking=True)
    for device in {source.device for source in sources if source.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


def _host_block(size_bytes: int) -> np.ndarray[Any, Any]:
    """Memory that a CUDA device, where there is one, can copy into without a detour."""
    block = np.empty(size_bytes, dtype=np.uint8)
    if torch.cuda.is_available():
        # Registered, not allocated by torch, which would round the size up to a power of two.
        from torch.cuda import _pin_memory_utils as pinning

        address = block.ctypes.data
        pinning.pin_memory(address, size_bytes)
        weakref.finalize(block, pinning.unpin_memory, address).atexit = False
    return block
