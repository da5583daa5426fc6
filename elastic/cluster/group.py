"""The worker group of a generation: started, told its ranks, watched and ended.

Performs what the driver is told to; what happens comes back as events. All calls into Ray's worker
group are made on one thread, in the order in which they were asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError

from elastic.cluster import capacity, worker
from elastic.cluster.commits import NothingToResume
from elastic.cluster.last_words import LastWords
from elastic.cluster.node_agents import NodeAgents, pids_by_node
from elastic.cluster.places import places
from elastic.cluster.polling import Polling, first_line
from elastic.cluster.ray_internals import Controller, GroupMember, GroupStartError
from elastic.cluster.snapshot_keepers import SnapshotKeepers
from elastic.cluster.survivors import key, to_end
from elastic.policy.coverage import Resume
from elastic.policy.events import (
    Event,
    GroupStarted,
    GroupStartFailed,
    GroupStopped,
    JoinersFailed,
    JoinersReady,
    Reform,
    ReformFailed,
    StartGroup,
    StartJoiners,
    WorkerDied,
)
from elastic.policy.situation import Rules
from elastic.training.coordinator import Orders

logger = logging.getLogger("elastic")

_SUSPECT_S = 10.0
_CALL_S = 10.0
_REFORM_S = 10.0
_FREE_S = 0.5
_DEATH_TOLD_S = 1.0
_ENDED_S = 5.0
_BURIED_S = 1.0
_TOLD_CHARS = 4000


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
        usable_nodes: Callable[[], set[str]] = capacity.answering_nodes,
        notices: Sequence[str] = (),
        keepers: SnapshotKeepers,
    ) -> None:
        self._run_id, self._last_words, self.keepers = run_id, last_words, keepers
        self._usable_nodes = usable_nodes
        self._host = host
        self._post = post
        self._spawn = spawn
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="elastic-group")
        self._join_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="elastic-join")
        self._generation = -1
        self._gone: set[tuple[str, int]] = set()
        self._joined: set[int] = set()
        self._all_joined = asyncio.Event()
        self._hung: dict[tuple[str, int], str] = {}
        self.agents = NodeAgents(notices)
        self._polling = Polling(host, on_thread=self.on_thread, post=post)
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
        choose: Callable[[int], Awaitable[Resume]],
        on_started: Callable[..., None],
    ) -> None:
        """Start a generation: processes first, then `GroupStarted`, then every rank is told.

        `choose` gives the step to resume. No word of a rank can come before `GroupStarted`.
        """
        generation = command.generation
        try:
            resume = await choose(generation)
            members = await self.on_thread(self._host.start_group, command.world_size)
        except GroupStartError as error:
            self._not_started(generation, error.reason, error.is_capacity)
            return
        except NothingToResume as error:
            self._not_started(generation, str(error), False, is_final=True)
            return
        except Exception as error:
            logger.exception("starting generation %d failed", generation)
            self._not_started(generation, first_line(error), False)
            return
        self._generation, self.members = generation, members
        self._gone = set()
        for member, watch in zip(members, self._host.watches(), strict=True):
            self._spawn(self._watch(member, watch))
        self._adopt(members)
        on_started(members, resume.step, **self._host.start_times_s())
        self._post(GroupStarted(generation=generation, world_size=len(members)))
        self._spawn(self._begin(generation, members, resume))

    def _not_started(
        self, generation: int, reason: str, is_capacity: bool, *, is_final: bool = False
    ) -> None:
        self.members = []
        self._post(
            GroupStartFailed(
                generation=generation, reason=reason, is_capacity=is_capacity, is_final=is_final
            )
        )

    async def reform(
        self,
        command: Reform,
        choose: Callable[[int], Awaitable[Resume]],
        *,
        rules: Rules,
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
            resume = await choose(generation)
            leaving = [self.members[rank] for rank in command.without]
            self._gone |= {key(member) for member in leaving}
            chosen = functools.partial(to_end, self._gone, leaving, rules.mesh)
            members = await self.on_thread(self._host.keep_group, chosen)
            self.members = members
            if generation != self._generation:
                return  # one more death: what is told to the ranks now is told by the next one
            if len(members) < rules.min_workers:  # a joiner has died meanwhile
                told = f"{len(members)} workers are left of at least {rules.min_workers}"
                raise GroupStartError(told, True)
            self._spawn(self._bury(leaving))
            self.keepers.start(pids_by_node(members))
            on_regrouped(generation, len(members))
            await self.on_thread(self._tell_ranks, generation, members, resume)
            await asyncio.wait_for(self._wait_for_all(), timeout=_REFORM_S)
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
        on_reformed(members, resume.step)
        self._post(GroupStarted(generation=generation, world_size=len(members)))
        await self._polling.until(generation, lambda: generation != self._generation)

    async def _wait_for_all(self) -> None:
        while not self._all_joined.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._all_joined.wait(), _FREE_S)
                return
            # Who came to `ray.train.report` only after its peer had gone waits there in vain.
            await self.on_thread(self._host.free_reporters)

    async def join(self, command: StartJoiners) -> None:
        """Start workers beside the group and warm them up; the next re-form takes them in."""
        begun_s = time.monotonic()
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
        self._adopt([member for member, _ in joiners])
        took_s = time.monotonic() - begun_s
        self._post(JoinersReady(num=len(joiners), took_s=took_s))

    def _start_joiners(self, num: int) -> list[tuple[GroupMember, Any]]:
        return self._host.start_joiners(num, self._usable_nodes(), worker.warm_up)

    def _post_reform_failed(self, generation: int, reason: str) -> None:
        if generation == self._generation:
            self._post(ReformFailed(generation=generation, reason=reason))

    def joined(self, rank: int) -> None:
        """A rank of the current generation has joined its process groups."""
        self._joined.add(rank)
        if len(self._joined) >= len(self.members):
            self._all_joined.set()

    async def _begin(self, generation: int, members: list[GroupMember], resume: Resume) -> None:
        try:
            await self.on_thread(self._tell_ranks, generation, members, resume)
        except Exception as error:  # noqa: BLE001 - as above
            # Most likely rank 0 is gone, which its watch will tell; if not, the group is restarted.
            told = "could not be told its place"
            self._polling.post_error(generation, 0, error, told, is_victim=True)
            return
        await self._polling.until(generation, lambda: generation != self._generation)

    def _tell_ranks(self, generation: int, members: list[GroupMember], resume: Resume) -> None:
        """Rank 0 binds the generation's store, then all ranks are told their place."""
        host = members[0].node_ip
        port = ray.get(self._host.call(0, worker.open_store, generation, host), timeout=_CALL_S)
        driver = ray.get_runtime_context().current_actor
        told = [
            (place, driver, self.keepers.told(member.node_id, members))
            for place, member in zip(
                places(self._run_id, generation, members, port, resume), members, strict=True
            )
        ]
        self._host.call_all(worker.post_member, told)

    async def stop(self, generation: int) -> float:
        """End every process of the generation; how long that took, in seconds."""
        begun_s = time.monotonic()
        self._generation = -1
        try:
            await asyncio.gather(self.on_thread(self._host.stop_group), self._bury(self.members))
        except Exception:  # the workers are gone or going: what is left is Ray's to collect
            logger.exception("stopping generation %d", generation)
        self._post(GroupStopped(generation=generation))
        return time.monotonic() - begun_s

    async def order(self, generation: int, orders: Orders) -> None:
        """Post the driver's wishes to every rank."""
        arguments = [(generation, orders)] * len(self.members)
        try:
            told = await self.on_thread(self._host.call_all, worker.post_orders, arguments)
            # Not on the group's thread, which a rank that stands still must not hold up.
            await asyncio.wait_for(asyncio.gather(*told), _CALL_S)
        except Exception as error:  # noqa: BLE001 - a dead rank has its own event
            logger.warning("not every rank could be told what is wanted: %s", error)

    # --- ranks that hold up the others ----------------------------------------------------------

    async def ask_for_looks(self, phases: Mapping[int, str]) -> list[Any]:
        """References to what each rank says of itself, by world rank: `worker.look_at_self`."""
        arguments = [(m.world_rank, phases.get(m.world_rank, "")) for m in self.members]
        found: list[Any] = await self.on_thread(self._host.call_all, worker.look_at_self, arguments)
        return found

    async def end_ranks(self, generation: int, why: Mapping[int, str]) -> None:
        """Kill these ranks and their children; the watch tells their deaths, with the reasons."""
        if generation != self._generation:
            return
        doomed = [self.members[rank] for rank in why]
        self._hung |= {key(member): why[member.world_rank] for member in doomed}
        await asyncio.gather(*[self.agents.end(one.node_id, [one.pid]) for one in doomed])
        for member in doomed:
            rank = self._rank_of(member)
            if key(member) not in self._gone and rank is not None:
                await self.on_thread(self._host.kill, rank)  # where the agent could not
        await asyncio.sleep(_ENDED_S)
        for member in doomed:
            # A process that hangs in the kernel ends as soon as it comes out, and not before.
            if key(member) not in self._gone and (rank := self._rank_of(member)) is not None:
                self._gone.add(key(member))
                detail = f"still in the kernel {_ENDED_S:g} s after SIGKILL"
                await self._tell_death(self._generation, rank, member, detail, False, "")

    async def _bury(self, members: list[GroupMember]) -> None:
        """End what is left of these processes, their children above all."""
        ends = [
            self.agents.end(node_id, pids, wait_s=_BURIED_S)
            for node_id, pids in pids_by_node(members).items()
        ]
        await asyncio.gather(*ends)

    def _adopt(self, members: list[GroupMember]) -> None:
        pids = pids_by_node(members)
        self.keepers.start(pids)
        self.agents.adopt(pids)

    # --- watching ------------------------------------------------------------------------------

    async def _watch(self, member: GroupMember, watch: Any) -> None:
        """Wait for the end of one worker's process, and say how it ended."""
        told = ""
        try:
            await watch
            detail = "its process ended"
        except ActorUnavailableError as error:
            detail = await self._confirm(member, error)
        except Exception as error:  # noqa: BLE001 - Ray has many errors for a dead process
            detail, told = first_line(error), str(error)[:_TOLD_CHARS]
        if key(member) in self._gone:
            return
        self._gone.add(key(member))
        generation, rank = self._generation, self._rank_of(member)
        if rank is None:
            return
        node_lost = not await asyncio.to_thread(capacity.node_answers, member.node_id)
        if not node_lost:
            await self._bury([member])
        else:
            self.agents.forget([member.node_id])
            self.keepers.forget([member.node_id])
            detail = f"node {member.node_id[:12]} ({member.node_ip}) does not answer; {detail}"
        now = self._rank_of(member)
        if now is not None:  # a re-form that began meanwhile has counted on it
            generation, rank = self._generation, now
        await self._tell_death(generation, rank, member, detail, node_lost, told)

    async def _tell_death(
        self, generation: int, rank: int, member: GroupMember, detail: str, lost: bool, told: str
    ) -> None:
        self._post(
            WorkerDied(
                generation=generation,
                world_rank=rank,
                node_lost=lost,
                node_id=member.node_id,
                node_ip=member.node_ip,
                detail=f"pid {member.pid} on node {member.node_id[:12]}: {detail}",
                hang=self._hung.get(key(member), ""),
                told=told,
                last_lines=await self._last_words.of(generation, rank),
            )
        )

    def _rank_of(self, member: GroupMember) -> int | None:
        """The process's rank in the current generation; None if it is of none."""
        if self._generation < 0:
            return None
        keys = [key(one) for one in self.members]
        return keys.index(key(member)) if key(member) in keys else None

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
