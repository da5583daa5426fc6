"""Expected: the checkpoints that must be there, as the ledger tells, and why one is not.

A run that goes back to an older one loses work, and says so once for each that it passes by. Must
not import ray or torch.
"""

from __future__ import annotations

from collections.abc import Iterable

from elastic.policy.events import Record
from elastic.storage import quarantine
from elastic.storage.checkpoints import Catalog
from elastic.storage.completeness import home, look_at
from elastic.storage.late_visibility import committed_steps
from elastic.storage.ledger import LedgerEvent
from elastic.storage.manifest import MARKER
from elastic.storage.readmission import BRING_BACK

__all__ = ["PASSED_BY", "Expected"]

PASSED_BY = "checkpoint_passed_by"
_MOST_TEXT = 300


class Expected:
    """What one process that drives the run expects of it. No method but `passed_by` and `refusal`
    asks storage."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._has_past = False
        self._committed: list[int] = []
        self._there: set[int] = set()
        self._told: set[int] = set()

    def hear_past(self, past: Iterable[LedgerEvent]) -> None:
        """What was recorded before this process came; the first call counts."""
        if not self._has_past:
            events = list(past)
            of_past = [event.step for event in events if event.kind == "checkpoint_committed"]
            self._committed = [*of_past, *self._committed]
            self._there |= committed_steps(events)
        self._has_past = True

    def committed(self, step: int) -> None:
        """It was published just now."""
        self._committed.append(step)
        self._there.add(step)
        self._told.discard(step)

    def gone(self, steps: Iterable[int]) -> None:
        """They were removed or set aside, which the ledger tells."""
        self._there -= set(steps)

    def newest(self) -> int | None:
        """The highest step that is expected, those that were passed by left out."""
        return max(self._there - self._told, default=None)

    def passed_by(self, resumed: int) -> list[Record]:
        """A record for each that is above the step which is resumed, and not complete; told once.

        Trouble in reading raises.
        """
        above = sorted(step for step in self._there - self._told if step > resumed)
        found = ((step, self._problem(step)) for step in above)
        told = [_record(step, problem, resumed) for step, problem in found if problem]
        self._told |= {record.step for record in told}
        return told

    def refusal(self) -> str:
        """Why a run without a complete checkpoint may not begin at step 0; "" if it may."""
        if not self._committed:
            return ""
        fs = self._catalog.fs
        aside = quarantine.steps(fs) & set(self._committed)
        kept = f" ({len(aside)} in its quarantine)" if aside else ""
        num = len(set(self._committed))
        those = "1 checkpoint was" if num == 1 else f"{num} checkpoints were"
        return (
            f"{those} committed, the last at step {self._committed[-1]}, and none is complete now "
            f"under {fs.url}/checkpoints{kept}; refusing to start again at "
            f"step 0. {BRING_BACK}, or use another name"
        )

    def _problem(self, step: int) -> str:
        """What is wrong there; "" if nothing is, or if it was set aside with a reason."""
        fs = self._catalog.fs
        look = look_at(fs, self._catalog.run_id, step)
        if look.has_marker:
            return look.flaw[:_MOST_TEXT]
        if step in quarantine.steps(fs):
            return ""
        path = home(step)
        return f"{path} has no {MARKER} marker" if fs.exists(path) else f"nothing lies at {path}"


def _record(step: int, problem: str, resumed: int) -> Record:
    reason = (
        f"it was committed and is not complete: {problem}; resuming from step {resumed}, what was "
        "done after that is done again. See `elastic checkpoints list`; to have it back, stop the "
        "run, restore its files, submit again"
    )
    data: dict[str, object] = {"problem": problem, "resumed_step": resumed}
    return Record(kind=PASSED_BY, step=step, reason=reason, data=data)
