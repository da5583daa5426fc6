"""Shard reader: the parts of a checkpoint's tensors that this rank needs, into the live tensors.

Nothing is unpickled that the manifest has not vouched for. Must not import ray.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from elastic.storage.checkpoints import digest_problem
from elastic.storage.filesystem import Filesystem
from elastic.storage.manifest import FileDigest
from elastic.training.shard_writer import METADATA

__all__ = ["CheckpointCorrupt", "ShardReader"]

_PICKLED = {
    "collections": {"OrderedDict"},
    # Where DCP itself was asked to save, which its own writer notes down.
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
}


class CheckpointCorrupt(Exception):
    """The bytes of a checkpoint are not those that were saved: it is to be quarantined."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(path, problem)
        self.path = path
        self.problem = problem

    def __str__(self) -> str:
        return f"the checkpoint at {self.path} is damaged: {self.problem}"


class ShardReader(StorageReader):
    """Reads the directory `path` of `fs`, whose files are those of the manifest.

    Raises `CheckpointCorrupt` only where a file is not what the manifest says. Other trouble, such
    as an unreachable store, says nothing about the bytes and is raised as it comes.
    """

    def __init__(self, fs: Filesystem, path: str, files: list[FileDigest]) -> None:
        super().__init__()
        self._fs = fs
        self._path = path
        self._files = {file.path: file for file in files}
        self._storage: Mapping[Any, _StorageInfo] = {}
        self._metadata: Metadata | None = None

    def read_checked(self, name: str) -> bytes:
        """A small file, whole and with the digest of the manifest. Raises `CheckpointCorrupt`."""
        file = self._file(name)
        try:
            data = self._fs.read_bytes(f"{self._path}/{name}")
        except FileNotFoundError:
            raise CheckpointCorrupt(self._path, f"{name} is missing") from None
        found = f"sha256:{hashlib.sha256(data).hexdigest()}"
        if found != file.digest:
            raise CheckpointCorrupt(
                self._path,
                f"{name}: expected {file.bytes} bytes with {file.digest}, "
                f"found {len(data)} with {found}",
            )
        return data

    def read_metadata(self) -> Metadata:
        # DCP may ask again after TrackedState has seen it.
        if self._metadata is None:
            self._metadata = _Unpickler(io.BytesIO(self.read_checked(METADATA))).load()
            self._metadata.storage_meta = self._metadata.storage_meta or StorageMeta()
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        def place(item: ReadItem) -> tuple[str, int]:
            info = self._storage[item.storage_index]
            return info.relative_path, info.offset

        for name, items in groupby(sorted(plan.items, key=place), key=lambda item: place(item)[0]):
            self._read_file(name, list(items), planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def files_of(self, names: Collection[str]) -> list[FileDigest]:
        """The files that hold these tensors. Raises `CheckpointCorrupt`."""
        storage = self.read_metadata().storage_data
        held = {info.relative_path for index, info in storage.items() if index.fqn in names}
        return [self._file(name) for name in sorted(held)]

    def read_tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """One whole tensor in this process's memory, of that dtype, whatever shards it lies in.

        Needs its size in memory and that of its largest shard, or once its size where both are one.
        """
        metadata = self.read_metadata()
        entry = metadata.state_dict_metadata[name]
        assert isinstance(entry, TensorStorageMetadata), name
        target: torch.Tensor | None = None
        for chunk in entry.chunks:
            info = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
            shard = self._read_shard(info)
            if shard.shape == entry.size and shard.dtype == dtype:
                return shard
            target = torch.empty(entry.size, dtype=dtype) if target is None else target
            part = target
            for dim, (offset, length) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                part = part.narrow(dim, offset, length)
            part.copy_(shard)
            del shard  # else the next one would be read while this one is still held
        held = sum(chunk.sizes.numel() for chunk in entry.chunks)
        if held != entry.size.numel():
            raise CheckpointCorrupt(
                self._path, f"{name!r} has {entry.size.numel()} values, its shards hold {held}"
            )
        return torch.empty(entry.size, dtype=dtype) if target is None else target

    def _read_shard(self, info: _StorageInfo) -> torch.Tensor:
        with self._reading(info.relative_path) as stream:
            return _load(stream, info)

    def _read_file(self, name: str, items: list[ReadItem], planner: LoadPlanner) -> None:
        with self._reading(name) as stream:
            for item in items:
                self._read_item(item, stream, planner)

    @contextmanager
    def _reading(self, name: str) -> Iterator[BinaryIO]:
        file = self._file(name)
        try:
            with self._fs.open_input(f"{self._path}/{name}") as stream:
                yield stream
        except FileNotFoundError:
            raise CheckpointCorrupt(self._path, f"{name} is missing") from None
        except OSError:
            raise
        except Exception as error:
            # Damage makes torch.load raise almost anything; so do other things. The digest knows.
            problem = digest_problem(self._fs, self._path, file)
            if problem:
                raise CheckpointCorrupt(self._path, problem) from error
            raise

    def _read_item(self, item: ReadItem, stream: BinaryIO, planner: LoadPlanner) -> None:
        tensor = _load(stream, self._storage[item.storage_index])
        for dim, (offset, length) in enumerate(
            zip(item.storage_offsets, item.lengths, strict=True)
        ):
            tensor = tensor.narrow(dim, offset, length)
        target = planner.resolve_tensor(item).detach()
        assert target.shape == tensor.shape, f"{item.storage_index} into {target.shape}"
        target.copy_(tensor)
        planner.commit_tensor(item, target)

    def _file(self, name: str) -> FileDigest:
        if name not in self._files:
            raise CheckpointCorrupt(self._path, f"the manifest has no file {name!r}")
        return self._files[name]

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        self._storage = metadata.storage_data

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        assert checkpoint_id is None, "the path is given at construction"

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False


def _load(stream: BinaryIO, info: _StorageInfo) -> torch.Tensor:
    part = _Slice(stream, info.offset, info.length)
    tensor: torch.Tensor = torch.load(
        part,  # type: ignore[arg-type]
        map_location="cpu",
        weights_only=True,
    )
    return tensor


class _Unpickler(pickle.Unpickler):
    """Makes DCP's own metadata and nothing else, whoever could write the checkpoint."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if name in _PICKLED.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(
            f"{METADATA} asks for {module}.{name}, which is no part of a checkpoint's metadata: "
            "it was not written by this program, or by one for another version of torch"
        )


class _Slice(io.RawIOBase):
    """`length` bytes of a stream from `start` on, as a file of their own."""

    def __init__(self, stream: BinaryIO, start: int, length: int) -> None:
        self._stream = stream
        self._start = start
        self._length = length
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        self._position = max(0, origin + offset)
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._length - self._position)]
        self._stream.seek(self._start + self._position)
        count: int = self._stream.readinto(view)  # type: ignore[attr-defined]
        self._position += count
        return count
