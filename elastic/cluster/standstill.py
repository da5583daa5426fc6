"""A group that stands still: noticed from heartbeats, looked at, and freed of who holds it up.

It decides nothing: whom to blame is the policy's to say, and what follows too.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from elastic.cluster.diagnosis import Diagnosis, diagnose
from elastic.cluster.group import Group
from elastic.policy.culprits import are_all_at_work, find_culprits
from elastic.policy.events import Diagnose, EndRanks, Event, HangFound, Stalled, StallPassed
from elastic.policy.hangs import HangLimits, HangWatch, Heartbeat
from elastic.storage.filesystem import Filesystem

logger = logging.getLogger("elastic")


class Standstill:
    """Use from the event loop only. Without `limits` nothing is ever taken for a hang."""

    def __init__(
        self,
        limits: HangLimits | None,
        *,
        group: Group,
        filesystem: Filesystem,
        post: Callable[[Event], None],
    ) -> None:
        self._watch = None if limits is None else HangWatch(limits)
        self._group = group
        self._filesystem = filesystem
        self._post = post
        self._phases: dict[int, str] = {}

    def begin(self, world_size: int) -> None:
        """From now on the ranks of a new generation are heard."""
        self._phases = dict.fromkeys(range(world_size), "build")
        if self._watch is not None:
            self._watch.begin(world_size, time.monotonic())

    def heard(self, world_rank: int, heartbeat: Mapping[str, Any]) -> None:
        """A rank's heartbeat, see `elastic.policy.hangs.Heartbeat`."""
        beat = Heartbeat(**heartbeat)
        self._phases[world_rank] = beat.phase
        if self._watch is not None:
            self._watch.heard(world_rank, beat, time.monotonic())

    def ended(self, world_rank: int) -> None:
        """The rank owes no more word."""
        if self._watch is not None:
            self._watch.ended(world_rank)

    def look(self, generation: int) -> None:
        """Post `Stalled` if all ranks are over their limits. To be called often."""
        if detail := self._stall():
            self._post(Stalled(generation=generation, detail=detail))

    def _stall(self) -> str:
        return "" if self._watch is None else self._watch.stall(time.monotonic())

    async def diagnose(self, command: Diagnose) -> None:
        """Look at every rank, keep the stacks of all, and say who is at fault."""
        generation = command.generation
        try:
            found = await diagnose(
                self._group.members,
                self._phases,
                ask=self._ask,
                agents=self._group.agents,
                filesystem=self._filesystem,
                generation=generation,
            )
        except Exception as error:  # the group is most likely being changed under us
            logger.exception("looking at a group that stands still")
            why = f"the ranks could not be looked at: {type(error).__name__}: {error}"
            self._post(StallPassed(generation=generation, why=why))
            return
        self._post(self._verdict(generation, found))

    def _verdict(self, generation: int, found: Diagnosis) -> HangFound | StallPassed:
        culprits = find_culprits(found.looks)
        places = tuple(
            f"rank {look.world_rank} in {look.phase} at {look.place or 'no known place'}"
            for look in found.looks
        )
        if self._watch is None or not self._stall():
            return StallPassed(generation=generation, why="the group went on by itself")
        if are_all_at_work(found.looks, culprits) and self._watch.grant():
            why = f"no rank waits for another, so they get more time: {'; '.join(places)}"
            return StallPassed(generation=generation, why=why)
        return HangFound(
            generation=generation, culprits=culprits, stacks=found.stacks, places=places
        )

    async def _ask(self) -> Any:
        return await self._group.ask_for_looks(self._phases)

    async def end(self, command: EndRanks) -> None:
        """End the culprits. Their deaths are told by those who watch them."""
        texts = {culprit.world_rank: culprit.text for culprit in command.culprits}
        await self._group.end_ranks(command.generation, texts)
