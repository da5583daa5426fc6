"""Digests of a piece, of each 16 MiB of it: a rank that reads a part checks what it touches.

xxh3_128 finds accidents, at the speed of memory and without the interpreter's lock. Must not import
ray or torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import xxhash

CHUNK_BYTES = 16 << 20


def digest(data: Any) -> str:
    """Of one chunk, in hex; `data` has a contiguous buffer."""
    found = xxhash.xxh3_128()
    # Not given to the constructor, which would keep the interpreter's lock.
    found.update(data)
    return found.hexdigest()


def chunks(num_bytes: int) -> Iterator[tuple[int, int]]:
    """Start and end of each chunk of a piece of that size."""
    for start in range(0, num_bytes, CHUNK_BYTES):
        yield start, min(start + CHUNK_BYTES, num_bytes)
