"""A source that is read block by block: what was decoded last is kept, up to a limit.

Tells a loader where its blocks begin, so that the order of samples can keep to a few of them at a
time. Must import neither torch nor ray.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
Block = TypeVar("Block")

CACHE_BYTES = 256 << 20
REMOTE_THREADS = 16
"""For an object store, where a read is mostly a wait."""


class _Process:
    """This one; to ask the system at each access would cost as much as the access."""

    id = os.getpid()

    @classmethod
    def is_forked(cls) -> None:
        cls.id = os.getpid()


os.register_at_fork(after_in_child=_Process.is_forked)


class Blockwise(ABC, Generic[Block]):
    """A map-style dataset over decoded blocks; picklable, and safe to use after a fork.

    block_starts: first sample of each block, then the number of samples
    cache_bytes: decoded blocks kept in memory beyond those that `keep_blocks` asks for
    """

    block_starts: Indices
    file_facts: dict[str, Any]
    """What tells the files from others: see `data_files.file_facts`."""
    _pool: ThreadPoolExecutor | None
    num_threads = 1
    """That decode ahead; 0 where blocks must not be decoded beside the caller."""

    def __init__(self, cache_bytes: int) -> None:
        self._cache_bytes = cache_bytes
        self._kept_blocks = 1
        self._forget()

    def __len__(self) -> int:
        return int(self.block_starts[-1])

    def keep_blocks(self, num_blocks: int) -> None:
        """Keep so many decoded blocks at least, whatever memory they take."""
        self._kept_blocks = max(1, num_blocks)

    def prefetch(self, indices: Sequence[int]) -> None:
        """Begin to decode, beside the caller, the blocks in which these samples begin.

        In order of first use, and no more than `keep_blocks` has asked for.
        """
        if self._pid != _Process.id:
            self._forget()
        if not self.num_threads:
            return
        blocks = np.searchsorted(self.block_starts, indices, side="right") - 1
        for number in list(dict.fromkeys(blocks.tolist()))[: self._kept_blocks]:
            if number not in self._cache:
                self._pool = self._pool or ThreadPoolExecutor(self.num_threads, "elastic-blocks")
                self._cache[number] = self._pool.submit(self._read, number)

    @abstractmethod
    def _read(self, block: int) -> Block:
        """The block, decoded. May be called from several threads at once."""

    @abstractmethod
    def _bytes_of(self, block: Block) -> int:
        """Memory that it takes."""

    def _dropped(self, block: Block) -> None:
        """Told of a block that is no longer kept, and that nobody else has."""

    def _block(self, number: int) -> Block:
        if self._pid != _Process.id:
            self._forget()  # else parent and child of a fork would move one file position
        found = self._cache.get(number)
        if found is None or isinstance(found, Future):
            return self._take(number, found)
        self._cache.move_to_end(number)
        return found

    def _take(self, number: int, ahead: Future[Block] | None) -> Block:
        self._cache.pop(number, None)
        # One that has not begun is decoded here, rather than waited for.
        block = self._read(number) if ahead is None or ahead.cancel() else ahead.result()
        self._cache[number] = block
        self._used_bytes += self._bytes_of(block)
        while self._used_bytes > self._cache_bytes and len(self._cache) > self._kept_blocks:
            self._drop_oldest()
        return block

    def _drop_oldest(self) -> None:
        _, oldest = self._cache.popitem(last=False)
        if isinstance(oldest, Future):
            oldest.cancel()
        else:
            self._used_bytes -= self._bytes_of(oldest)
            self._dropped(oldest)

    def _forget(self) -> None:
        """Starts with nothing cached, as every process must; files are opened anew as well."""
        self._pid = _Process.id
        self._cache: OrderedDict[int, Block | Future[Block]] = OrderedDict()
        self._used_bytes = 0
        self._pool = None

    def _checked(self, indices: Sequence[int]) -> Indices:
        """The indices counted from the front. Raises IndexError outside the data."""
        found = np.asarray(indices, dtype=np.int64)
        num_samples = len(self)
        if found.size and not -num_samples <= found.min() <= found.max() < num_samples:
            outside = found[(found < -num_samples) | (found >= num_samples)]
            raise IndexError(f"item {outside[0]} is outside 0 .. {num_samples - 1}")
        return found % num_samples

    def _place(self, index: int) -> tuple[int, int]:
        """(block, number within it) of a sample. Raises IndexError outside the data."""
        index = int(self._checked([index])[0])
        block = int(np.searchsorted(self.block_starts, index, side="right")) - 1
        return block, index - int(self.block_starts[block])

    def __getstate__(self) -> dict[str, Any]:
        opened = ("_pid", "_cache", "_used_bytes", "_pool")
        return {name: value for name, value in self.__dict__.items() if name not in opened}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()


def merged(sizes: Sequence[int] | Indices, block_size: int) -> Indices:
    """The first of the parts that make each block, then the number of parts.

    Parts that lie side by side are put together until they have about `block_size`; a larger one
    is a block by itself.
    """
    starts = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))
    bucket = starts[:-1] // block_size
    first = np.flatnonzero(np.diff(bucket, prepend=-1))
    return np.append(first, len(bucket)).astype(np.int64)
