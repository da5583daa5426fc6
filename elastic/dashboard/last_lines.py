"""What a dead or failed rank wrote last, found in the ledger where its death is told. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastic.dashboard.text import plain
from elastic.storage.ledger import LedgerEvent

_DEATHS = frozenset({"worker_died", "node_lost", "rank_failed"})
_BEGINS_ANEW = frozenset({"run_started", "started", "resumed", "run_finished"})


@dataclass(frozen=True, kw_only=True)
class LastLines:
    """At most 20 lines of one rank, and 4 kB."""

    generation: int
    world_rank: int
    lines: list[str]


def last_lines_told(event: LedgerEvent) -> list[str]:
    """What the rank of this event wrote last; [] unless it died, or raised on its own account."""
    told = event.data.get("last_lines")
    if event.kind not in _DEATHS or event.data.get("is_victim") or not isinstance(told, list):
        return []
    return [line for line in told if isinstance(line, str)]


def last_lines_of_failure(events: Sequence[LedgerEvent]) -> LastLines | None:
    """Those of the rank that caused the newest failure; None once the run goes on after it."""
    after = next((i for i, e in reversed(list(enumerate(events))) if e.kind in _BEGINS_ANEW), 0)
    recent = events[after:]
    decided = next((e for e in reversed(recent) if e.kind == "failure_decided"), None)
    if decided is None or decided.world_rank < 0:
        return None
    place = decided.generation, decided.world_rank
    for event in recent:
        lines = last_lines_told(event) if (event.generation, event.world_rank) == place else []
        if lines:
            return LastLines(generation=place[0], world_rank=place[1], lines=lines)
    return None


def quoted(lines: Sequence[str]) -> list[str]:
    """The lines as they stand below what they belong to."""
    return [f"    | {plain(line)}".rstrip() for line in lines]
