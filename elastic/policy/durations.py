"""Durations: what a person writes as seconds, and seconds as a person reads them. Pure."""

from __future__ import annotations

import re

_UNITS = {
    "ms": 1e-3,
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1.0),
    **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hour", "hours"), 3600.0),
    **dict.fromkeys(("d", "day", "days"), 86400.0),
}
_NUMBER = r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
_BARE = re.compile(_NUMBER)
_PART = re.compile(rf"\s*({_NUMBER})\s*([a-z]+)\s*")


def parse_duration_s(text: str, *, bare_unit: str | None = None) -> float:
    """Seconds meant by `8h`, `30min`, `1h30min`, `90s`, `2 days`; a bare number is in `bare_unit`.

    Raises:
        ValueError: the text is none of these, or not above 0.
    """
    asked = text.strip().lower()
    if bare_unit is not None and _BARE.fullmatch(asked):
        asked += bare_unit
    seconds = _sum_of_parts(asked)
    if seconds is None:
        bare = f", or a number of {bare_unit}" if bare_unit else ""
        raise ValueError(
            f"cannot read a duration from {text!r}; expected a number with ms, s, min, h or d, "
            f"as in 8h, 30min or 1h30min{bare}"
        )
    if not seconds > 0:
        raise ValueError(f"a duration must be above 0; found {text!r}")
    return seconds


def _sum_of_parts(text: str) -> float | None:
    total, at = 0.0, 0
    while at < len(text):
        part = _PART.match(text, at)
        if part is None or part[2] not in _UNITS:
            return None
        total += float(part[1]) * _UNITS[part[2]]
        at = part.end()
    return total if at else None


def told(seconds: float) -> str:
    """A duration in three digits and the unit that suits it: `383 ms`, `98 s`, `37.9 min`."""
    for limit, unit, name in (
        (1, 1e-3, "ms"),
        (100, 1, "s"),
        (100 * 60, 60, "min"),
        (48 * 3600, 3600, "h"),
    ):
        if seconds < limit:
            return f"{_digits(seconds / unit)} {name}"
    return f"{_digits(seconds / 86400)} days"


def _digits(amount: float) -> str:
    return f"{amount:,.0f}" if amount >= 100 else f"{amount:.3g}"
