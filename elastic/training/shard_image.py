"""Shard image: one rank's shards in memory, byte for byte as the file of them will hold them.

What torch.save puts around a tensor depends on its shape and dtype alone, so it is made once and
stays in memory; a save then copies the tensors' own bytes between, and writes the whole as it
lies. Must not import ray.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any, cast

import numpy as np
import torch
from torch.serialization import skip_data

__all__ = ["Place", "image_bytes", "lay_out", "places_for"]

# Every tensor's bytes begin at a multiple of it, so that any dtype may be viewed there.
_ALIGNMENT_BYTES = 64

Block = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Frame:
    """What torch.save writes before and after the bytes of a tensor."""

    head: bytes
    tail: bytes
    content_bytes: int

    @property
    def bytes(self) -> int:
        return len(self.head) + self.content_bytes + len(self.tail)


@dataclass(frozen=True, slots=True)
class Place:
    """Where one tensor's record lies in the file: `length` bytes from `start` on."""

    start: int
    length: int


def places_for(like: Sequence[torch.Tensor]) -> list[Place]:
    """The places of tensors like these, in their order."""
    places, start = [], 0
    for tensor in like:
        length = _frame(tensor.shape, tensor.dtype).bytes
        places.append(Place(start, length))
        start += -(-length // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return places


def image_bytes(places: Sequence[Place]) -> int:
    """Size of the file that holds them all."""
    return places[-1].start + places[-1].length if places else 0


def lay_out(
    block: Block, places: Sequence[Place], like: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Writes all but the tensors' own bytes into the block, and gives views for those."""
    views = []
    block = block[: image_bytes(places)]
    for place, tensor in zip(places, like, strict=True):
        frame = _frame(tensor.shape, tensor.dtype)
        record = block[place.start : place.start + place.length]
        head, tail = len(frame.head), len(frame.head) + frame.content_bytes
        record[:head] = np.frombuffer(frame.head, dtype=np.uint8)
        record[tail:] = np.frombuffer(frame.tail, dtype=np.uint8)
        block[place.start + place.length :][:_ALIGNMENT_BYTES] = 0  # up to the next record
        views.append(_view(record[head:tail], tensor))
    return views


def _view(room: Block, like: torch.Tensor) -> torch.Tensor:
    if like.numel() == 0:
        return torch.empty(like.shape, dtype=like.dtype)
    return torch.from_numpy(room).view(like.dtype).view(like.shape)


@functools.lru_cache(maxsize=4096)
def _frame(shape: torch.Size, dtype: torch.dtype) -> Frame:
    """Raises `ValueError` for a dtype that torch.save does not write as one run of bytes."""
    sink = _Sink()
    # Of torch's own: the sums of the content are left out, as its `set_crc32_options(False)` does.
    with skip_data():
        # Fresh memory that is neither written nor read costs nothing, however large.
        tensor = torch.empty(shape, dtype=dtype)
        torch.save(tensor, cast("IO[bytes]", sink))
    if sink.skipped_bytes != tensor.nbytes or len(sink.head) % _ALIGNMENT_BYTES * tensor.nbytes:
        raise ValueError(
            f"torch.save lays {dtype} of shape {tuple(shape)} out in a way that is not known here: "
            f"expected {tensor.nbytes} bytes at a multiple of {_ALIGNMENT_BYTES}, "
            f"found {sink.skipped_bytes} at {len(sink.head)}"
        )
    return Frame(bytes(sink.head), bytes(sink.tail), tensor.nbytes)


class _Sink:
    """A file for torch.save, which seeks over the content that it leaves out."""

    def __init__(self) -> None:
        self.head = bytearray()
        self.tail = bytearray()
        self.skipped_bytes = 0

    def write(self, data: Any) -> int:
        part = self.tail if self.skipped_bytes else self.head
        part += data
        return len(data)

    def seek(self, offset: int, whence: int) -> int:
        assert whence == os.SEEK_CUR and not self.skipped_bytes, (offset, whence)
        self.skipped_bytes = offset
        return self.tell()

    def tell(self) -> int:
        return len(self.head) + self.skipped_bytes + len(self.tail)

    def flush(self) -> None:
        """Nothing is kept back."""
