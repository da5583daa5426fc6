"""The agents of a run, one on each of its nodes: started beside the group, asked by the driver.

An agent that cannot be reached, as on a lost node, is nobody's failure: answers are missing then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elastic.cluster.node_agent import NodeAgent, ProcessLook
from elastic.cluster.ray_internals import GroupMember

logger = logging.getLogger("elastic")

_ANSWER_S = 2.0


def pids_by_node(members: Iterable[GroupMember]) -> dict[str, list[int]]:
    """The processes of these ranks, by the node that they run on."""
    found: dict[str, list[int]] = {}
    for member in members:
        found.setdefault(member.node_id, []).append(member.pid)
    return found


class NodeAgents:
    """Use from the event loop only. `notices` are the names of what each agent watches."""

    def __init__(self, notices: Sequence[str] = ()) -> None:
        self._notices = list(notices)
        self._agents: dict[str, Any] = {}

    def adopt(self, pids_by_node: Mapping[str, Sequence[int]]) -> None:
        """Have the agents of these nodes know the run's processes there. Does not wait."""
        for node_id, pids in pids_by_node.items():
            try:
                self._agent(node_id).adopt.remote(list(pids))
            except Exception as error:  # noqa: BLE001 - a node that is going has no agent
                logger.warning("no agent on node %s: %s", node_id[:12], error)

    async def look(self, node_id: str, pids: Sequence[int]) -> dict[int, ProcessLook]:
        """The processes as their node sees them; none when it does not answer in two seconds."""
        found: list[ProcessLook] = await self._ask(node_id, "look", list(pids)) or []
        return dict(zip(pids, found, strict=False))

    async def end(self, node_id: str, pids: Sequence[int], wait_s: float = _ANSWER_S) -> bool:
        """Kill these processes and their children; whether they are known to be gone."""
        left: list[int] | None = await self._ask(node_id, "end", list(pids), wait_s=wait_s)
        return left is not None and not left

    def forget(self, node_ids: Iterable[str]) -> None:
        """These nodes are lost: should they come back, they get new agents."""
        for node_id in node_ids:
            agent = self._agents.pop(node_id, None)
            if agent is not None:
                ray.kill(agent)

    def close(self) -> None:
        """End them all."""
        self.forget(list(self._agents))

    def _agent(self, node_id: str) -> Any:
        if node_id not in self._agents:
            where = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
            made = ray.remote(num_cpus=0, max_concurrency=4)(NodeAgent)
            agent = self._agents[node_id] = made.options(scheduling_strategy=where).remote()
            address = ray.get_runtime_context().gcs_address
            agent.watch_notices.remote(self._notices, node_id, address)
        return self._agents[node_id]

    async def _ask(self, node_id: str, method: str, *args: Any, wait_s: float = _ANSWER_S) -> Any:
        if node_id not in self._agents:
            return None
        try:
            answer = getattr(self._agents[node_id], method).remote(*args)
            return await asyncio.wait_for(answer, wait_s)
        except Exception as error:  # noqa: BLE001 - Ray has many errors for an actor that is gone
            logger.info("the agent on node %s does not answer: %r", node_id[:12], error)
            return None
