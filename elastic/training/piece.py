"""A piece: one rank's part of a snapshot as bytes in one block of memory, and the index to them.

It holds what the rank's files of a checkpoint would: its shards, raw and each at an aligned place,
and the plain files. Must not import ray.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

__all__ = ["Layout", "Part", "copy", "lay_out"]

_ALIGNMENT_BYTES = 64
_FORMAT_VERSION = 1


@dataclass(frozen=True)
class Part:
    """One shard of a tensor: `lengths` values from `offsets` on, of one with the shape `shape`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    start: int
    """Where it begins in the piece, in bytes; likewise below."""
    num_bytes: int


@dataclass(kw_only=True)
class Layout:
    """What lies where in a piece of `num_bytes`."""

    parts: list[Part] = field(default_factory=list)
    files: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Start and size by name."""
    num_bytes: int = 0

    def place(self, num_bytes: int) -> int:
        """The start of so many more bytes."""
        start = -(-self.num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self.num_bytes = start + num_bytes
        return start

    def to_json(self) -> bytes:
        """Text from which `from_json` makes an equal layout."""
        tree = {
            "format_version": _FORMAT_VERSION,
            "bytes": self.num_bytes,
            "parts": [list(vars(part).values()) for part in self.parts],
            "files": self.files,
        }
        return json.dumps(tree, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Layout:
        """Raises `ValueError` for what `to_json` did not write."""
        try:
            tree = json.loads(text)
            parts = [
                Part(name, dtype, tuple(shape), tuple(offsets), tuple(lengths), start, size)
                for name, dtype, shape, offsets, lengths, start, size in tree["parts"]
            ]
            files = {name: (int(start), int(size)) for name, (start, size) in tree["files"].items()}
            return cls(parts=parts, files=files, num_bytes=int(tree["bytes"]))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"the index of a piece lacks or garbles a field: {error!r}") from error


def lay_out(
    tensors: Mapping[str, torch.Tensor], files: Mapping[str, bytes], rank: int
) -> tuple[Layout, list[torch.Tensor]]:
    """Places for what this rank has to keep of these, and its local tensors in that order.

    What is not sharded is rank 0's alone, and of replicas the first alone is kept, as in a
    checkpoint. Raises `ValueError` for a tensor that has no dense memory of its own.
    """
    layout, sources = Layout(), []
    chunks: dict[Any, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    for name, tensor in tensors.items():
        if not _is_ours(tensor, rank):
            continue
        local = _local(name, tensor)
        offsets, lengths = _chunk(tensor, chunks)
        if local.numel() == 0 and tensor.numel() != 0:
            continue  # another rank has what there is
        layout.parts.append(
            Part(
                name,
                str(local.dtype).removeprefix("torch."),
                tuple(tensor.shape),
                offsets,
                lengths,
                layout.place(local.nbytes),
                local.nbytes,
            )
        )
        sources.append(local)
    for name, data in files.items():
        layout.files[name] = (layout.place(len(data)), len(data))
    return layout, sources


@torch.no_grad()
def copy(
    layout: Layout,
    sources: Sequence[torch.Tensor],
    files: Mapping[str, bytes],
    room: memoryview,
) -> None:
    """Fills the room as laid out; complete when it returns, also for tensors on a CUDA device."""
    block = np.frombuffer(room, dtype=np.uint8)
    for part, source in zip(layout.parts, sources, strict=True):
        if part.num_bytes:
            place = torch.from_numpy(block[part.start : part.start + part.num_bytes])
            place.view(source.dtype).view(source.shape).copy_(source, non_blocking=True)
    for name, (start, size) in layout.files.items():
        room[start : start + size] = files[name]
    for device in {source.device for source in sources if source.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


def _is_ours(tensor: torch.Tensor, rank: int) -> bool:
    if not isinstance(tensor, DTensor):
        return rank == 0
    place = tensor.device_mesh.get_coordinate()
    if place is None:
        return False  # the mesh leaves this rank out
    return all(
        coordinate == 0
        for coordinate, placement in zip(place, tensor.placements, strict=True)
        if placement.is_replicate()
    )


def _local(name: str, tensor: torch.Tensor) -> torch.Tensor:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
    if local.layout != torch.strided or local.is_meta or local.is_quantized:
        raise ValueError(
            f"{name!r} is a tensor that cannot be kept ({local.layout}, {local.device}, "
            f"{local.dtype}): expected a dense one with memory of its own"
        )
    return local


def _chunk(
    tensor: torch.Tensor, known: dict[Any, tuple[tuple[int, ...], tuple[int, ...]]]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.ndim, tuple(tensor.shape)
    # Moments lie as their parameters do. The id stands for the mesh, whose own equality takes no
    # account of this process's place in it.
    key = (id(tensor.device_mesh), tensor.placements, tensor.shape)
    if key not in known:
        chunk = tensor.__create_chunk_list__()[0]
        known[key] = tuple(chunk.offsets), tuple(chunk.sizes)
    return known[key]
