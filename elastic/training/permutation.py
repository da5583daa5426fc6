"""The keyed permutation of a range of numbers, computed where it is read.

An alternating Feistel network over a grid of rows x columns >= size cells (Black and Rogaway,
Ciphers with Arbitrary Finite Domains, 2002: generalised Feistel and cycle walking). It is made to
shuffle, not to keep secrets. Must import neither torch nor ray.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

NUM_ROUNDS = 12
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def permuted(start: int, stop: int, size: int, key: str) -> Indices:
    """Where start .. stop - 1 of the numbers 0 .. size - 1 go; all of them go to all of them.

    A function of (size, key) alone. Costs time and memory in proportion to stop - start. `size` is
    at most 2**62.
    """
    assert 0 <= start <= stop <= size, (start, stop, size)
    cells = np.arange(start, stop, dtype=np.uint64)
    if size == 1:
        return cells.astype(np.int64)
    rows = math.isqrt(size - 1) + 1
    columns = -(-size // rows)
    keys = _round_keys(key)
    cells = _feistel(cells, rows, columns, keys)
    # The grid has a few cells more than there are numbers: those walk on until inside.
    outside = np.flatnonzero(cells >= size)
    while outside.size:
        cells[outside] = _feistel(cells[outside], rows, columns, keys)
        outside = outside[cells[outside] >= size]
    return cells.astype(np.int64)


def _round_keys(key: str) -> _Words:
    digest = hashlib.shake_128(key.encode()).digest(8 * NUM_ROUNDS)
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def _feistel(cells: _Words, rows: int, columns: int, keys: _Words) -> _Words:
    left, right = np.divmod(cells, np.uint64(columns))
    for number, key in enumerate(keys):
        if number % 2 == 0:
            left = _shift(left, right, key, rows)
        else:
            right = _shift(right, left, key, columns)
    return left * np.uint64(columns) + right


def _shift(moved: _Words, other: _Words, key: np.uint64, size: int) -> _Words:
    """`moved` plus a keyed hash of `other` (the finaliser of splitmix64), modulo size <= 2**31."""
    mixed = other ^ key
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX_1
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX_2
    moved = moved + (((mixed >> np.uint64(32)) * np.uint64(size)) >> np.uint64(32))
    return np.where(moved >= size, moved - np.uint64(size), moved)
