"""Wanted: the parts of saved tensors that one load needs, read from a file to where they belong.

Values that lie in the file as they are to lie in memory are read there at once. All others, such
as a part of each row, or what another version of torch saved, go by way of memory of their own, a
bounded amount at a time. Must not import ray.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo

from elastic.storage.verified_file import VerifiedFile
from elastic.training.tensor_head import tensor_head

__all__ = ["Wanted", "fill", "fill_shares", "narrow", "shared_out"]

_SHARE_BYTES = 32 << 20
_BATCH_BYTES = 128 << 20


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """One part of one saved shard and where it is to go.

    `info` says where the shard lies, `shape` and `dtype` are its own, `offsets` and `lengths` the
    part of it, and `target` has the part's shape. Where `is_raw` the values lie there alone,
    without what torch.save puts around them.
    """

    info: _StorageInfo
    shape: torch.Size
    dtype: torch.dtype
    offsets: Sequence[int]
    lengths: Sequence[int]
    target: torch.Tensor
    is_raw: bool = False

    def __post_init__(self) -> None:
        assert self.target.shape == torch.Size(self.lengths), (self.lengths, self.target.shape)
        assert not self.is_raw or self.info.length == self.num_bytes, (self.info, self.shape)

    @property
    def num_bytes(self) -> int:
        """Of the shard's values."""
        return math.prod(self.shape) * self.dtype.itemsize


def shared_out(wanted: Sequence[Wanted], num_shares: int) -> list[list[Wanted]]:
    """Runs of about equal bytes in the order of the files, none so small that it would not pay."""
    ordered = sorted(wanted, key=lambda one: (one.info.relative_path, one.info.offset))
    all_bytes = sum(one.info.length for one in ordered)
    num_shares = max(1, min(num_shares, all_bytes // _SHARE_BYTES))
    shares: list[list[Wanted]] = [[] for _ in range(num_shares)]
    before = 0
    for one in ordered:
        shares[before * num_shares // all_bytes].append(one)
        before += one.info.length
    return [share for share in shares if share]


def fill_shares(
    shares: Sequence[Sequence[Wanted]], read: Callable[[str, Sequence[Wanted]], None]
) -> None:
    """Has `read` read each share, file by file in its order, each share in a thread.

    Raises what one of them has raised; nothing is being read by then.
    """
    if len(shares) < 2:
        for share in shares:
            _read_share(share, read)
        return
    with ThreadPoolExecutor(len(shares), "elastic-read") as pool:
        reads = [pool.submit(_read_share, share, read) for share in shares]
        try:
            for one in reads:
                one.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _read_share(share: Sequence[Wanted], read: Callable[[str, Sequence[Wanted]], None]) -> None:
    for name, ones in groupby(share, key=lambda one: one.info.relative_path):
        read(name, list(ones))


@torch.no_grad()
def fill(file: VerifiedFile, wanted: Sequence[Wanted]) -> None:
    """Reads them all, which lie in `file` in this order. Raises as `VerifiedFile.read` does."""
    for one in wanted:
        file.require(one.info.offset + one.info.length)
    for batch in _batches([_Reading(one) for one in wanted if one.target.numel()]):
        file.read([piece for reading in batch for piece in reading.pieces])
        for reading in batch:
            reading.finish(file)


def _batches(readings: Sequence[_Reading]) -> Iterator[list[_Reading]]:
    batch: list[_Reading] = []
    batch_bytes = 0
    for reading in readings:
        if batch and batch_bytes + reading.own_bytes > _BATCH_BYTES:
            yield batch
            batch, batch_bytes = [], 0
        reading.make_room()
        batch.append(reading)
        batch_bytes += reading.own_bytes
    if batch:
        yield batch


class _Reading:
    """How one wanted part is read: the head of its shard, to know it, and the values wanted."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._head = b"" if wanted.is_raw else tensor_head(wanted.shape, wanted.dtype)
        self._found = bytearray(len(self._head))
        self._strides = _strides(wanted.shape)
        target = wanted.target
        self._is_direct = (
            target.is_cpu
            and target.dtype == wanted.dtype
            and target.is_contiguous()
            and _is_dense(wanted.lengths, self._strides)
        )
        steps = zip(wanted.lengths, self._strides, strict=True)
        num_values = 1 + sum((length - 1) * stride for length, stride in steps)
        self._num_bytes = num_values * wanted.dtype.itemsize
        self.own_bytes = 0 if self._is_direct else self._num_bytes
        self._room: torch.Tensor | None = None

    def make_room(self) -> None:
        """From now on there is memory for the values."""
        if self._is_direct:
            self._room = self._wanted.target.reshape(-1).view(torch.uint8)
        else:
            self._room = torch.empty(self._num_bytes, dtype=torch.uint8)

    @property
    def pieces(self) -> list[tuple[int, memoryview]]:
        """What is to be read to where."""
        assert self._room is not None
        info = self._wanted.info
        if not self._fits():
            return []
        steps = zip(self._wanted.offsets, self._strides, strict=True)
        first = sum(offset * stride for offset, stride in steps) * self._wanted.dtype.itemsize
        values = info.offset + len(self._head) + first, self._room.numpy().data
        return [(info.offset, memoryview(self._found)), values] if self._head else [values]

    def _fits(self) -> bool:
        has_head = self._wanted.is_raw or len(self._head) > 0
        return has_head and len(self._head) <= self._wanted.info.length - self._wanted.num_bytes

    def finish(self, file: VerifiedFile) -> None:
        """The values are in their place."""
        room, self._room = self._room, None
        assert room is not None
        wanted = self._wanted
        if self._found != self._head or not self._fits():
            wanted.target.copy_(_loaded(file, wanted))
        elif not self._is_direct:
            values = room.view(wanted.dtype).as_strided(tuple(wanted.lengths), self._strides)
            wanted.target.copy_(values)


def _loaded(file: VerifiedFile, wanted: Wanted) -> torch.Tensor:
    """By way of torch itself, which knows what older ones have written."""
    whole = bytearray(wanted.info.length)
    file.read([(wanted.info.offset, memoryview(whole))])
    tensor: torch.Tensor = torch.load(io.BytesIO(whole), map_location="cpu", weights_only=True)
    return narrow(tensor, wanted.offsets, wanted.lengths)


def narrow(tensor: torch.Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    """A view of that part of it."""
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dim, offset, length)
    return tensor


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _is_dense(lengths: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a part of these lengths is one run of values."""
    return all(
        length == 1 or stride == expected
        for length, stride, expected in zip(lengths, strides, _strides(lengths), strict=True)
    )
