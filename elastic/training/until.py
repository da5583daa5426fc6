"""The end of a run's steps: a total of steps, samples or tokens, whichever comes first."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Until:
    """Raises `ValueError` if there is no end at all."""

    steps: int | None
    samples: int | None
    tokens: int | None

    def __post_init__(self) -> None:
        if self.steps is None and self.samples is None and self.tokens is None:
            raise ValueError("run.steps needs an end: until=, until_samples= or until_tokens=")

    def is_reached(self, step: int, samples: int, tokens: int) -> bool:
        """Whether these totals are the end."""
        return (
            (self.steps is not None and step >= self.steps)
            or (self.samples is not None and samples >= self.samples)
            or (self.tokens is not None and tokens >= self.tokens)
        )
