"""Tries left: how many more failures of which kind a run forgives, as its ledger tells. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastic.dashboard.restarts import whole
from elastic.policy import budgets
from elastic.policy.budgets import EXCEPTIONS, MOST_IN_A_ROW, Budgets
from elastic.storage.ledger import LedgerEvent

NEVER = "never given back"
WITH_CHECKPOINT = "given back by the next new checkpoint"


@dataclass(frozen=True, kw_only=True)
class TriesLeft:
    """One budget. `granted` and `left` are None where there is no limit."""

    budget: str
    used: int
    granted: int | None
    left: int | None
    comes_back: str


def tries_left(events: Sequence[LedgerEvent]) -> list[TriesLeft] | None:
    """Those of the newest submission, as they stood at its end if it has ended; None where the
    rules of the run are not recorded. `events` are in ledger order."""
    submission = _newest_submission(events)
    told = (e.data.get("rules") for e in reversed(submission) if e.kind == "run_started")
    rules = next((rules for rules in told if isinstance(rules, dict)), None)
    if rules is None:
        return None
    used = budgets.fold(submission)
    saved = [e.step for e in submission if e.kind == "checkpoint_committed"]
    in_a_row = {} if max(saved, default=-2) > used.committed_step else dict(used.in_a_row)
    return [*_each(rules, used.in_total, in_a_row), *_the_same(used, in_a_row)]


def left_text(one: TriesLeft) -> str:
    """How many of how many; a budget that never granted any is not used up."""
    if one.left is None:
        return "no limit"
    return f"{one.left} of {one.granted}" if one.granted else "none granted"


def _newest_submission(events: Sequence[LedgerEvent]) -> Sequence[LedgerEvent]:
    recent = budgets.since_last_end(events)
    if len(recent) == len(events) or any(event.kind == "run_started" for event in recent):
        return recent
    return budgets.since_last_end(events[: len(events) - len(recent) - 1])


def _each(
    rules: Mapping[str, Any], in_total: Mapping[str, int], in_a_row: Mapping[str, int]
) -> Iterator[TriesLeft]:
    told = rules.get("max_failures_by_cause")
    pairs = told.items() if isinstance(told, dict) else ()
    alone = {str(cause): limit for cause, limit in pairs if whole(limit) is not None}
    granted = whole(rules.get("max_failures"))
    if granted is not None:
        num = sum(in_total.get(cause, 0) for cause in EXCEPTIONS - set(alone))
        yield _left("exceptions", num, granted, NEVER)
    for cause, limit in sorted(alone.items()):
        is_total = cause in EXCEPTIONS
        num = (in_total if is_total else in_a_row).get(cause, 0)
        yield _left(cause, num, limit, NEVER if is_total else WITH_CHECKPOINT)
    for name, limit in MOST_IN_A_ROW.items():
        if name not in alone and in_a_row.get(name):
            yield _left(name, in_a_row[name], limit, WITH_CHECKPOINT)
    granted = whole(rules.get("max_failures_without_progress"))
    if granted is not None:
        num = sum(count for cause, count in in_a_row.items() if cause not in alone)
        yield _left("failures in a row", num, granted, WITH_CHECKPOINT)


def _the_same(used: Budgets, in_a_row: Mapping[str, int]) -> Iterator[TriesLeft]:
    """How often the last failure may come again as it was."""
    if used.last is None or not in_a_row or not used.last.num_same_to_end:
        return
    yield _left(
        f"the same {used.last.cause}",
        used.num_same,
        used.last.num_same_to_end - 1,
        "given back by a new checkpoint, or by a node that is lost",
    )


def _left(budget: str, used: int, granted: int, comes_back: str) -> TriesLeft:
    limit = granted if granted >= 0 else None
    left = None if limit is None else max(0, limit - used)
    return TriesLeft(budget=budget, used=used, granted=limit, left=left, comes_back=comes_back)
