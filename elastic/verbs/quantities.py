"""What options of the verbs are measured in: numbers of parameters, bandwidths, durations.

Each turns a person's text into a number, or into one sentence and exit code 2.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import click

from elastic.dashboard.text import plain
from elastic.policy.durations import parse_duration_s

_GB = 1e9
_COUNT = re.compile(r"([0-9]+(?:\.[0-9]*)?(?:e[+]?[0-9]{1,2})?)([kmbt]?)")
_COUNT_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


def count(text: str) -> int:
    """A whole number of parameters: `70e9`, `70B`, `350M`, `70_000_000_000`."""
    found = _COUNT.fullmatch(re.sub("[_,]", "", text).strip().lower())
    number = float(found[1]) * _COUNT_UNITS[found[2]] if found else 0.0
    if not 1 <= number < 1e18 or number != int(number):
        raise click.BadParameter(
            f"{plain(repr(text))} is not a number of parameters; expected a whole number of at "
            "least 1, as in 70e9, 70B or 350M"
        )
    return int(number)


def bandwidth(text: str) -> float:
    """Bytes per second, from a number of GB/s (1e9 bytes per second) above 0."""
    try:
        number = float(text.strip().lower().removesuffix("gb/s"))
    except ValueError:
        number = math.nan
    if not 1e-6 <= number <= 1e6:
        raise click.BadParameter(
            f"{plain(repr(text))} is not a bandwidth; expected GB/s (1e9 bytes per second) above "
            "0, as in 10 or 2.5"
        )
    return number * _GB


def duration(bare_unit: str) -> Callable[[str], float]:
    """A reader of times such as `8h`, `30min` or `90s`; a bare number is in `bare_unit`."""

    def duration_s(text: str) -> float:
        try:
            return parse_duration_s(text, bare_unit=bare_unit)
        except ValueError as error:
            raise click.BadParameter(plain(str(error))) from error

    return duration_s
