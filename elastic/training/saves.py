"""The saves of one rank in one generation: when, one at a time, and what became of them.

All ranks decide alike, since each decision is taken on numbers that were summed over the group.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from elastic.policy.cadence import BEFORE_MEASURED_S
from elastic.policy.mesh import TENSOR
from elastic.policy.saves import SaveInterval
from elastic.storage.filesystem import Filesystem
from elastic.storage.local_tier import LocalTier
from elastic.storage.manifest import FileDigest
from elastic.storage.store_errors import is_full
from elastic.training import rng
from elastic.training.checkpoint import AsyncSaver, SaveHandle, describe
from elastic.training.coordinator import (
    CommitResult,
    Coordinator,
    Reform,
    SaveFailed,
    Shard,
    StorageFull,
)
from elastic.training.host_memory import available_bytes, check_host_memory, staging_bytes
from elastic.training.local_files import warn_of_space
from elastic.training.membership import Membership, TrainingConfig
from elastic.training.process_group import Groups
from elastic.training.reporter import Reporter
from elastic.training.shortcuts import Mark
from elastic.training.state import TrackedState

_LOOK_S = 0.1
_COPIED_S = 6 * 3600.0


@dataclass(frozen=True, kw_only=True)
class _Flight:
    step: int
    result: Future[CommitResult]


class Saves:
    """Saves of the tracked state, at most one in flight."""

    def __init__(
        self,
        *,
        member: Membership,
        config: TrainingConfig,
        coordinator: Coordinator,
        groups: Groups,
        filesystem: Filesystem,
        saver: AsyncSaver,
        reporter: Reporter,
        positions: Callable[[], Mapping[str, Any]],
        local: LocalTier | None = None,
    ) -> None:
        """`positions` gives those in the data, of the last finished step.

        With a `local` tier a save is written there first, and is in flight until its files are in
        storage too and committed.
        """
        self._local = local
        self._storage_url = filesystem.url
        self._target = filesystem if local is None else local.to_write()
        self._positions = positions
        self._member = member
        self._config = config
        self._coordinator = coordinator
        self._groups = groups
        self._saver = saver
        self._reporter = reporter
        self._flight: _Flight | None = None
        self._attempt = 0
        self._failures_in_a_row = 0
        self._num_asked = self._num_seen = 0
        self.last_step = -1
        """Step of the last save that was begun, or restored."""
        self.last_s = self._begun_s = time.monotonic()
        self._late_step = -1
        self.committed_step = -1

    def prepared(self, state: TrackedState) -> TrackedState:
        """The same state, now that the memory is there, or in the making, that it is saved from.

        Every rank calls it.

        Raises:
            HostMemoryShort: a node has too little.
            FusedIntoBackward: on a GPU, an optimizer that steps during the backward pass.
        """
        missing_bytes = self.missing_bytes(state)
        member, control = self._member, self._groups.control
        here = (member.node_rank, control, available_bytes(), member.store_host)
        check_host_memory(missing_bytes, *here)
        self._saver.reserve(self._saver.held_bytes + missing_bytes)
        self._saver.follow(state.optimizers)
        return state

    def missing_bytes(self, state: TrackedState) -> int:
        """Host memory that this rank's copies take beyond what is kept for them already."""
        needed_bytes = staging_bytes(
            state.capture().tensors, state.optimizers, self._member.world_rank
        )
        return max(0, needed_bytes - self._saver.held_bytes)

    def is_due(self, step: int) -> bool:
        """Whether the interval asks for a save after `step`. Rank 0's answer counts.

        An interval in seconds asks once while the save before it is still in flight, so that it
        is skipped and counted once, and again when that save has ended.
        """
        interval, last_s = self._config.save, self.last_s
        if interval.is_computed:
            every_s = self._coordinator.orders().save_every_s or BEFORE_MEASURED_S
            interval, last_s = SaveInterval(seconds=every_s), self._begun_s
        is_due = interval.is_due(
            step=step, last_step=self.last_step, now_s=time.monotonic(), last_s=last_s
        )
        if not is_due or interval.seconds is None or not self.is_in_flight:
            return is_due
        is_first, self._late_step = self._late_step != self.last_step, self.last_step
        return is_first

    def is_wanted(self, step: int, num_asked: int) -> bool:
        """Whether one is due after `step`, or people have asked for one since the last.

        `num_asked` is how often they have. Rank 0's answer counts.
        """
        self._num_asked = num_asked
        # One that is asked for while another is in flight is put off, where a due one is skipped.
        return (num_asked > self._num_seen and not self.is_in_flight) or self.is_due(step)

    def restored(self, step: int, *, is_snapshot: bool = False) -> None:
        """The live state is that of this committed checkpoint.

        One of a snapshot is on no storage: where an interval is in time, a save is due at once.
        """
        self.last_step = step
        self.committed_step = -1 if is_snapshot else step
        self.last_s = self._begun_s = float("-inf") if is_snapshot else time.monotonic()

    @property
    def is_in_flight(self) -> bool:
        """Whether this rank's last save is still being written or committed."""
        return self._flight is not None and not self._flight.result.done()

    def save_or_skip(
        self, state: TrackedState, counters: Mapping[str, int], *, is_free: bool = False
    ) -> None:
        """Begin a save, unless one is still in flight on any rank and the policy is to skip.

        `is_free`: the ranks know from one another that none is. Raises:
            SaveFailed: as many saves in a row have failed as the run allows; `StorageFull` where
                the last did for want of room.
        """
        self.settle()
        if self._config.save_behind == "wait":
            self.wait()
        if is_free or not self._is_any_in_flight():
            self._num_seen = self._num_asked
            self._begin(state, counters)
            return
        if self._member.world_rank == 0:
            since_s = time.monotonic() - self._begun_s
            self._coordinator.notify("save_skipped", {"step": counters["step"], "since_s": since_s})

    def _is_any_in_flight(self) -> bool:
        """Whether some rank's last save has not ended yet. Every rank asks."""
        busy = torch.tensor(int(self._flight is not None))
        dist.all_reduce(busy, group=self._groups.control)
        return bool(busy.item())

    def save_and_wait(
        self, state: TrackedState, counters: Mapping[str, int], mark: Mark | None = None
    ) -> None:
        """The state of this step, committed when this returns.

        `mark` holds what has changed since, in a step that is dropped. Raises:
            SaveFailed: it could not be committed in two tries; `StorageFull` for want of room.
            Reform: the driver has gone on without it.
        """
        self.wait()
        if self.committed_step == counters["step"]:
            return
        result = CommitResult(committed=False)
        for _ in range(2):
            self._begin(state, counters, mark)
            result = self.wait()
            if result.committed:
                return
        told = f"the checkpoint of step {counters['step']} could not be committed"
        raise self._failed(told, result.reason)

    def wait(self) -> CommitResult:
        """The outcome of the save in flight; committed when there is none.

        Raises:
            Reform: the driver has gone on without it.
        """
        while self._flight is not None:
            try:
                self._flight.result.result(_LOOK_S)
                break
            except TimeoutError:
                if self._coordinator.is_over():
                    told = f"the save of step {self._flight.step} was not waited for"
                    raise Reform(told) from None
        return self.settle()

    def settle(self) -> CommitResult:
        """Take note of a save that has ended, and fail the run when too many have failed."""
        flight = self._flight
        if flight is None or not flight.result.done():
            return CommitResult(committed=True)
        self._flight = None
        result = flight.result.result()
        if result.committed:
            self.committed_step = flight.step
            self._failures_in_a_row = 0
            return result
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= self._config.max_save_failures:
            told = (
                f"{self._failures_in_a_row} saves in a row have failed "
                f"(limit {self._config.max_save_failures}); the last, of step {flight.step}"
            )
            raise self._failed(told, result.reason)
        return result

    def _failed(self, told: str, reason: str) -> SaveFailed:
        if not is_full(reason):
            return SaveFailed(f"{told}: {reason}")
        return StorageFull(
            f"storage is full at {self._storage_url}: {told}: {reason}. Free room there, then "
            "submit the run again: it goes on from its newest checkpoint"
        )

    def _begin(
        self, state: TrackedState, counters: Mapping[str, int], mark: Mark | None = None
    ) -> None:
        member = self._member
        self._attempt += 1
        step = counters["step"]
        path = f"checkpoints/step-{step}.tmp-{member.generation}-{self._attempt}"
        begun_s = time.monotonic()
        captured = state.capture()
        handle = self._saver.save(
            self._target,
            path,
            captured.tensors,
            plain={
                "counters": dict(counters),
                "loaders": self._positions(),
                "tracked": (mark or captured).plain,
            },
            rank_plain={
                "rng": mark.rng if mark else rng.capture(),
                TENSOR: self._groups.shape[TENSOR],
            },
            rank=member.world_rank,
            late=captured.stepped,
        )
        stall_s = time.monotonic() - begun_s
        self._reporter.moves(handle.staged_bytes)
        self._reporter.save_begun_s = begun_s
        tensors = describe(captured.tensors) if member.world_rank == 0 else {}

        def shard(files: Any = (), failure: str = "") -> Shard:
            return Shard(
                generation=member.generation,
                attempt=self._attempt,
                step=step,
                world_rank=member.world_rank,
                world_size=member.world_size,
                path=path,
                files=tuple(files),
                failure=failure,
                counters=dict(counters),
                tensors=tensors,
                stall_s=stall_s,
                write_s=time.monotonic() - begun_s,
            )

        def finish() -> CommitResult:
            try:
                done = shard(files=self._in_storage(path, handle))
            except Exception as error:  # noqa: BLE001 - the driver hears of it
                done = shard(failure=f"rank {member.world_rank}: {type(error).__name__}: {error}")
            # Metrics up to this step reach the driver before the commit, so that a resumed
            # history has no gap below the checkpoint.
            self._reporter.flush()
            self._reporter.save_begun_s = None  # what follows is the driver's
            return self._commit(done)

        self._flight = _Flight(step=step, result=_in_background(finish))
        self.last_step, self.last_s, self._begun_s = step, time.monotonic(), begun_s

    def _in_storage(self, path: str, handle: SaveHandle) -> list[FileDigest]:
        """This rank's files once the run's storage has them."""
        files = handle.files()
        if self._local is not None:
            if self._attempt == 1:
                warn_of_space(self._local, handle.staged_bytes, self._member)
            self._local.replicate(path, files, self._coordinator.is_over)
        return files

    def _commit(self, shard: Shard) -> CommitResult:
        timeout_s = self._config.commit_timeout_s
        if self._local is None:
            return self._coordinator.commit(shard, timeout_s)
        # Another node's link may be the slower one: its ranks are still at their copies.
        result = self._coordinator.commit(shard, timeout_s + _COPIED_S)
        self._local.settled(shard.path, committed=result.committed)
        return result


def _in_background(work: Callable[[], CommitResult]) -> Future[CommitResult]:
    future: Future[CommitResult] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - a thread has nobody to raise to
            future.set_result(
                CommitResult(committed=False, reason=f"{type(error).__name__}: {error}")
            )

    threading.Thread(target=run, name="elastic-save", daemon=True).start()
    return future
