"""Parquet tokens: fixed-length windows of one long row of tokens that lies in Parquet files.

Row groups are decoded when a window first needs them and kept up to a limit, so the whole corpus
need not fit in memory. Must not import ray.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from elastic.training.sources.blockwise import CACHE_BYTES, REMOTE_THREADS, merged
from elastic.training.sources.parquet_files import ParquetFiles
from elastic.training.sources.token_row import BLOCK_TOKENS, TokenRow, Tokens

# Rows that are decoded at a time: the memory for them is used again, where new memory would cost
# more than decoding. Few batches, since at each the threads wait for one another.
_FLAT_ROWS = 1 << 19
_LISTS = 64


class ParquetTokens(TokenRow):
    """Map-style dataset: item i is {"input_ids", "labels"}, int64 tensors of `length` tokens.

    All values of the column, over rows, row groups and files (by sorted path), are one row of
    tokens; item i starts at token i * length, its labels are the tokens one further on. The tokens
    left over at the end are not used. Opening reads the footers of the files; a column of lists is
    itself read where its writer has not counted what the lists hold. Picklable; a copy in another
    process opens the files anew.

    path: a Parquet file or a folder of them: local path or URL (file://, s3://, gs://)
    column: integers, or lists of integers, a document in each row
    length: tokens per item
    end_of_text: token put after each document; needs lists, and passes by those that are empty
    cache_bytes: decoded row groups kept in memory, at least those that the order of samples holds
        at a time; random access is fast for what fits, and costs one row group's decoding per item
        for what does not

    Raises ValueError for a path without Parquet files, a missing column (naming those found), a
    column that holds no integers, too few tokens for one item, and, on access, for nulls.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        column: str = "tokens",
        *,
        length: int,
        end_of_text: int | None = None,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        super().__init__(length, cache_bytes)
        self._column = column
        self._end_of_text = end_of_text
        self._kinds: set[pa.DataType] = set()
        self._files = ParquetFiles(path, self._count_tokens)
        self.num_threads = 1 if self._files.is_local else REMOTE_THREADS
        self._batch_rows = _FLAT_ROWS if all(map(pa.types.is_integer, self._kinds)) else _LISTS
        self._token_dtype = _common_dtype(self._kinds, end_of_text)
        self.file_facts = self._files.facts(self._files.sizes)
        self._first_groups = merged(self._files.sizes, BLOCK_TOKENS)
        group_starts = np.concatenate(([0], np.cumsum(self._files.sizes, dtype=np.int64)))
        self._lies_in(group_starts[self._first_groups], self._files.url, f" in column {column!r}")

    def _count_tokens(self, parquet: Any, name: str) -> Sequence[int]:
        """Tokens of each row group."""
        kind = _checked_kind(parquet.schema_arrow, self._column, name)
        self._kinds.add(kind)
        groups = range(parquet.metadata.num_row_groups)
        if pa.types.is_integer(kind):
            if self._end_of_text is not None:
                raise ValueError(
                    f"{name}: end_of_text goes after each document, but column {self._column!r} "
                    f"holds {kind} without ends of documents. Write a list of tokens for each "
                    "document, or the token itself into the column"
                )
            return [parquet.metadata.row_group(group).num_rows for group in groups]
        return [self._count_in_lists(parquet, group) for group in groups]

    def _count_in_lists(self, parquet: Any, group: int) -> int:
        found = _counted_by_writer(parquet.metadata, group, self._column)
        if found is None:
            column = parquet.read_row_group(group, [self._column], use_threads=False).column(0)
            lengths = pc.fill_null(pc.list_value_length(column), 0)
            found = pc.sum(lengths).as_py() or 0, pc.sum(pc.greater(lengths, 0)).as_py() or 0
        num_tokens, num_documents = found
        return num_tokens + (num_documents if self._end_of_text is not None else 0)

    def _decode(self, block: int, tokens: Tokens) -> None:
        found = 0
        for part in self._parts(block, self._batch_rows):
            tokens[found : found + len(part)] = part[: max(0, len(tokens) - found)]
            found += len(part)
        if found != len(tokens):
            first, last = (int(group) for group in self._first_groups[block : block + 2])
            raise ValueError(
                f"{self._files.name_of(first)} and the {last - first - 1} after it hold {found} "
                f"tokens in column {self._column!r}: expected {len(tokens)}, as they did at "
                "opening. Open the data anew if it was written anew"
            )

    def _beginning(self, block: int, num_tokens: int) -> Tokens:
        parts: list[Tokens] = []
        found = 0
        for part in self._parts(block, min(self._batch_rows, num_tokens), is_begun=True):
            parts.append(part)
            found += len(part)
            if found >= num_tokens:
                break
        return np.concatenate(parts)[:num_tokens]

    def _parts(self, block: int, num_rows: int, *, is_begun: bool = False) -> Iterator[Tokens]:
        """The tokens of so many rows at a time."""
        first, last = (int(group) for group in self._first_groups[block : block + 2])
        for group, batch in self._files.batches(
            first, last, [self._column], num_rows, is_begun=is_begun
        ):
            yield self._flat(pa.chunked_array([batch.column(0)]), group)

    def _flat(self, column: Any, group: int) -> Tokens:
        """The tokens of a column, those of all rows one after another."""
        values = column
        if not pa.types.is_integer(column.type):
            values = pc.list_flatten(column)
        if values.null_count:
            raise ValueError(
                f"{self._files.name_of(group)}: column {self._column!r} has {values.null_count} "
                "nulls where tokens were expected. Write it without nulls"
            )
        tokens: Tokens = values.to_numpy()
        if self._end_of_text is None:
            return tokens
        lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy()
        return with_ends(tokens, lengths[lengths > 0], self._end_of_text)

    def _forget(self) -> None:
        super()._forget()
        if hasattr(self, "_files"):
            self._files.reopened()


def with_ends(tokens: Tokens, lengths: Tokens, end_of_text: int) -> Tokens:
    """The tokens of documents of these lengths, each followed by `end_of_text`."""
    limits = np.iinfo(tokens.dtype)
    if not limits.min <= end_of_text <= limits.max:
        tokens = tokens.astype(np.int64)
    ended: Tokens = np.insert(tokens, np.cumsum(lengths), end_of_text)
    return ended


def _common_dtype(kinds: Iterable[pa.DataType], end_of_text: int | None) -> Any:
    """The integer type that holds the tokens of all files, and the end of text."""
    of_values = [kind if pa.types.is_integer(kind) else kind.value_type for kind in kinds]
    dtypes = [np.dtype(kind.to_pandas_dtype()) for kind in of_values]
    if end_of_text is not None:
        dtypes.append(np.min_scalar_type(end_of_text))
    common = np.result_type(*dtypes)
    return common if common.kind in "iu" else np.dtype(np.int64)


def _checked_kind(schema: pa.Schema, column: str, name: str) -> pa.DataType:
    """The type of the column, known to hold integers or lists of them."""
    if column not in schema.names:
        raise ValueError(
            f"{name} has no column {column!r}, found {', '.join(schema.names) or 'none'}. Name "
            "the one with tokens"
        )
    kind = schema.field(column).type
    values = kind if pa.types.is_integer(kind) else getattr(kind, "value_type", kind)
    if not pa.types.is_integer(values) or pa.types.is_dictionary(kind):
        raise ValueError(
            f"{name}: column {column!r} must hold integers or lists of integers, found {kind}"
        )
    return kind


def _counted_by_writer(footer: Any, group: int, column: str) -> tuple[int, int] | None:
    """Tokens, and lists that hold any, as the footer tells; None where it does not.

    Arrow's writer counts an entry for each value and for each list that is null or empty, and the
    latter, with values that are null, as nulls. What other writers call null is not certain.
    """
    if not (footer.created_by or "").startswith("parquet-cpp-arrow"):
        return None
    rows = footer.row_group(group)
    for number in range(rows.num_columns):
        chunk = rows.column(number)
        if chunk.path_in_schema.split(".list.")[0] == column:
            statistics = chunk.statistics
            if statistics is None or not statistics.has_null_count:
                return None
            num_nulls = statistics.null_count
            return chunk.num_values - num_nulls, rows.num_rows - num_nulls
    return None
