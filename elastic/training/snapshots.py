"""The snapshots of one rank in one generation: a copy of the state in memory every few steps.

The training thread only copies. What follows, digests and the copy on another node, is its node's
to do, and the next snapshot waits for it: when it is late, one is skipped and counted. All ranks
decide alike, since each decision is taken on numbers that were summed over the group.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

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
        self._is_ended = True
        self._is_kept = False
        self._unneeded = Unneeded()
        self._problem = ""
        self._num_skipped = 0

    def checked(self, state: TrackedState) -> TrackedState:
        """The same state, now that there is memory for snapshots of it.

        Raises `SnapshotsDoNotFit`.
        """
        if self.memory is None or self._every is None:
            return state
        rank = self._member.world_rank
        layout, _ = piece.lay_out(state.capture().tensors, {}, rank)
        piece_bytes = layout.num_bytes + state.expected_growth_bytes()
        problem = self.memory.check(piece_bytes)
        if problem:
            raise SnapshotsDoNotFit(
                f"{problem}, for pieces of about {piece_bytes} bytes on each rank of this node: "
                "switch them off (snapshot_every=None), or use nodes with more memory"
            )
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
        if agreement.snapshot_is_kept() and self._last is not None:
            self._unneeded = Unneeded(whole=self._last)
        step = counters["step"]
        if step % self._every:
            return
        if not agreement.snapshot_is_ended():
            self._num_skipped += 1
            self._say("snapshot_skipped", {"step": step, "skipped": self._num_skipped})
            return
        self._reporter.phase = "snapshot"
        flush()
        self._take(self.memory, state, counters)

    def _take(self, memory: NodeMemory, state: TrackedState, counters: Mapping[str, int]) -> None:
        member, begun_s = self._member, time.monotonic()
        # One that was not kept everywhere gives its place to this one, and not the one before it.
        whole = self._unneeded.whole
        unneeded = Unneeded(whole=whole, failed=None if self._last == whole else self._last)
        self._last = made = Piece(
            generation=member.generation,
            step=counters["step"],
            world_rank=member.world_rank,
            world_size=member.world_size,
        )
        self._is_ended = self._is_kept = False
        try:
            layout = self._copy(memory, state, counters, unneeded)
        except Exception as error:  # noqa: BLE001 - the others go on, and so does this rank
            self._has_failed(error)
            return
        stall_s = time.monotonic() - begun_s

        def finish() -> None:
            with contextlib.suppress(OSError, AttributeError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
            try:
                # A history that goes on from here has no gap below it.
                self._reporter.flush()
                memory.seal(made, layout.num_bytes, layout.to_json(), unneeded)
            except Exception as error:  # noqa: BLE001 - a thread has nobody to raise to
                self._has_failed(error)
                return
            self._is_kept = True
            self._is_ended = True
            took_s = time.monotonic() - begun_s
            told = {"bytes": layout.num_bytes, "stall_s": stall_s, "took_s": took_s}
            self._say("snapshot_kept", {"step": made.step, **told})

        threading.Thread(target=finish, name="elastic-snapshot", daemon=True).start()

    def _copy(
        self,
        memory: NodeMemory,
        state: TrackedState,
        counters: Mapping[str, int],
        unneeded: Unneeded,
    ) -> piece.Layout:
        """What a checkpoint of this moment would hold, in this rank's memory on the node."""
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
        layout, sources = piece.lay_out(captured.tensors, files, rank)
        room = memory.room(layout.num_bytes, unneeded)
        piece.copy(layout, sources, files, room)
        return layout

    def _has_failed(self, error: Exception) -> None:
        self._is_ended = True
        problem = f"rank {self._member.world_rank}: {type(error).__name__}: {error}"
        if problem != self._problem:  # the same trouble every few steps is told once
            self._problem = problem
            self._tell("snapshot_failed", {"step": self._reporter.step, "reason": problem})

    def _say(self, kind: str, data: Mapping[str, Any]) -> None:
        if self._member.world_rank == 0:
            self._tell(kind, data)
