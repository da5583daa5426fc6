"""The data history: which samples each step of a run has used, worked out from the ledger.

The ledger says from where on each generation read its data, and how; the rest is computed by the
very functions that the ranks have used. Must import neither ray nor torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from elastic.storage.ledger import LedgerEvent
from elastic.training.order import micro_batches, stream_of
from elastic.training.passes import foretold

Indices = npt.NDArray[np.int64]
Sample = tuple[int, int]
"""(epoch, index): of a dataset by index, or by count within the pass over a source."""

_BEGINS = frozenset({"started", "resumed", "data_read"})
# Words whose step this generation has finished, or began with.
_REACHED = _BEGINS | {
    *("progress", "checkpoint_committed", "recovered"),
    *("run_finished", "run_stopped"),
}


class NotRecorded(ValueError):
    """The ledger does not tell what was asked of the data."""


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Steps of one generation that read one source in one way."""

    generation: int
    first_step: int
    facts: Mapping[str, Any]
    """See `elastic.training.data.GlobalLoader.facts`."""

    @property
    def global_batch(self) -> int:
        return int(self.facts["global_batch"])

    @property
    def world_size(self) -> int:
        """All ranks of the generation."""
        return self.num_parts * self.tensor

    @property
    def num_parts(self) -> int:
        """Parts of a global batch, each of which one rank or one tensor-parallel group reads."""
        return int(self.facts["world_size"])

    @property
    def tensor(self) -> int:
        """Ranks of a tensor-parallel group, which read the same."""
        return int(self.facts.get("tensor", 1))

    @property
    def loader(self) -> str:
        """The name of the loader whose steps these are."""
        return str(self.facts.get("loader", "data"))

    @property
    def other_loaders(self) -> list[str]:
        """Those that the run had beside it, of which nothing is known here."""
        return [str(name) for name in self.facts.get("other_loaders", [])]

    def position(self, step: int) -> int:
        """The position of the first sample of a step."""
        before = step - self.first_step
        return int(self.facts["samples_done"]) + before * self.global_batch

    def samples(self, step: int) -> list[Sample]:
        """What the step used, over all ranks, in order of rank."""
        epochs, indices = self.at(self.position(step), self.global_batch)
        return list(zip(epochs.tolist(), indices.tolist(), strict=True))

    def at(self, position: int, count: int) -> tuple[Indices, Indices]:
        """Epoch and index of the samples at these positions."""
        if self.facts["read"] == "by index":
            pieces = list(stream_of(self.facts).pieces(position, count))
        else:
            passes = foretold(self.facts, position + count)
            pieces = [
                (epoch, np.arange(begin, end))
                for epoch, begin, end in passes.pieces(position, count)
            ]
        epochs = [np.full(len(indices), epoch) for epoch, indices in pieces]
        return np.concatenate(epochs), np.concatenate([indices for _, indices in pieces])

    def split(self, step: int) -> list[list[list[Sample]]]:
        """The same by rank and micro-batch; those that are padding are left out."""
        samples = self.samples(step)
        micro_batch = int(self.facts["micro_batch"])
        spans = (
            micro_batches(self.global_batch, micro_batch, self.num_parts, rank // self.tensor)
            for rank in range(self.world_size)
        )
        return [[samples[begin:end] for begin, end in of_rank if begin < end] for of_rank in spans]

    def way(self, step: int) -> dict[str, Any]:
        """All that decides what the steps from this one on use: equal ways, equal samples."""
        passed_over = {"micro_batch", "world_size", "tensor", "dataset"}
        passed_over |= {"loader", "other_loaders", "accepted"}
        told = {key: value for key, value in self.facts.items() if key not in passed_over}
        if not told.get("shuffle", True):
            del told["seed"]
        return {**told, "samples_done": self.position(step)}


@dataclass(frozen=True, kw_only=True)
class StepUse:
    """What one generation used in a step."""

    stretch: Stretch
    step: int
    is_done: bool
    """The ledger tells that this generation has finished the step."""
    counts: bool
    """No newer generation has begun before the step."""


class DataHistory:
    """Which generation's steps count, and what those used.

    A generation that begins behind step s replaces all steps after s of those before it.
    """

    def __init__(self, events: Iterable[LedgerEvent]) -> None:
        self._stretches: list[Stretch] = []
        self._begun: dict[int, int] = {}
        self._reached: dict[int, int] = {}
        self._stale: dict[int, int] = {}
        self._finished: int | None = None
        for event in events:
            self._add(event)

    def _add(self, event: LedgerEvent) -> None:
        generation = event.generation
        if event.kind == "run_finished":
            self._finished = event.step
        elif event.kind in _BEGINS:
            self._finished = None
        if generation < 0 or event.kind not in _REACHED:
            return
        if event.kind in _BEGINS:
            self._begun.setdefault(generation, event.step)
            self._stale.setdefault(generation, max(self._reached.values(), default=-1))
        elif event.kind == "progress" and event.step == self._stale.get(generation):
            return  # a driver goes on telling how far the group before had come
        else:
            self._stale[generation] = -1
        self._reached[generation] = max(event.step, self._reached.get(generation, -1))
        if event.kind == "data_read" and "read" in event.data:
            first = event.step + 1
            self._stretches.append(
                Stretch(generation=generation, first_step=first, facts=event.data)
            )

    @property
    def last_step(self) -> int:
        """The last step that is told to be finished, of those that count; 0 without."""
        newest = max(self._begun, default=None)
        return 0 if newest is None else max(0, self._reached[newest])

    @property
    def loaders(self) -> list[str]:
        """Those whose steps are told, by name."""
        return sorted({stretch.loader for stretch in self._stretches})

    @property
    def untold_loaders(self) -> list[str]:
        """Those of which no more is known than that the run has them."""
        found = {name for stretch in self._stretches for name in stretch.other_loaders}
        return sorted(found - {*self.loaders})

    def uses(self, step: int) -> list[StepUse]:
        """What generations have used in this step, or were at when they ended; oldest first."""
        found: dict[int, Stretch] = {}
        for stretch in self._stretches:
            if stretch.first_step <= step <= self._reached[stretch.generation] + 1:
                found[stretch.generation] = stretch
        return [self._use(stretch, step) for _, stretch in sorted(found.items())]

    def use(self, step: int, loader: str | None = None) -> StepUse:
        """What counts for this step: what it used, or will use as things stand.

        What a newest generation has not told yet is taken from the one before. Raises NotRecorded,
        also where the step is not one of `loader`.
        """
        if self._finished is not None and step > self._finished:
            raise NotRecorded(f"the run has finished at step {self._finished}: no step {step}")
        found = self._found(step)
        self.check_loader(loader)
        if loader not in (None, found.stretch.loader):
            raise NotRecorded(
                f"step {step} is one of loader {found.stretch.loader!r}, not of {loader!r}"
            )
        return found

    def check_loader(self, loader: str | None) -> None:
        """Raises NotRecorded for one of which nothing is told; None stands for any."""
        if loader is None or loader in self.loaders:
            return
        known = ", ".join(map(repr, self.loaders)) or "none"
        there = (
            f"of loader {loader!r} only that there is one: run.steps was not given it, so that "
            "none of its samples belong to a step"
            if loader in self.untold_loaders
            else f"nothing of a loader {loader!r}"
        )
        raise NotRecorded(f"its ledger tells {there}. It tells what was read of: {known}")

    def _found(self, step: int) -> StepUse:
        for first, last, stretch in reversed(self._current()):
            if first <= step <= last:
                return self._use(stretch, step)
        for use in reversed(self.uses(step)):
            return use
        raise NotRecorded(self._why_not(step))

    def _use(self, stretch: Stretch, step: int) -> StepUse:
        generation = stretch.generation
        newer = (begun for number, begun in self._begun.items() if number > generation)
        return StepUse(
            stretch=stretch,
            step=step,
            is_done=step <= self._reached[generation],
            counts=all(step <= begun for begun in newer),
        )

    def stretches(self, loader: str | None = None) -> list[tuple[int, int, Stretch]]:
        """(first step, last step, stretch) of all finished steps that count and are recorded.

        With `loader` those of this one alone.
        """
        found = [
            (first, min(last, self._reached[stretch.generation]), stretch)
            for first, last, stretch in self._current()
            if loader in (None, stretch.loader)
        ]
        return [one for one in found if one[0] <= one[1]]

    def _current(self) -> list[tuple[int, int, Stretch]]:
        """As `stretches`, and the last one without end."""
        found: list[tuple[int, int, Stretch]] = []
        limit = 1 << 62
        for generation in sorted(self._begun, reverse=True):
            last = limit
            for stretch in self._of(generation):
                if stretch.first_step <= last:
                    found.append((stretch.first_step, last, stretch))
                    last = stretch.first_step - 1
            limit = min(limit, self._begun[generation])
        return found[::-1]

    def _of(self, generation: int) -> Sequence[Stretch]:
        """Newest first."""
        return [one for one in reversed(self._stretches) if one.generation == generation]

    def _why_not(self, step: int) -> str:
        if not self._stretches:
            return (
                "its ledger tells nothing of its data: it has not read any yet, or was trained "
                "without run.loader or by an older version of this program"
            )
        first = min(stretch.first_step for stretch in self._stretches)
        return f"its ledger tells of the data of step {first} and later ones, not of step {step}"
