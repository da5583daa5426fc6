"""The nodes that a run keeps out, as its ledger tells, for those who ask. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from elastic.policy.strikes import Strikes
from elastic.storage.ledger import LedgerEvent

SHOWN = 12
"""Characters of a node's id that people are shown, and may give."""


@dataclass(frozen=True, kw_only=True)
class KeptOutNode:
    """One node on which nothing of the run starts."""

    node_id: str
    node_ip: str
    until_s: float
    """Seconds since 1970."""
    why: str
    strikes: list[dict[str, float | str]]
    """`cause` and `time_s` of each."""


def strikes_told(events: Iterable[LedgerEvent]) -> Strikes:
    """What these events, in ledger order, tell of nodes."""
    known = Strikes()
    for event in events:
        known = known.after(event)
    return known


def nodes_kept_out(events: Iterable[LedgerEvent], now_s: float) -> list[KeptOutNode]:
    """Those that are kept out at the wall time `now_s`."""
    return [
        KeptOutNode(
            node_id=one.node.node_id,
            node_ip=one.node.node_ip,
            until_s=one.until_s,
            why=one.why(),
            strikes=[{"cause": it.cause, "time_s": it.time_s} for it in one.strikes],
        )
        for one in strikes_told(events).kept_out
        if one.until_s > now_s
    ]


def kept_out_text(nodes: Sequence[KeptOutNode], run: str) -> list[str]:
    """One line for each: which, why, until when, and what lets it back in. `run` is its URL."""
    return [
        f"node {node.node_id[:SHOWN]} ({node.node_ip or 'address unknown'}): {node.why}; "
        f"until {_moment(node.until_s)}, or `elastic node allow {run} {node.node_id[:SHOWN]}`"
        for node in nodes
    ]


def _moment(time_s: float) -> str:
    try:
        then = datetime.fromtimestamp(time_s, UTC)
    except (ValueError, OverflowError, OSError):
        return f"{time_s:g} s"
    return then.strftime("%Y-%m-%d %H:%M UTC")
