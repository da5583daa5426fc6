"""Parquet tokens: fixed-length windows of one long row of tokens that lies in Parquet files.

Files are opened through pyarrow, memory-mapped where they are local. Row groups are decoded when a
window first needs them and kept up to a limit, so the whole corpus need not fit in memory. Must not
import ray.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

from elastic.storage.filesystem import Filesystem

CACHE_BYTES = 256 << 20

Tokens = npt.NDArray[Any]  # of the integer type the file has


class ParquetTokens:
    """Map-style dataset: item i is {"input_ids", "labels"}, int64 tensors of `length` tokens.

    All values of the column, over rows, row groups and files (by sorted path), are one row of
    tokens; item i starts at token i * length, its labels are the tokens one further on. The tokens
    left over at the end are not used. Picklable; a copy in another process opens the files anew.

    path: a Parquet file or a folder of them: local path or URL (file://, s3://, gs://)
    column: integers, or lists of integers (these are counted at opening, which reads the column)
    length: tokens per item
    cache_bytes: decoded row groups kept in memory; random access is fast for what fits, and costs
        one row group's decoding per item for what does not

    Raises ValueError for a path without Parquet files, a missing column (naming those found), a
    column that holds no integers, too few tokens for one item, and, on access, for nulls.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        column: str = "tokens",
        *,
        length: int,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        if length < 1:
            raise ValueError(f"length must be 1 token or more, found {length}")
        self.length = length
        self._url = _absolute(path)
        self._column = column
        self._cache_bytes = cache_bytes
        self._forget()
        self._files = list(_parquet_files(self._filesystem))
        if not self._files:
            raise ValueError(f"{self._url} holds no .parquet file: expected a file or a folder")
        counts = [self._count_tokens(file) for file in range(len(self._files))]
        self._groups = [(file, group) for file, of in enumerate(counts) for group in range(len(of))]
        self._starts = np.cumsum([0] + [count for of in counts for count in of], dtype=np.int64)
        if len(self) < 1:
            raise ValueError(
                f"{self._url} holds {self.num_tokens} tokens in column {column!r}: one item of "
                f"length {length} needs {length + 1}. Give more data or a smaller length"
            )

    @property
    def num_tokens(self) -> int:
        return int(self._starts[-1])

    def __len__(self) -> int:
        return max(0, (self.num_tokens - 1) // self.length)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"item {index} is outside 0 .. {len(self) - 1}")
        start = index % len(self) * self.length
        tokens = torch.from_numpy(self.tokens(start, start + self.length + 1))
        # A copy: of two views of one tensor, who writes into the labels changes the input too.
        return {"input_ids": tokens[:-1], "labels": tokens[1:].clone()}

    def tokens(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Tokens start .. stop - 1 of the whole row, an int64 array of its own."""
        if self._pid != os.getpid():
            self._forget()  # else parent and child of a fork would move one file position
        window = np.empty(stop - start, dtype=np.int64)
        number = int(np.searchsorted(self._starts, start, side="right")) - 1
        done = start
        while done < stop:
            begin, end = int(self._starts[number]), int(self._starts[number + 1])
            until = max(done, min(stop, end))
            if until > done:
                part = self._cached(number)[done - begin : until - begin]
                window[done - start : until - start] = part
            done = until
            number += 1
        return window

    def __getstate__(self) -> dict[str, Any]:
        kept = ("length", "_url", "_column", "_cache_bytes", "_files", "_groups", "_starts")
        return {name: self.__dict__[name] for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def _forget(self) -> None:
        """Starts with nothing open and nothing cached, as every process must."""
        self._pid = os.getpid()
        self._filesystem = Filesystem.at(self._url)
        self._open: dict[int, Any] = {}
        self._cache: OrderedDict[int, Tokens] = OrderedDict()
        self._used_bytes = 0

    def _parquet(self, file: int) -> Any:
        if file not in self._open:
            self._open[file] = _open_parquet(self._filesystem, self._files[file], self._column)
        return self._open[file]

    def _count_tokens(self, file: int) -> list[int]:
        """Tokens of each row group; of a flat column the footer knows them."""
        parquet = self._parquet(file)
        groups = range(parquet.metadata.num_row_groups)
        if pa.types.is_integer(parquet.schema_arrow.field(self._column).type):
            return [parquet.metadata.row_group(group).num_rows for group in groups]
        return [len(self._read(file, group)) for group in groups]

    def _read(self, file: int, group: int) -> Tokens:
        # Without threads: a pool that stayed behind in the parent of a fork would never answer.
        table = self._parquet(file).read_row_group(group, [self._column], use_threads=False)
        values = table.column(0)
        if not pa.types.is_integer(values.type):
            values = pc.list_flatten(values)
        if values.null_count:
            raise ValueError(
                f"{self._files[file] or self._url}, row group {group}: column {self._column!r} "
                f"has {values.null_count} nulls where tokens were expected. Write it without nulls"
            )
        tokens: Tokens = values.to_numpy()
        return tokens

    def _cached(self, number: int) -> Tokens:
        if number in self._cache:
            self._cache.move_to_end(number)
            return self._cache[number]
        tokens = self._cache[number] = self._read(*self._groups[number])
        self._used_bytes += tokens.nbytes
        while self._used_bytes > self._cache_bytes and len(self._cache) > 1:
            self._used_bytes -= self._cache.popitem(last=False)[1].nbytes
        return tokens


def _absolute(path: str | os.PathLike[str]) -> str:
    text = os.fspath(path)
    return text if "://" in text else os.path.abspath(text)


def _parquet_files(filesystem: Filesystem, folder: str = "") -> Iterator[str]:
    """Paths below the root, "" for the root that is a file itself; hidden and _ names left out."""
    if not folder and filesystem.size("") is not None:
        yield ""
        return
    for entry in filesystem.list(folder):
        path = f"{folder}/{entry.name}" if folder else entry.name
        if entry.name.startswith((".", "_")):
            continue
        if entry.is_dir:
            yield from _parquet_files(filesystem, path)
        elif entry.name.endswith(".parquet"):
            yield path


def _open_parquet(filesystem: Filesystem, path: str, column: str) -> Any:
    """The opened file, checked to hold integers in `column`."""
    where = f"{filesystem.url}/{path}".rstrip("/")
    try:
        source = pa.memory_map(where) if filesystem.is_local else filesystem.open_input(path)
        parquet = pq.ParquetFile(source, pre_buffer=False)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{where} is not a readable Parquet file: {error}") from error
    schema = parquet.schema_arrow
    if column not in schema.names:
        raise ValueError(
            f"{where} has no column {column!r}, found {', '.join(schema.names) or 'none'}. Name "
            "the one with tokens"
        )
    kind = schema.field(column).type
    values = kind if pa.types.is_integer(kind) else getattr(kind, "value_type", kind)
    if not pa.types.is_integer(values) or pa.types.is_dictionary(kind):
        raise ValueError(
            f"{where}: column {column!r} must hold integers or lists of integers, found {kind}"
        )
    return parquet
