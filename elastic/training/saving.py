"""Saving: from live tensors to a rank's files on storage, the training step held up by a copy only.

Must not import ray. Knows nothing of commits: a save makes files, others make them a checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor

from elastic.storage.filesystem import Filesystem
from elastic.storage.manifest import FileDigest
from elastic.training import jsonable
from elastic.training.shard_writer import ShardWriter
from elastic.training.staging import HostStager, StagedShard

__all__ = ["STATE", "AsyncSaver", "SaveHandle", "WriteFailed", "rank_file"]

STATE = "state.json"


def rank_file(world_rank: int) -> str:
    """The file of what one rank keeps for itself."""
    return f"rank-{world_rank}.json"


class WriteFailed(Exception):
    """A save came to nothing, on every rank; `reason` names the rank that caused it."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"the save to {self.path} failed: {self.reason}. Its files are not a checkpoint"


class SaveHandle:
    """One save on its way. `stall_s` is how long `AsyncSaver.save` held the caller up."""

    def __init__(
        self, path: str, future: Future[Any], writer: ShardWriter, stall_s: float, bytes: int
    ) -> None:
        self.path = path
        self.stall_s = stall_s
        self.staged_bytes = bytes
        self._future = future
        self._writer = writer

    def done(self) -> bool:
        """Whether `files` would return or raise at once."""
        return self._future.done()

    def files(self, timeout_s: float | None = None) -> list[FileDigest]:
        """The files of this rank, written, durable and digested, on every rank or on none.

        Waits for them. Raises `WriteFailed` if any rank failed, `TimeoutError` after `timeout_s`.
        """
        error = self._future.exception(timeout_s)
        if error is not None:
            raise WriteFailed(self.path, _reason(error)) from None
        return list(self._writer.written)


class AsyncSaver:
    """Saves of one process, one at a time, through all its generations.

    Attach it to each generation's process group: a gloo group for saves alone, whose collectives
    run beside those of training.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self._group = process_group
        self._stager = HostStager()
        self._future: Future[Any] | None = None

    def attach(self, process_group: dist.ProcessGroup | None) -> None:
        """Save with this group from now on; without one, as a process by itself.

        A save that is still in flight belongs to a group that is gone: it is left to fail.
        """
        if self.in_flight:
            # Its thread may go on reading the staged copies for as long as it likes.
            self._stager = HostStager()
        self._future = None
        self._group = process_group

    @property
    def in_flight(self) -> bool:
        """Whether a save is being written, and another may not begin yet."""
        return self._future is not None and not self._future.done()

    def save(
        self,
        fs: Filesystem,
        path: str,
        tensors: Mapping[str, torch.Tensor],
        *,
        plain: Mapping[str, Any],
        rank_plain: Mapping[str, Any],
        rank: int,
    ) -> SaveHandle:
        """Begins to write to the directory `path`; every rank of the group calls it.

        Returns when all is copied: what is passed may change from then on. `plain` is the same on
        every rank and kept once, under `tracked` that of `TrackedState.capture`; `rank_plain` is
        kept for each rank. Does not raise for a problem of this rank: the handle does, on every
        rank.
        """
        assert not self.in_flight, "the save before is still being written: wait, or skip this one"
        begun_s = time.monotonic()
        planner = _Planner(self._stager)
        files: dict[str, bytes] = {}
        try:
            files[rank_file(rank)] = jsonable.dumps(dict(rank_plain), "rank_plain").encode()
            if rank == 0:
                files[STATE] = jsonable.dumps(dict(plain), "plain").encode()
        except jsonable.NotPlain as error:
            planner.problem = f"{type(error).__name__}: {error}"
        writer = ShardWriter(fs, path, rank, files)
        # What is not sharded is rank 0's alone to write: chosen item by item, as DCP would, the
        # mean and the variance of a norm could come from two ranks that do not agree.
        ours = {n: t for n, t in tensors.items() if rank == 0 or isinstance(t, DTensor)}
        response = dcp.async_save(
            # One entry, since DCP logs twice for each before it even stages.
            {"tensors": ours},
            storage_writer=writer,
            planner=planner,
            process_group=self._group,
            async_stager=self._stager,
            no_dist=self._group is None,
        )
        self._future = cast("Future[Any]", response)
        stall_s = time.monotonic() - begun_s
        return SaveHandle(path, self._future, writer, stall_s, self._stager.staged_bytes)


class _Planner(DefaultSavePlanner):
    """DCP's planner, which also passes a problem of this rank on to all of them.

    Planning is the first thing the ranks do together; a rank that stayed away from it would leave
    the others waiting.
    """

    def __init__(self, stager: HostStager) -> None:
        super().__init__()
        self._stager = stager
        self.problem = ""

    def create_local_plan(self) -> SavePlan:
        problem = self.problem or self._stager.problem
        if problem:
            raise RuntimeError(problem)
        return super().create_local_plan()

    def lookup_object(self, index: MetadataIndex) -> Any:
        found = self.state_dict[index.fqn]
        return found.local if isinstance(found, StagedShard) else found


def _reason(error: BaseException) -> str:
    if isinstance(error, CheckpointException):
        causes = (f"rank {rank}: {found[0]}" for rank, found in error.failures.items())
        return "; ".join(causes)
    return f"{type(error).__name__}: {error}"
