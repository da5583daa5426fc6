"""The verdict on a rehearsal: equal or not, where the runs part, and what was likely forgotten.

Pure; must not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from elastic.training.rehearsal.comparison import Comparison, Curve
from elastic.training.rehearsal.diagnosis import Signals, Suspect, read_signals
from elastic.training.rehearsal.notes import Trace
from elastic.training.rehearsal.plan import Plan

EXACT, WITHIN, RANDOM = "exact", "within tolerance", "not comparable"
BEFORE, AFTER, OTHER = "before the kill", "after the resume", "at another size"
PARTED, NOT_REPRODUCIBLE, FAILED = "parted", "not reproducible", "failed"


@dataclass(kw_only=True)
class Rehearsal:
    """What has come of one."""

    plan: Plan
    metric: str
    dtype: str
    resumed_from: int = -1
    comparisons: list[Comparison] = field(default_factory=list)
    curves: dict[str, Curve] = field(default_factory=dict)
    """By the name of a phase."""
    suspects: list[Suspect] = field(default_factory=list)
    """Likeliest first; of a run that parted, also of one that did not, if something differed."""
    notes: list[str] = field(default_factory=list)
    tracked: list[str] = field(default_factory=list)
    failure: str = ""
    draws: bool = False
    """Whether training draws from the global random streams, each rank from its own."""
    took_s: float = 0.0

    @property
    def verdict(self) -> str:
        """One of the words above."""
        if self.failure:
            return FAILED
        parted = [one for one in self.comparisons if not one.is_equal]
        if any(one.name == BEFORE for one in parted):
            return NOT_REPRODUCIBLE
        if any(self.counts(one) for one in parted):
            return PARTED
        return EXACT if all(one.is_exact for one in self.comparisons) else WITHIN

    def counts(self, one: Comparison) -> bool:
        """Whether a difference here is a fault: not where other ranks draw other numbers."""
        return not (one.name == OTHER and self.draws)

    @property
    def exit_code(self) -> int:
        """0 equal, 1 differs."""
        return 0 if self.verdict in (EXACT, WITHIN) else 1

    def to_json(self) -> dict[str, Any]:
        """All of it, for programs. Numbers that are not finite become texts."""
        tree = {
            "verdict": self.verdict,
            "exit_code": self.exit_code,
            "likely": self.suspects[0].kind if self.suspects and self.exit_code else None,
            "metric": self.metric,
            "dtype": self.dtype,
            "killed_at": self.plan.half,
            "resumed_from": self.resumed_from,
            "comparisons": [
                {
                    **asdict(one),
                    "is_equal": one.is_equal,
                    "is_exact": one.is_exact,
                    "counts": self.counts(one),
                }
                for one in self.comparisons
            ],
            "suspects": [asdict(one) for one in self.suspects],
            "notes": self.notes,
            "tracked": self.tracked,
            "failure": self.failure,
            "took_s": self.took_s,
            "plan": asdict(self.plan),
            "curves": {
                name: {str(step): value for step, value in curve.items()}
                for name, curve in self.curves.items()
            },
        }
        finite: dict[str, Any] = _finite(tree)
        return finite


def _finite(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {name: _finite(value) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_finite(value) for value in tree]
    return str(tree) if isinstance(tree, float) and not math.isfinite(tree) else tree


def draws_random_numbers(traces: Sequence[Trace]) -> bool:
    """Whether steps leave the global random streams elsewhere than they found them."""
    return any(
        one.random_streams != other.random_streams
        for trace in traces
        for one, other in zip(
            list(trace.steps.values()), list(trace.steps.values())[1:], strict=False
        )
        if one.random_streams and other.random_streams
    )


def why_not_reproducible(
    expected: Sequence[Trace], found: Sequence[Trace], parted_at: int
) -> list[str]:
    """What differs between two runs that nothing has interrupted."""
    signals = read_signals(expected, found, range(1, parted_at + 1))
    lines = [
        (
            "two runs with one seed part before anything was killed: something is drawn at "
            "random outside of the streams that the run has seeded, or depends on time, on the "
            "process or on the order of a set"
        )
    ]
    return lines + _first_signs(signals)


def _first_signs(signals: Signals) -> list[str]:
    found = []
    if signals.inputs_at is not None:
        found.append(f"the model saw other inputs at step {signals.inputs_at}")
    if signals.random_at is not None:
        found.append(f"the random streams differ at the start of step {signals.random_at}")
    if signals.rates_at is not None:
        found.append(f"learning rates differ at step {signals.rates_at}")
    return found or ["inputs, random streams and learning rates were the same"]


def why_other_size(
    comparison: Comparison, expected: Sequence[Trace], found: Sequence[Trace]
) -> list[str]:
    """Why a run that resumes exactly at its own size parts at another."""
    step = comparison.parted_at
    assert step is not None
    rows = [
        sum(t.steps[step].num_rows for t in traces if step in t.steps)
        for traces in (expected, found)
    ]
    if rows[0] != rows[1] and all(rows):
        return [
            (
                f"at step {step} the model saw {rows[0]} rows in all on {ranks(len(expected))}, "
                f"and {rows[1]} on {len(found)}: the batch is one of each rank. Use run.loader, "
                "whose global batch is constant"
            )
        ]
    if comparison.largest <= 100 * comparison.tolerance:
        return [
            (
                "the difference is small and grows from rounding, as sums are added in another "
                "order: if that is good enough for this model, say so with --tolerance"
            )
        ]
    return [
        (
            "the loss or its gradient is weighted by the rank, not by the global batch (divide "
            "a summed loss by step.num_valid_tokens; log what is summed), a module looks at the "
            "batch of its rank alone (BatchNorm), or state of one rank was not carried over to "
            "the others"
        )
    ]


def ranks(number: int) -> str:
    """In words."""
    return f"{number} rank" + ("" if number == 1 else "s")


def curve_of(values: Mapping[int, Mapping[str, float]], metric: str) -> dict[int, float]:
    """One metric by step."""
    return {step: row[metric] for step, row in sorted(values.items()) if metric in row}
