"""The snapshots of one rank in one generation: a copy of the state in memory every few steps.

The training thread only copies. What follows, digests and the copy on another node, is its node's
to do, and the next snapshot waits for it: when it is late, one is skipped and told. All ranks
decide alike, since each decision is taken on numbers that were summed over the group.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from elastic.policy.coverage import Piece, Unneeded
from elastic.policy.mesh import TENSOR
from elastic.training import jsonable, piece, rng
from elastic.training.agreement import Agreement
from elastic.training.membership import Membership, TrainingConfig
from elastic.training.node_memory import NodeMemory
from elastic.training.process_group import Groups
from elastic.training.reporter import Reporter
from elastic.training.saving import STATE, rank_file
from elastic.training.state import TrackedState

_NICE = 10
_NO_ROOM = "the memory for it is still being made"
_LATE = "not all ranks were through with the one before"
_NOT_WHOLE = (
    "not every rank has kept its part: its memory was still being made there, or see "
    "snapshot_failed"
)

Tell = Callable[[str, Mapping[str, Any]], None]


class SnapshotsDoNotFit(ValueError):
    """Snapshots were asked for, and a node has not the memory for them."""


class Snapshots:
    """At most one in the making. Without a memory to keep them in, there are none."""

    def __init__(
        self,
        *,
        config: TrainingConfig,
        memory: NodeMemory | None,
        member: Membership,
        groups: Groups,
        reporter: Reporter,
        positions: Callable[[], Mapping[str, Any]],
        tell: Tell,
    ) -> None:
        """`positions` gives those in the data, of the last finished step."""
        self._every = config.snapshot_every
        self.memory = memory
        self._member = member
        self._groups = groups
        self._reporter = reporter
        self._positions = positions
        self._tell = tell
        self._last: Piece | None = None
        self._is_judged = True
        self._kept_told: Mapping[str, Any] = {}
        self._is_ended = True
        self._is_kept = False
        self._has_room = False
        self._unneeded = Unneeded()
        self._problem = ""

    def checked(
        self, state: TrackedState, beside_bytes: Callable[[TrackedState], int]
    ) -> TrackedState:
        """The same state, now that there is memory for snapshots of it.

        `beside_bytes` tells what else this rank is about to take for it.

        Raises `SnapshotsDoNotFit`.
        """
        if self.memory is None or self._every is None:
            return state
        rank = self._member.world_rank
        layout, _ = piece.lay_out(state.capture().tensors, {}, rank)
        piece_bytes = layout.num_bytes + state.expected_growth_bytes()
        problem = self.memory.check(piece_bytes, beside_bytes(state))
        if problem:
            raise SnapshotsDoNotFit(
                f"{problem}, for pieces of about {piece_bytes / 1e9:.2f} GB on each rank of this "
                "node: switch them off (snapshot_every=None), or use nodes with more memory"
            )
        self._say("snapshots_on", {"every": self._every})
        return state

    @property
    def is_ended(self) -> bool:
        """Whether this rank is through with its part of the last one, if there was one."""
        return self._is_ended

    @property
    def is_kept(self) -> bool:
        """Whether that part lies in memory, with its copy on another node."""
        return self._is_kept

    def at_boundary(
        self,
        state: TrackedState,
        counters: Mapping[str, int],
        agreement: Agreement,
        flush: Callable[[], None],
    ) -> None:
        """Take one if it is due; `flush` hands on the metrics of the steps until now."""
        if self.memory is None or self._every is None:
            return
        self._judge(agreement)
        step = counters["step"]
        is_due = step % self._every == 0
        if not is_due and self._has_room:
            return
        if not agreement.snapshot_is_ended():
            if is_due:
                self._skip(step, _NO_ROOM if self._last is None else _LATE)
            return
        self._reporter.phase = "snapshot"
        flush()
        try:
            self._begin(self.memory, state, counters, is_due)
        except Exception as error:  # noqa: BLE001 - the others go on, and so does this rank
            self._is_kept = False
            self._has_failed(error)

    def _judge(self, agreement: Agreement) -> None:
        """Whether the last one taken is whole, once all ranks are through with it."""
        if self._last is None or self._is_judged or not agreement.snapshot_is_ended():
            return
        self._is_judged = True
        if not agreement.snapshot_is_kept():
            self._skip(self._last.step, _NOT_WHOLE)
            return
        self._unneeded = Unneeded(whole=self._last)
        self._problem = ""
        self._say("snapshot_kept", self._kept_told)

    def _begin(
        self, memory: NodeMemory, state: TrackedState, counters: Mapping[str, int], is_due: bool
    ) -> None:
        """A copy in this node's memory, where it has room; where not, room for the next one."""
        begun_s = time.monotonic()
        # One that was not kept everywhere gives its place to this one, and not the one before it.
        whole = self._unneeded.whole
        unneeded = Unneeded(whole=whole, failed=None if self._last == whole else self._last)
        tensors, files = self._content(state, counters)
        layout, sources = piece.lay_out(tensors, files, self._member.world_rank)
        room = memory.room(layout.num_bytes, unneeded)
        self._has_room = True
        if room is None:
            self._in_background(lambda: memory.prepare(layout.num_bytes, unneeded))
        if not is_due:
            return
        self._is_kept = False
        if room is None:
            self._skip(counters["step"], _NO_ROOM)
            return
        self._last = made = self._piece(counters["step"])
        self._is_judged = False
        piece.copy(layout, sources, files, room)
        stall_s = time.monotonic() - begun_s

        def seal() -> None:
            # A history that goes on from here has no gap below it.
            self._reporter.flush()
            memory.seal(made, layout.num_bytes, layout.to_json(), unneeded)
            took_s = time.monotonic() - begun_s
            told = {"bytes": layout.num_bytes, "stall_s": stall_s, "took_s": took_s}
            self._kept_told = {"step": made.step, **told}
            self._is_kept = True

        self._in_background(seal)

    def _piece(self, step: int) -> Piece:
        member = self._member
        return Piece(
            generation=member.generation,
            step=step,
            world_rank=member.world_rank,
            world_size=member.world_size,
        )

    def _content(
        self, state: TrackedState, counters: Mapping[str, int]
    ) -> tuple[dict[str, torch.Tensor], dict[str, bytes]]:
        """What a checkpoint of this moment would hold: live tensors, and this rank's files."""
        rank = self._member.world_rank
        captured = state.capture()
        rank_plain = {"rng": rng.capture(), TENSOR: self._groups.shape[TENSOR]}
        files = {rank_file(rank): jsonable.dumps(rank_plain, "rank_plain").encode()}
        if rank == 0:
            plain = {
                "counters": dict(counters),
                "loaders": self._positions(),
                "tracked": captured.plain,
            }
            files[STATE] = jsonable.dumps(plain, "plain").encode()
        return captured.tensors, files

    def _in_background(self, work: Callable[[], None]) -> None:
        self._is_ended = False

        def run() -> None:
            with contextlib.suppress(OSError, AttributeError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
            try:
                work()
                self._is_ended = True
            except Exception as error:  # noqa: BLE001 - a thread has nobody to raise to
                self._has_failed(error)

        threading.Thread(target=run, name="elastic-snapshot", daemon=True).start()

    def _has_failed(self, error: Exception) -> None:
        problem = f"rank {self._member.world_rank}: {type(error).__name__}: {error}"
        try:
            if problem != self._problem:  # the same trouble every few steps is told once
                self._problem = problem
                self._tell("snapshot_failed", {"step": self._reporter.step, "reason": problem})
        finally:
            self._is_ended = True

    def _skip(self, step: int, why: str) -> None:
        self._say("snapshot_skipped", {"step": step, "why": why})

    def _say(self, kind: str, data: Mapping[str, Any]) -> None:
        if self._member.world_rank == 0:
            self._tell(kind, data)
