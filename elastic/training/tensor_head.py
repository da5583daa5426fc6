"""A tensor's head: what torch.save writes before the bytes of a dense tensor.

It depends on shape and dtype alone. Who finds it in a file knows where the values lie, and need not
have torch.load make the tensor first. Must not import ray.
"""

from __future__ import annotations

import functools
from typing import IO, Any, cast

import torch
from torch.serialization import skip_data

__all__ = ["tensor_head"]


@functools.lru_cache(maxsize=4096)
def tensor_head(shape: torch.Size, dtype: torch.dtype) -> bytes:
    """The head of a contiguous tensor that is not empty; b"" if its bytes are not written as one
    run."""
    sink = _Sink()
    with skip_data():
        # Memory that is neither written nor read costs nothing, however large.
        tensor = torch.empty(shape, dtype=dtype)
        torch.save(tensor, cast("IO[bytes]", sink))
    return bytes(sink.head) if sink.skipped_bytes == [tensor.nbytes] else b""


class _Sink:
    """A file for torch.save, which seeks over the values that it leaves out."""

    def __init__(self) -> None:
        self.head = bytearray()
        self.skipped_bytes: list[int] = []
        self._position = 0

    def write(self, data: Any) -> int:
        if not self.skipped_bytes:
            self.head += data
        self._position += len(data)
        return len(data)

    def seek(self, offset: int, whence: int) -> int:
        self.skipped_bytes.append(offset)
        self._position += offset
        return self._position

    def tell(self) -> int:
        return self._position

    def flush(self) -> None:
        """Nothing is kept back."""
