"""Shard reader: the parts of a checkpoint's tensors that this rank needs, into the live tensors.

Nothing is unpickled that the manifest has not vouched for. Must not import ray.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from elastic.storage.completeness import digest_problem, sha256
from elastic.storage.filesystem import Filesystem
from elastic.storage.manifest import FileDigest
from elastic.storage.verified_file import CheckpointCorrupt, VerifiedFile
from elastic.training.shard_writer import METADATA
from elastic.training.wanted import Wanted, fill, fill_shares, narrow, shared_out

__all__ = ["CheckpointCorrupt", "GivenReader", "ShardReader"]

_NUM_THREADS = 2
_NUM_REQUESTS = 8

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


class GivenReader(StorageReader):
    """What DCP asks of a reader that was told at its construction what to read."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        assert checkpoint_id is None, "what to read is given at construction"

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False


class ShardReader(GivenReader):
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
        found = sha256(data)
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
        """Fills the live tensors, several parts of the plan at a time, each in a thread."""
        targets = [planner.resolve_tensor(item).detach() for item in plan.items]
        self._fill(
            [
                self._wanted(item.storage_index, item.storage_offsets, item.lengths, target)
                for item, target in zip(plan.items, targets, strict=True)
            ]
        )
        for item, target in zip(plan.items, targets, strict=True):
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def files_of(self, names: Collection[str]) -> list[FileDigest]:
        """The files that hold these tensors. Raises `CheckpointCorrupt`."""
        storage = self.read_metadata().storage_data
        held = {info.relative_path for index, info in storage.items() if index.fqn in names}
        return [self._file(name) for name in sorted(held)]

    def read_tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """One whole tensor in this process's memory, of that dtype, whatever shards it lies in."""
        metadata = self.read_metadata()
        entry = metadata.state_dict_metadata[name]
        assert isinstance(entry, TensorStorageMetadata), name
        held = sum(chunk.sizes.numel() for chunk in entry.chunks)
        if held != entry.size.numel():
            raise CheckpointCorrupt(
                self._path, f"{name!r} has {entry.size.numel()} values, its shards hold {held}"
            )
        target = torch.empty(entry.size, dtype=dtype)
        self._fill(
            [
                self._wanted(
                    MetadataIndex(name, chunk.offsets),
                    [0] * len(chunk.sizes),
                    chunk.sizes,
                    narrow(target, chunk.offsets, chunk.sizes),
                )
                for chunk in entry.chunks
            ]
        )
        return target

    def _wanted(
        self,
        index: MetadataIndex,
        offsets: Sequence[int],
        lengths: Sequence[int],
        target: torch.Tensor,
    ) -> Wanted:
        metadata = self.read_metadata()
        entry = metadata.state_dict_metadata[index.fqn]
        assert isinstance(entry, TensorStorageMetadata), index
        return Wanted(
            info=metadata.storage_data[index],
            shape=_chunk(entry, index).sizes,
            dtype=entry.properties.dtype,
            offsets=offsets,
            lengths=lengths,
            target=target,
        )

    def _fill(self, wanted: Sequence[Wanted]) -> None:
        at_once = _NUM_THREADS if self._fs.is_local else _NUM_REQUESTS
        fill_shares(shared_out(wanted, at_once), self._read_from)

    def _read_from(self, name: str, wanted: Sequence[Wanted]) -> None:
        with self._open(name) as file:
            fill(file, wanted)

    @contextmanager
    def _open(self, name: str) -> Iterator[VerifiedFile]:
        digest = self._file(name)
        try:
            with VerifiedFile(self._fs, self._path, digest) as file:
                yield file
        except (OSError, CheckpointCorrupt):
            raise
        except Exception as error:
            # Damage makes torch.load raise almost anything; so do other things. The digest knows.
            problem = "" if digest.chunk_bytes else digest_problem(self._fs, self._path, digest)
            if problem:
                raise CheckpointCorrupt(self._path, problem) from error
            raise

    def _file(self, name: str) -> FileDigest:
        if name not in self._files:
            raise CheckpointCorrupt(self._path, f"the manifest has no file {name!r}")
        return self._files[name]

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        self._storage = metadata.storage_data


def _chunk(entry: TensorStorageMetadata, index: MetadataIndex) -> ChunkStorageMetadata:
    if index.index is not None and entry.chunks[index.index].offsets == index.offset:
        return entry.chunks[index.index]
    return next(chunk for chunk in entry.chunks if chunk.offsets == index.offset)


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
