"""A piece: one rank's part of a snapshot as bytes in one block of memory, and the index to them.

It holds what the rank's files of a checkpoint would: its shards, raw and each at an aligned place,
and the plain files. Must not import ray.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from elastic.storage.chunk_digests import digest_of
from elastic.training.share import share_of

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
    files: dict[str, tuple[int, int, str]] = field(default_factory=dict)
    """Start, size and digest by name: to check one, the chunk that it lies in need not be read."""
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
            files = {
                name: (int(start), int(size), str(digest))
                for name, (start, size, digest) in tree["files"].items()
            }
            return cls(parts=parts, files=files, num_bytes=int(tree["bytes"]))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"the index of a piece lacks or garbles a field: {error!r}") from error


def lay_out(
    tensors: Mapping[str, torch.Tensor], files: Mapping[str, bytes], rank: int
) -> tuple[Layout, list[torch.Tensor]]:
    """Places for what this rank has to keep of these, and its local tensors in that order.

    They are those that `share_of` gives it, as in a checkpoint. Raises `ValueError` for a tensor
    that has no dense memory of its own.
    """
    layout = Layout()
    pieces, sources, _ = share_of(tensors, rank)
    for piece, source in zip(pieces, sources, strict=True):
        layout.parts.append(
            Part(
                piece.name,
                str(piece.dtype).removeprefix("torch."),
                tuple(piece.size),
                tuple(piece.chunk.offsets),
                tuple(piece.chunk.sizes),
                layout.place(source.nbytes),
                source.nbytes,
            )
        )
    for name, data in files.items():
        layout.files[name] = (layout.place(len(data)), len(data), digest_of(data))
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
    for name, (start, size, _) in layout.files.items():
        room[start : start + size] = files[name]
    for device in {source.device for source in sources if source.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
