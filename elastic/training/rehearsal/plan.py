"""The plan of a rehearsal: what is run, for how long, on how many ranks. Must not import torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

LEAST_STEPS = 4


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to rehearse and how. The kill comes when half of the steps are done and saved."""

    target: str
    """`FILE.py` or a dotted module, and `:FUNCTION` if it is not the default."""
    arguments: Sequence[str] = ()
    """For the module's own `rehearsal(argv)`."""
    steps: int = 200
    workers: int = 2
    other_workers: int = 3
    """The other world size; 0 tries none."""
    seed: int = 0
    metric: str = "loss"
    tolerance: float | None = None
    """Relative difference allowed at the other size; None goes by the model's dtype."""
    limit_s: float = 600.0
    """For everything together."""

    def __post_init__(self) -> None:
        if self.steps < LEAST_STEPS:
            raise ValueError(f"a rehearsal takes at least {LEAST_STEPS} steps; found {self.steps}")
        if self.workers < 1 or self.other_workers < 0:
            raise ValueError(
                "a rehearsal needs 1 worker or more, and 0 or more at the other size; "
                f"found {self.workers} and {self.other_workers}"
            )
        if self.workers == self.other_workers:
            raise ValueError(
                f"the other size must be another one; found {self.workers} for both. "
                "Give --other-workers 0 to try none"
            )
        if not self.limit_s > 0 or (self.tolerance is not None and not self.tolerance > 0):
            raise ValueError(
                "the limit and the tolerance must be above 0; "
                f"found {self.limit_s} and {self.tolerance}"
            )

    @property
    def half(self) -> int:
        """The step after which every rank is killed; its state is saved."""
        return self.steps // 2

    @property
    def save_every(self) -> int:
        """Steps between saves, such that the state of `half` is saved."""
        return self.half if self.half % 2 else self.half // 2

    def to_json(self) -> str:
        """One line, for another process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """What `to_json` gave."""
        tree: dict[str, Any] = json.loads(text)
        return cls(**tree)
