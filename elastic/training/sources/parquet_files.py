"""The Parquet files below a path, as one list of row groups.

Files are opened through pyarrow, memory-mapped where they are local, and a limited number of them
is open at a time. Must import neither torch nor ray.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from elastic.storage.filesystem import Filesystem
from elastic.training.sources.blockwise import Indices
from elastic.training.sources.data_files import absolute, data_files, file_facts, nothing_there

_MOST_OPEN = 64
_FOOTERS_AT_ONCE = 16
_HEAD_BUFFER_BYTES = 1 << 16

Measure = Callable[[Any, str], Sequence[Any]]


class _File:
    """An open Parquet file.

    in_pieces: the same, of which no more is fetched than is decoded; by default pyarrow fetches
        the whole of a column of a row group before it decodes any
    """

    def __init__(self, source: Any, *, is_mapped: bool) -> None:
        self.parquet = pq.ParquetFile(source, pre_buffer=False)
        self.in_pieces = self.parquet
        if not is_mapped:
            footer = self.parquet.metadata
            self.in_pieces = pq.ParquetFile(
                source, metadata=footer, buffer_size=_HEAD_BUFFER_BYTES, pre_buffer=False
            )


class ParquetFiles:
    """Row groups of a Parquet file, or of all those below a folder in order of path.

    path: local path or URL (file://, s3://, gs://); hidden names and those with _ are left out
    measure: called with each opened file and its name; the size of each of its row groups, in
        whatever unit the caller counts. May raise for a file that does not do
    sizes: what it gave, over all files

    Picklable; use `reopened` in another process. Raises ValueError for a path without Parquet files
    and for a file that is none.
    """

    def __init__(self, path: str | os.PathLike[str], measure: Measure) -> None:
        self.url = absolute(path)
        self._forget()
        self._paths = list(data_files(self._filesystem, (".parquet",)))
        if not self._paths:
            raise nothing_there(self._filesystem, path, (".parquet",))
        sizes = list(self._measured(measure))
        self.sizes: Indices = np.array([*itertools.chain.from_iterable(sizes)], dtype=np.int64)
        self._first_groups: Indices = np.cumsum([0, *map(len, sizes)], dtype=np.int64)

    @property
    def is_local(self) -> bool:
        """Whether they lie on a disk of this machine, or one that looks so."""
        return self._filesystem.is_local

    def facts(self, counts: Indices) -> dict[str, Any]:
        """What tells the files from others; `counts` is how much each row group holds."""
        sums = np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))[self._first_groups]
        return file_facts(self.url, self._paths, np.diff(sums).tolist())

    def __len__(self) -> int:
        """Row groups in all files."""
        return int(self._first_groups[-1])

    def read(
        self, first: int, last: int, columns: Sequence[str] | None
    ) -> Iterator[tuple[int, pa.Table]]:
        """Row groups first .. last - 1 by file: number of the first one in it, and the table."""
        for file, groups in self._by_file(first, last):
            parquet = self._opened(file).parquet
            # Without threads: a pool that stayed behind in the parent of a fork never answers.
            table = parquet.read_row_groups(groups, columns, use_threads=False)
            yield int(self._first_groups[file]) + groups[0], table

    def batches(
        self,
        first: int,
        last: int,
        columns: Sequence[str],
        num_rows: int,
        *,
        is_begun: bool = False,
    ) -> Iterator[tuple[int, Any]]:
        """The same in batches of so many rows at most, each with the number of the first group.

        `is_begun`: the caller will stop early, so no more than it takes is to be fetched.
        """
        for file, groups in self._by_file(first, last):
            opened = self._opened(file)
            parquet = opened.in_pieces if is_begun else opened.parquet
            for batch in parquet.iter_batches(
                num_rows, row_groups=groups, columns=columns, use_threads=False
            ):
                yield int(self._first_groups[file]) + groups[0], batch

    def name_of(self, group: int) -> str:
        """File and number of a row group, for messages."""
        ((file, groups),) = self._by_file(group, group + 1)
        return f"{self._name(file)}, row group {groups[0]}"

    def reopened(self) -> None:
        """Lets go of what the process opened that this one was forked from."""
        self._forget()

    def _by_file(self, first: int, last: int) -> Iterator[tuple[int, list[int]]]:
        file = int(np.searchsorted(self._first_groups, first, side="right")) - 1
        while first < last:
            begin, end = (int(group) for group in self._first_groups[file : file + 2])
            until = min(last, end)
            if first < until:
                yield file, list(range(first - begin, until - begin))
            first, file = max(first, until), file + 1

    def _measured(self, measure: Measure) -> Iterable[Sequence[Any]]:
        def of_file(file: int) -> Sequence[Any]:
            return measure(self._open(file).parquet, self._name(file))

        files = range(len(self._paths))
        if self._filesystem.is_local:
            return map(of_file, files)
        # Each footer is a wait for an object store. The pool ends here, before any fork.
        with ThreadPoolExecutor(_FOOTERS_AT_ONCE) as pool:
            return list(pool.map(of_file, files))

    def _opened(self, file: int) -> _File:
        if not hasattr(self._of_thread, "files"):
            self._of_thread.files = OrderedDict()
        files: OrderedDict[int, _File] = self._of_thread.files
        if file not in files:
            files[file] = self._open(file)
        files.move_to_end(file)
        while len(files) > _MOST_OPEN:
            files.popitem(last=False)
        return files[file]

    def _open(self, file: int) -> _File:
        name = self._name(file)
        try:
            if self._filesystem.is_local:
                return _File(pa.memory_map(name), is_mapped=True)
            return _File(self._filesystem.open_input(self._paths[file]), is_mapped=False)
        except pa.ArrowInvalid as error:
            raise ValueError(f"{name} is not a readable Parquet file: {error}") from error

    def _name(self, file: int) -> str:
        return f"{self.url}/{self._paths[file]}".rstrip("/")

    def _forget(self) -> None:
        self._filesystem = Filesystem.at(self.url)
        self.url = self._filesystem.url
        # For each thread its own, since a reader of pyarrow is not made for several.
        self._of_thread = threading.local()

    def __getstate__(self) -> dict[str, Any]:
        opened = ("_filesystem", "_of_thread")
        return {name: value for name, value in self.__dict__.items() if name not in opened}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()
