"""Nodes as lanes: when each held ranks of a run, and what happened on it. Folded from the ledger.

Pure. Must import neither ray nor torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from elastic.dashboard.kept_out import strikes_told
from elastic.dashboard.restarts import words
from elastic.storage.ledger import LedgerEvent

MOST_LANES = 48
MOST_MARKS = 400
_ENDS = frozenset({"generation_ended", "run_finished", "run_failed", "run_stopped", "driver_lost"})
_DEATHS = {"worker_died": "death", "node_lost": "node lost"}


@dataclass(kw_only=True)
class Lane:
    """One node. Times are seconds since 1970."""

    node_id: str
    node_ip: str
    spans: list[dict[str, Any]] = field(default_factory=list)
    """`start_s`, `end_s` (None while it lasts), `ranks` at its start."""
    marks: list[dict[str, Any]] = field(default_factory=list)
    """`time_s`, `what` (death, node lost, error, drain, strike, kept out) and `why`."""


def lanes_of(events: Sequence[LedgerEvent]) -> list[Lane]:
    """The lanes, in the order in which nodes joined; `MOST_LANES` at most, the newest ones."""
    fold = _Fold()
    for event in events:
        fold.add(event)
    for strike in strikes_told(events).strikes:
        fold.mark(strike.node.node_id, strike.node.node_ip, strike.time_s, "strike", strike.cause)
    lanes = list(fold.lanes.values())[-MOST_LANES:]
    most = max(8, MOST_MARKS // max(1, len(lanes)))
    for lane in lanes:
        lane.spans = lane.spans[-most:]
        lane.marks = sorted(lane.marks, key=lambda mark: float(mark["time_s"]))[-most:]
    return lanes


class _Fold:
    def __init__(self) -> None:
        self.lanes: dict[str, Lane] = {}
        self._places: dict[tuple[int, int], str] = {}
        self._open: set[str] = set()

    def add(self, event: LedgerEvent) -> None:
        if event.kind == "generation_started":
            self._stands(event)
        elif event.kind in _ENDS:
            self._close(self._open, event.time_s)
        elif event.kind in _DEATHS:
            lane = self._at(event)
            self._mark(lane, event, _DEATHS[event.kind], event.reason)
            if event.kind == "node_lost" and lane is not None:
                self._close({lane.node_id}, event.time_s)
        elif event.kind == "rank_failed" and not event.data.get("is_victim"):
            self._mark(self._at(event), event, "error", event.reason)
        elif event.kind == "drain_noticed":
            for lane in self._drained(event):
                self._mark(lane, event, "drain", event.reason)
        elif event.kind == "node_kept_out":
            self._mark(self._at(event), event, "kept out", event.reason)

    def mark(self, node_id: str, node_ip: str, time_s: float, what: str, why: str) -> None:
        lane = self._lane(node_id, node_ip)
        lane.marks.append({"time_s": time_s, "what": what, "why": why})

    def _mark(self, lane: Lane | None, event: LedgerEvent, what: str, why: str) -> None:
        if lane is not None:
            who = f"rank {event.world_rank}: " if event.world_rank >= 0 else ""
            self.mark(lane.node_id, lane.node_ip, event.time_s, what, who + why)

    def _stands(self, event: LedgerEvent) -> None:
        told = event.data.get("ranks")
        ranks = [
            rank for rank in (told if isinstance(told, list) else []) if isinstance(rank, dict)
        ]
        held: dict[str, list[int]] = {}
        self._places = {}
        for rank in ranks:
            node = words(rank.get("node_id")) or words(rank.get("node_ip"))
            number = rank.get("world_rank")
            if node and isinstance(number, int):
                self._lane(node, words(rank.get("node_ip")))
                self._places[event.generation, number] = node
                held.setdefault(node, []).append(number)
        self._close(self._open - held.keys(), event.time_s)
        for node in held.keys() - self._open:
            span = {"start_s": event.time_s, "end_s": None, "ranks": sorted(held[node])}
            self.lanes[node].spans.append(span)
        self._open = set(held)

    def _close(self, nodes: Iterable[str], time_s: float) -> None:
        for node in list(nodes):
            self.lanes[node].spans[-1]["end_s"] = time_s
            self._open.discard(node)

    def _at(self, event: LedgerEvent) -> Lane | None:
        node = words(event.data.get("node_id")) or words(event.data.get("node_ip"))
        node = node or self._places.get((event.generation, event.world_rank), "")
        if not node:
            return None
        known = self.lanes.get(node) or self.lanes.get(words(event.data.get("node_ip")))
        return known or self._lane(node, words(event.data.get("node_ip")))

    def _drained(self, event: LedgerEvent) -> Iterator[Lane]:
        told = event.data.get("world_ranks")
        ranks = [rank for rank in (told if isinstance(told, list) else []) if isinstance(rank, int)]
        places = [self._places.get((event.generation, rank), "") for rank in ranks]
        yield from (self.lanes[node] for node in dict.fromkeys(filter(None, places)))

    def _lane(self, node_id: str, node_ip: str) -> Lane:
        return self.lanes.setdefault(node_id, Lane(node_id=node_id, node_ip=node_ip))
