"""The stream reader: batches of a source that can only be read from its beginning, found by count.

Every reading of the source gives the same samples, whoever reads: so each rank and each of its
loader processes goes through all of it, keeps its own part and drops the rest. Must not import ray.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import IterableDataset
from torch.utils.data._utils import worker as torch_worker

from elastic.training.passes import Passes
from elastic.training.reader import Collate, Reader, own_random_streams


@dataclass(frozen=True, kw_only=True)
class Span:
    """The positions of one micro-batch, and up to where to read on behind it."""

    start: int
    stop: int
    until: int


class SourceChanged(ValueError):
    """A source without random access gave fewer samples than it did when it was read before."""


def is_stream(source: Any) -> bool:
    """Whether it is to be read from its beginning, having no items by index or no length."""
    if isinstance(source, IterableDataset):
        return True  # which inherits a __getitem__ that raises
    by_index = hasattr(source, "__getitem__") and hasattr(source, "__len__")
    return hasattr(source, "__iter__") and not by_index


class StreamReader(Reader):
    """Reads spans of positions, which grow, into (collated batch, the passes that have ended).

    Position p is the p-th sample of the run. When the source ends its next pass begins, after
    `source.set_epoch(number of the pass)` if it has that. Samples before the first position are
    read and dropped, or left out by `source.skip(count)` if it has that. What is drawn at random
    while a sample is read is a function of (seed, pass, index within the pass).

    Raises ValueError for an iterator, which could be read once only, and for an empty source.
    """

    def __init__(self, source: Iterable[Any], collate: Collate, seed: int) -> None:
        super().__init__(source, collate, seed)  # type: ignore[arg-type]  # has no items by index
        self._source = source
        self._begin = (0, Passes(), True)
        self._iterator: Iterator[Any] = iter(())
        self._forget()
        if iter(source) is source:
            raise ValueError(
                f"a {type(source).__name__} can be read once only, and a run that is resumed reads "
                "it again: give an object whose __iter__ begins anew each time"
            )

    def begin(self, position: int, passes: Passes | None) -> None:
        """Spans from `position` on come next; `passes` are those known to have ended before it.

        None: not known, so that what is read on the way there may hold ends of passes.
        """
        self._begin = (position, passes or Passes(), passes is not None)
        if not (self._is_open and self._position == position and self._passes == passes):
            self._close()

    def first(self) -> Any:
        """A batch of the first sample of a pass, to see what they look like."""
        _, passes, _ = self._begin
        with own_random_streams(), _alone():
            self._open(passes, 0)
            batch = self._collate([self._next()])
        self._close()
        return batch

    def __getitems__(self, span: Span) -> Any:  # type: ignore[override]
        try:
            with own_random_streams(), _alone():
                if not self._is_open:
                    self._go_to_begin()
                self._drop(span.start)
                batch = self._collate([self._next() for _ in range(span.start, span.stop)])
                self._drop(span.until)
        except BaseException:
            self._close()  # a generator that has raised only seems to be at its end
            raise
        return batch, self._passes.runs

    def _go_to_begin(self) -> None:
        position, passes, is_sure = self._begin
        passes = passes.before(position)
        count = position - passes.start
        if not is_sure or not hasattr(self._source, "skip"):
            self._open(passes, 0)
            self._drop(position)
        else:
            self._open(passes, count)
        if is_sure and self._passes != passes:
            raise SourceChanged(
                f"{type(self._source).__name__} ended after {self._passes.runs[-1][0]} samples of "
                f"pass {passes.epoch}, of which {count} were read before: it is not the source "
                "that this run was trained on. Give that one, or begin another run"
            )

    def _drop(self, until: int) -> None:
        while self._position < until:
            self._next()

    def _next(self) -> Any:
        while True:
            self._seed_for((self._passes.epoch, self._index))
            try:
                item = next(self._iterator)
            except StopIteration:
                self._end_pass()
                continue
            self._index += 1
            return item

    def _end_pass(self) -> None:
        if self._index == 0:
            raise ValueError(
                f"{type(self._source).__name__} gave no sample in pass {self._passes.epoch}: "
                "expected one at least, each time that it is iterated"
            )
        self._open(self._passes.ended(self._index), 0)

    def _open(self, passes: Passes, index: int) -> None:
        self._close()
        source = self._source
        if hasattr(source, "set_epoch"):
            source.set_epoch(passes.epoch)
        self._seed_for((passes.epoch, index))
        self._iterator = iter(source.skip(index) if index else source)  # type: ignore[attr-defined]
        self._passes, self._index, self._is_open = passes, index, True

    @property
    def _position(self) -> int:
        return self._passes.start + self._index

    def _close(self) -> None:
        close = getattr(self._iterator, "close", None)
        self._forget()
        if close is not None:
            close()

    def _forget(self) -> None:
        self._iterator = iter(())
        self._passes, self._index, self._is_open = Passes(), 0, False

    def __getstate__(self) -> dict[str, Any]:
        closed = {"_iterator": iter(()), "_passes": Passes(), "_index": 0, "_is_open": False}
        return {**self.__dict__, **closed}


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Hides from the source that it is read in one of several loader processes.

    Many share their samples out among those by themselves, and each is to read all of them.
    """
    told = torch_worker._worker_info
    torch_worker._worker_info = None
    try:
        yield
    finally:
        torch_worker._worker_info = told
