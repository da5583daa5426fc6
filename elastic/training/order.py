"""The order of samples: which sample comes at which position of a run, and which rank takes it.

A position is global and free of the world size. The order of an epoch is a keyed permutation that
is computed where it is read, so that a billion samples cost neither memory nor start-up time and a
resume may begin anywhere. Positions run on without end: epoch e + 1 follows epoch e, also in the
middle of a global batch. Must import neither torch nor ray.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from elastic.training.block_order import BlockOrder, Blocks
from elastic.training.permutation import Indices, permuted


@dataclass(frozen=True, kw_only=True)
class EpochOrder:
    """The order of one epoch: maps position 0 <= i < num_samples to a sample, each exactly once.

    A function of (num_samples, seed, epoch) alone. Reading a slice costs time and memory in
    proportion to the slice.

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
        if not self.shuffle:
            return np.arange(start, stop, dtype=np.int64)
        return permuted(start, stop, self.num_samples, f"order/{self.seed}/{self.epoch}")


@dataclass(frozen=True, kw_only=True)
class SampleStream:
    """The endless stream of samples of a run; position p lies in epoch p // num_samples.

    With `blocks` that need more than one window, the order of an epoch is a `BlockOrder`.

    Raises ValueError for num_samples outside 1 .. 2**62 or other than that of `blocks`.
    """

    num_samples: int
    seed: int
    shuffle: bool = True
    blocks: Blocks | None = None
    _opened: dict[int, EpochOrder | BlockOrder] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        EpochOrder(num_samples=self.num_samples, seed=self.seed, epoch=0)
        if self.blocks is not None and self.blocks.num_samples != self.num_samples:
            raise ValueError(
                f"expected blocks that hold num_samples = {self.num_samples} samples, found "
                f"{self.blocks.num_samples}"
            )

    def facts(self) -> dict[str, Any]:
        """Plain values from which `stream_of` makes an equal stream, also in another process."""
        told = {"num_samples": self.num_samples, "seed": self.seed, "shuffle": self.shuffle}
        if self.window is None:
            return told
        return {**told, "window_blocks": self.window.window_blocks, "blocks": self.window.text}

    @property
    def window(self) -> Blocks | None:
        """The blocks, where the order keeps to a window of them; None where it is of an epoch."""
        has_window = self.shuffle and self.blocks is not None and not self.blocks.is_one_window
        return self.blocks if has_window else None

    def _order(self, epoch: int) -> EpochOrder | BlockOrder:
        if epoch not in self._opened:
            # That of the epoch before stays, for a global batch may straddle two.
            for old in self._opened.keys() - {epoch - 1}:
                del self._opened[old]
            self._opened[epoch] = self._open(epoch)
        return self._opened[epoch]

    def _open(self, epoch: int) -> EpochOrder | BlockOrder:
        if self.window is not None:
            return BlockOrder(blocks=self.window, seed=self.seed, epoch=epoch)
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
        found: list[tuple[int, int]] = []
        for epoch, piece in self.pieces(start, count):
            found.extend(zip(itertools.repeat(epoch), piece.tolist()))
        return found


def stream_of(facts: Mapping[str, Any]) -> SampleStream:
    """The stream with these facts; what else is in `facts` does not matter.

    Raises KeyError for a fact that is missing, ValueError for one that no stream has.
    """
    blocks = Blocks.of_text(facts["blocks"], facts["window_blocks"]) if "blocks" in facts else None
    return SampleStream(
        num_samples=facts["num_samples"],
        seed=facts["seed"],
        shuffle=facts["shuffle"],
        blocks=blocks,
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
