"""The block order: an epoch's shuffled order that keeps to a few blocks of the data at a time.

A block is a run of samples that are read together, such as a Parquet row group. The blocks are
shuffled, and a window slides over their list, a few blocks at a time; where it stands, samples of
all blocks in it are shuffled. So who reads along holds no more blocks than the window does, decodes
each once, and meets a few new ones at a time. What is kept in memory is one number for each block,
never one for each sample. Must import neither torch nor ray.
"""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from elastic.training.permutation import Indices, permuted

DEFAULT_WINDOW_BLOCKS = 64
_STANDS = 16  # of the window in which a block takes part, each time with as large a piece of it
_GROUPS_AT_ONCE = 1 << 14  # while the stands are measured, so that this needs little memory


@dataclass(frozen=True, kw_only=True, eq=False)
class Blocks:
    """How samples lie in blocks, and how many of these a window may hold.

    starts: the first sample of each block in ascending order, then the number of samples: block b
        holds samples starts[b] .. starts[b + 1] - 1; one that holds none is passed over
    window_blocks: blocks whose samples are shuffled together, at most

    Raises ValueError for a window without blocks and for starts that are no such list.
    """

    starts: Indices
    window_blocks: int = DEFAULT_WINDOW_BLOCKS

    def __post_init__(self) -> None:
        starts = np.asarray(self.starts, dtype=np.int64)
        object.__setattr__(self, "starts", starts)
        if self.window_blocks < 1:
            raise ValueError(f"a window must hold 1 block or more, found {self.window_blocks}")
        if starts.ndim != 1 or len(starts) < 2 or starts[0] != 0 or (np.diff(starts) < 0).any():
            raise ValueError(
                "starts must begin with 0, not descend, and end with the number of samples, "
                f"found {starts!r}"
            )

    @property
    def num_samples(self) -> int:
        return int(self.starts[-1])

    @property
    def num_blocks(self) -> int:
        return len(self.starts) - 1

    @property
    def is_one_window(self) -> bool:
        """Whether all blocks fit in a window that need not slide."""
        return self.num_blocks <= self.window_blocks

    @property
    def num_stands(self) -> int:
        """Stands of the window that a block takes part in."""
        return min(_STANDS, self.window_blocks)

    @property
    def num_groups(self) -> int:
        """Groups in the ring of blocks; as many as there are stands of the window."""
        return -(-self.num_blocks // (self.window_blocks // self.num_stands))

    @property
    def samples_ahead(self) -> int:
        """Samples whose blocks can be read ahead while `held_blocks` are held: two stands."""
        return 2 * self.num_samples // self.num_groups

    @property
    def held_blocks(self) -> int:
        """Blocks to keep when the least recently used goes first, so that none is read twice.

        Those of the window, of the stand before, and of the two that are read ahead.
        """
        return self.window_blocks + 3 * (self.window_blocks // self.num_stands)

    @cached_property
    def digest(self) -> str:
        """Short text that differs where the samples lie in other blocks."""
        return hashlib.blake2b(self._sizes(), digest_size=8).hexdigest()

    @cached_property
    def text(self) -> str:
        """The sizes of the blocks as text, from which `of_text` makes them again.

        A few kilobytes where blocks are alike; one or two bytes for each where they are not.
        """
        return base64.b64encode(zlib.compress(self._sizes())).decode()

    @classmethod
    def of_text(cls, text: str, window_blocks: int) -> Blocks:
        """The blocks of which this is the `text`. Raises ValueError for one of no blocks."""
        try:
            sizes = np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype="<i8")
        except (ValueError, zlib.error) as error:
            raise ValueError(f"cannot read the sizes of blocks: {error}") from error
        return cls(starts=np.concatenate(([0], np.cumsum(sizes))), window_blocks=window_blocks)

    def _sizes(self) -> bytes:
        return np.diff(self.starts).astype("<i8").tobytes()


@dataclass(frozen=True, kw_only=True)
class BlockOrder:
    """The order of one epoch, as `EpochOrder`, but through a window that slides over the blocks.

    A function of (blocks, seed, epoch) alone. The shuffled list of blocks is cut into groups of
    `window_blocks` / 16. At each of its stands the window takes in one group more and leaves the
    oldest; a block gives a sixteenth of its samples to each of the 16 stands that it takes part in
    (with a window of less than 16 blocks, read that number for 16). The list is a ring: the blocks
    that came last are in the first stands as well, where they are read a second time, so that the
    window is as full at both ends of an epoch as in its middle. Neighbouring positions lie in one
    stand, or in the last of one and the first of the next.

    Opening an epoch costs time in proportion to the number of blocks, reading a slice in
    proportion to the slice and the stands that it touches.

    Raises ValueError for a negative epoch, and for blocks that fit in one window.
    """

    blocks: Blocks
    seed: int
    epoch: int
    _ends: Indices = field(init=False, repr=False, compare=False)
    """Samples up to the end of each stand."""

    def __post_init__(self) -> None:
        if self.epoch < 0:
            raise ValueError(f"epoch must be 0 or more, found {self.epoch}")
        if self.blocks.is_one_window:
            raise ValueError(
                f"expected more blocks than a window of {self.blocks.window_blocks} holds, found "
                f"{self.blocks.num_blocks}: shuffle them as a whole"
            )
        object.__setattr__(self, "_ends", self._measured())

    def __len__(self) -> int:
        return self.blocks.num_samples

    def __getitem__(self, position: int) -> int:
        """The sample at `position`. Raises IndexError outside 0 .. num_samples - 1."""
        if not 0 <= position < len(self):
            raise IndexError(f"position {position} is outside 0 .. {len(self) - 1}")
        return int(self.slice(position, position + 1)[0])

    def slice(self, start: int, stop: int) -> Indices:
        """The samples at positions start .. stop - 1. Raises IndexError outside the epoch."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"positions {start} .. {stop} are outside 0 .. {len(self)}")
        pieces = list(self._pieces(start, stop))
        return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int64)

    def _pieces(self, start: int, stop: int) -> Iterator[Indices]:
        stand = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            begin = int(self._ends[stand - 1]) if stand else 0
            end = int(self._ends[stand])
            until = min(stop, end)
            if start < until:
                yield self._within(stand, start - begin, until - begin, end - begin)
            start, stand = max(start, until), stand + 1

    def _within(self, stand: int, start: int, stop: int, num_samples: int) -> Indices:
        """The samples at places start .. stop - 1 of this stand's."""
        key = f"window/{self.seed}/{self.epoch}/{stand}"
        places = permuted(start, stop, num_samples, key)
        rank, age = self._standing(stand)
        block = self._shuffled(rank)
        piece = (rank + age) % self.blocks.num_stands
        ends = np.cumsum(self._counts(block, piece))
        entry = np.searchsorted(ends, places, side="right")
        number = places - np.concatenate(([0], ends[:-1]))[entry]
        samples: Indices = (
            self.blocks.starts[block[entry]] + number * self.blocks.num_stands + piece[entry]
        )
        return samples

    def _bound(self, group: Indices) -> Indices:
        """Where in the list of blocks these groups begin; they differ by one block at most."""
        bound: Indices = group * self.blocks.num_blocks // self.blocks.num_groups
        return bound

    def _standing(self, stand: int) -> tuple[Indices, Indices]:
        """Place in the list, and stands since it came in, of each block in the window."""
        groups = np.arange(stand - self.blocks.num_stands + 1, stand + 1) % self.blocks.num_groups
        begins, ends = self._bound(groups), self._bound(groups + 1)
        ages = np.arange(self.blocks.num_stands - 1, -1, -1)
        rank = np.concatenate([np.arange(b, e) for b, e in zip(begins, ends, strict=True)])
        return rank, np.repeat(ages, ends - begins)

    def _shuffled(self, rank: Indices) -> Indices:
        """The blocks at these places of the shuffled list, which ascend but for one turn."""
        key = f"blocks/{self.seed}/{self.epoch}"
        turn = int(np.argmin(rank))
        runs = [run for run in (rank[:turn], rank[turn:]) if run.size]
        num_blocks = self.blocks.num_blocks
        return np.concatenate(
            [permuted(int(run[0]), int(run[-1]) + 1, num_blocks, key) for run in runs]
        )

    def _counts(self, block: Indices, piece: Indices) -> Indices:
        """Samples of this piece of each block: one in `_num_stands`, from number `piece` on."""
        starts = self.blocks.starts
        counts: Indices = (
            starts[block + 1] - starts[block] - piece + self.blocks.num_stands - 1
        ) // self.blocks.num_stands
        return counts

    def _measured(self) -> Indices:
        num_groups, num_stands = self.blocks.num_groups, self.blocks.num_stands
        samples = np.zeros(num_groups, dtype=np.int64)
        for first in range(0, num_groups, _GROUPS_AT_ONCE):
            group = np.arange(first, min(num_groups, first + _GROUPS_AT_ONCE))
            bounds = self._bound(np.append(group, group[-1] + 1))
            rank = np.arange(bounds[0], bounds[-1])
            block = self._shuffled(rank)
            for age in range(num_stands):
                counts = self._counts(block, (rank + age) % num_stands)
                # Each group stands at `age` once, so no index comes twice.
                samples[(group + age) % num_groups] += np.add.reduceat(
                    counts, bounds[:-1] - bounds[0]
                )
        return np.cumsum(samples)
