"""Chunk digests: what tells the bytes of a large file from others, 16 MiB at a time.

Who writes a file digests it on the way, who reads a range of it checks the chunks that the range
touches and no others. xxh3_128 finds accidents, at memory speed and without the interpreter's lock;
it is no defence against people. Must not import ray or torch.
"""

from __future__ import annotations

from typing import Any

import xxhash

from elastic.storage.manifest import CHUNK_DIGEST_HEX, CHUNKED, FileDigest

__all__ = ["CHUNK_BYTES", "ChunkCheck", "ChunkDigester", "chunk_problem", "difference", "digest_of"]

CHUNK_BYTES = 16 << 20


class ChunkDigester:
    """Takes the bytes of one file in the order they are written, in pieces of any size.

    `bytes` counts them, `digests` has those of the chunks that are full, in hex.
    """

    def __init__(self, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.bytes = 0
        self.digests: list[str] = []
        self._chunk_bytes = chunk_bytes
        self._chunk = xxhash.xxh3_128()

    def update(self, data: Any) -> None:
        """`data` is anything with a contiguous buffer."""
        view = memoryview(data).cast("B")
        while view.nbytes:
            piece = view[: self._chunk_bytes - self.bytes % self._chunk_bytes]
            # Not given to the constructor, which would keep the interpreter's lock.
            self._chunk.update(piece)
            self.bytes += piece.nbytes
            view = view[piece.nbytes :]
            if self.bytes % self._chunk_bytes == 0:
                self._end_chunk()

    def file(self, path: str) -> FileDigest:
        """The digests of all that was given, as those of the whole file at `path`."""
        self.flush()
        digests = "".join(self.digests)
        return FileDigest(
            path=path,
            bytes=self.bytes,
            digest=_of_digests(digests),
            chunk_bytes=self._chunk_bytes,
            chunk_digests=digests,
        )

    def flush(self) -> None:
        """Ends the last chunk where the file ends: nothing may be given after it."""
        if self.bytes % self._chunk_bytes:
            self._end_chunk()

    def _end_chunk(self) -> None:
        self.digests.append(self._chunk.hexdigest())
        self._chunk.reset()


class ChunkCheck:
    """Takes the bytes of a file from its beginning, and compares each chunk as it ends."""

    def __init__(self, file: FileDigest) -> None:
        self._file = file
        self._digester = ChunkDigester(file.chunk_bytes)
        self._num_checked = 0

    def update(self, data: Any) -> str:
        """What is wrong with the first bad chunk that ends in `data`, "" if none does."""
        self._digester.update(data)
        return self._compared()

    def end(self) -> str:
        """What is wrong at the end of the file: with its last chunk, or with where it ends."""
        self._digester.flush()
        problem = self._compared()
        expected, found = self._file.bytes, self._digester.bytes
        if not problem and found != expected:
            return f"{self._file.path}: expected {expected} bytes, found {found}"
        return problem

    def _compared(self) -> str:
        for index in range(self._num_checked, len(self._digester.digests)):
            problem = difference(self._file, index, self._digester.digests[index])
            if problem:
                return problem
            self._num_checked += 1
        return ""


def chunk_problem(file: FileDigest, index: int, data: Any) -> str:
    """What is wrong with `data` as that chunk of `file`, "" if nothing is."""
    digest = xxhash.xxh3_128()
    digest.update(data)
    return difference(file, index, digest.hexdigest())


def difference(file: FileDigest, index: int, found: str) -> str:
    """What to say of a chunk of `file` with the digest `found`, "" if it is the right one."""
    expected = file.chunk_digest(index)
    if found == expected:
        return ""
    start, stop = file.chunk_range(index)
    return (
        f"{file.path}: expected {CHUNKED}{expected} for its bytes {start} to {stop}, "
        f"found {CHUNKED}{found}"
    )


def _of_digests(digests: str) -> str:
    assert len(digests) % CHUNK_DIGEST_HEX == 0
    return CHUNKED + digest_of(bytes.fromhex(digests))


def digest_of(data: bytes) -> str:
    """Of a few bytes as one, in hex."""
    return xxhash.xxh3_128(data).hexdigest()
