"""A scheduler's failure history: the times at which something failed, read from a CSV file.

Any table with one failure a line will do, as schedulers print it: columns separated by comma,
semicolon, tab or `|`, with or without a header, times as ISO 8601 or as seconds since 1970.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

TIME_COLUMNS = (
    "failed_at",
    "failure_time",
    "time",
    "timestamp",
    "datetime",
    "date",
    "end",
    "ended_at",
    "end_time",
)
"""Names of the column that holds the time, the likelier first; case does not matter."""

_DELIMITERS = ",;\t|"
# A count, a node number or milliseconds must not pass for a time: 1973 to 2099.
_EARLIEST_S, _LATEST_S = 1e8, 4.1e9

Line = tuple[int, list[str]]


def read_failure_times(path: Path) -> list[float]:
    """Seconds since 1970 of every failure in the file, in its order. A time without a zone is UTC.

    Empty lines and lines that begin with # are left out.

    Raises:
        ValueError: no times, no column of times, or a line whose time cannot be read, by number.
        OSError: the file cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8: {error}. Expected a CSV file") from error
    lines = list(_lines(text))
    if not lines:
        raise ValueError(f"{path} holds no lines; expected one failure a line")
    column, failures = _time_column(path, lines)
    if not failures:
        raise ValueError(f"{path} holds a header and no failures; expected one failure a line")
    return [_time_on(path, line, column) for line in failures]


def _lines(text: str) -> Iterator[Line]:
    rows = text.splitlines()
    first = next((row for row in rows if _counts(row)), "")
    delimiter = max(_DELIMITERS, key=first.count)
    for number, row in enumerate(rows, start=1):
        if _counts(row):
            yield number, [cell.strip() for cell in next(csv.reader([row], delimiter=delimiter))]


def _counts(row: str) -> bool:
    return bool(row.strip()) and not row.lstrip().startswith("#")


def _time_column(path: Path, lines: Sequence[Line]) -> tuple[int, Sequence[Line]]:
    """Which column holds the times, and the lines below the header if there is one."""
    head = lines[0][1]
    in_first = _columns_of_times(head)
    if len(in_first) == 1:
        return in_first[0], lines
    if in_first:
        raise ValueError(
            f"{path} has {len(in_first)} columns of times in its first line, {', '.join(head)}; "
            f"expected one, or a header that names one of them {TIME_COLUMNS[0]}"
        )
    names = [cell.lower().replace(" ", "_") for cell in head]
    for name in TIME_COLUMNS:
        if name in names:
            return names.index(name), lines[1:]
    below = _columns_of_times(lines[1][1]) if len(lines) > 1 else []
    if len(below) == 1:
        return below[0], lines[1:]
    raise ValueError(
        f"{path} has no column that is known to hold times: found {', '.join(head)}; expected one "
        f"named {', '.join(TIME_COLUMNS[:4])} or the like, or a column of ISO 8601 times or of "
        "seconds since 1970"
    )


def _columns_of_times(cells: Sequence[str]) -> list[int]:
    return [i for i, cell in enumerate(cells) if _time_s(cell) is not None]


def _time_on(path: Path, line: Line, column: int) -> float:
    number, cells = line
    found = cells[column] if column < len(cells) else ""
    time_s = _time_s(found)
    if time_s is None:
        raise ValueError(
            f"{path}, line {number}: cannot read a time from {found!r}; expected ISO 8601, as in "
            "2026-11-29T16:40:00Z, or seconds since 1970"
        )
    return time_s


def _time_s(text: str) -> float | None:
    try:
        seconds = float(text)
    except ValueError:
        return _iso_s(text)
    return seconds if math.isfinite(seconds) and _EARLIEST_S <= seconds <= _LATEST_S else None


def _iso_s(text: str) -> float | None:
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        return None
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
