"""The goodput of a run, read from its ledger and metrics, and as a person reads it.

What it is stands in `elastic.policy.goodput`. Must import neither ray nor torch.
"""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

from elastic.dashboard.text import table
from elastic.policy.goodput import Goodput, goodput, money
from elastic.storage.filesystem import Filesystem
from elastic.storage.ledger import LedgerEvent
from elastic.storage.metrics import step_times

DEFINITION = (
    "GOODPUT is the time spent in steps that count, each step once however often it was done, "
    "over all the time for which the run held slots, a slot being the place of one worker. "
    "`elastic goodput RUN` tells where the rest went."
)

DAMAGED_METRICS = (pa.ArrowException, OSError, ValueError, KeyError)
"""What reading metrics raises that are there and cannot be read."""

_MOST_TOLD = 3
_SHORTEST_TOLD_S = 0.05


def read_goodput(fs: Filesystem, events: Iterable[LedgerEvent]) -> Goodput:
    """Of the run at the root of `fs`, whose ledger holds `events`. Raises `UnsupportedFormat`."""
    return goodput(events, step_times(fs))


def goodput_if_readable(fs: Filesystem, events: Iterable[LedgerEvent]) -> Goodput | None:
    """The same, but None where the metrics are damaged, which must not hide all else."""
    try:
        return read_goodput(fs, events)
    except DAMAGED_METRICS:
        return None


def share_text(found: Goodput | None) -> str:
    """On one line: the share of useful time, and what took most of the rest."""
    if found is None or found.share is None:
        return "-"
    whole = found.whole_slot_seconds
    rest = [(held, name) for name, held in found.slot_seconds.items() if name != "useful"]
    largest = [one for one in sorted(rest, reverse=True)[:_MOST_TOLD] if one[0] >= whole / 200]
    told = ", ".join(f"{_words(name)} {_percent(held / whole)}" for held, name in largest)
    return f"{_percent(found.share)} of {whole:,.0f} slot-seconds" + (f"; {told}" if told else "")


def goodput_text(found: Goodput, *, price_per_slot_hour: float | None = None) -> str:
    """A bucket a line, in the order of its definition, empty ones left out; then the whole."""
    if found.share is None:
        return "the run has held no slot yet"
    whole = found.whole_slot_seconds
    header = ["BUCKET", "SLOT-SECONDS", "SHARE"]
    buckets = [(name, held) for name, held in found.slot_seconds.items() if held > 0]
    rows = [[_words(name), f"{held:,.1f}", _percent(held / whole)] for name, held in buckets]
    rows.append(["in all", f"{whole:,.1f}", _percent(1.0)])
    if price_per_slot_hour is not None:
        header.append("MONEY")
        costs = money(found, price_per_slot_hour=price_per_slot_hour)
        for row, (name, _) in zip(rows, buckets, strict=False):
            row.append(f"{costs[name]:,.2f}")
        rows[-1].append(f"{sum(costs.values()):,.2f}")
    lines = table(header, rows, right="SLOT-SECONDS SHARE MONEY")
    if found.without_slots_s >= _SHORTEST_TOLD_S:
        lines.append(f"and {found.without_slots_s:,.1f} s in which the run held no slot")
    return "\n".join(lines)


def _words(bucket: str) -> str:
    return bucket.replace("reform_", "re-form: ").replace("_", " ")


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
