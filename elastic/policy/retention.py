"""Retention: which complete checkpoints a run keeps, a rule over step numbers.

It deletes nothing. Must not import anything that reads a clock, a file or the environment.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Keeps the newest `keep` checkpoints, and for ever each whose step `keep_every` divides.

    Where the run has an archive, the latter are kept here until they are there.

    `keep` is at least 1, or -1 for all; `keep_every` is at least 1, or None for no archive. Raises
    `ValueError` for other values: there is no way to ask for none to be kept.
    """

    keep: int = 3
    keep_every: int | None = None

    def __post_init__(self) -> None:
        if self.keep < 1 and self.keep != -1:
            raise ValueError(
                f"keep must be at least 1, or -1 to keep all checkpoints, found {self.keep}"
            )
        if self.keep_every is not None and self.keep_every < 1:
            raise ValueError(
                f"keep_every must be at least 1 step, or None for no archive, "
                f"found {self.keep_every}"
            )

    def to_remove(
        self,
        complete_steps: Sequence[int],
        protected: Collection[int],
        archived: Collection[int] = (),
    ) -> list[int]:
        """Those of `complete_steps`, in any order, that are neither kept nor protected; ascending.

        Incomplete checkpoints must not be passed: they would count as kept ones. `archived` are
        those that lie, complete, in an archive as well.
        """
        steps = sorted(set(complete_steps))
        newest = steps if self.keep == -1 else steps[-self.keep :]
        kept = set(newest) | set(protected)
        kept |= {step for step in steps if self.archives(step) and step not in archived}
        return [step for step in steps if step not in kept]

    def to_archive(self, complete_steps: Sequence[int], archived: Collection[int]) -> list[int]:
        """Those of `complete_steps` that belong in the archive and are not there; ascending."""
        missing = set(complete_steps) - set(archived)
        return sorted(step for step in missing if self.archives(step))

    def archives(self, step: int) -> bool:
        """Whether that step is kept for ever."""
        return self.keep_every is not None and step % self.keep_every == 0
