"""Progress: one line on a terminal's standard error that says how far a long reading has come.

Where nobody looks, in a pipe or a log, it says nothing. Must import neither ray nor torch.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from elastic.dashboard.text import size

_EVERY_S = 0.1


@contextmanager
def progress(label: str) -> Iterator[Callable[..., None]]:
    """A function to tell (bytes done, bytes in all), and a label that is to follow this one.

    Not to be called by two threads at once.
    """
    if not sys.stderr.isatty():
        yield lambda done, all, label="": None
        return
    shown_s = 0.0

    def tell(done: int, all: int, label: str = label) -> None:
        nonlocal shown_s
        if time.monotonic() - shown_s >= _EVERY_S:
            shown_s = time.monotonic()
            _show(f"{label}: {size(done)} of {size(all)}")

    try:
        yield tell
    finally:
        _show("")


def _show(text: str) -> None:
    to_end_of_line = "\x1b[K"
    sys.stderr.write(f"\r{text}{to_end_of_line}")
    sys.stderr.flush()
