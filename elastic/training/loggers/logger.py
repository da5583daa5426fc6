"""The interface of a logger: what a run tells it, and in which order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol, runtime_checkable


@runtime_checkable
class Logger(Protocol):
    """Takes the values of a run, in the process of its driver, all calls from one thread.

    It is pickled on its way there: open files and connections on the first call. What it raises
    ends it, with a warning, and never the run; while it is slow, nothing waits for it.
    """

    def rewind(self, step: int) -> None:
        """`step` is the next one that will be logged: forget it and later ones, if there are any.

        Called first of all, also by a new submission, and after each restart.
        """

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """The values of one finished step, summed over ranks, as `step.log` was given them."""

    def annotate(self, step: int, text: str) -> None:
        """Something happened to the run at `step`: a restart with its cause, or its failure."""

    def flush(self) -> None:
        """Make durable what was logged: a checkpoint is about to be committed."""

    def close(self) -> None:
        """The run is over."""


_METHODS = ("rewind", "log", "annotate", "flush", "close")


def check_loggers(loggers: Iterable[object]) -> None:
    """Raises `TypeError` for one that lacks a method of `Logger`, and names it."""
    for one in loggers:
        missing = [name for name in _METHODS if not callable(getattr(one, name, None))]
        if missing or isinstance(one, type):
            raise TypeError(
                f"loggers: {one!r} is no logger: expected an object with the methods "
                f"{', '.join(_METHODS)}, "
                + (
                    f"found none called {', '.join(missing)}"
                    if missing
                    else "found a class: call it"
                )
            )
