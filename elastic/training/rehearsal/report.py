"""The report on a rehearsal: a table, the curves as a plot, the verdict in words. Pure text.

Must not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from elastic.training.rehearsal.comparison import Comparison, difference, is_same
from elastic.training.rehearsal.diagnosis import Suspect
from elastic.training.rehearsal.holding import STATE
from elastic.training.rehearsal.verdict import (
    AFTER,
    EXACT,
    FAILED,
    NOT_REPRODUCIBLE,
    OTHER,
    WITHIN,
    Rehearsal,
    ranks,
)

_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 60


def report(found: Rehearsal) -> str:
    """What a person reads."""
    return "\n".join(_lines(found))


def _lines(found: Rehearsal) -> Iterator[str]:
    plan = found.plan
    yield f"{plan.target}: {plan.steps} steps, every rank killed at step {plan.half}"
    if found.resumed_from >= 0:
        tracked = ", ".join(found.tracked)
        yield f"resumed from the checkpoint of step {found.resumed_from}, which holds: {tracked}"
    yield ""
    if found.comparisons:
        yield from _table(found)
        yield ""
    if found.curves:
        yield from _plot(found)
        yield ""
    yield from _verdict(found)
    for note in found.notes:
        yield f"  {note}"
    yield f"took {found.took_s:.0f} s"


def _table(found: Rehearsal) -> Iterator[str]:
    rows = [["COMPARED", "RANKS", "STEPS", "ASKED FOR", "FOUND", "LARGEST DIFFERENCE"]]
    for one in found.comparisons:
        asked = "exact" if one.tolerance == 0 else f"within {one.tolerance:g}"
        rows.append(
            [
                f"{found.metric} {one.name}",
                str(one.num_workers),
                f"{one.first_step}-{one.last_step}",
                asked if found.counts(one) else "-",
                _found(one),
                "0" if one.largest_at is None else f"{one.largest:.2g} at step {one.largest_at}",
            ]
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()


def _found(one: Comparison) -> str:
    if one.is_exact:
        return "exact"
    return "within" if one.is_equal else f"parts at step {one.parted_at}"


def _plot(found: Rehearsal) -> Iterator[str]:
    """The curves on one scale, and below each the size of its difference, on a logarithmic one."""
    first = next(iter(found.curves))
    reference = found.curves[first]
    steps = sorted(reference)
    label = max(len(name) for name in found.curves) + 2
    low, high = _range([value for curve in found.curves.values() for value in curve.values()])
    yield (
        f"{found.metric} over steps {steps[0]}-{steps[-1]}, from {low:.4g} to {high:.4g}; apart: "
        "a bar for each two digits lost of sixteen"
    )
    for name, curve in found.curves.items():
        values = [curve.get(step) for step in steps]
        yield f"{name:<{label}}{sparkline(values, low, high)}"
        if name != first:
            apart = [_digits(reference[s], curve[s]) if s in curve else None for s in steps]
            yield f"{'  apart':<{label}}{sparkline(apart, -16.0, 0.0)}"


def _digits(one: float, other: float) -> float:
    """The logarithm of the relative difference: -16 for none, 0 for all of it."""
    apart = 0.0 if is_same(one, other) else difference(one, other)
    return -16.0 if apart == 0 else max(-16.0, min(0.0, math.log10(apart)))


def sparkline(values: Sequence[float | None], low: float, high: float) -> str:
    """One row of bars, a column for each value or for the mean of several; a gap for none."""
    width = min(_WIDTH, len(values))
    columns = [
        values[i * len(values) // width : (i + 1) * len(values) // width] for i in range(width)
    ]
    return "".join(_bar([v for v in column if v is not None], low, high) for column in columns)


def _bar(values: Sequence[float], low: float, high: float) -> str:
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return "!" if values else " "
    share = (sum(known) / len(known) - low) / (high - low) if high > low else 0.0
    return _BARS[min(len(_BARS) - 1, max(0, int(share * len(_BARS))))]


def _range(values: Sequence[float]) -> tuple[float, float]:
    known = [value for value in values if math.isfinite(value)] or [0.0]
    return min(known), max(known)


# --- in words -------------------------------------------------------------------------------------


def _verdict(found: Rehearsal) -> Iterator[str]:
    verdict = found.verdict
    if verdict == FAILED:
        yield f"FAILED: {found.failure}"
    elif verdict == EXACT:
        yield f"EXACT: every {found.metric} after the resume is equal to the bit"
    elif verdict == WITHIN:
        yield f"EQUAL: {_how_equal(found)}"
    elif verdict == NOT_REPRODUCIBLE:
        yield f"NOT REPRODUCIBLE: {_parted(found)}"
    else:
        yield f"PARTED: {_parted(found)}"
    if found.exit_code == 0:
        yield from _loose_ends(found.suspects)
    elif found.suspects:
        yield "likely forgotten:"
        yield from _suspect(found.suspects[0])
        if len(found.suspects) > 1:
            yield "not equal after the resume either:"
            for one in found.suspects[1:]:
                yield f"  {_named(one)}: {'; '.join(one.evidence[:1])}"


def _how_equal(found: Rehearsal) -> str:
    said = []
    for one in found.comparisons:
        if one.name == AFTER:
            said.append(f"exact at {ranks(one.num_workers)}")
        elif one.name == OTHER and found.counts(one):
            said.append(
                f"within {one.tolerance:g} ({found.dtype or 'unknown dtype'}) at "
                f"{one.num_workers}, the largest difference {one.largest:.2g}"
            )
        elif one.name == OTHER:
            said.append(
                f"not comparable at {one.num_workers}, where other random numbers are drawn "
                f"(largest difference {one.largest:.2g})"
            )
    return "; ".join(said)


def _parted(found: Rehearsal) -> str:
    one = next(one for one in found.comparisons if not one.is_equal and found.counts(one))
    assert one.expected is not None and one.found is not None
    apart = difference(one.expected, one.found)
    return (
        f"{found.metric} {one.name} on {ranks(one.num_workers)} parts at step {one.parted_at}: "
        f"{one.expected!r} uninterrupted, {one.found!r} here, {apart:.2g} apart"
        + ("" if one.tolerance == 0 else f" where {one.tolerance:g} is allowed")
    )


def _loose_ends(suspects: Sequence[Suspect]) -> Iterator[str]:
    # Times, paths and texts are mostly not the training's; the JSON has them all.
    suspects = [one for one in suspects if one.kind != STATE]
    if suspects:
        yield "not tracked, and not equal after the resume, though no loss has shown it:"
        for one in suspects:
            yield f"  {_named(one)}: {'; '.join(one.evidence[:1])}"


def _suspect(one: Suspect) -> Iterator[str]:
    yield f"  {_named(one)}"
    for line in one.evidence:
        yield f"    {line}"
    yield f"    what to do: {one.advice}"


def _named(one: Suspect) -> str:
    if not one.name:
        return f"{one.kind}, of which the function holds nothing that we can see"
    kind = "" if one.type_name in ("", "int", "float") else f" ({one.type_name})"
    return f"{one.kind}: {one.name}{kind} in {one.where}"
