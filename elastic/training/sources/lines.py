"""Lines of text files, and JSON lines: a sample in each line.

The files are read once at opening, to count their lines; kept is where each block of about a
megabyte begins, so that any line can be read with no more than its block. Must import neither torch
nor ray.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np

from elastic.storage.filesystem import Filesystem
from elastic.training.sources.blockwise import CACHE_BYTES, REMOTE_THREADS, Blockwise, Indices
from elastic.training.sources.data_files import absolute, data_files, file_facts, nothing_there

BLOCK_BYTES = 1 << 20
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".lz4")
_LINE_OVERHEAD_BYTES = 64  # of a bytes object in a list


class TextLines(Blockwise[list[bytes]]):
    """Map-style dataset: item i is line i of the files, by sorted path, a str without line end.

    Lines with nothing but white space are passed over. Picklable; a copy in another process opens
    the files anew.

    path: a file, or a folder with files of these endings: local path or URL
    cache_bytes: lines kept in memory, at least those that the order of samples holds at a time

    Raises ValueError for a path without such files or with compressed ones, for files without a
    line, and, on access, for what is not UTF-8.
    """

    endings: tuple[str, ...] = (".txt",)

    def __init__(self, path: str | os.PathLike[str], *, cache_bytes: int = CACHE_BYTES) -> None:
        super().__init__(cache_bytes)
        self._url = absolute(path)
        filesystem = Filesystem.at(self._url)
        self._paths = _found(filesystem, path, self.endings)
        self.num_threads = 1 if filesystem.is_local else REMOTE_THREADS
        blocks = [
            (file, begin, size, count)
            for file, name in enumerate(self._paths)
            for begin, size, count in _scanned(filesystem.open_input(name))
        ]
        if not blocks:
            raise ValueError(f"{self._url} holds no line of text: expected one for each sample")
        table: Indices = np.array(blocks, dtype=np.int64)
        self._spans = table[:, :3]
        sizes = np.zeros(len(self._paths), dtype=np.int64)
        np.add.at(sizes, table[:, 0], table[:, 2])
        self.file_facts = file_facts(self._url, self._paths, sizes.tolist())
        self.block_starts = np.concatenate(([0], np.cumsum(table[:, 3])))

    def __getitem__(self, index: int) -> Any:
        block, number = self._place(index)
        try:
            return self._decoded(self._block(block)[number])
        except ValueError as error:
            why = str(error)
            if isinstance(error, json.JSONDecodeError):
                why = f"{error.msg} at column {error.colno}"
            raise ValueError(f"{self._name_of(block, number)} {self._fault}: {why}") from error

    _fault = "is not UTF-8 text"

    def _decoded(self, line: bytes) -> Any:
        return line.decode()

    def _read(self, block: int) -> list[bytes]:
        file, begin, size = self._spans[block].tolist()
        with Filesystem.at(self._url).open_input(self._paths[file]) as stream:
            stream.seek(begin)
            lines = _lines(stream.read(size))
        expected = int(self.block_starts[block + 1] - self.block_starts[block])
        if len(lines) != expected:
            raise ValueError(
                f"{self._file_name(file)} holds {len(lines)} lines in its {size} bytes from "
                f"{begin} on: expected {expected}, as it did at opening. Open the data anew if it "
                "was written anew"
            )
        return lines

    def _bytes_of(self, block: list[bytes]) -> int:
        return sum(map(len, block)) + _LINE_OVERHEAD_BYTES * len(block)

    def _file_name(self, file: int) -> str:
        return f"{self._url}/{self._paths[file]}".rstrip("/")

    def _name_of(self, block: int, number: int) -> str:
        """File and line as an editor counts them, from 1 and with the empty ones."""
        file, begin, size = self._spans[block].tolist()
        with Filesystem.at(self._url).open_input(self._paths[file]) as stream:
            before = sum(piece.count(b"\n") for piece in _pieces(stream, begin))
            text = stream.read(size).split(b"\n")
        of_block = [place for place, line in enumerate(text) if line.strip()]
        # Where the file has changed meanwhile, there may be no such line.
        number = of_block[number] if number < len(of_block) else number
        return f"{self._file_name(file)}: line {before + number + 1}"


class JsonLines(TextLines):
    """Map-style dataset: item i is the JSON value in line i of the files, usually a dict.

    As `TextLines` in everything else. Raises ValueError, on access, for what is no JSON.
    """

    endings = (".jsonl", ".ndjson")
    _fault = "is not JSON"

    def _decoded(self, line: bytes) -> Any:
        return json.loads(line)


def _found(
    filesystem: Filesystem, path: str | os.PathLike[str], endings: tuple[str, ...]
) -> list[str]:
    url = absolute(path)
    compressed = tuple(ending + suffix for ending in endings for suffix in _COMPRESSED)
    paths = list(data_files(filesystem, (*endings, *compressed)))
    wrong = [found for found in paths if (found or url).endswith(_COMPRESSED)]
    if wrong:
        raise ValueError(
            f"{f'{url}/{wrong[0]}'.rstrip('/')} is compressed, so that no line can be read without "
            "all before it: decompress it, or write it as Parquet"
        )
    if not paths:
        raise nothing_there(filesystem, path, endings)
    return paths


def _scanned(stream: BinaryIO) -> Iterator[tuple[int, int, int]]:
    """(begin, bytes, lines) of each block of a file, which is closed after; lines stay whole."""
    with stream:
        begin, waiting = 0, b""
        while True:
            read = stream.read(BLOCK_BYTES)
            waiting += read
            end = waiting.rfind(b"\n") + 1 if read else len(waiting)
            count = len(_lines(waiting[:end]))
            if count:
                yield begin, end, count
            begin, waiting = begin + end, waiting[end:]
            if not read:
                return


def _pieces(stream: BinaryIO, num_bytes: int) -> Iterator[bytes]:
    """So many bytes of the stream, a block at a time."""
    while num_bytes > 0 and (read := stream.read(min(num_bytes, BLOCK_BYTES))):
        num_bytes -= len(read)
        yield read


def _lines(text: bytes) -> list[bytes]:
    # Not splitlines: to it a carriage return alone is a line end as well.
    return [line.removesuffix(b"\r") for line in text.split(b"\n") if line.strip()]
