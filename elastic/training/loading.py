"""Loading: a checkpoint into the tracked objects where they live, at whatever size they live.

Every rank reads what its own shards need; the ranks meet once, at the end, to agree that all of
them could. Must not import ray.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.storage import StorageReader

from elastic.storage.checkpoints import digest_problem
from elastic.storage.filesystem import Filesystem
from elastic.storage.manifest import FileDigest, Manifest, TensorInfo
from elastic.training import jsonable
from elastic.training.part import StateMismatch
from elastic.training.saving import STATE, rank_file
from elastic.training.shard_reader import CheckpointCorrupt, ShardReader
from elastic.training.shard_writer import METADATA
from elastic.training.state import TrackedState

__all__ = ["LoadFailed", "Restored", "agree", "load", "read_tensors", "unchecked", "verify_share"]


class LoadFailed(Exception):
    """Another rank could not load the checkpoint, for a reason that is not in its bytes."""

    def __init__(self, path: str, world_rank: int, reason: str) -> None:
        super().__init__(path, world_rank, reason)
        self.path = path
        self.world_rank = world_rank
        self.reason = reason

    def __str__(self) -> str:
        return f"rank {self.world_rank} could not load {self.path}: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class Restored:
    """What was saved beside the tensors; `rank_plain` is None for a rank that did not exist."""

    plain: Any
    rank_plain: Any | None
    is_snapshot: bool = False
    """It came from the memories of the nodes."""


def load(
    fs: Filesystem,
    path: str,
    manifest: Manifest,
    tracked: TrackedState,
    process_group: dist.ProcessGroup | None = None,
) -> Restored:
    """Restores `tracked` in place from the directory `path`; the same outcome on every rank.

    Every rank of the group calls it; without a group, this process loads by itself. What a rank
    reads is checked as it reads it; of an older manifest, call `verify_share` before with the files
    that `unchecked` names.

    Raises `StateMismatch` if the checkpoint does not fit, before anything has changed on the ranks
    that see it; `CheckpointCorrupt` if its bytes are bad, and then some tensors may have changed;
    what the store raised otherwise, and `LoadFailed` on the other ranks.
    """
    rank = dist.get_rank(process_group) if process_group is not None else 0
    problem: Exception | None = None
    restored = None
    try:
        restored = _load(fs, path, manifest, tracked, rank)
    except Exception as error:  # noqa: BLE001 - the other ranks have to hear of it
        problem = error
    agree(problem, path, process_group)
    assert restored is not None
    return restored


def unchecked(manifest: Manifest, world_size: int) -> list[FileDigest]:
    """The files that `load` on that many ranks would not check while it reads them.

    Those of an older manifest that have one digest for all their bytes, and what is kept for ranks
    that there will not be.
    """
    num_ranks = min(world_size, manifest.world_size)
    checked = {METADATA, STATE, *(rank_file(rank) for rank in range(num_ranks))}
    return [file for file in manifest.files if not file.chunk_bytes and file.path not in checked]


def verify_share(
    fs: Filesystem, path: str, files: Sequence[FileDigest], rank: int, world_size: int
) -> list[str]:
    """Problems in this rank's share of the files, read to their ends; [] if none.

    The shares of all ranks together are all files, about the same bytes for each rank.
    """
    loads_bytes = [0] * world_size
    problems = []
    for file in sorted(files, key=lambda file: (-file.bytes, file.path)):
        owner = loads_bytes.index(min(loads_bytes))
        loads_bytes[owner] += file.bytes
        if owner == rank:
            problems.append(digest_problem(fs, path, file))
    return [problem for problem in problems if problem]


def _load(
    fs: Filesystem, path: str, manifest: Manifest, tracked: TrackedState, rank: int
) -> Restored:
    reader = ShardReader(fs, path, manifest.files)
    saved = {}
    for name, entry in reader.read_metadata().state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise ValueError(f"{name!r} in {path} is pickled and not a tensor: not a save of ours")
        dtype = str(entry.properties.dtype).removeprefix("torch.")
        saved[name] = TensorInfo(shape=list(entry.size), dtype=dtype)
    plain = jsonable.loads(reader.read_checked(STATE))
    rank_plain = None
    if rank < manifest.world_size:
        rank_plain = jsonable.loads(reader.read_checked(rank_file(rank)))

    tracked.restore(plain["tracked"], saved, partial(read_tensors, reader))
    return Restored(plain=plain, rank_plain=rank_plain)


def read_tensors(reader: StorageReader, targets: dict[str, torch.Tensor]) -> None:
    """Fills these tensors, each with the saved one of its name, as much of it as lies here."""
    with warnings.catch_warnings():
        # no_dist is on purpose: no rank needs another to know which bytes it needs itself.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            dcp.load(targets, storage_reader=reader, no_dist=True)
        except CheckpointException as error:
            raise _cause(error) from error


def _cause(error: CheckpointException) -> Exception:
    for cause, _ in error.failures.values():
        if isinstance(cause, Exception):
            return cause
        raise cause
    return RuntimeError(str(error))


def agree(problem: Exception | None, path: str, group: dist.ProcessGroup | None) -> None:
    """Nothing, if no rank had a problem with `path`; every rank calls it.

    Else raises on every rank what concerns all: a mismatch, else damage, else what one rank met.
    """
    told: list[Any] = [_to_tell(problem)]
    if group is not None:
        told = [None] * dist.get_world_size(group)
        dist.all_gather_object(told, _to_tell(problem), group=group)
    for kind in (StateMismatch, CheckpointCorrupt):
        for found in told:
            if isinstance(found, kind):
                raise found
    if problem is not None:
        raise problem
    for rank, found in enumerate(told):
        if found is not None:
            raise LoadFailed(path, rank, found)


def _to_tell(problem: Exception | None) -> Any:
    if problem is None or isinstance(problem, StateMismatch | CheckpointCorrupt):
        return problem
    # Any other exception may not survive pickling.
    return f"{type(problem).__name__}: {problem}"
