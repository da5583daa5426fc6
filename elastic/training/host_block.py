"""A host block: one run of host memory, made before it is needed and kept as long as the process.

Must not import ray.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref
from typing import Any

import numpy as np
import torch

__all__ = ["make_host_block"]


def make_host_block(size_bytes: int) -> np.ndarray[Any, Any]:
    """Zeros that begin at a page and whose pages exist already.

    A CUDA device, where there is one, can copy into it without a detour.
    """
    if size_bytes == 0:
        return np.empty(0, dtype=np.uint8)
    memory = mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without large pages has small ones
        memory.madvise(mmap.MADV_HUGEPAGE)
    block = np.frombuffer(memory, dtype=np.uint8)
    # Touched once here, for making a page costs more than copying into it. Without the
    # interpreter's lock, which numpy leaves while it fills.
    block.fill(0)
    if torch.cuda.is_available():
        _pin(block)
    return block


def _pin(block: np.ndarray[Any, Any]) -> None:
    # Registered, not allocated by torch, which would round the size up to a power of two.
    from torch.cuda import _pin_memory_utils as pinning

    address = block.ctypes.data
    pinning.pin_memory(address, block.nbytes)
    weakref.finalize(block, pinning.unpin_memory, address).atexit = False
