"""A verified file: one file of a checkpoint, read by ranges, each chunk checked as it is read.

What it gives out are the bytes that were saved. Bytes go straight to where they are wanted and are
digested while they are hot, so that checking costs next to nothing beside reading. Must not import
ray or torch, and never interprets what it reads.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from typing import BinaryIO, Protocol

import xxhash

from elastic.storage.chunk_digests import CHUNK_BYTES, difference
from elastic.storage.completeness import size_problem
from elastic.storage.manifest import FileDigest

__all__ = ["CheckpointCorrupt", "Holder", "VerifiedFile"]

_PIECE_BYTES = 1 << 19  # small enough to be in the processor's cache when it is digested

Wanted = Sequence[tuple[int, memoryview]]


class CheckpointCorrupt(Exception):
    """The bytes of a checkpoint are not those that were saved: it is to be quarantined."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(path, problem)
        self.path = path
        self.problem = problem

    def __str__(self) -> str:
        return f"the checkpoint at {self.path} is damaged: {self.problem}"


class Holder(Protocol):
    """Where the bytes lie: a `Filesystem`, or memory."""

    @property
    def url(self) -> str:
        """The place, for people."""

    @property
    def is_local(self) -> bool:
        """Whether to read by `open_input`, and by `read_range` if not."""

    def open_input(self, path: str) -> BinaryIO:
        """A seekable stream with `readinto`. Raises `FileNotFoundError`.

        One of memory may have `take(num_bytes)`: a view of the next so many bytes where they lie,
        and moves on; None where there are not so many.
        """

    def read_range(self, path: str, start: int, num_bytes: int) -> bytes | memoryview:
        """So many bytes from `start` on, fewer where it ends. Raises `FileNotFoundError`."""

    def size(self, path: str) -> int | None:
        """In bytes, None where there is none."""


class VerifiedFile:
    """`file` in the directory `path` of `fs`, for one thread at a time.

    A file without digests by chunk is read as it is: have it verified before. Raises
    `CheckpointCorrupt` for bytes that are not those that were saved, also if they are missing;
    what the store raises otherwise says nothing about the bytes and comes as it is.
    """

    def __init__(self, fs: Holder, path: str, file: FileDigest) -> None:
        self._fs = fs
        self._path = path
        self._name = f"{path}/{file.path}"
        self._file = file
        self._chunk_bytes = file.chunk_bytes or CHUNK_BYTES
        self._stream: BinaryIO | None = None
        self._unwanted = memoryview(bytearray(_PIECE_BYTES))

    def __enter__(self) -> VerifiedFile:
        return self

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def read(self, wanted: Wanted) -> None:
        """Fills each buffer with the file's bytes from its offset on; offsets ascend, and no two
        buffers overlap.

        Reads the chunks that hold any of these bytes, each once and whole, and no others. When this
        raises, some of the buffers may hold anything.
        """
        begin = 0
        while begin < len(wanted):
            index = wanted[begin][0] // self._chunk_bytes
            begin = self._read_run(index, wanted, begin)

    def require(self, num_bytes: int) -> None:
        """Nothing if the file is so long. Raises `CheckpointCorrupt`."""
        if num_bytes > self._file.bytes:
            problem = f"{self._file.path}: expected {num_bytes} bytes, found {self._file.bytes}"
            raise CheckpointCorrupt(self._path, problem)

    def _read_run(self, index: int, wanted: Wanted, begin: int) -> int:
        """Reads chunks from `index` on for as long as a buffer goes on into the next one; where in
        `wanted` the rest begins."""
        while True:
            first, last = index * self._chunk_bytes, (index + 1) * self._chunk_bytes
            end = begin
            while end < len(wanted) and wanted[end][0] < last:
                end += 1
            self._read_chunk(index, wanted[begin:end])
            start, view = wanted[end - 1]
            if start + view.nbytes <= last:
                return end
            assert first < last
            begin, index = end - 1, index + 1

    def _read_chunk(self, index: int, wanted: Wanted) -> None:
        first = index * self._chunk_bytes
        last = min(first + self._chunk_bytes, self._file.bytes)
        self.require(wanted[-1][0] + wanted[-1][1].nbytes)
        problem = self._problem(index, first, last, wanted)
        if problem:
            # Once more, from a new stream: what went wrong on the way says nothing about the file.
            self.__exit__()
            problem = self._problem(index, first, last, wanted)
        if problem:
            raise CheckpointCorrupt(self._path, problem)

    def _problem(self, index: int, first: int, last: int, wanted: Wanted) -> str:
        digest = xxhash.xxh3_128()
        try:
            stream = self._at(first, last)
            for room, is_wanted in self._rooms(first, last, wanted):
                found = None if is_wanted else _in_place(stream, room.nbytes)
                if found is None:
                    self._fill(room, stream)
                    found = room
                if self._file.chunk_bytes:
                    digest.update(found)
        except FileNotFoundError:
            raise CheckpointCorrupt(self._path, size_problem(self._file, None)) from None
        if not self._file.chunk_bytes:
            return ""
        return difference(self._file, index, digest.hexdigest())

    def _at(self, first: int, last: int) -> BinaryIO:
        if not self._fs.is_local:
            return io.BytesIO(self._fs.read_range(self._name, first, last - first))
        if self._stream is None:
            self._stream = self._fs.open_input(self._name)
        self._stream.seek(first)
        return self._stream

    def _rooms(self, first: int, last: int, wanted: Wanted) -> Iterator[tuple[memoryview, bool]]:
        """Where the bytes from `first` to `last` go, piece by piece and in their order, and whether
        they are wanted there."""
        for start, view in wanted:
            yield from self._gap(first, start)
            view = view[max(0, first - start) : last - start]
            for at in range(0, view.nbytes, _PIECE_BYTES):
                yield view[at : at + _PIECE_BYTES], True
            first = max(first, start) + view.nbytes
        yield from self._gap(first, last)

    def _gap(self, first: int, last: int) -> Iterator[tuple[memoryview, bool]]:
        for at in range(first, last, _PIECE_BYTES):
            yield self._unwanted[: min(_PIECE_BYTES, last - at)], False

    def _fill(self, room: memoryview, stream: BinaryIO) -> None:
        count = 0
        while count < room.nbytes:
            more: int = stream.readinto(room[count:])  # type: ignore[attr-defined]
            if not more:
                size = self._fs.size(self._name)
                if size != self._file.bytes:
                    raise CheckpointCorrupt(self._path, size_problem(self._file, size))
                raise OSError(f"{self._name} in {self._fs.url} ended before its {size} bytes")
            count += more


def _in_place(stream: BinaryIO, num_bytes: int) -> memoryview | None:
    """The next bytes where they lie; None where they have to be copied to be seen."""
    take: Callable[[int], memoryview | None] | None = getattr(stream, "take", None)
    return None if take is None else take(num_bytes)
