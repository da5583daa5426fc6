"""The flag `--json` of benchmarks and soaks: what was found, in a file or on stdout."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

STDOUT = "-"


def add_to(parser: argparse.ArgumentParser) -> None:
    """Its value is the path, `STDOUT`, or None where it was not given."""
    what = "write what was found there; without a path to stdout, and all else to stderr"
    parser.add_argument("--json", nargs="?", const=STDOUT, metavar="PATH", help=what)


def write(found: Mapping[str, Any], where: str | None, say: Callable[[str], object]) -> None:
    """Write it where the flag says; `say` is told of a file."""
    if where is None:
        return
    text = json.dumps(found, indent=2)
    if where == STDOUT:
        print(text, flush=True)
        return
    Path(where).parent.mkdir(parents=True, exist_ok=True)
    Path(where).write_text(text + "\n")
    say(f"written to {where}")
