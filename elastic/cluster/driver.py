"""The driver: events in, the policy's decision, its commands performed, new events.

It decides nothing itself. The loop performs what the policy says, and the ledger has each record
before the commands after it are performed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

from elastic.cluster.claimed_run import ClaimedRun
from elastic.cluster.commits import Commits, words_of
from elastic.cluster.drains import Drains
from elastic.cluster.driver_config import DriverConfig
from elastic.cluster.group import Group
from elastic.cluster.inbox import Inbox
from elastic.cluster.kept_out import KeptOutNodes
from elastic.cluster.last_words import LastWords
from elastic.cluster.lookout import Lookout
from elastic.cluster.rank_words import NO_WORD, RankWords
from elastic.cluster.ray_internals import Controller, GroupMember
from elastic.cluster.recovery import Recovery
from elastic.cluster.resumption import Resumption
from elastic.cluster.rounds import Rounds
from elastic.cluster.standstill import Standstill
from elastic.cluster.training_failed import TrainingFailed
from elastic.policy.budgets import ENDS
from elastic.policy.coverage import Resume, Snapshot
from elastic.policy.events import (
    Command,
    Diagnose,
    End,
    EndRanks,
    Event,
    JoinersReady,
    LookForCapacity,
    OrderLeave,
    OrderSave,
    Record,
    Reform,
    StartGroup,
    StartJoiners,
    StopGroup,
    StopRequested,
    Tick,
    WorkerDied,
)
from elastic.policy.situation import FINAL, Phase, Situation
from elastic.policy.suspicion import Doubt
from elastic.policy.transitions import decide, record_death
from elastic.training.coordinator import CommitResult, Orders, Shard
from elastic.training.pacing import Pacing

logger = logging.getLogger("elastic")

_LOOK_S = 1.0
_PROGRESS_S = 5.0
_FLUSH_S = 5.0
_DRAINS_S = 0.5
_CLOSED_S = 5.0
_LATE_S = 0.3
_SHORT = (Phase.WAITING, Phase.HOLDING)
_WATCHED = (Phase.RUNNING, Phase.GATHERING, Phase.LEAVING)


class Driver:
    """Watches the group and performs what the policy decides, with a Ray actor as its hands."""

    def __init__(self, config: DriverConfig, host: Controller) -> None:
        self._config = config
        self._host = host
        self._situation = Situation(since_s=time.monotonic(), reason="claiming the run")
        self._is_open = False
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._recovery = Recovery()
        self._tasks: set[asyncio.Future[None]] = set()
        self._ended: End | None = None
        self._orders = Orders()

    def _open(self) -> None:
        """Claim the run, and make all that writes to it. Nothing is written without the claim."""
        run = self._run = ClaimedRun(self._config)
        self._situation = run.situation(time.monotonic())
        self._commits = Commits(
            run.catalog,
            self._config.keep,
            tell=self._told_of_save,
            before_publishing=run.before_publishing,
            check_right=run.check_lease,
        )
        tell: dict[str, Any] = {"post": self._post, "record": self._record}
        self._resumption = Resumption(
            self._config, run.past, self._commits, lambda: self._situation.committed_step, **tell
        )
        self._kept_out = KeptOutNodes(self._config, run.past, **tell)
        self._group = Group(
            self._host,
            post=self._post,
            spawn=self._spawn,
            run_id=run.run_id,
            last_words=LastWords(run.filesystem),
            usable_nodes=self._kept_out.answering,
            notices=self._config.notices,
            keepers=self._resumption.keepers,
        )
        self._standstill = Standstill(
            self._config.hangs, group=self._group, filesystem=run.filesystem, post=self._post
        )
        self._drains = Drains(self._post)
        self._lookout = Lookout(
            self._config,
            self._host,
            self._group,
            self._kept_out,
            post=self._post,
            world_size=lambda: self._situation.world_size,
        )
        self._words = RankWords(
            recovery=self._recovery,
            metrics=run.metrics,
            post=self._post,
            record=self._record,
            on_connected=self._group.joined,
            on_restored=self._resumption.restored,
            standstill=self._standstill,
            pacing=Pacing(run.cadence, record=self._record, order=self._order_interval),
        )
        self._inbox = Inbox(
            run.filesystem,
            run.epoch,
            in_order=self._commits.in_order,
            post=self._post,
            allow=self._kept_out.allow,
            record=self._record,
            where=lambda: (self._situation.generation, self._situation.step),
            inheritance=run.inheritance,
        )
        self._is_open = True

    # --- called through the actor ----------------------------------------------------------------

    async def run(self) -> None:
        """Train until the run is over. Raises what `claim` raises, and then nothing was done."""
        await asyncio.to_thread(self._open)
        self._run.record_start(self._recovery)
        self._commits.archive(self._run.archive, self._record, self._run.check_lease)
        self._perform(LookForCapacity())
        self._spawn(self._rounds().run())
        while self._situation.phase not in FINAL:
            self._handle(await self._events.get())
        await self._close()

    def stop(self, reason: str, within_s: float | None = None) -> None:
        """Have the group save at an agreed step, and stop; within a time if there is one."""
        self._post(StopRequested(reason=reason, within_s=within_s))

    def status(self) -> dict[str, Any]:
        """Where the run stands now."""
        now = self._situation
        latest = self._words.latest if self._is_open else NO_WORD
        return {
            **latest,
            "state": str(now.phase),
            "reason": now.reason,
            "generation": now.generation,
            "world_size": now.world_size,
            "step": max(now.step, self._words.resumed_step if self._is_open else -1),
            "checkpoint_step": now.committed_step,
            "restarts": self._recovery.count,
            **(self._run.told() if self._is_open else {}),
        }

    def outcome(self) -> dict[str, Any]:
        """How the run has ended."""
        assert self._ended is not None
        error = self._ended.error
        return {
            **self.status(),
            "outcome": self._ended.outcome,
            "reason": self._ended.reason,
            "traceback": "" if error is None else error.traceback,
            "cause_rank": self._ended.cause_rank,
            "last_lines": self._ended.last_lines,
        }

    def rank_event(
        self, generation: int, world_rank: int, kind: str, data: Mapping[str, Any]
    ) -> None:
        """A rank's word."""
        self._words.hear(generation, world_rank, kind, data)

    async def commit(self, shard: Shard) -> CommitResult:
        """The outcome of the save that this shard is a part of."""
        return await self._commits.hand_in(shard)

    async def step_back(self, generation: int, step: int, reason: str) -> tuple[int | None, str]:
        """The next older checkpoint than this bad one, or why there is none."""
        return await self._resumption.step_back(generation, step, reason)

    async def reject_snapshot(
        self, generation: int, snapshot: Snapshot, reason: str
    ) -> tuple[Resume | None, str]:
        """What to resume in place of this snapshot, or why there is nothing."""
        return await self._resumption.reject(generation, snapshot, reason)

    async def doubt(self, doubt: Doubt) -> tuple[str, str]:
        """What follows from a loss that is not finite, and why."""
        return await self._resumption.doubt(doubt)

    # --- the loop --------------------------------------------------------------------------------

    def _post(self, event: Event) -> None:
        self._events.put_nowait(event)

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _handle(self, event: Event) -> None:
        before = self._situation
        if isinstance(event, WorkerDied) and event.generation != before.generation:
            self._record(record_death(before, event))  # the re-form has left it out already
        if isinstance(event, JoinersReady) and before.phase is Phase.HOLDING:
            self._recovery.took("join", event.took_s)
        decision = decide(self._config.rules, before, event, time.monotonic())
        now = self._situation = decision.situation
        if decision.reason and decision.reason != before.reason:
            logger.info("%s: %s", now.phase, decision.reason)
        for command in decision.commands:
            self._perform(command)

    def _perform(self, command: Command) -> None:
        perform: Callable[[Any], object] = getattr(self, _PERFORMERS[type(command)])
        perform(command)

    def _look_for_capacity(self, _: object = None) -> None:
        self._spawn(self._lookout.look())

    def _start_group(self, command: StartGroup) -> None:
        self._orders = Orders()
        self._words.begin(command.generation, command.world_size)
        self._spawn(self._group.start(command, self._resumption.choose, self._told_of_start))

    def _reform(self, command: Reform) -> None:
        self._orders = Orders()
        self._recovery.planned(command.reason, command.old_world_size)
        self._spawn(
            self._group.reform(
                command,
                self._resumption.choose,
                rules=self._config.rules,
                on_regrouped=self._words.begin,
                on_reformed=self._told_of_start,
            )
        )

    def _start_joiners(self, command: StartJoiners) -> None:
        self._spawn(self._group.join(command))

    def _diagnose(self, command: Diagnose) -> None:
        self._recovery.suspected()
        self._spawn(self._standstill.diagnose(command))

    def _end_ranks(self, command: EndRanks) -> None:
        self._spawn(self._standstill.end(command))

    def _stop_group(self, command: StopGroup) -> None:
        self._spawn(self._stop(command.generation))

    def _order_leave(self, command: OrderLeave) -> None:
        self._recovery.planned(command.reason, self._situation.world_size)
        orders = replace(
            self._orders,
            leave=True,
            cut_evaluation=command.has_deadline,
            drop_step=command.drop_step,
        )
        self._order(command.generation, orders)

    def _order_save(self, command: OrderSave) -> None:
        asked = self._orders.saves_asked + 1
        self._order(command.generation, replace(self._orders, saves_asked=asked))

    def _order_interval(self, generation: int, every_s: float) -> None:
        self._order(generation, replace(self._orders, save_every_s=every_s))

    def _end(self, command: End) -> None:
        self._ended = command

    def _order(self, generation: int, orders: Orders) -> None:
        self._orders = orders
        self._spawn(self._group.order(generation, orders))

    def _record(self, record: Record) -> None:
        if record.kind in ENDS:
            self._record_progress()  # the loss of the last step, too
        if record.kind == "stall_passed":
            self._recovery.not_suspected()
        if record.kind == "failure_decided":
            world_size = record.data.get("world_size", self._situation.world_size)
            self._recovery.failed(record.reason, int(str(world_size)))
        self._run.record(record)
        self._kept_out.heard(record)

    def _rounds(self) -> Rounds:
        rounds = Rounds(lambda: self._situation)
        rounds.add(self._record_progress, every_s=_PROGRESS_S)
        flush = self._run.metrics.flush
        rounds.add(lambda: self._spawn(self._commits.in_order(flush)), every_s=_FLUSH_S)
        rounds.add(
            self._look_for_drains,
            every_s=_DRAINS_S,
            applies=lambda now: now.phase in (Phase.RUNNING, Phase.LEAVING),
        )
        rounds.add(lambda: self._spawn(self._inbox.look()), every_s=_LOOK_S)
        rounds.add(lambda: self._kept_out.look(self._situation, self._group.members))
        rounds.add(self._look_for_capacity, every_s=_LOOK_S, applies=self._wants_more)
        rounds.add(
            lambda: self._standstill.look(self._situation.generation),
            applies=lambda now: now.phase in _WATCHED and not now.is_stalled,
        )
        rounds.add(lambda: self._post(Tick()))
        return rounds

    def _look_for_drains(self) -> None:
        generation = self._situation.generation
        self._spawn(self._drains.look(generation, self._group.members, self._lookout.thread))

    def _wants_more(self, now: Situation) -> bool:
        is_small = now.world_size < self._config.rules.max_workers
        wants = now.phase in _SHORT or (now.phase is Phase.RUNNING and is_small)
        return (wants or bool(now.draining)) and not self._lookout.is_looking

    def _record_progress(self) -> None:
        now = self._situation
        data = {**self._words.latest, "state": str(now.phase)}
        self._record(Record(kind="progress", generation=now.generation, step=now.step, data=data))

    # --- performing ------------------------------------------------------------------------------

    async def _stop(self, generation: int) -> None:
        self._recovery.took("stop", await self._group.stop(generation))

    # --- telling ---------------------------------------------------------------------------------

    def _told_of_start(
        self, members: list[GroupMember], resume_step: int | None, **took_s: float
    ) -> None:
        self._recovery.started(took_s)
        ranks, mesh = [vars(m) for m in members], self._config.rules.mesh.shape(len(members))
        self._record(
            Record(
                kind="generation_started",
                generation=self._situation.generation,
                step=-1 if resume_step is None else resume_step,
                data={"world_size": len(members), "mesh": str(mesh), "ranks": ranks},
            )
        )

    def _told_of_save(self, what: str, found: Any) -> None:
        for word in words_of(what, found):
            self._record(word) if isinstance(word, Record) else self._post(word)

    async def _close(self) -> None:
        assert self._ended is not None
        self._inbox.close()
        # A start that is still under way holds it up; what is left is Ray's, and ends with the job.
        is_late = self._situation.leave_by_s is not None
        with contextlib.suppress(TimeoutError):
            ended = self._group.on_thread(self._host.stop_group)
            await asyncio.wait_for(ended, _LATE_S if is_late else _CLOSED_S)
        self._group.agents.close()
        self._resumption.keepers.close()
        await self._commits.in_order(self._run.metrics.flush)
        await self._commits.end_archiving(finish=self._ended.outcome == "finished")
        await asyncio.to_thread(self._run.close)
        failed = self._ended.outcome == "failed"
        await self._host.end(TrainingFailed(self._ended.reason) if failed else None)


_PERFORMERS: dict[type[Command], str] = {
    Record: "_record",
    LookForCapacity: "_look_for_capacity",
    StartGroup: "_start_group",
    Reform: "_reform",
    StartJoiners: "_start_joiners",
    Diagnose: "_diagnose",
    EndRanks: "_end_ranks",
    StopGroup: "_stop_group",
    OrderLeave: "_order_leave",
    OrderSave: "_order_save",
    End: "_end",
}
