"""Passes over a source without random access: how long each one was, as far as they are over.

Nobody knows how long a pass is before it has ended, and one may be longer than the one before. What
is known of them is part of a position: without it, whoever resumes in the second pass would have to
read through the first. Must import neither torch nor ray.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Passes:
    """The passes that have ended, as (samples in each, how many such in a row)."""

    runs: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, runs: Sequence[Sequence[int]]) -> Passes:
        """From `runs` as JSON holds them. Raises ValueError for what cannot be such."""
        made = tuple((int(length), int(times)) for length, times in runs)
        if any(length < 1 or times < 1 for length, times in made):
            raise ValueError(f"expected pairs of a length and a number of passes, found {made}")
        return cls(made)

    @property
    def epoch(self) -> int:
        """The number of the pass that has not ended, from 0."""
        return sum(times for _, times in self.runs)

    @property
    def start(self) -> int:
        """The position at which that pass began."""
        return sum(length * times for length, times in self.runs)

    def ended(self, length: int) -> Passes:
        """With one more pass, of `length` samples."""
        if self.runs and self.runs[-1][0] == length:
            return Passes((*self.runs[:-1], (length, self.runs[-1][1] + 1)))
        return Passes((*self.runs, (length, 1)))

    def before(self, position: int) -> Passes:
        """Those that have ended at `position` or before."""
        kept: list[tuple[int, int]] = []
        start = 0
        for length, times in self.runs:
            fitting = min(times, (position - start) // length)
            if fitting > 0:
                kept.append((length, fitting))
            if fitting < times:
                break
            start += length * times
        return Passes(tuple(kept))

    def pieces(self, start: int, count: int) -> Iterator[tuple[int, int, int]]:
        """(epoch, first index, end index) of each pass that these positions touch.

        Positions beyond the passes that have ended are all in the one that follows them.
        """
        stop = start + count
        while start < stop:
            ended = self.before(start)
            begin, until = start - ended.start, ended.start + self._length(ended.epoch, stop)
            end = min(stop, until) - ended.start
            yield ended.epoch, begin, end
            start += end - begin

    def _length(self, epoch: int, unknown: int) -> int:
        for length, times in self.runs:
            if epoch < times:
                return length
            epoch -= times
        return unknown

    def repeated(self, until: int) -> Passes:
        """With further passes like the last one, as many as end at position `until` or before."""
        if not self.runs or until <= self.start:
            return self
        length, times = self.runs[-1]
        return Passes((*self.runs[:-1], (length, times + (until - self.start) // length)))

    def facts(self, position: int) -> dict[str, Any]:
        """Plain values that tell of these passes, all that have ended before `position`.

        Told once they foretell the next ones, which are as long as the last: unless the one that is
        read now is longer already (`is_longer`).
        """
        is_longer = self.repeated(position - 1) != self
        return {"passes": [list(run) for run in self.runs], "is_longer": is_longer}


def foretold(facts: Mapping[str, Any], position: int) -> Passes:
    """The passes that have ended before `position` by what `facts` tell. Raises KeyError."""
    told = Passes.of(facts["passes"])
    return told if facts["is_longer"] else told.repeated(position - 1)


def is_foretold(told: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether the facts `told` foretell those of `now`, at the position "samples_done"."""
    found = Passes.of(now["passes"])
    return foretold(told, int(now["samples_done"])) == found
