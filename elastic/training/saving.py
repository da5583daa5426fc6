"""Saving: from live tensors to a rank's files on storage, the training step held up by a copy only.

Must not import ray. Knows nothing of commits: a save makes files, others make them a checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist

from elastic.storage.filesystem import Filesystem
from elastic.storage.manifest import FileDigest
from elastic.training import jsonable
from elastic.training.shard_writer import ShardWriter
from elastic.training.staging import HostStager, Staged
from elastic.training.verdicts import FailedTogether, Verdicts

__all__ = ["STATE", "AsyncSaver", "SaveHandle", "WriteFailed", "rank_file"]

STATE = "state.json"
# Training comes first where both want the processor; its own threads have 0.
_NICENESS = 10


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
        self, path: str, future: Future[None], writer: ShardWriter, stall_s: float, bytes: int
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
            raise WriteFailed(self.path, str(error)) from None
        return list(self._writer.written)


class AsyncSaver:
    """Saves of one process, one at a time, through all its generations.

    Attach it to each generation's process group: a gloo group for saves alone, whose collectives
    run beside those of training.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self._verdicts = Verdicts(process_group)
        self._stager = HostStager()
        self._future: Future[None] | None = None

    def attach(self, process_group: dist.ProcessGroup | None) -> None:
        """Save with this group from now on; without one, as a process by itself.

        A save that is still in flight belongs to a group that is gone: it is left to fail.
        """
        if self.in_flight:
            # Its thread may go on reading the staged copies for as long as it likes.
            self._stager = HostStager()
        self._future = None
        self._verdicts = Verdicts(process_group)

    @property
    def held_bytes(self) -> int:
        """Host memory that is kept for copies."""
        return self._stager.held_bytes

    def reserve(self, size_bytes: int) -> None:
        """Has at least so much, made beside the caller; not while a save is in flight."""
        assert not self.in_flight
        self._stager.reserve(size_bytes)

    def follow(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Their next steps wait for the copies of a save. Raises `FusedIntoBackward`."""
        self._stager.follow(optimizers)

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
        late: Collection[str] = (),
    ) -> SaveHandle:
        """Begins to write to the directory `path`; every rank of the group calls it.

        Returns when all is copied: what is passed may change from then on. `plain` is the same on
        every rank and kept once, under `tracked` that of `TrackedState.capture`; `rank_plain` is
        kept for each rank. `late` names tensors that nothing but a step of the optimizers given to
        `follow` changes: on a CUDA device their copies are awaited there. Does not raise for a
        problem of this rank: the handle does, on every rank.
        """
        assert not self.in_flight, "the save before is still being written: wait, or skip this one"
        begun_s = time.monotonic()
        staged = self._stager.stage(tensors, rank, self._verdicts.spares, late)
        files = [_PlainFile(rank_file(rank), rank_plain, "rank_plain")]
        if rank == 0:
            files.append(_PlainFile(STATE, plain, "plain"))
        writer = ShardWriter(fs, path, rank)
        self._future = _in_background(_Write(writer, staged, files, self._verdicts))
        stall_s = time.monotonic() - begun_s
        return SaveHandle(path, self._future, writer, stall_s, staged.layout.bytes)


class _PlainFile:
    """A file of plain values as they are now; who reads them later meets none that has changed."""

    def __init__(self, name: str, values: Mapping[str, Any], path: str) -> None:
        self.name = name
        self._path = path
        self._values: Mapping[str, Any] = {}
        self._pickled = b""
        try:
            # A copy of a thousand small dicts takes a fifth of the time that their text takes.
            self._pickled = pickle.dumps(dict(values), pickle.HIGHEST_PROTOCOL)
        except Exception:  # noqa: BLE001 - it is not plain, which is told with the text
            self._values = values

    def text(self) -> bytes:
        """Its content. Raises `NotPlain`."""
        values = pickle.loads(self._pickled) if self._pickled else dict(self._values)
        return jsonable.dumps(values, self._path).encode()


class _Write:
    """What is left of a save once all is copied."""

    def __init__(
        self,
        writer: ShardWriter,
        staged: Staged,
        files: Sequence[_PlainFile],
        verdicts: Verdicts,
    ) -> None:
        self._writer = writer
        self._staged = staged
        self._files = files
        self._verdicts = verdicts

    def __call__(self) -> None:
        problem = self._staged.problem
        if not problem:
            try:
                files = {file.name: file.text() for file in self._files}
                self._staged.wait()
                self._writer.write(self._staged.image, files)
            except Exception as error:  # noqa: BLE001 - the other ranks hear of it
                problem = f"{type(error).__name__}: {error}"
        self._verdicts.reach(problem, self._staged.layout, self._writer.write_metadata)


def _in_background(write: _Write) -> Future[None]:
    future: Future[None] = Future()

    def run() -> None:
        _step_back()
        try:
            write()
        except FailedTogether as error:
            future.set_exception(error)
        except BaseException as error:  # noqa: BLE001 - a thread has nobody to raise to
            # As text: with its traceback the error would keep the memory that it met.
            future.set_exception(FailedTogether(f"{type(error).__name__}: {error}"))
        else:
            future.set_result(None)

    # A daemon, since a store that hangs must not keep the process from ending.
    threading.Thread(target=run, name="elastic-write", daemon=True).start()
    return future


def _step_back() -> None:
    """Gives this thread a lower priority than those of training."""
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):
        niceness = max(_NICENESS, os.getpriority(os.PRIO_PROCESS, thread))
        os.setpriority(os.PRIO_PROCESS, thread, niceness)
