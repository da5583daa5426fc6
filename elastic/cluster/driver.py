"""The driver actor: events in, the policy's decision, its commands performed, new events.

It decides nothing itself. Ranks and owners call its methods; the loop performs what the policy
says, and the ledger has each record before the commands after it are performed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError
from ray.train import TrainingFailedError

from elastic.cluster import capacity, worker
from elastic.cluster.commits import Commits, Published
from elastic.cluster.ray_internals import Controller, GroupMember, GroupStartError
from elastic.cluster.recovery import Recovery
from elastic.policy.events import (
    CapacitySeen,
    Command,
    Committed,
    End,
    Event,
    GroupStarted,
    GroupStartFailed,
    GroupStopped,
    LookForCapacity,
    OrderLeave,
    Progressed,
    RankError,
    RankFailed,
    RankFinished,
    RankLeft,
    Record,
    StartGroup,
    StopGroup,
    StopRequested,
    Tick,
    Unrecoverable,
    WorkerDied,
)
from elastic.policy.retention import Retention
from elastic.policy.situation import FINAL, Phase, Rules, Situation
from elastic.policy.transitions import decide
from elastic.storage.checkpoints import Catalog
from elastic.storage.filesystem import Filesystem
from elastic.storage.ledger import LedgerWriter, next_life, read_ledger
from elastic.storage.metrics import MetricsWriter
from elastic.training.coordinator import CommitResult, Orders, Shard
from elastic.training.membership import Membership

logger = logging.getLogger("elastic")

_TICK_S = 0.25
_POLL_S = 0.25
_LOOK_S = 1.0
_PROGRESS_S = 2.0
_FLUSH_S = 5.0
_SUSPECT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class DriverConfig:
    """What the driver is told at its birth."""

    run_url: str
    run_id: str
    run_name: str
    rules: Rules
    keep: Retention
    resources_per_worker: dict[str, float]
    label_selector: dict[str, str] | None = None
    from_scratch: bool = False
    """Checkpoints of an earlier history may be left alone, and the run start at step 0."""


class TrainingFailed(TrainingFailedError):
    """The run is over and has failed; the message leads with the first cause and its rank."""


class DriverActor(Controller):
    """The driver as a Ray actor: its methods are what the owner of a run and the ranks may call."""

    def __init__(self, *, driver_config: DriverConfig, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._driver = Driver(driver_config, self)

    async def run(self) -> None:
        """Train until the run is over; then `outcome` tells how it ended."""
        await self._driver.run()

    async def stop(self, reason: str) -> None:
        """Ask for a save at an agreed step and a stop."""
        self._driver.stop(reason)

    async def status(self) -> dict[str, Any]:
        """Where the run stands, for a progress line."""
        return self._driver.status()

    async def outcome(self) -> dict[str, Any]:
        """How the run ended: outcome, reason, and the figures of its summary."""
        return self._driver.outcome()

    async def rank_event(
        self, generation: int, world_rank: int, kind: str, data: Mapping[str, Any]
    ) -> None:
        """A rank's word: see `Coordinator.notify`."""
        self._driver.rank_event(generation, world_rank, kind, data)

    async def commit(self, shard: Shard) -> CommitResult:
        """A rank's shard of a save; answers when the save is committed or has failed."""
        return await self._driver.commit(shard)

    async def step_back(self, generation: int, step: int, reason: str) -> tuple[int | None, str]:
        """Quarantine a checkpoint whose bytes are bad; the next older one, or why there is none."""
        return await self._driver.step_back(generation, step, reason)


