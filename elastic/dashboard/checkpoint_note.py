"""What became of checkpoints that were committed and do not count now, as a run's ledger tells.

Pure: text from events.
"""

from __future__ import annotations

from collections.abc import Iterable

from elastic.dashboard.restarts import words
from elastic.storage.ledger import LedgerEvent

__all__ = ["checkpoint_note"]

_LOOK = "see `elastic checkpoints list`"


def checkpoint_note(events: Iterable[LedgerEvent], highest: int | None) -> str:
    """`highest` is the step of the newest complete checkpoint; "" if there is nothing to say."""
    committed: set[int] = set()
    aside: set[int] = set()
    passed_by: dict[int, str] = {}
    for event in events:
        if event.kind == "checkpoint_passed_by":
            passed_by[event.step] = words(event.data.get("problem"))
        elif event.kind == "checkpoint_committed":
            committed.add(event.step)
            aside.discard(event.step)
            passed_by.pop(event.step, None)
        elif event.kind in ("checkpoint_removed", "checkpoint_quarantined"):
            passed_by.pop(event.step, None)
            if event.kind == "checkpoint_quarantined":
                aside.add(event.step)
        elif event.kind == "rolled_back":
            passed_by = {step: why for step, why in passed_by.items() if step <= event.step}
    if highest is None:
        return _none_left(len(committed), len(aside & committed))
    above = sorted(step for step in passed_by if step > highest)
    if not above:
        return ""
    older = f" (and {len(above) - 1} before it)" if above[1:] else ""
    return f"step {above[-1]}{older} was passed by: {passed_by[above[-1]]}"


def _none_left(num_committed: int, num_aside: int) -> str:
    if num_committed == 0:
        return ""
    kept = f", {num_aside} of them are in quarantine" if num_aside else ""
    return f"none complete; {num_committed} were committed{kept}: {_LOOK}"
