"""Packing: documents tokenised as they are read, one after another, in items of one length.

What is kept in memory is the number of tokens in each block of documents, so that any item is found
without those before it: its position resumes at any world size, as that of a dataset on disk does.
Must not import ray.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from elastic.storage.filesystem import Filesystem
from elastic.storage.format import check_format
from elastic.training.sources.blockwise import CACHE_BYTES, Indices
from elastic.training.sources.data_files import absolute
from elastic.training.sources.token_row import TokenRow, Tokens

FORMAT_VERSION = 1
_DOCUMENTS_AT_ONCE = 1024


class PackedTokens(TokenRow):
    """Map-style dataset: item i is {"input_ids", "labels"}, int64 tensors of `length` tokens.

    The tokens of all documents, `end_of_text` after each, are one row; item i starts at token
    i * length, also in the middle of a document, and its labels are the tokens one further on. A
    document without tokens is passed over. The tokens left over at the end are not used.

    Opening tokenises everything once, to count; with `index` only the first opening does. Where
    that takes long, write the tokens as a list column of Parquet and use `ParquetTokens`, which
    does the same without tokenising.

    documents: map-style dataset, such as `TextLines` or `JsonLines`; read by its blocks if it
        tells them
    tokenize: the token ids of one document, of 32 bits at most, each time the same; picklable for
        loader processes
    index: file to keep the counts in, local path or URL; written when missing. For these documents
        and this `tokenize` alone, at any length
    cache_bytes: tokenised blocks kept in memory, at least those that the order holds at a time

    Raises ValueError for too few tokens for one item and for an index of other documents; on
    access, where there are not as many tokens as the index says.
    """

    num_threads = 0  # who knows whether `tokenize` and the documents bear it

    def __init__(
        self,
        documents: Any,
        tokenize: Callable[[Any], Sequence[int]],
        *,
        length: int,
        end_of_text: int,
        index: str | os.PathLike[str] | None = None,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        super().__init__(length, cache_bytes)
        self._token_dtype = np.dtype(np.int32)
        self._documents = documents
        self._tokenize = tokenize
        self._end_of_text = end_of_text
        self.file_facts: dict[str, Any] = getattr(documents, "file_facts", {})
        self._document_starts = _blocks_of(documents)
        kept = None if index is None else _Index(absolute(index), self._document_starts)
        counts = None if kept is None else kept.read()
        if counts is None:
            blocks = range(len(self._document_starts) - 1)
            counts = np.array([sum(map(len, self._ended(block))) for block in blocks])
            if kept is not None:
                kept.write(counts)
        self._lies_in(
            np.concatenate(([0], np.cumsum(counts, dtype=np.int64))),
            f"{type(documents).__name__} of {len(documents)} documents",
        )

    def _ended(self, block: int) -> Iterator[Tokens]:
        """The tokens of each document of a block."""
        first, last = self._document_starts[block : block + 2].tolist()
        for number in range(first, last):
            ids = np.asarray(self._tokenize(self._documents[number]), dtype=np.int64)
            if ids.size and not -(2**31) <= ids.min() <= ids.max() < 2**31:
                raise ValueError(
                    f"document {number} has token ids beyond 32 bits, up to {ids.max()}"
                )
            if ids.size:
                yield np.append(ids, self._end_of_text)

    def _decode(self, block: int, tokens: Tokens) -> None:
        found = 0
        for part in self._ended(block):
            tokens[found : found + len(part)] = part[: max(0, len(tokens) - found)]
            found += len(part)
        if found != len(tokens):
            first, last = self._document_starts[block : block + 2].tolist()
            raise ValueError(
                f"documents {first} .. {last - 1} give {found} tokens: expected {len(tokens)}, as "
                "counted before. Another tokenize or other documents need an index of their own"
            )

    def _beginning(self, block: int, num_tokens: int) -> Tokens:
        parts: list[Tokens] = []
        for part in self._ended(block):
            parts.append(part)
            if sum(map(len, parts)) >= num_tokens:
                break
        return np.concatenate(parts)[:num_tokens]


def _blocks_of(documents: Any) -> Indices:
    """The first document of each block, then their number."""
    starts = getattr(documents, "block_starts", None)
    if starts is not None:
        return np.asarray(starts, dtype=np.int64)
    num_documents = len(documents)
    return np.append(np.arange(0, num_documents, _DOCUMENTS_AT_ONCE), num_documents)


class _Index:
    """The file that keeps how many tokens each block of documents has."""

    def __init__(self, url: str, document_starts: Indices) -> None:
        folder, _, self._name = url.rpartition("/")
        self._filesystem = Filesystem.at(folder or "/")
        self._url = url
        self._document_starts = document_starts

    def read(self) -> Indices | None:
        """Tokens of each block; None where there is no such file yet."""
        try:
            text = self._filesystem.read_bytes(self._name)
        except FileNotFoundError:
            return None
        try:
            tree = json.loads(text)
            check_format(self._url, tree.get("format_version"), FORMAT_VERSION)
            sizes, counts = (np.array(tree[key], dtype=np.int64) for key in ("documents", "tokens"))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{self._url} is no index of packed documents: {error}. Remove it, or name another"
            ) from error
        if sizes.tolist() != np.diff(self._document_starts).tolist():
            raise ValueError(
                f"{self._url} is the index of other documents: expected "
                f"{self._document_starts[-1]} documents in {len(self._document_starts) - 1} "
                f"blocks, found {sizes.sum()} in {len(sizes)}. Remove it, or name another"
            )
        return counts

    def write(self, counts: Indices) -> None:
        """Keep them."""
        sizes = np.diff(self._document_starts).tolist()
        tree = {"format_version": FORMAT_VERSION, "documents": sizes, "tokens": counts.tolist()}
        self._filesystem.write_bytes(self._name, json.dumps(tree).encode())