class Driver:
    """Watches the group and performs what the policy decides, with an actor as its hands."""

    def __init__(self, config: DriverConfig, host: Controller) -> None:
        self._config = config
        self._host = host
        self._filesystem = Filesystem.at(config.run_url)
        self._past = read_ledger(self._filesystem)
        life_id = uuid.uuid4().hex[:8]
        self._ledger = LedgerWriter(self._filesystem, next_life(self._filesystem), life_id)
        self._metrics = MetricsWriter(self._filesystem)
        self._catalog = Catalog(self._filesystem, config.run_id)
        self._situation = Situation(
            generation=max((event.generation for event in self._past), default=-1),
            since_s=time.monotonic(),
        )
        self._group_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="elastic-group")
        self._look_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="elastic-look")
        self._members: list[GroupMember] = []
        self._recovery = Recovery()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._status: dict[str, Any] = {"phase": "", "loss": None, "tokens_per_s": None}
        self._ended: End | None = None
        self._resumed_step = -1
        self._last_progress_s = self._last_flush_s = time.monotonic()
        self._is_looking = False
        self._last_look_s = float("-inf")

    # --- called by the owner of the run --------------------------------------------------------

    async def run(self) -> None:
        """Train until the run is over. The outcome is `outcome()`."""
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._commits = Commits(
            self._catalog,
            self._config.keep,
            tell=self._told_of_save,
            before_publishing=self._metrics.flush,
        )
        self._record(Record(kind="run_started", data=self._who()))
        self._perform(LookForCapacity())
        self._spawn(self._tick())
        while self._situation.phase not in FINAL:
            self._handle(await self._events.get())
        await self._close()

    def stop(self, reason: str) -> None:
        """See `DriverActor`; likewise below."""
        self._post(StopRequested(reason=reason))

    def status(self) -> dict[str, Any]:
        """Where the run stands now."""
        now = self._situation
        return {
            **self._status,
            "state": str(now.phase),
            "reason": now.reason,
            "generation": now.generation,
            "world_size": now.world_size,
            "step": max(now.step, self._resumed_step),
            "checkpoint_step": now.committed_step,
            "restarts": self._recovery.count,
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
        }

    # --- called by the ranks -------------------------------------------------------------------

    def rank_event(
        self, generation: int, world_rank: int, kind: str, data: Mapping[str, Any]
    ) -> None:
        """A rank's word; one method below for each kind."""
        if generation != self._situation.generation:
            return
        getattr(self, f"_rank_{kind}")(generation, world_rank, data)

    async def commit(self, shard: Shard) -> CommitResult:
        """A rank's shard of a save; answers when the save is committed or has failed."""
        return await self._commits.hand_in(shard)

    async def step_back(
        self, generation: int, step: int, reason: str
    ) -> tuple[int | None, str]:
        """Quarantine a checkpoint whose bytes are bad; the next older one, or why there is none."""
        self._record(
            Record(
                kind="checkpoint_quarantined", generation=generation, step=step, reason=reason
            )
        )
        older = await self._commits.step_back(step, reason)
        if older is not None:
            return older, ""
        problem = (
            f"no checkpoint with sound bytes is left; the last tried, step {step}: {reason}. "
            "Restore the files from a copy, or start a new run under another name"
        )
        self._post(Unrecoverable(generation=generation, reason=problem))
        return None, problem

    def _rank_connected(self, generation: int, rank: int, data: Mapping[str, Any]) -> None:
        self._recovery.took("connect", data["connect_s"])

    def _rank_restored(self, generation: int, rank: int, data: Mapping[str, Any]) -> None:
        self._recovery.took("build", data["build_s"])
        self._recovery.took("load", data["load_s"])
        self._recovery.restored_ranks.add(rank)
        if len(self._recovery.restored_ranks) < self._situation.world_size:
            return
        step = int(data["step"])
        self._resumed_step = step
        self._commits.restored()
        self._metrics.start(generation, step + 1, time.time())
        kind = "resumed" if data["resumed"] else "started"
        self._record(Record(kind=kind, generation=generation, step=step))

    def _rank_first_step(self, generation: int, rank: int, data: Mapping[str, Any]) -> None:
        if rank != 0:
            return
        lost_steps = self._recovery.lost_steps(self._resumed_step)
        phases = self._recovery.finish(float(data["first_step_s"]))
        if phases is None:
            return
        self._record(
            Record(
                kind="recovered",
                generation=generation,
                step=int(data["step"]),
                reason=self._recovery.reason,
                data={
                    "lost_steps": lost_steps,
                    "old_world_size": self._recovery.old_world_size,
                    "new_world_size": self._situation.world_size,
                    "phases_s": phases,
                },
            )
        )

    def _rank_progress(self, generation: int, rank: int, data: Mapping[str, Any]) -> None:
        step = int(data["step"])
        self._recovery.reached(step)
        if rank != 0:
            return
        self._status["phase"] = data["phase"]
        for row in data["rows"]:
            self._metrics.add(generation, row["step"], row["time_s"], row["values"])
            self._status["loss"] = row["values"].get("loss", self._status["loss"])
            duration_s = row["values"].get("step_s", 0.0)
            if duration_s > 0:
                self._status["tokens_per_s"] = row["values"].get("tokens", 0.0) / duration_s
        if step > self._situation.step or (data["rows"] and step != self._situation.step):
            self._post(Progressed(generation=generation, step=step))

    def _rank_save_skipped(self, generation: int, rank: int, data: Mapping[str, Any]) -> None:
        self._record(
            Record(
                kind="checkpoint_skipped",
                generation=generation,
                step=int(data["step"]),
                reason="the save before it was still being written",
            )
        )

    def _rank_rng_left_out(self, generation: int, rank: int, data: Mapping[str, Any]) -> None:
        streams = ", ".join(data["streams"])
        self._record(
            Record(
                kind="rng_left_out",
                generation=generation,
                world_rank=rank,
                reason=f"random streams not restored: {streams}; one side has no such device",
            )
        )

    def _rank_failed(self, generation: int, rank: int, data: Mapping[str, Any]) -> None:
        self._recovery.reached(int(data["step"]))
        error = RankError(
            world_rank=rank,
            type_name=data["type_name"],
            message=data["message"],
            traceback=data["traceback"],
            is_victim=data["is_victim"],
        )
        self._post(RankFailed(generation=generation, error=error))

    def _rank_left(self, generation: int, rank: int, data: Mapping[str, Any]) -> None:
        self._recovery.reached(int(data["step"]))
        self._post(RankLeft(generation=generation, world_rank=rank, step=int(data["step"])))

    def _rank_finished(self, generation: int, rank: int, data: Mapping[str, Any]) -> None:
        self._post(RankFinished(generation=generation, world_rank=rank, step=int(data["step"])))

    # --- the loop ------------------------------------------------------------------------------

    def _post(self, event: Event) -> None:
        self._events.put_nowait(event)

    async def _tick(self) -> None:
        while self._situation.phase not in FINAL:
            await asyncio.sleep(_TICK_S)
            self._on_tick()
            self._post(Tick())

    def _handle(self, event: Event) -> None:
        before = self._situation
        decision = decide(self._config.rules, before, event, time.monotonic())
        self._situation = decision.situation
        if decision.reason and decision.reason != before.reason:
            logger.info("%s: %s", decision.situation.phase, decision.reason)
        for command in decision.commands:
            self._perform(command)

    def _perform(self, command: Command) -> None:
        if isinstance(command, Record):
            self._record(command)
        elif isinstance(command, LookForCapacity):
            self._spawn(self._look())
        elif isinstance(command, StartGroup):
            self._spawn(self._start(command))
        elif isinstance(command, StopGroup):
            self._spawn(self._stop(command))
        elif isinstance(command, OrderLeave):
            self._recovery.planned(command.reason, self._situation.world_size)
            self._spawn(self._order(command.generation, Orders(leave=True)))
        elif isinstance(command, End):
            self._ended = command
        else:
            raise AssertionError(f"no performer for {command}")

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _record(self, record: Record) -> None:
        if record.kind == "failure_decided":
            self._recovery.failed(record.reason, self._situation.world_size)
        try:
            self._ledger.append(
                record.kind,
                generation=record.generation,
                step=record.step,
                world_rank=record.world_rank,
                reason=record.reason,
                data=record.data,
                time_s=time.time(),
            )
        except OSError as error:
            logger.error("the ledger could not take %s: %s", record.kind, error)

    def _on_tick(self) -> None:
        now_s = time.monotonic()
        phase = self._situation.phase
        if now_s - self._last_look_s >= _LOOK_S and not self._is_looking:
            small = self._situation.world_size < self._config.rules.max_workers
            if phase is Phase.WAITING or (phase is Phase.RUNNING and small):
                self._spawn(self._look())
        if now_s - self._last_flush_s >= _FLUSH_S:
            self._last_flush_s = now_s
            self._spawn(self._commits.in_order(self._metrics.flush))
        if now_s - self._last_progress_s >= _PROGRESS_S:
            self._last_progress_s = now_s
            data = {"loss": self._status["loss"], "tokens_per_s": self._status["tokens_per_s"],
                    "phase": self._status["phase"], "state": str(phase)}
            self._record(
                Record(
                    kind="progress",
                    generation=self._situation.generation,
                    step=self._situation.step,
                    data=data,
                )
            )

    # --- performing ----------------------------------------------------------------------------

    async def _in_group_thread(self, work: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._group_thread, work, *args)

    async def _look(self) -> None:
        self._is_looking = True
        held: dict[str, int] = {}
        for member in self._members:
            held[member.node_id] = held.get(member.node_id, 0) + 1
        try:
            found = await asyncio.get_running_loop().run_in_executor(
                self._look_thread,
                capacity.look,
                self._config.resources_per_worker,
                held,
                self._config.label_selector,
            )
            event = CapacitySeen(num_workers=found.num_workers, note=found.note)
        except Exception as error:  # unknown is not none: ask again at the next tick
            logger.warning("could not read Ray's node table: %s", error)
            event = CapacitySeen(
                num_workers=self._situation.world_size, note=f"node table unreadable: {error}"
            )
        finally:
            self._is_looking = False
            self._last_look_s = time.monotonic()
        self._post(event)

    async def _start(self, command: StartGroup) -> None:
        generation = command.generation
        try:
            resume_step = await self._choose(generation)
            self._recovery.begin_start()
            members = await self._in_group_thread(self._host.start_group, command.world_size)
            self._members = members
            self._recovery.started(self._host.start_times_s())
            for rank, watch in self._host.watches().items():
                self._spawn(self._watch(generation, members[rank], watch))
            self._record(
                Record(
                    kind="generation_started",
                    generation=generation,
                    step=-1 if resume_step is None else resume_step,
                    data={"world_size": len(members), "ranks": [vars(m) for m in members]},
                )
            )
        except GroupStartError as error:
            self._members = []
            self._post(
                GroupStartFailed(
                    generation=generation, reason=error.reason, is_capacity=error.is_capacity
                )
            )
        except _NothingToResume as error:
            self._post(
                GroupStartFailed(generation=generation, reason=str(error), is_capacity=False)
            )
        except Exception as error:
            logger.exception("starting generation %d failed", generation)
            await self._in_group_thread(self._host.stop_group)
            self._members = []
            self._post(
                GroupStartFailed(
                    generation=generation,
                    reason=f"{type(error).__name__}: {error}",
                    is_capacity=False,
                )
            )
        else:
            # Posted before any rank is told to train, so that no word of a rank comes before it.
            self._post(GroupStarted(generation=generation, world_size=len(members)))
            self._spawn(self._begin(generation, members, resume_step))

    async def _begin(
        self, generation: int, members: list[GroupMember], resume_step: int | None
    ) -> None:
        try:
            await self._in_group_thread(self._publish, generation, members, resume_step)
        except Exception as error:
            # Most likely rank 0 is gone, which its watch will tell; if not, the group is restarted.
            found = RankError(
                world_rank=0,
                type_name=type(error).__name__,
                message=f"could not be told its place: {_first_line(error)}",
                is_victim=True,
            )
            self._post(RankFailed(generation=generation, error=found))
            return
        await self._poll(generation)

    async def _choose(self, generation: int) -> int | None:
        step = await self._commits.open(generation)
        if step is not None:
            self._post(Committed(step=step))
            return step
        committed = [event.step for event in self._past if event.kind == "checkpoint_committed"]
        if committed and not self._config.from_scratch:
            raise _NothingToResume(
                f"{len(committed)} checkpoints were committed, the last at step {committed[-1]}, "
                f"and none is complete now under {self._config.run_url}/checkpoints; "
                "refusing to start again at step 0: restore them, or use another name"
            )
        return None

    def _publish(
        self, generation: int, members: list[GroupMember], resume_step: int | None
    ) -> None:
        """Tell every rank its place. Runs in the group thread; the first rank binds the store."""
        host = members[0].node_ip
        port = ray.get(self._host.call(0, worker.open_store, generation, host), timeout=60)
        driver = ray.get_runtime_context().current_actor
        told = [
            Membership(
                generation=generation,
                world_rank=member.world_rank,
                world_size=member.world_size,
                local_rank=member.local_rank,
                local_world_size=member.local_world_size,
                node_rank=member.node_rank,
                store_host=host,
                store_port=port,
                resume_step=resume_step,
            )
            for member in members
        ]
        self._host.call_all(worker.post_member, [(member, driver) for member in told])

    async def _stop(self, command: StopGroup) -> None:
        begun_s = time.monotonic()
        try:
            await self._in_group_thread(self._host.stop_group)
        except Exception:
            logger.exception("stopping generation %d", command.generation)
        # What they held is free for the next group, unless its node is gone.
        self._recovery.took("stop", time.monotonic() - begun_s)
        self._post(GroupStopped(generation=command.generation))

    async def _order(self, generation: int, orders: Orders) -> None:
        def post() -> None:
            arguments = [(generation, orders)] * len(self._members)
            ray.get(self._host.call_all(worker.post_orders, arguments), timeout=10)

        try:
            await self._in_group_thread(post)
        except Exception as error:  # a dead worker: its own event tells
            logger.warning("not every rank could be told to leave: %s", error)

    async def _watch(self, generation: int, member: GroupMember, watch: Any) -> None:
        """Wait for the end of one worker's process, and say how it ended."""
        try:
            await watch
            detail = "its process ended"
        except ActorUnavailableError as error:
            detail = await self._confirm(generation, member, error)
        except Exception as error:
            detail = _first_line(error)
        if generation != self._situation.generation or not self._host.has_group():
            return
        node_lost = not await asyncio.to_thread(capacity.node_answers, member.node_id)
        if node_lost:
            detail = f"node {member.node_id[:12]} ({member.node_ip}) does not answer; {detail}"
        self._post(
            WorkerDied(
                generation=generation,
                world_rank=member.world_rank,
                node_lost=node_lost,
                detail=f"pid {member.pid} on node {member.node_id[:12]}: {detail}",
            )
        )

    async def _confirm(
        self, generation: int, member: GroupMember, error: ActorUnavailableError
    ) -> str:
        """Unavailable is suspicion, not death: wait for word of either, then fence the worker."""
        until_s = time.monotonic() + _SUSPECT_S
        while time.monotonic() < until_s and generation == self._situation.generation:
            if not await asyncio.to_thread(capacity.node_answers, member.node_id):
                return f"unavailable, and so is its node: {_first_line(error)}"
            try:
                await asyncio.wait_for(self._host.call(member.world_rank, os.getpid), timeout=1.0)
            except ActorUnavailableError:
                await asyncio.sleep(0.2)
            except Exception as found:
                return _first_line(found)
        await self._in_group_thread(self._host.kill, member.world_rank)
        return f"unavailable for {_SUSPECT_S:g} s, and ended by us: {_first_line(error)}"

    async def _poll(self, generation: int) -> None:
        """Collect what ranks give to `ray.train.report`, and errors of the serving loop itself."""
        over = (Phase.STOPPING, Phase.LOOKING, Phase.WAITING, *FINAL)
        while True:
            await asyncio.sleep(_POLL_S)
            if generation != self._situation.generation or self._situation.phase in over:
                return
            try:
                errors = await self._in_group_thread(self._poll_once)
            except Exception as problem:
                logger.warning("polling generation %d: %s", generation, problem)
                continue
            for rank, error in errors.items():
                self._post_serving_error(generation, rank, error)

    def _poll_once(self) -> dict[int, BaseException]:
        if not self._host.has_group():
            return {}
        self._host.ask_for_resources()
        return self._host.poll_reports(timeout_s=0.1)

    def _post_serving_error(self, generation: int, rank: int, error: BaseException) -> None:
        """An error that the serving loop did not turn into a report. Deaths come by the watch."""
        inner = getattr(error, "_base_exc", error)
        if type(error).__name__.startswith("WorkerHealthCheck"):
            return
        found = RankError(
            world_rank=rank,
            type_name=type(inner).__name__,
            message=str(inner),
            traceback=str(error),
        )
        self._post(RankFailed(generation=generation, error=found))

    # --- telling -------------------------------------------------------------------------------

    def _told_of_save(self, what: str, found: Any) -> None:
        if what == "refused":
            shard, reason = found
            self._record(
                Record(
                    kind="checkpoint_failed",
                    generation=shard.generation,
                    step=shard.step,
                    reason=reason,
                )
            )
            return
        assert isinstance(found, Published)
        self._record(
            Record(
                kind="checkpoint_committed",
                generation=found.generation,
                step=found.step,
                data={
                    "bytes": found.bytes,
                    "path": found.path,
                    "stall_s": found.stall_s,
                    "write_s": found.write_s,
                    "duration_s": found.write_s + found.commit_s,
                },
            )
        )
        for step in found.removed:
            self._record(Record(kind="checkpoint_removed", step=step, reason="retention"))
        self._post(Committed(step=found.step))

    def _who(self) -> dict[str, Any]:
        context = ray.get_runtime_context()
        return {
            "run_id": self._config.run_id,
            "name": self._config.run_name,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "job_id": context.get_job_id(),
            "node_id": context.get_node_id(),
            "dashboard_url": ray._private.worker.get_dashboard_url() or "",
            "rules": vars(self._config.rules),
        }

    async def _close(self) -> None:
        assert self._ended is not None
        if self._host.has_group():
            await self._in_group_thread(self._host.stop_group)
        await self._commits.in_order(self._metrics.flush)
        self._ledger.close()
        failed = self._ended.outcome == "failed"
        await self._host.end(TrainingFailed(self._ended.reason) if failed else None)


class _NothingToResume(RuntimeError):
    """Checkpoints were committed, and none can be found: starting at 0 would lose them."""


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]
