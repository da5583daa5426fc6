"""Shard writer: one rank's files of one save, digested while they are written.

The bytes are those that stock DCP writes and reads; only where they go is ours. Must not import
ray.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
from collections.abc import Mapping
from typing import IO, Any, BinaryIO, cast

import torch
from torch.distributed.checkpoint.filesystem import (
    CURRENT_DCP_VERSION,
    DEFAULT_SUFFIX,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from elastic.storage.chunk_digests import ChunkDigester
from elastic.storage.completeness import sha256
from elastic.storage.filesystem import Filesystem
from elastic.storage.manifest import FileDigest

__all__ = ["METADATA", "ShardWriter"]

METADATA = ".metadata"
_PIECE_BYTES = 1 << 18


class ShardWriter(StorageWriter):
    """Writes to `path` of `fs`: this rank's shards, `files` by name, and on rank 0 `.metadata`.

    Afterwards `written` tells every file it wrote. Each is durable before its digest is there.
    """

    def __init__(self, fs: Filesystem, path: str, rank: int, files: Mapping[str, bytes]) -> None:
        super().__init__()
        self._fs = fs.sub(path)
        self._rank = rank
        self._files = files
        self.written: list[FileDigest] = []

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        done: Future[list[WriteResult]] = Future()
        try:
            results = self._write_shards(plan.items, planner)
            for name, data in self._files.items():
                self._write_file(name, data)
        except Exception as error:
            raise _plain_error(error) from error
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        metadata = dataclasses.replace(
            metadata,
            version=CURRENT_DCP_VERSION,
            storage_data={r.index: r.storage_data for rank in results for r in rank},
            storage_meta=StorageMeta(),
        )
        try:
            self._write_file(METADATA, pickle.dumps(metadata))
        except Exception as error:
            raise _plain_error(error) from error

    def _write_shards(self, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        if not items:
            return []
        name = f"__{self._rank}_0{DEFAULT_SUFFIX}"
        results = []
        with self._fs.open_output(name) as file:
            stream = _DigestingStream(file)
            for item in items:
                start = stream.tell()
                torch.save(planner.resolve_data(item).detach(), cast("IO[bytes]", stream))
                length = stream.tell() - start
                results.append(
                    WriteResult(
                        index=item.index,
                        size_in_bytes=length,
                        storage_data=_StorageInfo(name, start, length),
                    )
                )
            digest = stream.digest(name)
        # Only now, closed, is it durable.
        self.written.append(digest)
        return results

    def _write_file(self, name: str, data: bytes) -> None:
        self._fs.write_bytes(name, data)
        self.written.append(FileDigest(path=name, bytes=len(data), digest=sha256(data)))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        assert checkpoint_id is None, "the path is given at construction"

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False


class _DigestingStream:
    """What torch.save needs of a file, with a running size and digest.

    torch.save writes forty small pieces around each tensor; they are gathered, since each piece
    that is digested and written by itself takes the interpreter from training.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digester = ChunkDigester()
        self._bytes = 0
        self._gathered = bytearray()

    def write(self, data: Any) -> int:
        size: int = memoryview(data).nbytes
        if size >= _PIECE_BYTES:
            self._pass_on()
            self._emit(data)
        else:
            self._gathered += data
            if len(self._gathered) >= _PIECE_BYTES:
                self._pass_on()
        self._bytes += size
        return size

    def tell(self) -> int:
        return self._bytes

    def flush(self) -> None:
        """Nothing is promised before `digest`."""

    def digest(self, name: str) -> FileDigest:
        """Of all that was written, now passed on to the file."""
        self._pass_on()
        return self._digester.file(name)

    def _pass_on(self) -> None:
        if self._gathered:
            self._emit(self._gathered)
            self._gathered = bytearray()

    def _emit(self, data: Any) -> None:
        self._file.write(data)
        self._digester.update(data)


def _plain_error(error: Exception) -> RuntimeError:
    # DCP pickles it to tell the other ranks; a store's own exception may not survive that, and
    # then they would wait for this rank until the group's timeout.
    return RuntimeError(f"{type(error).__name__}: {error}")
