"""The nodes that a run keeps out, as its ledger tells: struck too often, until that has expired.

Hears every record of the driver and asks `elastic.policy.strikes` what follows. What it lets in or
keeps out is recorded before it counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastic.cluster import capacity
from elastic.cluster.driver_config import DriverConfig
from elastic.cluster.ray_internals import GroupMember
from elastic.policy import strikes
from elastic.policy.events import Event, NodesDraining, Record
from elastic.policy.situation import Phase, Situation
from elastic.policy.strikes import Node, Strikes
from elastic.storage.ledger import LedgerEvent


@dataclass(frozen=True, kw_only=True)
class _Told:
    kind: str
    time_s: float
    generation: int
    world_rank: int
    data: Mapping[str, Any]


class KeptOutNodes:
    """Use from the event loop only, but for `told` and `answering`.

    `past` is what earlier lives of the driver have recorded.
    """

    def __init__(
        self,
        config: DriverConfig,
        past: Iterable[LedgerEvent],
        *,
        record: Callable[[Record], None],
        post: Callable[[Event], None],
    ) -> None:
        self._rules = config.strikes
        self._min_workers = config.rules.min_workers
        self._record = record
        self._post = post
        self._nodes: frozenset[str] = frozenset()
        self._known = Strikes()
        for event in past:
            self._known = self._known.after(event)

    @property
    def told(self) -> Mapping[str, str]:
        """Why each of them is kept out, in words, by node id."""
        return {one.node.node_id: f"{one.node}, {one.why()}" for one in self._known.kept_out}

    def heard(self, record: Record) -> None:
        """This is in the ledger now; keeps a node out if it was one strike too many."""
        self._known = self._known.after(
            _Told(
                kind=record.kind,
                time_s=time.time(),
                generation=record.generation,
                world_rank=record.world_rank,
                data=record.data,
            )
        )
        if record.kind not in (strikes.KEPT_OUT, strikes.ALLOWED, strikes.TOLERATED):
            self.settle()

    def settle(self) -> None:
        """Record what has become due: who is kept out, and whose strikes have expired."""
        while (
            due := strikes.judge(self._known, self._rules, time.time(), self._nodes)
        ) is not None:
            self._record(due)

    def saw(self, nodes: Iterable[str]) -> None:
        """These nodes could run workers, if they were let in."""
        self._nodes = frozenset(nodes)
        self.settle()

    def allow(self, node_id: str, why: str) -> None:
        """Let this node back in, or forget its strikes."""
        known = {node.node_id: node for node in self._known.nodes()}
        self._record(strikes.allowed(known.get(node_id, Node(node_id=node_id)), why))

    def answering(self) -> set[str]:
        """The ids of the nodes that answer and are not kept out."""
        return capacity.answering_nodes() - set(self.told)

    def look(self, now: Situation, members: Sequence[GroupMember]) -> None:
        """Let in what has expired, and have the group leave ranks on nodes that are kept out."""
        self.settle()
        # Nodes that are about to go have a deadline, and go first.
        if now.phase is Phase.RUNNING and not now.draining:
            self._leave(now.generation, members)

    def _leave(self, generation: int, members: Sequence[GroupMember]) -> None:
        """Post `NodesDraining` for ranks that still live there, if enough others are elsewhere."""
        why = self.told
        leaving = [member for member in members if member.node_id in why]
        if not leaving or len(members) - len(leaving) < self._min_workers:
            return
        nodes = dict.fromkeys(member.node_id for member in leaving)
        self._post(
            NodesDraining(
                generation=generation,
                world_ranks=frozenset(member.world_rank for member in leaving),
                detail="; ".join(f"{why[node_id]}, which is kept out" for node_id in nodes),
            )
        )
