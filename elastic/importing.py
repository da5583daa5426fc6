"""Imports without the garbage collector, which has nothing to collect meanwhile.

Importing torch and Ray makes hundreds of thousands of objects that all stay, and Python's collector
walks through them again and again: more than a quarter of the time a worker needs to start. Must
import neither ray nor torch.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """No collection until the block ends. For imports at the head of a module; may be nested."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
