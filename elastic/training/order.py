"""The order of samples: which sample comes at which position of a run, and which rank takes it.

A position is global and free of the world size. The order of an epoch is a keyed permutation that
is computed where it is read, so that a billion samples cost neither memory nor start-up time and a
resume may begin anywhere. Positions run on without end: epoch e + 1 follows epoch e, also in the
middle of a global batch. Must import neither torch nor ray.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

NUM_ROUNDS = 12
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True, kw_only=True)
class EpochOrder:
    """The order of one epoch: maps position 0 <= i < num_samples to a sample, each exactly once.

    A function of (num_samples, seed, epoch) alone. Reading a slice costs time and memory in
    proportion to the slice. The permutation is an alternating Feistel network over a grid of rows x
    columns >= num_samples cells (Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002:
    generalised Feistel and cycle walking). It is made to shuffle, not to keep secrets.

    Raises ValueError for num_samples outside 1 .. 2**62 or a negative epoch.
    """

    num_samples: int
    seed: int
    epoch: int
    shuffle: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.num_samples <= 2**62:
            raise ValueError(f"num_samples must be in 1 .. 2**62, found {self.num_samples}")
        if self.epoch < 0:
            raise ValueError(f"epoch must be 0 or more, found {self.epoch}")

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, position: int) -> int:
        """The sample at `position`. Raises IndexError outside 0 .. num_samples - 1."""
        if not 0 <= position < self.num_samples:
            raise IndexError(f"position {position} is outside 0 .. {self.num_samples - 1}")
        return int(self.slice(position, position + 1)[0])

    def slice(self, start: int, stop: int) -> Indices:
        """The samples at positions start .. stop - 1. Raises IndexError outside the epoch."""
        if not 0 <= start <= stop <= self.num_samples:
            raise IndexError(f"positions {start} .. {stop} are outside 0 .. {self.num_samples}")
        positions = np.arange(start, stop, dtype=np.uint64)
        if not self.shuffle or self.num_samples == 1:
            return positions.astype(np.int64)
        return self._permute(positions).astype(np.int64)

    def _permute(self, cells: _Words) -> _Words:
        rows = math.isqrt(self.num_samples - 1) + 1
        columns = -(-self.num_samples // rows)
        keys = _round_keys(self.seed, self.epoch)
        cells = _feistel(cells, rows, columns, keys)
        # The grid has a few cells more than there are samples: those walk on until inside.
        outside = np.flatnonzero(cells >= self.num_samples)
        while outside.size:
            cells[outside] = _feistel(cells[outside], rows, columns, keys)
            outside = outside[cells[outside] >= self.num_samples]
        return cells


def _round_keys(seed: int, epoch: int) -> _Words:
    digest = hashlib.shake_128(f"order/{seed}/{epoch}".encode()).digest(8 * NUM_ROUNDS)
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


@dataclass(frozen=True, kw_only=True)
class SampleStream:
    """The endless stream of samples of a run; position p lies in epoch p // num_samples.

    Raises ValueError for num_samples outside 1 .. 2**62.
    """

    num_samples: int
    seed: int
    shuffle: bool = True

    def __post_init__(self) -> None:
        self._order(0)

    def facts(self) -> dict[str, Any]:
        """Plain values from which `stream_of` makes an equal stream, also in another process."""
        return {"num_samples": self.num_samples, "seed": self.seed, "shuffle": self.shuffle}

    def _order(self, epoch: int) -> EpochOrder:
        return EpochOrder(
            num_samples=self.num_samples, seed=self.seed, epoch=epoch, shuffle=self.shuffle
        )

    def pieces(self, start: int, count: int) -> Iterator[tuple[int, Indices]]:
        """(epoch, indices) of each epoch that positions start .. start + count - 1 touch."""
        if start < 0 or count < 0:
            raise ValueError(f"start and count must be 0 or more, found {start} and {count}")
        stop = start + count
        while start < stop:
            epoch, begin = divmod(start, self.num_samples)
            end = min(self.num_samples, begin + stop - start)
            yield epoch, self._order(epoch).slice(begin, end)
            start += end - begin

    def indices(self, start: int, count: int) -> list[tuple[int, int]]:
        """(epoch, index) of each of the samples at positions start .. start + count - 1."""
        return [
            (epoch, index) for epoch, piece in self.pieces(start, count) for index in piece.tolist()
        ]


def stream_of(facts: Mapping[str, Any]) -> SampleStream:
    """The stream with these facts; what else is in `facts` does not matter.

    Raises KeyError for a fact that is missing, ValueError for one that no stream has.
    """
    return SampleStream(
        num_samples=facts["num_samples"], seed=facts["seed"], shuffle=facts["shuffle"]
    )


def share(global_batch: int, world_size: int, world_rank: int) -> tuple[int, int]:
    """(start, stop) of this rank's samples in a global batch; shares differ by one at most."""
    assert 0 <= world_rank < world_size, (world_rank, world_size)
    size, remainder = divmod(global_batch, world_size)
    start = world_rank * size + min(world_rank, remainder)
    return start, start + size + (world_rank < remainder)


def num_micro_batches(global_batch: int, micro_batch: int, world_size: int) -> int:
    """Micro-batches per step, the same on all ranks: what the largest share needs."""
    largest_share = -(-global_batch // world_size)
    return -(-largest_share // micro_batch)


def micro_batches(
    global_batch: int, micro_batch: int, world_size: int, world_rank: int
) -> list[tuple[int, int]]:
    """(start, stop) within the global batch of each of this rank's micro-batches in a step.

    All ranks get a list of the same length, since every rank must run the same number of
    collectives; a rank with fewer samples gets empty spans at the end, which stand for padding.
    """
    start, stop = share(global_batch, world_size, world_rank)
    count = num_micro_batches(global_batch, micro_batch, world_size)
    begins = [min(stop, start + number * micro_batch) for number in range(count)]
    return [(begin, min(stop, begin + micro_batch)) for begin in begins]
