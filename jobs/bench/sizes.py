"""Sizes as a person writes them on the command line. Pure."""

from __future__ import annotations

import argparse
import re

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?i?)b?", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_bytes(text: str) -> int:
    """A number of bytes: `1000000000`, `1GB`, `1.5g`, `512MiB` (1 GB is 1e9 bytes, 1 GiB is 2**30).

    Raises ArgumentTypeError for anything else, and for what is no whole number of bytes.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is not None:
        unit = found[2].lower()
        base = 1024 if unit.endswith("i") else 1000
        number = float(found[1]) * base ** _POWERS[unit.removesuffix("i")]
        if number >= 1 and number == int(number) and unit != "i":
            return int(number)
    raise argparse.ArgumentTypeError(
        f"expected a whole number of bytes of at least 1, as 1000000000, 1GB or 512MiB; "
        f"found {text!r}"
    )
