"""Reading: how the positions of a run are found in a source, by index or by count.

Knows which samples lie at a position, hands their keys to a reader, and says what of that a
checkpoint must hold. Must not import ray.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from elastic.training.order import SampleStream
from elastic.training.passes import Passes
from elastic.training.reader import Collate, MapDataset, Reader
from elastic.training.stream_reader import Span, StreamReader

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
    """A map-style dataset: its order is computed where it is read, so nothing need be kept."""

    place = 0

    def __init__(self, dataset: MapDataset, collate: Collate, seed: int, shuffle: bool) -> None:
        self.num_samples = len(dataset)
        self.reader = Reader(dataset, collate, seed)
        self._stream = SampleStream(num_samples=self.num_samples, seed=seed, shuffle=shuffle)

    def begin(self, position: int) -> None:
        """Nothing to do."""

    def keys(self, position: int, spans: Spans, until: int) -> Iterator[Any]:
        """Lists of (epoch, index)."""
        start, stop = spans[0][0], spans[-1][1]
        keys = self._stream.indices(position + start, stop - start)
        for begin, end in spans:
            if begin < end:
                yield keys[begin - start : end - start]

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
        """Nothing."""
        return {}

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
