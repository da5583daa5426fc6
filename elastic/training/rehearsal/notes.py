"""Notes of one rank on its rehearsal: a line of JSON for each observation, readable after SIGKILL.

Must not import torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from elastic.training.rehearsal.holding import Holding


@dataclass(kw_only=True)
class StepSeen:
    """What one rank saw of one step. Digests tell equal from different, and no more."""

    random_streams: dict[str, str] = field(default_factory=dict)
    """By stream, at the start of the step."""
    batches: list[str] | None = None
    """Of the micro-batches that `run.loader` gave; None in a loop of the user's own."""
    rates: dict[str, float] = field(default_factory=dict)
    """Learning rates and whatever else optimizers hold by the group, at the start of the step."""
    inputs: list[str] = field(default_factory=list)
    """Of what the tracked modules were called with, call by call."""
    num_rows: int = 0
    """Rows of those inputs in all."""


@dataclass(kw_only=True)
class Trace:
    """All that one rank noted in one phase."""

    steps: dict[int, StepSeen] = field(default_factory=dict)
    holdings: dict[int, list[Holding]] = field(default_factory=dict)
    """By the step at whose start they were looked at."""
    tracked: dict[int, dict[str, str]] = field(default_factory=dict)
    """Digests of what is tracked, tensor by tensor, likewise."""
    tracked_names: list[str] = field(default_factory=list)
    dtype: str = ""
    """The narrowest floating-point dtype of the tracked modules' parameters."""


class Notebook:
    """Where a rank writes them."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", encoding="utf-8")

    def write(self, kind: str, step: int, data: Any) -> None:
        """One observation; with the operating system when this returns."""
        self._file.write(json.dumps([kind, step, data]) + "\n")
        self._file.flush()


def as_data(holdings: list[Holding]) -> list[dict[str, str]]:
    """For `Notebook.write`."""
    return [asdict(holding) for holding in holdings]


def read(path: Path) -> Trace:
    """The notes in this file; a line that the kill has cut off is none."""
    trace = Trace()
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n"):
            _take(trace, *json.loads(line))
    return trace


def _take(trace: Trace, kind: str, step: int, data: Any) -> None:
    if kind == "holdings":
        trace.holdings[step] = [Holding(**each) for each in data]
    elif kind == "tracked":
        trace.tracked[step] = data
    elif kind == "built":
        trace.tracked_names, trace.dtype = data["tracked"], data["dtype"]
    else:
        _set(trace.steps.setdefault(step, StepSeen()), data)


def _set(seen: StepSeen, data: Mapping[str, Any]) -> None:
    for name, value in data.items():
        setattr(seen, name, value)
