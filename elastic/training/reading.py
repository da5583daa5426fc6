"""Reading: how the positions of a run are found in a source, by index or by count.

Knows which samples lie at a position, hands their keys to a reader, and says what of that a
checkpoint must hold. Must not import ray.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from elastic.training.order_choice import choose, facts
from elastic.training.passes import Passes
from elastic.training.reader import Collate, Key, MapDataset, Reader
from elastic.training.stream_reader import Span, StreamReader

_SAMPLES_AT_ONCE = 2048
_MOST_AHEAD = 8192  # samples; a list of keys is kept of them

Spans = Sequence[tuple[int, int]]


class Reading(Protocol):
    """What a loader asks of a source."""

    @property
    def reader(self) -> Any:
        """Reads what `keys` yields; picklable where source and collate function are."""

    def begin(self, position: int) -> None:
        """Keys from `position` on come next."""

    def keys(self, position: int, spans: Spans, until: int) -> Iterator[Any]:
        """A key for each span that is not empty; `position` and `until` are those of the step."""

    def ahead(self, keys: Iterator[Any], share: float) -> Iterator[Any]:
        """The same keys; what they will ask for is begun to be read, in this process.

        `share` of the samples is read with them.
        """

    def first(self) -> Any:
        """A batch of one sample, to see what batches look like."""

    def taken(self, read: Any) -> Any:
        """The batch in what the reader gave."""

    def epoch(self, position: int) -> int:
        """The epoch of the sample at `position`, which is the next one."""

    def state(self) -> dict[str, Any]:
        """What, beside the position, tells where the run stands in the source: plain values."""

    def facts(self, position: int) -> dict[str, Any]:
        """What tells which samples lie at which position, as known at this one: plain values."""

    @property
    def place(self) -> int:
        """A number that is the same on all ranks if their sources give the same samples."""


class ByIndex:
    """A map-style dataset: its order is computed where it is read, so only which one it is is kept.

    For `window`, `began` and `name` see `choose`, whose errors are raised.
    """

    place = 0

    def __init__(
        self,
        dataset: MapDataset,
        collate: Collate,
        seed: int,
        shuffle: bool,
        window: int | None,
        began: Mapping[str, Any] | None,
        name: str,
    ) -> None:
        self.num_samples = len(dataset)
        self.reader = Reader(dataset, collate, seed)
        self._stream = choose(
            dataset, seed=seed, shuffle=shuffle, window=window, began=began, name=name
        )
        self._order = facts(self._stream, dataset)
        self._ahead: tuple[int, list[Key]] = (0, [])

    def begin(self, position: int) -> None:
        """Nothing to do."""

    def keys(self, position: int, spans: Spans, until: int) -> Iterator[Any]:
        """Lists of (epoch, index)."""
        begin, keys = self._ahead
        if not begin <= position <= until <= begin + len(keys):
            begin, keys = self._ahead = position, self._worked_out(position, until - position)
        for start, stop in spans:
            if start < stop:
                yield keys[position - begin + start : position - begin + stop]

    def _worked_out(self, position: int, global_batch: int) -> list[Key]:
        """Those of many steps, since for a few samples it takes as long as for a thousand."""
        num_samples = min(_SAMPLES_AT_ONCE, self.num_samples)
        num_steps = max(1, num_samples // global_batch)
        return self._stream.indices(position, num_steps * global_batch)

    def ahead(self, keys: Iterator[Any], share: float) -> Iterator[Any]:
        """The dataset is told of them, as far ahead as it can keep what it reads."""
        window = self._stream.window
        num_samples = _MOST_AHEAD if window is None else min(window.samples_ahead, _MOST_AHEAD)
        return self.reader.ahead(keys, max(1, int(num_samples * share)))

    def first(self) -> Any:
        """Of the sample 0."""
        return self.reader.__getitems__([(0, 0)])

    def taken(self, read: Any) -> Any:
        """All of it."""
        return read

    def epoch(self, position: int) -> int:
        """Exact."""
        return position // self.num_samples

    def state(self) -> dict[str, Any]:
        """Which order it is, so that none goes on in another one than it began with."""
        return {"order": self._order}

    def facts(self, position: int) -> dict[str, Any]:
        """Those of the order."""
        return {"read": "by index", **self._stream.facts()}


class ByCount:
    """A source without random access, whose passes end where they do."""

    def __init__(
        self, source: Iterable[Any], collate: Collate, seed: int, state: Mapping[str, Any]
    ) -> None:
        """`state` as of where keys will begin; {} where it is not known."""
        self.reader = StreamReader(source, collate, seed)
        self._is_sure = "passes" in state
        self._passes = Passes.of(state.get("passes", ()))

    def begin(self, position: int) -> None:
        """Reads on from there, or again from the beginning of the pass."""
        self.reader.begin(position, self._passes if self._is_sure else None)

    def keys(self, position: int, spans: Spans, until: int) -> Iterator[Any]:
        """Spans; the last one goes on to the end of the step, so that all ranks know the same."""
        real = [(begin, end) for begin, end in spans if begin < end]
        for begin, end in real:
            read_to = until if (begin, end) == real[-1] else position + end
            yield Span(start=position + begin, stop=position + end, until=read_to)

    def ahead(self, keys: Iterator[Any], share: float) -> Iterator[Any]:
        """Nothing is read ahead."""
        return keys

    def first(self) -> Any:
        """Of the first sample of the pass."""
        return self.reader.first()

    def taken(self, read: Any) -> Any:
        """The batch; the passes that had ended are noted."""
        batch, runs = read
        self._passes, self._is_sure = Passes.of(runs), True
        return batch

    def epoch(self, position: int) -> int:
        """At the very end of a pass still that one, since nobody knows yet that it is over."""
        return self._passes.epoch

    def state(self) -> dict[str, Any]:
        """The lengths of the passes, without which no position could be found again."""
        return {"passes": [list(run) for run in self._passes.runs]}

    def facts(self, position: int) -> dict[str, Any]:
        """The passes as far as they are known."""
        return {"read": "by count", **self._passes.facts(position)}

    @property
    def place(self) -> int:
        """Where the pass has begun that is read now."""
        return self._passes.start
