"""The keepers of a run's snapshots, one on each of its nodes: the driver starts, asks, ends them.

One that cannot be reached, as on a lost node, has nothing: what counts is what the living say.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from typing import Any

import ray
from ray.exceptions import ActorDiedError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elastic.cluster.memory_line import Keepers
from elastic.cluster.ray_internals import GroupMember
from elastic.cluster.snapshot_keeper import SnapshotKeeper
from elastic.policy.coverage import Piece, Snapshot, buddy

logger = logging.getLogger("elastic")

_ANSWER_S = 2.0
_MOST_CALLS = 32


class SnapshotKeepers:
    """Use from the event loop only, but for `told`. Without `is_on` there are none."""

    def __init__(self, *, is_on: bool) -> None:
        self._is_on = is_on
        self._keepers: dict[str, Any] = {}

    def start(self, node_ids: Iterable[str]) -> None:
        """Have a keeper on each of these nodes. Does not wait."""
        for node_id in node_ids:
            if not self._is_on or node_id in self._keepers:
                continue
            where = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
            made = ray.remote(num_cpus=0, max_concurrency=_MOST_CALLS)(SnapshotKeeper)
            try:
                self._keepers[node_id] = made.options(scheduling_strategy=where).remote()
            except Exception as error:  # noqa: BLE001 - a node that is going has no keeper
                logger.warning("no keeper of snapshots on node %s: %s", node_id[:12], error)

    def told(self, node_id: str, members: Sequence[GroupMember]) -> Keepers | None:
        """What a rank on that node is told, in a group of these; None if there are none."""
        if not self._is_on:
            return None
        return Keepers(
            by_node=dict(self._keepers),
            own=node_id,
            buddy=buddy(node_id, [member.node_id for member in members]),
        )

    async def open(self, generation: int) -> dict[str, list[Piece]]:
        """Fence off older generations; the pieces by node, of all that answer in two seconds."""
        asked = {node_id: self._ask(node_id, "open", generation) for node_id in [*self._keepers]}
        found = await asyncio.gather(*asked.values())
        return {node_id: pieces or [] for node_id, pieces in zip(asked, found, strict=True)}

    async def keep_only(self, snapshot: Snapshot | None) -> None:
        """Drop what older generations have left, but for this snapshot."""
        age = None if snapshot is None else (snapshot.generation, snapshot.step)
        await asyncio.gather(*[self._ask(one, "keep_only", age) for one in [*self._keepers]])

    async def drop(self, snapshot: Snapshot) -> None:
        """This one is of no use."""
        age = snapshot.generation, snapshot.step
        await asyncio.gather(*[self._ask(one, "drop", age) for one in [*self._keepers]])

    def forget(self, node_ids: Iterable[str]) -> None:
        """These nodes are lost: should they come back, they get new keepers."""
        for node_id in node_ids:
            keeper = self._keepers.pop(node_id, None)
            if keeper is not None:
                ray.kill(keeper)

    def close(self) -> None:
        """End them all, and what they hold is gone."""
        self.forget(list(self._keepers))

    async def _ask(self, node_id: str, method: str, *args: Any) -> Any:
        try:
            answer = getattr(self._keepers[node_id], method).remote(*args)
            return await asyncio.wait_for(answer, _ANSWER_S)
        except ActorDiedError:
            self._keepers.pop(node_id, None)  # the next group there gets another one
            logger.warning("the keeper on node %s has died", node_id[:12])
            return None
        except Exception as error:  # noqa: BLE001 - Ray has many errors for an actor that is gone
            logger.warning("no answer from the keeper on node %s: %r", node_id[:12], error)
            return None
