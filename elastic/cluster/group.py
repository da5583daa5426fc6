"""The worker group of a generation: started, told its ranks, watched and ended.

Performs what the driver is told to; what happens comes back as events. All calls into Ray's worker
group are made on one thread, in the order in which they were asked for.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError

from elastic.cluster import capacity, worker
from elastic.cluster.last_words import LastWords
from elastic.cluster.ray_internals import Controller, GroupMember, GroupStartError
from elastic.policy.events import (
    Event,
    GroupStarted,
    GroupStartFailed,
    GroupStopped,
    JoinersFailed,
    JoinersReady,
    RankError,
    RankFailed,
    Reform,
    ReformFailed,
    StartGroup,
    StartJoiners,
    WorkerDied,
)
from elastic.training.coordinator import Orders
from elastic.training.membership import Membership

logger = logging.getLogger("elastic")

_POLL_S = 0.25
_SUSPECT_S = 10.0
_CALL_S = 60.0
_REFORM_S = 10.0
_DEATH_TOLD_S = 1.0


class NothingToResume(RuntimeError):
    """Checkpoints were committed, and none can be found: starting at 0 would lose them."""


class Group:
    """The current generation's workers. Use from the event loop only."""

    def __init__(
        self,
        host: Controller,
        *,
        post: Callable[[Event], None],
        spawn: Callable[[Awaitable[None]], None],
        run_id: str,
        last_words: LastWords,
    ) -> None:
        self._run_id = run_id
        self._last_words = last_words
        self._host = host
        self._post = post
        self._spawn = spawn
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="elastic-group")
        self._join_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="elastic-join")
        self._generation = -1
        self._gone: set[tuple[str, int]] = set()
        self._joined: set[int] = set()
        self._all_joined = asyncio.Event()
        self.members: list[GroupMember] = []
        """Of the newest generation, also after its end: what they held is free, or was lost."""

    async def on_thread(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """The result of `work`, done on the group's thread after all that was asked before."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    def held(self) -> dict[str, int]:
        """Slots by node id that are reserved for the group, those of its dead among them.

        Asks Ray. Of a group that has just ended, those it was placed on: they may not yet be
        counted as free.
        """
        slots = self._host.slots() or [member.node_id for member in self.members]
        counts: dict[str, int] = {}
        for node_id in slots:
            counts[node_id] = counts.get(node_id, 0) + 1
        return counts

    async def start(
        self,
        command: StartGroup,
        choose: Callable[[int], Awaitable[int | None]],
        on_started: Callable[[list[GroupMember], int | None, dict[str, float]], None],
    ) -> None:
        """Start a generation: processes first, then `GroupStarted`, then every rank is told.

        `choose` gives the step to resume. No word of a rank can come before `GroupStarted`.
        """
        generation = command.generation
        try:
            resume_step = await choose(generation)
            members = await self.on_thread(self._host.start_group, command.world_size)
        except GroupStartError as error:
            self._not_started(generation, error.reason, error.is_capacity)
            return
        except NothingToResume as error:
            self._not_started(generation, str(error), False)
            return
        except Exception as error:
            logger.exception("starting generation %d failed", generation)
            self._not_started(generation, first_line(error), False)
            return
        self._generation, self.members = generation, members
        self._gone = set()
        for member, watch in zip(members, self._host.watches(), strict=True):
            self._spawn(self._watch(member, watch))
        on_started(members, resume_step, self._host.start_times_s())
        self._post(GroupStarted(generation=generation, world_size=len(members)))
        self._spawn(self._begin(generation, members, resume_step))

    def _not_started(self, generation: int, reason: str, is_capacity: bool) -> None:
        self.members = []
        self._post(GroupStartFailed(generation=generation, reason=reason, is_capacity=is_capacity))

    async def reform(
        self,
        command: Reform,
        choose: Callable[[int], Awaitable[int | None]],
        *,
        min_workers: int,
        on_regrouped: Callable[[int, int], None],
        on_reformed: Callable[[list[GroupMember], int | None], None],
    ) -> None:
        """Make a generation of the processes that are alive: new ranks, a new store, no restart.

        Survivors come out of their collectives by themselves, since a peer's death breaks them,
        and find their new place in their mailbox.
        """
        generation = command.generation
        self._generation = generation
        self._joined, self._all_joined = set(), asyncio.Event()
        try:
            resume_step = await choose(generation)
            alive = [
                rank for rank, member in enumerate(self.members) if _key(member) not in self._gone
            ]
            if len(alive) < min_workers:
                raise GroupStartError(
                    f"{len(alive)} workers are left of at least {min_workers}", True
                )
            self.members = await self.on_thread(self._host.keep_group, alive)
            members = self.members
            on_regrouped(generation, len(members))
            await self.on_thread(self._tell_ranks, generation, members, resume_step)
            await asyncio.wait_for(self._all_joined.wait(), timeout=_REFORM_S)
        except TimeoutError:
            late = sorted(set(range(len(self.members))) - self._joined)
            self._post_reform_failed(
                generation, f"ranks {late} did not join generation {generation} in {_REFORM_S:g} s"
            )
            return
        except Exception as error:  # noqa: BLE001 - most likely one more death, told by its watch
            await asyncio.sleep(_DEATH_TOLD_S)
            self._post_reform_failed(generation, first_line(error))
            return
        if generation != self._generation:
            return
        on_reformed(members, resume_step)
        self._post(GroupStarted(generation=generation, world_size=len(members)))
        await self._poll(generation)

    async def join(self, command: StartJoiners) -> None:
        """Start workers beside the group and warm them up; the next re-form takes them in."""
        work = asyncio.get_running_loop().run_in_executor(
            self._join_thread, self._start_joiners, command.num
        )
        try:
            joiners = await work
        except Exception as error:  # noqa: BLE001 - whatever Ray raises becomes an event
            reason = error.reason if isinstance(error, GroupStartError) else first_line(error)
            self._post(JoinersFailed(reason=reason))
            return
        for member, watch in joiners:
            self._spawn(self._watch(member, watch))
        self._post(JoinersReady(num=len(joiners)))

    def _start_joiners(self, num: int) -> list[tuple[GroupMember, Any]]:
        return self._host.start_joiners(num, capacity.answering_nodes(), worker.warm_up)

    def _post_reform_failed(self, generation: int, reason: str) -> None:
        if generation == self._generation:
            self._post(ReformFailed(generation=generation, reason=reason))

    def joined(self, rank: int) -> None:
        """A rank of the current generation has joined its process groups."""
        self._joined.add(rank)
        if len(self._joined) >= len(self.members):
            self._all_joined.set()

    async def _begin(
        self, generation: int, members: list[GroupMember], resume_step: int | None
    ) -> None:
        try:
            await self.on_thread(self._tell_ranks, generation, members, resume_step)
        except Exception as error:  # noqa: BLE001 - as above
            # Most likely rank 0 is gone, which its watch will tell; if not, the group is restarted.
            self._post_error(generation, 0, error, "could not be told its place", is_victim=True)
            return
        await self._poll(generation)

    def _tell_ranks(
        self, generation: int, members: list[GroupMember], resume_step: int | None
    ) -> None:
        """Rank 0 binds the generation's store, then all ranks are told their place."""
        host = members[0].node_ip
        port = ray.get(self._host.call(0, worker.open_store, generation, host), timeout=_CALL_S)
        driver = ray.get_runtime_context().current_actor
        told = [
            Membership(
                run_id=self._run_id,
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

    async def stop(self, generation: int) -> float:
        """End every process of the generation; how long that took, in seconds."""
        begun_s = time.monotonic()
        self._generation = -1
        try:
            await self.on_thread(self._host.stop_group)
        except Exception:  # the workers are gone or going: what is left is Ray's to collect
            logger.exception("stopping generation %d", generation)
        self._post(GroupStopped(generation=generation))
        return time.monotonic() - begun_s

    async def order(self, generation: int, orders: Orders) -> None:
        """Post the driver's wishes to every rank."""
        arguments = [(generation, orders)] * len(self.members)

        def post() -> None:
            ray.get(self._host.call_all(worker.post_orders, arguments), timeout=_CALL_S)

        try:
            await self.on_thread(post)
        except Exception as error:  # noqa: BLE001 - a dead rank has its own event
            logger.warning("not every rank could be told what is wanted: %s", error)

    # --- watching ------------------------------------------------------------------------------

    async def _watch(self, member: GroupMember, watch: Any) -> None:
        """Wait for the end of one worker's process, and say how it ended."""
        try:
            await watch
            detail = "its process ended"
        except ActorUnavailableError as error:
            detail = await self._confirm(member, error)
        except Exception as error:  # noqa: BLE001 - Ray has many errors for a dead process
            detail = first_line(error)
        self._gone.add(_key(member))
        generation, rank = self._generation, self._rank_of(member)
        if rank is None:
            return
        node_lost = not await asyncio.to_thread(capacity.node_answers, member.node_id)
        if node_lost:
            detail = f"node {member.node_id[:12]} ({member.node_ip}) does not answer; {detail}"
        now = self._rank_of(member)
        if now is not None:  # a re-form that began meanwhile has counted on it
            generation, rank = self._generation, now
        await self._tell_death(generation, rank, member, detail, node_lost)

    async def _tell_death(
        self, generation: int, rank: int, member: GroupMember, detail: str, node_lost: bool
    ) -> None:
        self._post(
            WorkerDied(
                generation=generation,
                world_rank=rank,
                node_lost=node_lost,
                detail=f"pid {member.pid} on node {member.node_id[:12]}: {detail}",
                last_lines=await self._last_words.of(generation, rank),
            )
        )

    def _rank_of(self, member: GroupMember) -> int | None:
        """The process's rank in the current generation; None if it is of none."""
        if self._generation < 0:
            return None
        keys = [_key(one) for one in self.members]
        return keys.index(_key(member)) if _key(member) in keys else None

    async def _confirm(self, member: GroupMember, error: ActorUnavailableError) -> str:
        """Unavailable is suspicion, not death: wait for word of either, then fence the worker."""
        until_s = time.monotonic() + _SUSPECT_S
        while time.monotonic() < until_s:
            rank = self._rank_of(member)
            if rank is None:
                break
            if not await asyncio.to_thread(capacity.node_answers, member.node_id):
                return f"unavailable, and so is its node: {first_line(error)}"
            try:
                await asyncio.wait_for(self._host.call(rank, os.getpid), timeout=1.0)
            except (ActorUnavailableError, TimeoutError):
                await asyncio.sleep(0.2)
            except Exception as found:  # noqa: BLE001 - any other word is of its death
                return first_line(found)
        rank = self._rank_of(member)
        if rank is not None:
            await self.on_thread(self._host.kill, rank)
        return f"unavailable for {_SUSPECT_S:g} s, and ended by us: {first_line(error)}"

    async def _poll(self, generation: int) -> None:
        """Collect what ranks give to `ray.train.report`, and errors of the serving loop itself."""
        while True:
            await asyncio.sleep(_POLL_S)
            if generation != self._generation:
                return
            try:
                errors = await self.on_thread(self._poll_once, generation)
            except Exception as problem:  # noqa: BLE001 - unknown is not dead: ask again
                logger.warning("polling generation %d: %s", generation, problem)
                continue
            for rank, error in errors.items():
                # Deaths come by the watch.
                if not type(error).__name__.startswith("WorkerHealthCheck"):
                    inner = getattr(error, "_base_exc", error)
                    self._post_error(generation, rank, inner, "", traceback=str(error))

    def _poll_once(self, generation: int) -> dict[int, BaseException]:
        if generation != self._generation:
            return {}
        return self._host.poll_reports(timeout_s=0.1)

    def _post_error(
        self,
        generation: int,
        rank: int,
        error: BaseException,
        what: str,
        *,
        is_victim: bool = False,
        traceback: str = "",
    ) -> None:
        found = RankError(
            world_rank=rank,
            type_name=type(error).__name__,
            message=f"{what}: {error}" if what else str(error),
            traceback=traceback,
            is_victim=is_victim,
        )
        self._post(RankFailed(generation=generation, error=found))


def _key(member: GroupMember) -> tuple[str, int]:
    """What tells a process from all others of the run, whatever its rank."""
    return member.node_id, member.pid


def first_line(error: BaseException) -> str:
    """The error's class and the first line of its text, at most 300 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]
