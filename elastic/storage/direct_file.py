"""A direct file: large writes go from the caller's memory to the medium, past the page cache.

Through the cache every byte is copied once more and a page is made for it, all on the processors
that train; and gigabytes of dirty pages make other writers wait. Must not import ray or torch.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
from typing import Any

import numpy as np

__all__ = ["DirectFile"]

_ALIGNMENT_BYTES = 4096
_LEAST_BYTES = 1 << 24


class DirectFile(io.FileIO):
    """A new or emptied file to write to. What a medium, a place or a size does not allow to go
    directly goes through the cache, as with any file.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path, "wb")
        self._may_be_direct = hasattr(os, "O_DIRECT")

    def write(self, data: Any, /) -> int:
        """Bytes written, perhaps fewer than there are."""
        view = memoryview(data).cast("B")
        length = view.nbytes // _ALIGNMENT_BYTES * _ALIGNMENT_BYTES
        if self._may_be_direct and length >= _LEAST_BYTES and self._is_aligned(view):
            try:
                self._set_direct(True)
                return super().write(view[:length])
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._may_be_direct = False  # not on this filesystem
            finally:
                self._set_direct(False)
        return super().write(view)

    def _is_aligned(self, view: memoryview) -> bool:
        address = np.frombuffer(view, dtype=np.uint8).ctypes.data
        return address % _ALIGNMENT_BYTES == 0 and self.tell() % _ALIGNMENT_BYTES == 0

    def _set_direct(self, is_direct: bool) -> None:
        flags = fcntl.fcntl(self.fileno(), fcntl.F_GETFL)
        wanted = flags | os.O_DIRECT if is_direct else flags & ~os.O_DIRECT
        if wanted != flags:
            fcntl.fcntl(self.fileno(), fcntl.F_SETFL, wanted)
