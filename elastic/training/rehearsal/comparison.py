"""The comparison of two curves, step by step: bit for bit, or within a tolerance. Pure.

Must not import torch.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

# Relative, over at most a few hundred steps: what adding in another order may come to.
TOLERANCES = {"float64": 1e-9, "float32": 1e-5, "float16": 1e-2, "bfloat16": 5e-2}
_COARSEST = max(TOLERANCES.values())

Curve = Mapping[int, float]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """How a curve follows the uninterrupted one over some steps. Differences are relative."""

    name: str
    num_workers: int
    first_step: int
    last_step: int
    tolerance: float
    """0 asks for equality to the bit."""
    parted_at: int | None
    """The first step at which they differ by more."""
    expected: float | None = None
    found: float | None = None
    """Of that step."""
    largest: float
    largest_at: int | None
    """None when all are equal."""

    @property
    def is_equal(self) -> bool:
        """Within what was asked for."""
        return self.parted_at is None

    @property
    def is_exact(self) -> bool:
        """To the bit."""
        return self.largest_at is None


def compare(
    name: str,
    expected: Curve,
    found: Curve,
    steps: Sequence[int],
    *,
    num_workers: int,
    tolerance: float,
) -> Comparison:
    """`found` against `expected` at these steps, all of which both have."""
    parted_at, largest, largest_at = None, 0.0, None
    for step in steps:
        one, other = expected[step], found[step]
        if is_same(one, other):
            continue
        apart = difference(one, other)
        if largest_at is None or apart > largest:
            largest, largest_at = apart, step
        if parted_at is None and not apart <= tolerance:
            parted_at = step
    if tolerance == 0 and parted_at is None:
        # Unequal bits of equal values, such as the two zeros.
        parted_at = largest_at
    return Comparison(
        name=name,
        num_workers=num_workers,
        first_step=steps[0],
        last_step=steps[-1],
        tolerance=tolerance,
        parted_at=parted_at,
        expected=None if parted_at is None else expected[parted_at],
        found=None if parted_at is None else found[parted_at],
        largest=largest,
        largest_at=largest_at,
    )


def is_same(one: float, other: float) -> bool:
    """Whether all bits are the same; any two NaNs are."""
    return struct.pack("d", one) == struct.pack("d", other) or (one != one and other != other)


def difference(one: float, other: float) -> float:
    """Relative to the larger; infinite where only one of them is finite."""
    if not (math.isfinite(one) and math.isfinite(other)):
        return math.inf
    return abs(one - other) / max(abs(one), abs(other), 5e-324)


def tolerance_of(dtype: str) -> float:
    """What is allowed to a model in this dtype."""
    return TOLERANCES.get(dtype, _COARSEST)


def is_constant(values: Iterable[float]) -> bool:
    """Whether a curve never changes, so that comparing it shows nothing."""
    return len({struct.pack("d", value) for value in values}) < 2
