"""The tail of a run's logs: what its ranks have written, line by line, read on as it grows.

Between ranks the order is that of reading, since a line does not say when it was written. Reads
storage, changes nothing. Must import neither ray nor torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from elastic.storage.filesystem import Filesystem
from elastic.storage.log_lines import LineSplitter
from elastic.storage.rank_logs import WrittenLog, logged_generations, logged_ranks

_PIECE_BYTES = 256 * 1024


@dataclass(frozen=True)
class Line:
    """One line that a rank wrote, as it wrote it."""

    generation: int
    world_rank: int
    raw: bytes


class Tail:
    """The logs of one generation, or of the newest and all that come after it.

    `num_lines` is how far back each log that is there already is begun; None is at its start.
    """

    def __init__(
        self,
        fs: Filesystem,
        *,
        generation: int | None = None,
        world_rank: int | None = None,
        num_lines: int | None = None,
    ) -> None:
        self._fs = fs
        self._generation = generation
        self._world_rank = world_rank
        self._growing: dict[tuple[int, int], _Growing] = {}
        self._first = generation if generation is not None else max(self._logged(), default=0)
        self._open_new(num_lines)

    def read(self, *, to_end: bool = False) -> Iterator[Line]:
        """What has come since the last time, rank by rank.

        `to_end` says that no more will come: a line that was begun is one then.
        """
        self._open_new(None)
        newest = max((generation for generation, _ in self._growing), default=-1)
        for (generation, rank), growing in list(self._growing.items()):
            before = growing.position
            for raw in growing.new_lines():
                yield Line(generation, rank, raw)
            if to_end or (generation < newest and growing.position == before):
                growing.is_closed = True
                for raw in growing.splitter.rest():
                    yield Line(generation, rank, raw)

    def is_superseded(self) -> bool:
        """Whether the generation that was asked for has been followed by another."""
        return self._generation is not None and max(self._logged(), default=0) > self._generation

    def _open_new(self, num_lines: int | None) -> None:
        for generation in self._logged():
            if generation < self._first or self._generation not in (None, generation):
                continue
            for rank in logged_ranks(self._fs, generation):
                is_wanted = self._world_rank in (None, rank)
                if is_wanted and (generation, rank) not in self._growing:
                    log = WrittenLog(self._fs, generation, rank)
                    start = 0 if num_lines is None else log.start_of_last(num_lines)
                    self._growing[generation, rank] = _Growing(log, start)
            # No rank begins in a generation that another has followed.
            self._first = generation

    def _logged(self) -> list[int]:
        return logged_generations(self._fs)


class _Growing:
    """One log, and how far it was read."""

    def __init__(self, log: WrittenLog, position: int) -> None:
        self.splitter = LineSplitter()
        self.is_closed = False
        self.position = position
        self._log = log

    def new_lines(self) -> Iterator[bytes]:
        end = self.position if self.is_closed else self._log.size()
        while self.position < end:
            piece = self._log.read(self.position, min(_PIECE_BYTES, end - self.position))
            if not piece:
                return
            self.position += len(piece)
            yield from self.splitter.feed(piece)
