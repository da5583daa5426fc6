"""Rows of Parquet files: a sample in each row, its columns as a dict.

Must import neither torch nor ray.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from elastic.training.sources.blockwise import CACHE_BYTES, REMOTE_THREADS, Blockwise, merged
from elastic.training.sources.parquet_files import ParquetFiles

BLOCK_BYTES = 4 << 20
"""Smaller row groups that lie side by side are read as one block of about so many bytes."""


class ParquetRows(Blockwise[pa.Table]):
    """Map-style dataset: item i is row i, over all files by sorted path, as a dict by column.

    Numbers, text and bytes are plain Python values and a null is None; a list of numbers is a
    numpy array of its own. Picklable; a copy in another process opens the files anew.

    path: a Parquet file or a folder of them: local path or URL (file://, s3://, gs://)
    columns: those that are read, all without
    cache_bytes: decoded rows kept in memory, at least those that the order of samples holds at a
        time

    Raises ValueError for a path without Parquet files or rows, and for a missing column (naming
    those found).
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        columns: Sequence[str] | None = None,
        *,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        super().__init__(cache_bytes)
        self._columns = None if columns is None else list(columns)
        self._files = ParquetFiles(path, self._measured)
        self.num_threads = 1 if self._files.is_local else REMOTE_THREADS
        num_rows, num_bytes = self._files.sizes.reshape(-1, 2).T
        self.file_facts = self._files.facts(num_rows)
        self._first_groups = merged(num_bytes, BLOCK_BYTES)
        group_starts = np.concatenate(([0], np.cumsum(num_rows)))
        self.block_starts = group_starts[self._first_groups]
        if not len(self):
            raise ValueError(f"{self._files.url} holds no row: expected one for each sample")

    def _measured(self, parquet: Any, name: str) -> Sequence[tuple[int, int]]:
        """Rows and bytes of each row group."""
        found = parquet.schema_arrow.names
        missing = [column for column in self._columns or () if column not in found]
        if missing:
            raise ValueError(
                f"{name} has no column {missing[0]!r}, found {', '.join(found) or 'none'}"
            )
        footer = parquet.metadata
        groups = (footer.row_group(group) for group in range(footer.num_row_groups))
        return [(group.num_rows, group.total_byte_size) for group in groups]

    def __getitem__(self, index: int) -> dict[str, Any]:
        block, number = self._place(index)
        table = self._block(block)
        return {name: _value(table.column(name)[number]) for name in table.column_names}

    def _read(self, block: int) -> pa.Table:
        first, last = self._first_groups[block : block + 2].tolist()
        tables = [table for _, table in self._files.read(first, last, self._columns)]
        if len(tables) == 1:
            return tables[0]
        return pa.concat_tables(tables, promote_options="permissive")

    def _bytes_of(self, block: pa.Table) -> int:
        return int(block.nbytes)

    def _forget(self) -> None:
        super()._forget()
        if hasattr(self, "_files"):
            self._files.reopened()


def _value(scalar: Any) -> Any:
    values = getattr(scalar, "values", None)
    if not isinstance(values, pa.Array) or values.null_count:
        return scalar.as_py()
    if not (pa.types.is_integer(values.type) or pa.types.is_floating(values.type)):
        return scalar.as_py()
    return values.to_numpy(zero_copy_only=False).copy()
