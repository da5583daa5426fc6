"""Suspicion: whether a loss that is not finite, soon after a load, is the checkpoint's fault.

The bytes may be those that were saved and the state in them spoilt all the same. One step back
tells: where an older checkpoint comes to the same loss at the same step, its data or the learning
rate are at fault, and no checkpoint. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from elastic.policy.events import Record
from elastic.policy.fitting import Recorded

__all__ = ["SUSPECT_STEPS", "Doubt", "Ruling", "Suspicion", "Then", "fold", "rule"]

SUSPECT_STEPS = 3


class Then(StrEnum):
    """What is to follow from a loss that is not finite."""

    GO_ON = "go on"
    STEP_BACK = "step back"
    FAIL = "fail"


@dataclass(frozen=True, kw_only=True)
class Doubt:
    """The first loss of a generation that is not finite: of `loss_step`, after a load of
    `loaded_step`."""

    generation: int
    loaded_step: int
    loss_step: int
    loss: str


@dataclass(frozen=True, kw_only=True)
class Suspicion:
    """The checkpoint that was last suspected, for the loss of which step."""

    step: int
    loss_step: int


@dataclass(frozen=True, kw_only=True)
class Ruling:
    """What follows, and what the ledger is told of it; nothing where the run goes on."""

    then: Then
    reason: str = ""
    record: Record | None = None


def rule(doubt: Doubt, past: Suspicion | None, *, older_step: int | None) -> Ruling:
    """`past` is the last suspicion that still stands, `older_step` the checkpoint to go back to."""
    where = f"the loss of step {doubt.loss_step} is {doubt.loss}"
    if past is not None and past.loss_step == doubt.loss_step:
        reason = (
            f"{where}, from the checkpoint of step {doubt.loaded_step} as it was from that of step "
            f"{past.step}: the bytes are not the cause. Look at the data of that step and at the "
            "learning rate; the suspicion is lifted"
        )
        return Ruling(
            then=Then.FAIL, reason=reason, record=_record("trusted", past.step, doubt, reason)
        )
    num_steps = doubt.loss_step - doubt.loaded_step
    if num_steps > SUSPECT_STEPS or older_step is None:
        return Ruling(then=Then.GO_ON)
    steps = "1 step" if num_steps == 1 else f"{num_steps} steps"
    reason = (
        f"{where}, {steps} after the checkpoint of step {doubt.loaded_step} was loaded: "
        f"it is suspect, the run goes back to step {older_step}"
    )
    record = _record("suspect", doubt.loaded_step, doubt, reason)
    return Ruling(then=Then.STEP_BACK, reason=reason, record=record)


def fold(events: Iterable[Recorded]) -> Suspicion | None:
    """The last suspicion in a run's ledger that nobody has lifted."""
    found: Suspicion | None = None
    for event in events:
        if event.kind == "checkpoint_suspect":
            loss_step = event.data.get("loss_step")
            if isinstance(loss_step, int):
                found = Suspicion(step=event.step, loss_step=loss_step)
        elif event.kind in ("checkpoint_trusted", "rolled_back"):
            found = None
    return found


def _record(what: str, step: int, doubt: Doubt, reason: str) -> Record:
    return Record(
        kind=f"checkpoint_{what}",
        generation=doubt.generation,
        step=step,
        reason=reason,
        data={"loss_step": doubt.loss_step, "loss": doubt.loss},
    )
