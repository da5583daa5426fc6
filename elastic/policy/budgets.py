"""Budgets: how many failures of which class a run forgives, and what gives them back.

What was counted is folded from the ledger's own records, so that a driver that takes the run over
goes on counting where the last one stopped. Pure data: the driver's clock is an argument elsewhere.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from elastic.policy.causes import Cause

FREE = frozenset({Cause.PREEMPTION, Cause.NODE_LOST})
"""They say nothing about the run: never counted, and never a reason to end it."""

EXCEPTIONS = frozenset({Cause.USER_EXCEPTION, Cause.DATA})
"""What `max_failures` counts, over the whole submission: nothing gives these back."""

MOST_IN_A_ROW = {Cause.HOST_MEMORY: 2, Cause.CUDA_MEMORY: 2}
"""Classes that are given up sooner than the others, without a new checkpoint in between."""

MOST_BACKOFF_S = 60.0

ENDS = ("run_finished", "run_failed", "run_stopped")
_COUNTED = ("failure_decided", "start_failed")

# Outages end by themselves, and say the same words each time.
_OUTAGES = frozenset({Cause.STORAGE, Cause.START_UP, Cause.DRIVER})
_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\b[0-9a-fA-F]{12,}\b|\d+")
_TEXT_CHARS = 300


class Limits(Protocol):
    """What the owner of the run grants."""

    @property
    def max_failures(self) -> int: ...

    @property
    def max_failures_without_progress(self) -> int: ...

    @property
    def max_failures_by_cause(self) -> Mapping[str, int]: ...

    @property
    def backoff_s(self) -> float: ...


class Recorded(Protocol):
    """An event of the ledger."""

    @property
    def kind(self) -> str: ...

    @property
    def data(self) -> Mapping[str, Any]: ...


Event = TypeVar("Event", bound=Recorded)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One failure, as far as another one may be the same."""

    cause: Cause
    step: int
    """The last step that was finished, of this generation or before it; -1 where there was none."""
    text: str = ""
    """What was said, without numbers; empty for a process that was killed without a word."""
    has_stepped: bool = True
    """Its generation had finished a step."""
    headline: str = ""

    @property
    def num_same_to_end(self) -> int:
        """How often in a row the same failure at the same step ends the run; 0 for never.

        A kill without words, or victims alone, may be chance: that takes one more, and says nothing
        of the step where the generation had come to none.
        """
        if self.cause in FREE or self.cause in _OUTAGES:
            return 0
        if self.text and self.cause is not Cause.COMMUNICATION:
            return 2
        return 3 if self.has_stepped else 0

    def is_same_as(self, other: Failure) -> bool:
        """Whether both have the same class, step and words."""
        mine = (self.cause, self.step, self.text)
        return mine == (other.cause, other.step, other.text)


def without_numbers(text: str) -> str:
    """The first line without what differs from one try to the next: addresses, pids, counts."""
    lines = text.strip().splitlines()
    return _NUMBER.sub("#", lines[0])[:_TEXT_CHARS] if lines else ""


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """What a submission of the run has used up."""

    in_total: Mapping[str, int] = field(default_factory=dict)
    """Failures by class."""
    in_a_row: Mapping[str, int] = field(default_factory=dict)
    """The same, since the last new checkpoint."""
    committed_step: int = -2
    """The newest checkpoint when the last failure was counted."""
    last: Failure | None = None
    num_same: int = 0
    """How often in a row the last failure has come, with no new checkpoint and no node lost."""

    def count(self, failure: Failure, committed_step: int) -> Budgets:
        """With one more failure; a checkpoint that is newer than the last failure refills first."""
        has_progressed = committed_step > self.committed_step
        if failure.cause in FREE:
            # What is the same on other nodes may not be the same failure any more.
            return Budgets(
                in_total=self.in_total,
                in_a_row={} if has_progressed else self.in_a_row,
                committed_step=max(committed_step, self.committed_step),
            )
        in_a_row = {} if has_progressed else self.in_a_row
        is_same = not has_progressed and self.last is not None and failure.is_same_as(self.last)
        return Budgets(
            in_total=_one_more(self.in_total, failure.cause),
            in_a_row=_one_more(in_a_row, failure.cause),
            committed_step=max(committed_step, self.committed_step),
            last=failure,
            num_same=self.num_same + 1 if is_same else 1,
        )

    def backoff_s(self, limits: Limits) -> float:
        """How long the next start has to wait: not for the first failure in a row, then doubling.

        It begins with `limits.backoff_s`, and is at most a minute.
        """
        num = sum(self.in_a_row.values())
        return min(MOST_BACKOFF_S, limits.backoff_s * 2.0 ** min(num - 2, 16)) if num > 1 else 0.0

    def verdict(self, limits: Limits, failure: Failure) -> str:
        """Why the run is given up after this failure, which is counted already; or an empty string.

        The text leads with the failure.
        """
        if failure.cause in FREE:
            return ""
        spent = self._spent_alone(limits, failure) or self._spent_together(limits, failure)
        return spent or self._is_the_same(failure)

    def _spent_alone(self, limits: Limits, failure: Failure) -> str:
        cause = failure.cause
        granted = limits.max_failures_by_cause.get(cause)
        if granted is not None:
            used = self.in_total if cause in EXCEPTIONS else self.in_a_row
            if 0 <= granted < used.get(cause, 0):
                return f"{failure.headline} (restarts granted for {cause}: {granted})"
            return ""
        if cause in EXCEPTIONS:
            counted = EXCEPTIONS - set(limits.max_failures_by_cause)
            if 0 <= limits.max_failures < sum(self.in_total.get(one, 0) for one in counted):
                return (
                    f"{failure.headline} (restarts granted for exceptions: {limits.max_failures})"
                )
        most = MOST_IN_A_ROW.get(cause)
        if most is not None and self.in_a_row.get(cause, 0) > most:
            return (
                f"{failure.headline}; {cause} {self.in_a_row[cause]} times in a row, the last "
                f"{_after(failure.step)}, without a new checkpoint (limit {most}). {ADVICE[cause]}"
            )
        return ""

    def _spent_together(self, limits: Limits, failure: Failure) -> str:
        alone = limits.max_failures_by_cause
        num = sum(count for cause, count in self.in_a_row.items() if cause not in alone)
        if failure.cause in alone or num <= limits.max_failures_without_progress:
            return ""
        return (
            f"{num} failures in a row without a new checkpoint since step {self.committed_step} "
            f"(limit {limits.max_failures_without_progress}); the last: {failure.headline}"
        )

    def _is_the_same(self, failure: Failure) -> str:
        if not 0 < failure.num_same_to_end <= self.num_same:
            return ""
        return (
            f"{failure.headline}; {failure.cause} for the {_ordinal(self.num_same)} time "
            f"{_after(failure.step)}, with no new checkpoint and no lost node in between: another "
            f"try would end the same way. {ADVICE[failure.cause]}"
        )


