"""Collector: keeps Python's garbage collector from stalling training while a save is written.

Must not import ray.
"""

from __future__ import annotations

import gc

__all__ = ["settle"]


def settle() -> None:
    """Takes all objects that exist now out of every later collection; call it once per process.

    A save makes thousands of small objects, so that about every other one sets off a full
    collection; with torch imported that means 300,000 objects and a quarter of a second in which
    no other thread runs. Call it before the model is built: what is here now and later becomes
    garbage in a cycle is never freed.
    """
    gc.collect()
    gc.freeze()
