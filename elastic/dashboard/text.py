"""Values as text: ages, sizes and aligned columns for people, JSON for programs. Pure.

What a run recorded (names, messages of exceptions) may hold anything, so nothing reaches a
terminal but through `plain`: an escape sequence in an error text must not repaint the screen.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any


def age(seconds: float) -> str:
    """A duration in the largest unit that keeps it readable: `9 s`, `5 min`, `3 h`, `2 days`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    if seconds < 36 * 3600:
        return f"{seconds / 3600:.0f} h"
    return f"{seconds / 86400:.0f} days"


def size(num_bytes: int) -> str:
    """A size in decimal units, three digits at least: `734 B`, `12.4 MB`."""
    amount = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.0f} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"


def count(number: int, noun: str) -> str:
    """So many of what `noun` names: `1 step`, `2 steps`."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def plain(text: str) -> str:
    """`text` on one line, everything unprintable spelled out as an escape."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, right: str = "") -> list[str]:
    """Lines of aligned columns; the columns named in `right` (space-separated) align right."""
    cells = [list(header), *([plain(cell) for cell in row] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(header))]
    to_right = [name in right.split() for name in header]
    return [
        "  ".join(
            cell.rjust(width) if flush else cell.ljust(width)
            for cell, width, flush in zip(line, widths, to_right, strict=True)
        ).rstrip()
        for line in cells
    ]


def to_json(value: Any) -> str:
    """`value` as strict JSON; a number that JSON cannot hold (NaN, infinity) becomes null."""
    return json.dumps(finite(value), indent=2, allow_nan=False)


def finite(value: Any) -> Any:
    """`value` with null for each number that JSON cannot hold."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list | tuple) else value
