"""Shard writer: one rank's files of one save, digested while they are written.

The bytes are those that stock DCP writes and reads; only where they go is ours. Must not import
ray.
"""

from __future__ import annotations

from collections.abc import Mapping

from elastic.storage.chunk_digests import CHUNK_BYTES, ChunkDigester
from elastic.storage.completeness import sha256
from elastic.storage.filesystem import Filesystem
from elastic.storage.manifest import FileDigest
from elastic.training.verdicts import shard_file

__all__ = ["METADATA", "ShardWriter"]

METADATA = ".metadata"


class ShardWriter:
    """Writes to `path` of `fs`: this rank's shards, files by name, and on rank 0 `.metadata`.

    Afterwards `written` tells every file it wrote. Each is durable before its digest is there.
    """

    def __init__(self, fs: Filesystem, path: str, rank: int) -> None:
        self._fs = fs.sub(path)
        self._rank = rank
        self.written: list[FileDigest] = []

    def write(self, shards: memoryview, files: Mapping[str, bytes]) -> None:
        """The shards, which are written as they lie in memory, and the files by name."""
        if shards.nbytes:
            self._write_shards(shard_file(self._rank), shards)
        for name, data in files.items():
            self._write_file(name, data)

    def write_metadata(self, data: bytes) -> None:
        """DCP's description of all ranks' shards."""
        self._write_file(METADATA, data)

    def _write_shards(self, name: str, shards: memoryview) -> None:
        with self._fs.open_output(name) as file:
            digester = ChunkDigester()
            for start in range(0, shards.nbytes, CHUNK_BYTES):
                # Both take the memory as it is, and leave the interpreter to training meanwhile.
                piece = shards[start : start + CHUNK_BYTES]
                file.write(piece)
                digester.update(piece)
        # Only now, closed, is it durable.
        self.written.append(digester.file(name))

    def _write_file(self, name: str, data: bytes) -> None:
        self._fs.write_bytes(name, data)
        self.written.append(FileDigest(path=name, bytes=len(data), digest=sha256(data)))
