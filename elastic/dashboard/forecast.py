"""The forecast of `elastic plan` as a person reads it, and as JSON. Pure: text from values."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from elastic.dashboard.text import size as sized
from elastic.dashboard.text import table
from elastic.policy.durations import told
from elastic.policy.forecast import Forecast, Machine, SavePlan
from elastic.policy.intervals import FORMULA, OVERHEAD_FORMULA, SOURCE
from elastic.policy.sizes import CheckpointSize

GB = 1e9


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What was asked and what came out: all that the two views below show."""

    num_params: int
    dtype: str
    optimizer: str
    num_gpus: int
    size: CheckpointSize
    machine: Machine
    mtbf_source: str
    forecasts: tuple[Forecast, ...]
    """By rising number of GPUs; one of them is of `num_gpus`."""
    given: frozenset[str]
    """Names of the options that were given; the other values are defaults."""

    def asked(self) -> Forecast:
        return next(one for one in self.forecasts if one.num_gpus == self.num_gpus)


def plan_text(plan: Plan) -> str:
    """Sizes, stalls, intervals, assumptions and formulas, a table each."""
    parts = [
        _title(plan),
        table(["CHECKPOINT", "DTYPE", "PER RANK", "IN ALL"], _sizes(plan), right="PER IN"),
    ]
    sections = [
        [_title(plan)],
        _right(["CHECKPOINT", "DTYPE", "PER RANK", "IN ALL"], _sizes(plan), "PER RANK,IN ALL"),
        _one_save(plan),
        _intervals(plan),
        _notes(plan),
        _assumptions(plan),
        _formulas(plan),
    ]
    del parts
    return "\n\n".join("\n".join(lines) for lines in sections if lines)
