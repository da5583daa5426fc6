"""The resumption: where a generation begins, in the nodes' memories or on storage.

The newest snapshot that is whole counts, unless a newer checkpoint was committed; where it counts,
storage is not asked. What is bad is given up, and the next older one named.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from elastic.cluster.commits import Commits
from elastic.cluster.driver_config import DriverConfig
from elastic.cluster.snapshot_keepers import SnapshotKeepers
from elastic.policy import coverage
from elastic.policy.coverage import Resume, Snapshot
from elastic.policy.events import Committed, Event, Record, Unrecoverable
from elastic.policy.suspicion import Doubt, Then
from elastic.storage.ledger import LedgerEvent
from elastic.storage.readmission import BRING_BACK

logger = logging.getLogger("elastic")


class Resumption:
    """Use from the event loop only."""

    def __init__(
        self,
        config: DriverConfig,
        past: Sequence[LedgerEvent],
        commits: Commits,
        committed_step: Callable[[], int],
        *,
        post: Callable[[Event], None],
        record: Callable[[Record], None],
    ) -> None:
        """`committed_step` is the highest one that this driver knows of; -1 where it knows none."""
        self.keepers = SnapshotKeepers(is_on=config.snapshots)
        self._from_scratch = config.from_scratch
        self._past = past
        self._commits = commits
        self._committed_step = committed_step
        self._post = post
        self._record = record
        self._snapshot: Snapshot | None = None
        doubted = (event.generation for event in past if event.kind == "checkpoint_suspect")
        self._doubted_generation = max(doubted, default=-1)
        self._tasks: set[asyncio.Future[None]] = set()

    async def choose(self, generation: int) -> Resume:
        """Where this generation begins, and older ones write no more. Raises `NothingToResume`."""
        found = await self._newest(generation)
        known = self._committed_step()
        if found is not None and 0 <= known <= found.step:
            self._snapshot = found
            self._spawn(self._fence(generation))
            return Resume(step=found.step, snapshot=found)
        step = await self._commits.choose(generation, self._past, from_scratch=self._from_scratch)
        if step is not None:
            self._post(Committed(step=step))
        return await self._told(self._chosen(step, found))

    async def _told(self, resume: Resume) -> Resume:
        """The same, once it is said which newer checkpoints it passes by."""
        if resume.step is not None:
            await self._commits.tell_passed_by(resume.step)
        return resume

    async def _newest(self, generation: int) -> Snapshot | None:
        """The newest whole snapshot that was not trained from a suspect checkpoint."""
        held = await self.keepers.open(generation)
        last = self._doubted_generation
        return coverage.newest(
            {node: [one for one in held[node] if one.generation > last] for node in held}
        )

    def _chosen(self, step: int | None, found: Snapshot | None) -> Resume:
        # Without any checkpoint nothing tells which history a snapshot belongs to.
        resume = coverage.choose(step, found) if step is not None else Resume(step=None)
        self._snapshot = resume.snapshot
        return resume

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _fence(self, generation: int) -> None:
        """Storage is told too, and nobody waits for it."""
        try:
            await self._commits.fence(generation)
        except Exception as error:  # noqa: BLE001 - a commit asks it again, and says what is wrong
            logger.warning("storage could not be told of generation %d: %s", generation, error)

    def restored(self) -> None:
        """All ranks have loaded: what they did not load from memory is of no use any more."""
        self._commits.restored()
        self._spawn(self.keepers.keep_only(self._snapshot))

    async def reject(
        self, generation: int, snapshot: Snapshot, reason: str
    ) -> tuple[Resume | None, str]:
        """What to resume in place of this bad snapshot, or why there is nothing."""
        kind = "snapshot_rejected"
        self._record(Record(kind=kind, generation=generation, step=snapshot.step, reason=reason))
        await self.keepers.drop(snapshot)
        found = await self._newest(generation)
        resume = await self._told(self._chosen(await self._commits.highest(), found))
        if resume.step is not None:
            return resume, ""
        problem = f"the snapshot of step {snapshot.step} cannot be loaded: {reason}; there is none "
        problem += "older, and no checkpoint"
        self._post(Unrecoverable(generation=generation, reason=problem))
        return None, problem

    async def doubt(self, doubt: Doubt) -> tuple[str, str]:
        """What follows from a loss that is not finite, and why; see `Coordinator.doubt`."""
        then, reason = await self._commits.doubt(doubt)
        if then == Then.STEP_BACK:
            self._doubted_generation = doubt.generation
        return then, reason

    async def step_back(self, generation: int, step: int, reason: str) -> tuple[int | None, str]:
        """The next older checkpoint than this bad one, or why there is none."""
        kind = "checkpoint_quarantined"
        self._record(Record(kind=kind, generation=generation, step=step, reason=reason))
        older = await self._commits.step_back(step, reason)
        if older is not None:
            await self._commits.tell_passed_by(older)
            return older, ""
        problem = (
            f"no checkpoint with sound bytes is left; the last tried, step {step}: {reason}. "
            f"{BRING_BACK}, or start a new run under another name"
        )
        self._post(Unrecoverable(generation=generation, reason=problem))
        return None, problem
