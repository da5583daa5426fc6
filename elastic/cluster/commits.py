"""Commits: gathering the ranks' shards of a save, and publishing the save once all have reported.

Also where the driver asks storage which checkpoint to resume. All of it runs on one storage
thread, so that a commit of an older generation is either before a new generation's choice or
refused after it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from elastic.policy import suspicion
from elastic.policy.events import Committed, Event, Record, Unrecoverable
from elastic.policy.retention import Retention
from elastic.storage.archive import Archive
from elastic.storage.archiver import ARCHIVED_S, Archiver
from elastic.storage.checkpoints import Catalog
from elastic.storage.expected import Expected
from elastic.storage.late_visibility import wait_for
from elastic.storage.ledger import LedgerEvent
from elastic.storage.room import RoomWatch
from elastic.storage.suspects import highest_trusted, rule_on
from elastic.training.coordinator import CommitResult, Shard
from elastic.training.failed_saves import FULL, clean_up
from elastic.training.publishing import Published, publish

logger = logging.getLogger("elastic")


@dataclass
class _Attempt:
    shards: dict[int, Shard] = field(default_factory=dict)
    outcome: asyncio.Future[CommitResult] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class NothingToResume(RuntimeError):
    """Checkpoints were committed, and none can be found: starting at 0 would lose them."""


class Commits:
    """The saves of the current generation. Use from the event loop only.

    `tell(kind, fields)` is called for every save that failed or was published, of checkpoints that
    made room, and of too little room. `check_right` raises if this driver may write to the run no
    longer.
    """

    def __init__(
        self,
        catalog: Catalog,
        keep: Retention,
        *,
        tell: Callable[[str, Any], None],
        before_publishing: Callable[[], object],
        check_right: Callable[[], object],
    ) -> None:
        self._catalog = catalog
        self._keep = keep
        self._tell = tell
        self._before_publishing = before_publishing
        self._check_right = check_right
        self._room = RoomWatch(catalog.fs)
        self._short = ""
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="elastic-storage")
        self._generation = -1
        self._attempts: dict[int, _Attempt] = {}
        self._protected: set[int] = set()
        self._expected = Expected(catalog)
        self._suspicion: suspicion.Suspicion | None = None
        self._archiver: Archiver | None = None

    def archive(
        self,
        archive: Archive | None,
        record: Callable[[Record], None],
        may_write: Callable[[], object],
    ) -> None:
        """From now on what belongs there is copied to the archive, if there is one, beside all
        else.

        `may_write` raises when this driver may write no more.
        """
        if archive is None:
            return
        loop = asyncio.get_running_loop()

        def tell(kind: str, step: int, reason: str, data: dict[str, Any]) -> None:
            word = Record(kind=kind, step=step, reason=reason, data=data)
            loop.call_soon_threadsafe(record, word)

        self._archiver = Archiver(
            self._catalog, archive, self._keep, tell=tell, before_publishing=may_write
        )

    async def end_archiving(self, *, finish: bool) -> None:
        """No copy begins any more; with `finish`, once the archive has all that belongs there."""
        if self._archiver is not None:
            wait_s = ARCHIVED_S if finish else 0.0
            await asyncio.to_thread(self._archiver.close, wait_s)

    async def in_order(self, work: Callable[[], Any]) -> Any:
        """The result of `work`, done on the storage thread after all that was asked before."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def fence(self, generation: int) -> None:
        """Fence off older generations, where this one needs no checkpoint to begin with."""
        self._begin(generation)
        self._protected = set()
        await self.in_order(lambda: self._catalog.sweep(generation))

    async def highest(self) -> int | None:
        """The step of the checkpoint to resume, protected from now on; None without any."""
        found = await self.in_order(lambda: highest_trusted(self._catalog))
        self._protected = set() if found is None else {found.step}
        return None if found is None else int(found.step)

    async def open(self, generation: int) -> int | None:
        """Fence off older generations; the step that this one resumes, None if there is none."""
        self._begin(generation)

        def choose() -> int | None:
            self._catalog.sweep(generation)
            found = highest_trusted(self._catalog)
            self._short = "" if found is None else self._room.look(found.bytes)
            return None if found is None else found.step

        step: int | None = await self.in_order(choose)
        self._protected = set() if step is None else {step}
        self._tell("short", self._short)
        return step

    def _begin(self, generation: int) -> None:
        self._generation = generation
        for attempt in self._attempts.values():
            if not attempt.outcome.done():
                attempt.outcome.set_result(_refused(f"generation {generation} has taken over"))
        self._attempts = {}

    async def choose(
        self, generation: int, past: Sequence[LedgerEvent], *, from_scratch: bool
    ) -> int | None:
        """As `open`, for a run with this past, whose newest checkpoint may be shown late.

        Raises:
            NothingToResume: checkpoints were committed, none can be found, and nobody has said
                that the run may start again.
        """
        if not from_scratch:
            self._expected.hear_past(past)
        loop = asyncio.get_running_loop()

        def tell(word: Record) -> None:
            said = dataclasses.replace(word, generation=generation)
            loop.call_soon_threadsafe(self._tell, "said", said)

        newest = self._expected.newest()
        await self.in_order(lambda: wait_for(self._catalog, newest, tell=tell))
        step = await self.open(generation)
        self._suspicion = self._suspicion or suspicion.fold(past)
        refusal = "" if step is not None else await self.in_order(self._expected.refusal)
        if refusal:
            raise NothingToResume(refusal)
        return step

    async def tell_passed_by(self, resumed: int) -> None:
        """Say which newer checkpoints are not resumed though they were committed, and why."""
        for word in await self.in_order(lambda: self._expected.passed_by(resumed)):
            logger.warning("checkpoint passed by, step %d: %s", word.step, word.reason)
            self._tell("said", dataclasses.replace(word, generation=self._generation))

    async def step_back(self, step: int, reason: str) -> int | None:
        """Quarantine a checkpoint with bad bytes; the next older complete one."""

        self._expected.gone([step])

        def choose() -> int | None:
            if self._catalog.inspect(step).complete:
                self._catalog.quarantine(step, reason)
            found = highest_trusted(self._catalog, below=step)
            return None if found is None else found.step

        older: int | None = await self.in_order(choose)
        self._protected = set() if older is None else {older}
        return older

    async def doubt(self, doubt: suspicion.Doubt) -> tuple[str, str]:
        """What follows from a loss that is not finite, and why; see `Coordinator.doubt`."""
        past = self._suspicion

        def work() -> suspicion.Ruling:
            return rule_on(self._catalog, doubt, past, time_s=time.time())

        ruling: suspicion.Ruling = await self.in_order(work)
        if ruling.record is not None:
            self._suspicion = suspicion.fold([ruling.record])
            self._tell("ruled", ruling.record)
        return str(ruling.then), ruling.reason

    def restored(self) -> None:
        """All ranks have loaded: the resumed checkpoint needs no protection from retention."""
        self._protected = set()

    async def hand_in(self, shard: Shard) -> CommitResult:
        """Take one rank's shard; the outcome, once all ranks have handed in theirs."""
        if shard.generation != self._generation:
            return _refused(
                f"generation {shard.generation} was replaced by generation {self._generation}"
            )
        attempt = self._attempts.setdefault(shard.attempt, _Attempt())
        attempt.shards[shard.world_rank] = shard
        if shard.failure:
            self._settle(attempt, shard, _refused(shard.failure))
        if len(attempt.shards) == shard.world_size:  # no rank writes any more
            if attempt.outcome.done():
                await self._clean_up(shard, attempt.outcome.result().reason)
            else:
                await self._publish(attempt, shard)
        return await asyncio.shield(attempt.outcome)

    async def _publish(self, attempt: _Attempt, last: Shard) -> None:
        shards = list(attempt.shards.values())

        def work() -> Published:
            if last.generation != self._generation:
                raise RuntimeError(f"generation {last.generation} was replaced meanwhile")
            self._before_publishing()
            return publish(self._catalog, shards, self._keep, self._protected, self._archiver)

        try:
            published = await self.in_order(work)
        except Exception as error:  # noqa: BLE001 - whatever storage raises fails the save
            reason = f"{type(error).__name__}: {error}"
            self._settle(attempt, last, _refused(reason))
            await self._clean_up(last, reason)
            return
        if not attempt.outcome.done():
            attempt.outcome.set_result(CommitResult(committed=True))
        self._attempts.pop(last.attempt, None)
        self._expected.committed(published.step)
        self._expected.gone(published.removed)
        self._tell("published", published)
        self._tell("short", await self.in_order(lambda: self._room.look(published.bytes)))

    async def _clean_up(self, shard: Shard, reason: str) -> None:
        def work() -> list[int]:
            right, keep = self._check_right, self._keep
            return clean_up(self._catalog, shard, reason, keep, self._protected, right)

        freed = await self.in_order(work)
        self._expected.gone(freed)
        self._tell("freed", freed)

    def _settle(self, attempt: _Attempt, shard: Shard, result: CommitResult) -> None:
        if not attempt.outcome.done():
            attempt.outcome.set_result(result)
            self._tell("refused", (shard, result.reason))


def words_of(what: str, found: Any) -> list[Record | Event]:
    """What ledger and policy are told of a save, in that order, from the arguments of `tell`."""
    if what == "refused":
        shard, reason = found
        failed = Record(
            kind="checkpoint_failed", generation=shard.generation, step=shard.step, reason=reason
        )
        if "LeaseLost" in reason:
            return [failed, Unrecoverable(generation=shard.generation, reason=reason)]
        return [failed]
    if what == "freed":
        return [Record(kind="checkpoint_removed", step=step, reason=FULL) for step in found]
    if what == "short":
        return [Record(kind="storage_short", reason=found)] if found else []
    if what in ("ruled", "said"):
        return [found]
    assert isinstance(found, Published)
    committed = Record(
        kind="checkpoint_committed",
        generation=found.generation,
        step=found.step,
        data=found.record(),
    )
    removed = [
        Record(kind="checkpoint_removed", step=step, reason="retention") for step in found.removed
    ]
    took_s = found.write_s + found.commit_s
    return [committed, *removed, Committed(step=found.step, took_s=took_s)]


def _refused(reason: str) -> CommitResult:
    return CommitResult(committed=False, reason=reason)
