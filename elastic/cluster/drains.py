"""Drains: the nodes that Ray says are about to go, and which ranks go with them.

Whoever wants a node back tells Ray so: its autoscaler, `ray drain-node`, KubeRay, or an agent of
ours that has read a notice of the cloud.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor

from elastic.cluster.ray_internals import GroupMember, read_draining_nodes
from elastic.policy.events import Event, NodesDraining

logger = logging.getLogger("elastic")


class Drains:
    """Use from the event loop only."""

    def __init__(
        self,
        post: Callable[[Event], None],
        read: Callable[[], dict[str, int]] = read_draining_nodes,
    ) -> None:
        self._post = post
        self._read = read
        self._is_looking = False

    async def look(
        self, generation: int, members: Sequence[GroupMember], executor: Executor
    ) -> None:
        """Post `NodesDraining` if a node of the group is about to go. Asks Ray in `executor`."""
        if self._is_looking:
            return
        self._is_looking = True
        try:
            draining = await asyncio.get_running_loop().run_in_executor(executor, self._read)
        except Exception as error:  # noqa: BLE001 - unknown is not draining: ask again
            logger.warning("could not ask Ray which nodes drain: %s", error)
            return
        finally:
            self._is_looking = False
        leaving = [member for member in members if member.node_id in draining]
        if not leaving:
            return
        nodes = dict.fromkeys((member.node_id, member.node_ip) for member in leaving)
        told = ", ".join(
            f"node {node_id[:12]} ({address}), which goes {_when(draining[node_id])}"
            for node_id, address in nodes
        )
        self._post(
            NodesDraining(
                generation=generation,
                world_ranks=frozenset(member.world_rank for member in leaving),
                detail=told,
                remaining_s=_remaining_s([draining[node_id] for node_id, _ in nodes]),
            )
        )


def _remaining_s(deadlines_ms: Sequence[int]) -> float | None:
    """How long the first of them will still be there; None if no time is told."""
    known = [deadline_ms for deadline_ms in deadlines_ms if deadline_ms != 0]
    return max(0.0, min(known) / 1000 - time.time()) if known else None


def _when(deadline_ms: int) -> str:
    remaining_s = _remaining_s([deadline_ms])
    return "at a time not told" if remaining_s is None else f"in {remaining_s:.0f} s"
