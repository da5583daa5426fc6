"""Prepared text: a corpus as token ids in one Parquet file, kept in a cache outside the project.

A prepared file is named by the content it was made of and appears whole or not at all, so that any
number of processes may prepare the same corpus at once. Must import neither torch nor ray.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from jobs.corpus import NUM_BYTE_TOKENS, Corpus, Ids, find_corpus

COLUMN = "tokens"
FORMAT_VERSION = 1
ROW_GROUP_TOKENS = 1 << 17  # small, for a window of a shuffled epoch decodes a row group at worst


@dataclass(frozen=True, kw_only=True)
class Text:
    """A prepared corpus.

    path: Parquet file on this machine, one flat integer column `tokens`
    identity: of the content, the same on every machine with the same data
    vocab_size: one more than the highest token id; 257 for text
    data: what it was made of, an absolute path, None for the standard library
    name: the same in words
    """

    path: Path
    identity: str
    num_tokens: int
    vocab_size: int
    data: str | None
    name: str


def prepare(
    data: str | os.PathLike[str] | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    *,
    sequence_length: int = 1,
    min_samples: int = 1,
) -> Text:
    """The corpus at `data` (default: Python's standard library) as tokens, from the cache if there.

    data, and what it may hold: see `find_corpus`
    cache_dir: default `default_cache_dir()`
    sequence_length, min_samples: what is asked of it: samples of so many tokens each

    Raises ValueError for data that is missing, empty, unreadable, of the wrong form or too short,
    and for a cache that cannot be written or lies in the working directory, which Ray would ship.
    """
    corpus = find_corpus(data)
    identity = hashlib.sha256(f"{FORMAT_VERSION}/{corpus.digest()}".encode()).hexdigest()
    folder = _cache_folder(cache_dir)
    text = _published(folder, identity, corpus) or _publish(folder, identity, corpus)
    num_samples = (text.num_tokens - 1) // sequence_length
    if num_samples < min_samples:
        raise ValueError(
            f"{text.name} holds {text.num_tokens} tokens, {max(0, num_samples)} samples of "
            f"{sequence_length} tokens: expected {min_samples} or more, one global batch. Give "
            "more data, a smaller global batch or shorter samples"
        )
    return text


def ensure_tokens(
    data: str | os.PathLike[str] | None,
    identity: str,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Text:
    """What `prepare` gave elsewhere, on this machine: from its cache, else made anew from `data`.

    Raises ValueError when the data here is not the data that has this identity.
    """
    folder = _cache_folder(cache_dir)
    text = _published(folder, identity, None)
    if text is not None:
        return text
    text = prepare(data, cache_dir)
    if text.identity != identity:
        raise ValueError(
            f"{text.name} on {socket.gethostname()} is not the data this run was started with: "
            f"expected content {identity[:16]}, found {text.identity[:16]}. "
            + (
                "Run the same Python version on every node, or give --data PATH"
                if data is None
                else "Put the same files there on every node, or on storage that all share"
            )
        )
    return text


def default_cache_dir() -> Path:
    """$XDG_CACHE_HOME/elastic or ~/.cache/elastic; a temporary folder if that is in the project."""
    candidates = []
    with contextlib.suppress(RuntimeError):  # no home directory
        candidates.append(Path("~/.cache").expanduser())
    shared = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if shared.is_absolute():
        candidates.insert(0, shared)
    folders = [folder / "elastic" for folder in candidates]
    folders.append(Path(tempfile.gettempdir(), f"elastic-{os.getuid()}"))
    return next((folder for folder in folders if not _is_shipped(folder)), folders[0])


def _is_shipped(folder: Path) -> bool:
    """Whether it lies in the working directory; a root directory is never shipped."""
    current = Path.cwd()
    return current != Path(current.anchor) and folder.resolve().is_relative_to(current.resolve())


def _cache_folder(cache_dir: str | os.PathLike[str] | None) -> Path:
    if cache_dir is None:
        return default_cache_dir() / "tokens"
    folder = Path(os.path.abspath(cache_dir))
    if _is_shipped(folder):
        raise ValueError(
            f"the cache {folder} lies in the working directory {Path.cwd()}, which Ray would ship "
            "to every node: give a folder outside it"
        )
    return folder / "tokens"


def _published(folder: Path, identity: str, corpus: Corpus | None) -> Text | None:
    path = folder / f"{identity[:32]}.parquet"
    try:
        footer = pq.read_metadata(path)
    except (OSError, pa.ArrowException):
        return None  # not there, or torn by a disk that failed: made anew
    facts = footer.metadata or {}
    if facts.get(b"elastic.identity") != identity.encode():
        return None
    source = facts[b"elastic.data"].decode() if corpus is None else corpus.source or ""
    return Text(
        path=path,
        identity=identity,
        num_tokens=footer.num_rows,
        vocab_size=int(facts[b"elastic.vocab_size"]),
        data=source or None,
        name=facts[b"elastic.name"].decode() if corpus is None else corpus.name,
    )


def _publish(folder: Path, identity: str, corpus: Corpus) -> Text:
    path = folder / f"{identity[:32]}.parquet"
    temporary = folder / f".{path.name}.{uuid.uuid4().hex}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(temporary, identity, corpus)
        os.replace(temporary, path)
    except OSError as error:
        raise ValueError(
            f"cannot write tokens to the cache {folder}: {error.strerror or error}. Free some "
            "space or set XDG_CACHE_HOME to a folder that can be written"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
    text = _published(folder, identity, corpus)
    assert text is not None, path
    return text


def _write(path: Path, identity: str, corpus: Corpus) -> None:
    kind = np.uint16 if corpus.is_text else np.uint32
    schema = pa.schema([pa.field(COLUMN, pa.from_numpy_dtype(kind), nullable=False)])
    highest = NUM_BYTE_TOKENS - 1 if corpus.is_text else 0
    num_tokens = 0
    with path.open("wb") as file:
        with pq.ParquetWriter(file, schema, compression="zstd") as writer:
            for block in _blocks(corpus.tokens()):
                writer.write_table(pa.table([block], schema=schema))
                highest = max(highest, int(block.max()))
                num_tokens += len(block)
            writer.add_key_value_metadata(
                {
                    "elastic.format_version": str(FORMAT_VERSION),
                    "elastic.identity": identity,
                    "elastic.vocab_size": str(highest + 1),
                    "elastic.data": corpus.source or "",
                    "elastic.name": corpus.name,
                }
            )
        file.flush()
        os.fsync(file.fileno())
    if not num_tokens:
        raise ValueError(f"data {corpus.name} is empty: expected some text or tokens in it")


def _blocks(pieces: Iterator[Ids]) -> Iterator[Ids]:
    """The same tokens in arrays of ROW_GROUP_TOKENS, the last one shorter."""
    waiting: list[Ids] = []
    num_waiting = 0
    for piece in pieces:
        waiting.append(piece)
        num_waiting += len(piece)
        if num_waiting >= ROW_GROUP_TOKENS:
            joined = np.concatenate(waiting)
            whole = num_waiting - num_waiting % ROW_GROUP_TOKENS
            for start in range(0, whole, ROW_GROUP_TOKENS):
                yield joined[start : start + ROW_GROUP_TOKENS]
            waiting, num_waiting = [joined[whole:]], num_waiting - whole
    if num_waiting:
        yield np.concatenate(waiting)
