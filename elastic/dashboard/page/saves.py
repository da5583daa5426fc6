"""The saves of a run for its page: what the ledger tells of each, and what lies in storage now.

Must import neither ray nor torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from elastic.dashboard.restarts import number, whole
from elastic.policy.retention import Retention
from elastic.storage.checkpoints import Checkpoint
from elastic.storage.ledger import LedgerEvent

MOST_SHOWN = 100

_HELD = ("started", "resumed")
_FATES = {
    "checkpoint_failed": "failed",
    "checkpoint_skipped": "skipped",
    "checkpoint_quarantined": "quarantined",
}


@dataclass(frozen=True, kw_only=True)
class Save:
    """One save, or what became of one. None where that is not known."""

    step: int
    state: str
    """complete, archived, pinned, removed, gone, quarantined, failed, skipped or incomplete."""
    why: str = ""
    time_s: float | None = None
    bytes: int | None = None
    duration_s: float | None = None
    stall_s: float | None = None
    archive: str = ""
    """Where the archive is that has it too, or alone."""
    verified: bool = False
    """All of its bytes were checked when a group resumed from it."""


def saves_of(
    events: Sequence[LedgerEvent],
    checkpoints: Iterable[Checkpoint],
    *,
    pinned: set[int],
    retention: Retention,
) -> list[Save]:
    """The newest `MOST_SHOWN`, by step. A step that was saved again is told once, as it is now."""
    told: dict[int, Save] = {}
    for event in events:
        _fold(told, event)
    for one in checkpoints:
        known = told.get(one.step, Save(step=one.step, state="incomplete"))
        told[one.step] = _as_it_lies(known, one)
    there = {one.step for one in checkpoints if one.complete}
    steps = sorted(told)[-MOST_SHOWN:]
    return [_named(told[step], there, pinned, retention) for step in steps]


def retention_of(operational: Mapping[str, object]) -> Retention:
    """What the run recorded of it; the default where it did not."""
    keep, every = whole(operational.get("keep")), whole(operational.get("keep_every"))
    try:
        return Retention(keep=3 if keep is None else keep, keep_every=every)
    except ValueError:
        return Retention()


def _fold(told: dict[int, Save], event: LedgerEvent) -> None:
    known = told.get(event.step)
    if event.kind == "checkpoint_committed":
        told[event.step] = Save(
            step=event.step,
            state="complete",
            time_s=event.time_s,
            bytes=whole(event.data.get("bytes")),
            duration_s=number(event.data.get("duration_s")),
            stall_s=number(event.data.get("stall_s")),
        )
    elif event.kind == "checkpoint_removed" and known is not None:
        told[event.step] = replace(known, state="removed", why=event.reason)
    elif event.kind == "checkpoint_archived" and known is not None:
        told[event.step] = replace(known, archive=str(event.data.get("archive", "the archive")))
    elif event.kind in _HELD and known is not None and event.data.get("source") != "memory":
        told[event.step] = replace(known, verified=True)
    elif event.kind in _FATES:
        known = known or Save(step=event.step, state="", time_s=event.time_s)
        is_loss = event.kind == "checkpoint_quarantined" or known.state != "complete"
        if is_loss:
            told[event.step] = replace(known, state=_FATES[event.kind], why=event.reason)


def _as_it_lies(known: Save, one: Checkpoint) -> Save:
    if one.complete:
        return replace(known, state="complete", why="", bytes=one.bytes)
    if known.state in ("complete", "quarantined"):
        return known if known.why else replace(known, why=one.reason)
    state = "quarantined" if one.reason.startswith("quarantined") else "incomplete"
    return replace(known, state=state, why=known.why or one.reason)


def _named(one: Save, there: set[int], pinned: set[int], retention: Retention) -> Save:
    if one.state == "removed" and one.archive:
        return replace(one, state="archived", why=f"in {one.archive}")
    if one.state != "complete":
        return one
    if one.step not in there:
        return replace(one, state="gone", why=one.why or "nothing lies there now")
    if one.step in pinned:
        return replace(one, state="pinned", why="kept until it is unpinned")
    if one.archive:
        return replace(one, state="archived", why=f"in {one.archive} too")
    if retention.archives(one.step):
        return replace(one, state="archived", why=f"each {retention.keep_every} steps, for ever")
    return one
