"""Rank logs: what the ranks of each generation wrote, as it lies in the run directory.

`logs/g<generation>/rank<rank>.log` is a file that grows. On an object store, where nothing can
grow, it is a prefix of segments, each named by the offset of its first byte, of which the last is
replaced by a longer one until it is full. Must not import ray or torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from elastic.storage import log_lines
from elastic.storage.filesystem import Filesystem

LOGS = "logs"
_GENERATION = re.compile(r"g(0|[1-9]\d*)")
_RANK = re.compile(r"rank(0|[1-9]\d*)\.log")
_SEGMENT = re.compile(r"\d{15}")
_PIECE_BYTES = 64 * 1024


def log_path(generation: int, world_rank: int) -> str:
    """Where the output of one rank lies, relative to the run directory."""
    return f"{LOGS}/g{generation}/rank{world_rank}.log"


def segment_path(generation: int, world_rank: int, start: int) -> str:
    """On an object store, the segment of that output whose first byte has this offset."""
    return f"{log_path(generation, world_rank)}/{start:015d}"


def logged_generations(fs: Filesystem) -> list[int]:
    """The generations that have written something, ascending."""
    found = (_GENERATION.fullmatch(entry.name) for entry in fs.list(LOGS) if entry.is_dir)
    return sorted(int(match[1]) for match in found if match)


def logged_ranks(fs: Filesystem, generation: int) -> list[int]:
    """The world ranks whose output there is of this generation, ascending."""
    found = (_RANK.fullmatch(entry.name) for entry in fs.list(f"{LOGS}/g{generation}"))
    return sorted(int(match[1]) for match in found if match)


@dataclass(frozen=True)
class _Segment:
    start: int
    end: int
    path: str


class WrittenLog:
    """One rank's output in one generation, to be read while it grows. Offsets are in bytes."""

    def __init__(self, fs: Filesystem, generation: int, world_rank: int) -> None:
        self.generation = generation
        self.world_rank = world_rank
        self._fs = fs
        self._path = log_path(generation, world_rank)

    def size(self) -> int:
        """How much there is so far; 0 when there is no such log."""
        return max((segment.end for segment in self._segments()), default=0)

    def read(self, start: int, most_bytes: int) -> bytes:
        """What is there from `start` on, not always as much as asked for; empty at the end."""
        for segment in self._segments():
            if segment.start <= start < segment.end:
                with self._fs.open_input(segment.path) as file:
                    file.seek(start - segment.start)
                    return file.read(min(most_bytes, segment.end - start))
        return b""

    def start_of_last(self, num_lines: int) -> int:
        """The offset at which the last so many lines begin."""
        start, wanted = self.size(), num_lines
        if wanted == 0:
            return start
        for begin, piece in self._backwards(start):
            end = len(piece)
            # The line end at the very end of the log ends the last line and begins none.
            if begin + end == start and piece.endswith(b"\n"):
                end -= 1
            while (found := piece.rfind(b"\n", 0, end)) >= 0:
                wanted -= 1
                if wanted == 0:
                    return begin + found + 1
                end = found
        return 0

    def last_lines(self) -> list[str]:
        """Its last lines, readable: at most 20, and 4 kB in all."""
        end = self.size()
        start = max(0, end - log_lines.TAIL_BYTES)
        pieces = [piece for _, piece in self._backwards(end, start)]
        return log_lines.last_lines(b"".join(reversed(pieces)), is_whole=start == 0)

    def _backwards(self, end: int, until: int = 0) -> Iterator[tuple[int, bytes]]:
        """(offset, bytes) of the pieces before `end`, the last one first, down to `until`."""
        while end > until:
            begin = max(until, end - _PIECE_BYTES)
            piece = self._read_all(begin, end)
            if len(piece) < end - begin:
                return  # cut off meanwhile
            yield begin, piece
            end = begin

    def _read_all(self, start: int, end: int) -> bytes:
        data = b""
        while len(data) < end - start:
            more = self.read(start + len(data), end - start - len(data))
            if not more:
                break
            data += more
        return data

    def _segments(self) -> list[_Segment]:
        size = self._fs.size(self._path)
        if size is not None:
            return [_Segment(0, size, self._path)]
        return [
            _Segment(int(entry.name), int(entry.name) + entry.bytes, f"{self._path}/{entry.name}")
            for entry in self._fs.list(self._path)
            if _SEGMENT.fullmatch(entry.name)
        ]