def since_last_end(events: Sequence[Event]) -> Sequence[Event]:
    """The events since the run was last finished, failed or stopped, in ledger order.

    Whoever submits it again after that begins with full budgets. A driver that is gone without a
    word ends nothing: who takes the run up after it goes on counting.
    """
    ends = [place for place, event in enumerate(events) if event.kind in ENDS]
    return events[ends[-1] + 1 :] if ends else events


def fold(events: Iterable[Recorded]) -> Budgets:
    """What the recorded failures add up to, in ledger order. Those that do not tell enough to be
    counted, as of an older version, are left out."""
    budgets = Budgets()
    for event in events:
        told = event.data.get("counted")
        if event.kind in _COUNTED and isinstance(told, Mapping):
            with contextlib.suppress(KeyError, TypeError, ValueError):
                failure = Failure(
                    cause=Cause(event.data["cause"]),
                    step=int(told["step"]),
                    text=str(told["text"]),
                    has_stepped=bool(told["has_stepped"]),
                    headline=str(told["headline"]),
                )
                budgets = budgets.count(failure, int(told["committed_step"]))
    return budgets


def as_recorded(failure: Failure, committed_step: int) -> dict[str, object]:
    """What `fold` needs of a failure, for the ledger."""
    return {
        "step": failure.step,
        "text": failure.text,
        "has_stepped": failure.has_stepped,
        "headline": failure.headline,
        "committed_step": committed_step,
    }


def check_by_cause(limits: Mapping[str, Any]) -> None:
    """Raises `ValueError` for a class that does not exist or is never counted, and for a number
    below -1."""
    countable = sorted(set(Cause) - FREE)
    for name, limit in limits.items():
        if name in FREE:
            raise ValueError(
                f"max_failures_by_cause: {name} is never counted, since it says nothing about the "
                "run; wait_for_capacity_s bounds how long a run waits for nodes"
            )
        if name not in countable:
            raise ValueError(
                f"max_failures_by_cause: there is no cause {name!r}; expected one of "
                f"{', '.join(countable)}"
            )
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < -1:
            raise ValueError(
                f"max_failures_by_cause[{name!r}] is a number of restarts, or -1 for no limit; "
                f"found {limit!r}"
            )


def _one_more(counts: Mapping[str, int], cause: Cause) -> dict[str, int]:
    return {**counts, cause.value: counts.get(cause, 0) + 1}


def _after(step: int) -> str:
    return "before its first step" if step < 0 else f"after step {step}"


def _ordinal(num: int) -> str:
    return {2: "2nd", 3: "3rd"}.get(num, f"{num}th")


ADVICE = {
    Cause.WORKER_KILLED: "Look at dmesg on its node: the kernel's memory killer gives no words.",
    Cause.HOST_MEMORY: (
        "Give each worker more memory, or use less: fewer loader processes, a smaller prefetch."
    ),
    Cause.CUDA_MEMORY: "Use smaller micro-batches, more workers to shard over, or recomputation.",
    Cause.CUDA_ERROR: "Run once with CUDA_LAUNCH_BLOCKING=1 to see which kernel fails.",
    Cause.ECC_ERROR: "Take the node with this GPU out, and reset or replace the GPU.",
    Cause.NCCL_ERROR: "Look at the links between the nodes: NCCL_DEBUG=WARN names the one.",
    Cause.HANG: "Look at the stacks that were kept in the run directory.",
    Cause.COMMUNICATION: "Look at the network, and at what the ranks wrote last.",
    Cause.DATA: "Look at the sample or shard that the loader read there.",
    Cause.STORAGE: "Look at the storage: its space, its quota, its credentials.",
    Cause.USER_EXCEPTION: "Look at the traceback: it comes from the training function.",
    Cause.START_UP: "Look at what the workers need to start: packages, images, files.",
    Cause.DRIVER: "Look at the head node and Ray's control plane.",
}
"""What to look at, by class."""
