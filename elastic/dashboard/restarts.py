"""Restarts: what made the group form anew each time, and what that cost, folded from the ledger.

A restart is all that was told from the first sign to the first new step. It may still be under way,
and the failure that ends a run is the last of them. Pure; a ledger with holes gives fewer facts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from elastic.storage.ledger import LedgerEvent

UNKNOWN = "unknown"
RECOVERED = "recovered"
UNDER_WAY = "under way"
ABANDONED = "submitted again"

_ENDS = {"run_finished": "finished", "run_failed": "failed", "run_stopped": "stopped"}
_DRIVER = frozenset({"driver_lost", "driver_took_over"})
_LEAVES = frozenset({"leave_ordered", "left_unsaved"})
_OPENERS = frozenset({"failure_decided"}) | _DRIVER | _LEAVES

# Told before anything is decided.
_SIGNS = frozenset(
    {
        *("drain_noticed", "worker_died", "node_lost", "rank_failed", "stall_seen", "hang_found"),
        *("growth_planned", "request_taken", "start_failed", "waiting"),
        "fault_announced",
    }
)
_STANDS = frozenset(
    {
        *("started", "resumed", "checkpoint_quarantined", "checkpoint_suspect"),
        *("checkpoint_trusted", "snapshot_rejected", "rng_left_out"),
        *("checkpoint_awaited", "checkpoint_passed_by"),
    }
)
_COURSE = _STANDS | {
    *("size_infeasible", "node_kept_out", "holding", "reform_failed"),
    *("generation_planned", "generation_started", "generation_ended"),
}
# A whole number beyond this may not fit into a float.
_MOST = 1e300
_SOURCES = ("memory", "storage")
# What a word takes back of what was told before it.
_TAKES_BACK = {"stall_passed": "stall_seen", "growth_failed": "growth_planned"}


@dataclass(frozen=True, kw_only=True)
class Restart:
    """One restart. None where the ledger does not say it; times of day are seconds since 1970."""

    number: int
    """From 1, over all submissions of the run."""
    outcome: str
    """RECOVERED, UNDER_WAY, or how it ended without a new step: failed, stopped, finished, or
    ABANDONED where the run was submitted again."""
    causes: list[str]
    """Classes of failure, or one of driver, drain, growth, stop, capacity; one for each failure on
    the way to the new step."""
    time_s: float
    generation: int | None
    """The one that ended."""
    new_generation: int | None
    world_rank: int | None
    """The rank that was found at fault."""
    step: int | None
    """Where the run stood."""
    lost_steps: int | None
    """Finished steps that were done again."""
    source: str
    """Where the state of the new group came from, memory or storage; "" where that is not told."""
    took_s: float | None
    """From the detection to the end of the first new step."""
    old_world_size: int | None
    new_world_size: int | None
    reason: str
    phases_s: dict[str, float]
    """What that time went to."""
    stacks: str
    """Where the stacks of a hang lie in the run directory; "" without."""
    events: list[LedgerEvent]
    """All that was told of it, in ledger order."""

    @property
    def is_failure(self) -> bool:
        """Whether it was not planned."""
        return any(event.kind in _DRIVER | {"failure_decided"} for event in self.events)


@dataclass(frozen=True, kw_only=True)
class Totals:
    """What all restarts of a run add up to."""

    by_cause: dict[str, int]
    lost_steps: int
    took_s: float


def restarts_of(events: Iterable[LedgerEvent]) -> list[Restart]:
    """All of them, the oldest first. `events` are in ledger order.

    A group that left because the run was stopped, or had finished, is none.
    """
    fold = _Fold()
    for event in events:
        fold.add(event)
    return fold.finished()


def totals(restarts: Iterable[Restart]) -> Totals:
    """Their sum; what is not known counts as nothing."""
    told = list(restarts)
    counts = Counter(cause for one in told for cause in one.causes)
    return Totals(
        by_cause={cause: counts[cause] for cause in sorted(counts)},
        lost_steps=sum(one.lost_steps or 0 for one in told),
        took_s=sum(one.took_s or 0.0 for one in told),
    )


@dataclass(kw_only=True)
class _Open:
    """A restart that has begun."""

    opener: LedgerEvent
    step: int | None
    world_size: int | None
    events: list[LedgerEvent]
    stands: LedgerEvent | None = None
    """The word that the new group stands."""
    ahead: list[LedgerEvent] = field(default_factory=list)
    """What was told of the new group: of this restart, if that makes no step, else of the next."""

    def merged(self) -> list[LedgerEvent]:
        return [*self.events, *self.ahead]


class _Fold:
    def __init__(self) -> None:
        self._done: list[Restart] = []
        self._open: _Open | None = None
        self._signs: list[LedgerEvent] = []
        self._step: int | None = None
        self._world_size: int | None = None

    def add(self, event: LedgerEvent) -> None:
        if event.kind == "progress":
            self._step = event.step if event.step >= 0 else self._step
        elif event.kind == "recovered":
            self._recovered(event)
        elif event.kind in _ENDS:
            self._ended(event)
        elif event.kind == "run_started":
            self._submitted(event)
        elif self._open is None:
            self._begin(event)
        else:
            self._go_on(self._open, event)
        if event.kind == "generation_started":
            self._world_size = whole(event.data.get("world_size"))

    def finished(self) -> list[Restart]:
        """All, with the one that is under way."""
        if self._open is not None:
            self._close(UNDER_WAY, None, self._open.merged())
        return self._done

    def _begin(self, event: LedgerEvent) -> None:
        is_drain = event.kind == "generation_planned" and _planned(self._signs) == "drain"
        if event.kind in _OPENERS or is_drain:
            self._open_with(event)
        elif event.kind in _SIGNS:
            if event.kind != "request_taken" or event.data.get("request") == "stop":
                self._signs.append(event)
        elif event.kind in _TAKES_BACK:
            self._signs = _without(self._signs, _TAKES_BACK[event.kind])
        elif event.kind == "generation_started":
            self._signs = _since(self._signs, event.generation)

    def _open_with(self, event: LedgerEvent) -> None:
        step = event.step if event.step >= 0 else self._step
        signs = _since(self._signs, _generation_before(event))
        self._signs = []
        self._open = _Open(
            opener=event, step=step, world_size=self._world_size, events=[*signs, event]
        )

    def _go_on(self, now: _Open, event: LedgerEvent) -> None:
        if event.kind == "generation_started":
            now.events, now.ahead, now.stands = [*now.merged(), event], [], event
        elif event.kind in _TAKES_BACK:
            now.ahead = _without(now.ahead, _TAKES_BACK[event.kind])
        elif event.kind in _SIGNS | _COURSE | _OPENERS:
            is_ahead = now.stands is not None and event.kind not in _STANDS
            if is_ahead and not _is_older(event, now.stands):
                now.ahead.append(event)
            else:
                now.events.append(event)

    def _submitted(self, event: LedgerEvent) -> None:
        """A launcher tells of the failure first, and then that it has started the group again."""
        if "take_over" in event.data:
            return
        if self._open is not None and self._open.opener.life != event.life:
            merged = self._open.merged()
            if _failures(merged):
                self._close(ABANDONED, None, merged)
        if self._open is None or self._open.opener.life != event.life:
            self._open, self._signs = None, []

    def _recovered(self, event: LedgerEvent) -> None:
        now = self._open
        if now is None:
            self._open_with(event)
            self._close(RECOVERED, event, self._opened().events)
            return
        self._close(RECOVERED, event, [*now.events, event])
        for one in now.ahead:
            self.add(one)

    def _ended(self, event: LedgerEvent) -> None:
        has_failed = event.kind == "run_failed"
        if self._open is None and has_failed:
            self._open_with(event)
            self._close(_ENDS[event.kind], event, self._opened().events)
        elif self._open is not None:
            merged = [*self._open.merged(), event]
            if has_failed or _failures(merged):
                self._close(_ENDS[event.kind], event, merged)
        self._open, self._signs = None, []

    def _opened(self) -> _Open:
        assert self._open is not None
        return self._open

    def _close(self, outcome: str, last: LedgerEvent | None, events: list[LedgerEvent]) -> None:
        now = self._opened()
        data: Mapping[str, Any] = last.data if last is not None else {}
        phases_s = _phases_s(data.get("phases_s"))
        decided = [event for event in events if event.kind == "failure_decided"]
        stood = [event for event in events if event.kind == "generation_started"]
        sizes = [event.data.get("world_size") for event in (*decided, *stood)]
        self._done.append(
            Restart(
                number=len(self._done) + 1,
                outcome=outcome,
                causes=_causes(events, outcome),
                time_s=now.opener.time_s,
                generation=_or_none(_generation_before(now.opener)),
                new_generation=_or_none(stood[-1].generation) if stood else None,
                world_rank=_or_none(decided[-1].world_rank) if decided else None,
                step=now.step,
                lost_steps=whole(data.get("lost_steps")),
                source=_source(events),
                took_s=_took_s(phases_s, now.opener, last, outcome),
                old_world_size=_first(data.get("old_world_size"), *sizes[: len(decided)])
                or now.world_size,
                new_world_size=_first(data.get("new_world_size"), *reversed(sizes[len(decided) :])),
                reason=_reason(events, last),
                phases_s=phases_s,
                stacks=_stacks(events),
                events=events,
            )
        )
        self._open = None


def whole(value: object) -> int | None:
    """The value, if it is a whole number."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def number(value: object) -> float | None:
    """The value, if it is a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < _MOST else None


def words(value: object) -> str:
    """The value, if it is text; else nothing."""
    return value if isinstance(value, str) else ""


def _or_none(value: int) -> int | None:
    return value if value >= 0 else None


def _first(*values: object) -> int | None:
    return next((value for value in map(whole, values) if value is not None), None)


def _without(events: Iterable[LedgerEvent], kind: str) -> list[LedgerEvent]:
    return [event for event in events if event.kind != kind]


def _since(events: Iterable[LedgerEvent], generation: int) -> list[LedgerEvent]:
    """Those that are not of an earlier generation."""
    return [event for event in events if event.generation < 0 or event.generation >= generation]


def _is_older(event: LedgerEvent, other: LedgerEvent | None) -> bool:
    return other is not None and 0 <= event.generation < other.generation


def _failures(events: Iterable[LedgerEvent]) -> list[str]:
    """The cause of each; both words about the death of one driver are one."""
    found: list[str] = []
    told_of = -1
    for event in events:
        if event.kind == "failure_decided":
            found.append(words(event.data.get("cause")) or UNKNOWN)
        elif event.kind in _DRIVER and event.life != told_of:
            told_of = event.life
            found.append("driver")
    return found


def _causes(events: Sequence[LedgerEvent], outcome: str) -> list[str]:
    failures = _failures(events)
    if failures:
        return failures
    if any(event.kind in _LEAVES | {"generation_planned"} for event in events):
        return [_planned(events) or ("growth" if outcome == RECOVERED else "stop")]
    failed = [event for event in events if event.kind == "start_failed"]
    told = [words(event.data.get("cause")) for event in failed]
    if outcome != "failed" or not events:
        return [UNKNOWN]
    waits = any(event.kind in ("waiting", "start_failed") for event in events)
    return [next(filter(None, reversed(told)), "") or ("capacity" if waits else UNKNOWN)]


def _planned(events: Iterable[LedgerEvent]) -> str:
    """What a group that was not at fault had to leave for; "" if that is not told."""
    kinds = {event.kind for event in events}
    if "drain_noticed" in kinds or "left_unsaved" in kinds:
        return "drain"
    if "request_taken" in kinds:
        return "stop"
    grows = any(e.reason.startswith("growing") for e in events if e.kind == "leave_ordered")
    return "growth" if grows or "growth_planned" in kinds else ""


def _generation_before(opener: LedgerEvent) -> int:
    """The one that ended. A plan, or an end of which nothing else is told, names the one after."""
    is_after = opener.kind in ("recovered", "generation_planned")
    return opener.generation - 1 if is_after else opener.generation


def _took_s(
    phases_s: Mapping[str, float], opener: LedgerEvent, last: LedgerEvent | None, outcome: str
) -> float | None:
    """The phases add up to the whole; without them the wall clock has to do."""
    if last is None or outcome != RECOVERED:
        return None
    if phases_s:
        return sum(phases_s.values())
    return max(0.0, last.time_s - opener.time_s) if opener is not last else None


def _phases_s(told: object) -> dict[str, float]:
    pairs = told.items() if isinstance(told, dict) else ()
    found = ((str(name), number(value)) for name, value in pairs)
    return {name: value for name, value in found if value is not None and value >= 0}


def _reason(events: Sequence[LedgerEvent], last: LedgerEvent | None) -> str:
    if last is not None and last.reason:
        return last.reason
    openers = (event.reason for event in reversed(events) if event.kind in _OPENERS)
    return next(filter(None, openers), "")


def _source(events: Sequence[LedgerEvent]) -> str:
    told = (words(event.data.get("source")) for event in reversed(events))
    return next((source for source in told if source in _SOURCES), "")


def _stacks(events: Iterable[LedgerEvent]) -> str:
    told = (words(event.data.get("stacks")) for event in events if event.kind == "hang_found")
    return next(filter(None, told), "")
