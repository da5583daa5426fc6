"""A corpus: files of text or tokens that a run trains on, found, checked and read as token ids.

Text becomes tokens byte by byte: ids 0 .. 255 are the bytes of its UTF-8, END_OF_TEXT closes each
document. Reads files, writes none. Must import neither torch nor ray.
"""

from __future__ import annotations

import codecs
import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

END_OF_TEXT = 256
NUM_BYTE_TOKENS = 257

Ids = npt.NDArray[Any]  # of an unsigned integer type

_READ_BYTES = 4 << 20
_PARQUET_SUFFIXES = (".parquet", ".pq")
_SKIPPED_FOLDERS = ("site-packages", "dist-packages", "__pycache__")


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Files in the order in which they are read.

    `name` says what this is, for messages; `kind` is "source", "text", "parquet text" or "parquet
    tokens". `source` is what `find_corpus` was given, as an absolute path, None for the default.
    """

    name: str
    kind: str
    source: str | None
    files: tuple[Path, ...]

    @property
    def is_text(self) -> bool:
        return self.kind != "parquet tokens"

    def digest(self) -> str:
        """sha256, in hex, of how the files are read and of all their bytes; not of their names."""
        hasher = hashlib.sha256(self.kind.encode())
        for path in self.files:
            num_bytes = 0
            for block in _blocks(path):
                hasher.update(block)
                num_bytes += len(block)
            hasher.update(num_bytes.to_bytes(8, "little"))
        return hasher.hexdigest()

    def tokens(self) -> Iterator[Ids]:
        """All token ids, piece by piece. Raises ValueError for bytes that are not such text."""
        read: dict[str, Callable[[Path], Iterator[Ids]]] = {
            "source": _source_tokens,
            "text": _text_tokens,
            "parquet text": _parquet_text_tokens,
            "parquet tokens": _parquet_tokens,
        }
        for path in self.files:
            yield from read[self.kind](path)


def find_corpus(data: str | os.PathLike[str] | None) -> Corpus:
    """The corpus at a path, or the default one: the source files of Python's standard library.

    A path may name a text file, a folder of text files, a Parquet file or a folder of those, with a
    column `tokens` of integers or lists of integers, or a column `text` of strings. A folder with
    any Parquet file is a Parquet folder. Hidden files are left out.

    Raises ValueError when nothing is there, it cannot be read, it is empty, or has neither column.
    """
    if data is None:
        return _standard_library()
    if "://" in os.fspath(data):
        raise ValueError(
            f"data {data} is a URL: expected a path that every node can read, mount it"
        )
    path = Path(os.path.abspath(Path(data).expanduser()))
    with _readable(path):
        if not path.exists():
            raise ValueError(
                f"data {path} does not exist on this machine: expected a text file, a Parquet file "
                "or a folder of either. Check the path; on a cluster every node must see it"
            )
        files = _files_of(path)
        if not any(file.stat().st_size for file in files):
            raise ValueError(f"data {path} is empty: expected some text or tokens in it")
        parquet = tuple(file for file in files if _is_parquet(file, alone=path == file))
    if not parquet:
        return Corpus(name=str(path), kind="text", source=str(path), files=files)
    kind = f"parquet {_column_of(parquet)}"
    return Corpus(name=str(path), kind=kind, source=str(path), files=parquet)


def _standard_library() -> Corpus:
    root = Path(sysconfig.get_path("stdlib"))
    with _readable(root):
        files = tuple(path for path in _walk(root) if path.suffix == ".py")
    if not files:
        raise ValueError(
            f"there are no source files of the standard library in {root}: "
            "give your own text with --data PATH"
        )
    name = f"the {len(files)} source files of the standard library in {root}"
    return Corpus(name=name, kind="source", source=None, files=files)


def _files_of(path: Path) -> tuple[Path, ...]:
    if path.is_dir():
        return tuple(_walk(path))
    if not path.is_file():
        raise ValueError(f"data {path} is neither a file nor a folder")
    return (path,)


def _walk(root: Path) -> Iterator[Path]:
    """The files below a folder, in an order that only their names decide."""

    def fail(error: OSError) -> None:
        raise error  # os.walk leaves out what it cannot list

    for folder, below, names in os.walk(root, onerror=fail):
        below[:] = sorted(
            name for name in below if name not in _SKIPPED_FOLDERS and not name.startswith(".")
        )
        for name in sorted(names):
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                yield path


def _is_parquet(path: Path, *, alone: bool) -> bool:
    if path.suffix in _PARQUET_SUFFIXES:
        return alone or not path.name.startswith("_")
    with path.open("rb") as file:
        return alone and file.read(4) == b"PAR1"


def _column_of(files: tuple[Path, ...]) -> str:
    """ "tokens" or "text": the first of these that all the files have, with the right type."""
    schemas = [_schema(path) for path in files]
    for column in ("tokens", "text"):
        if column in schemas[0].names:
            break
    else:
        column = ""
    for path, schema in zip(files, schemas, strict=True):
        if column not in schema.names:
            raise ValueError(
                f"{path} has columns {', '.join(schema.names) or 'none'}: expected "
                f"{'a column ' + column if column else 'tokens (integers) or text (strings)'}. "
                "Rename the column that holds your data"
            )
        _check_type(path, column, schema.field(column).type)
    return column


def _check_type(path: Path, column: str, kind: pa.DataType) -> None:
    values = getattr(kind, "value_type", kind)
    if column == "tokens":
        is_right, expected = pa.types.is_integer(values), "integers or lists of integers"
    else:
        is_right, expected = _is_string(values), "strings"
    if not is_right or (column == "text" and values is not kind and pa.types.is_nested(kind)):
        raise ValueError(f"{path}: column {column} must hold {expected}, found {kind}")


def _is_string(kind: pa.DataType) -> bool:
    checks = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return any(check(kind) for check in checks)


def _schema(path: Path) -> pa.Schema:
    with _readable(path):
        return pq.read_schema(path)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turns what the system or Arrow says of unreadable files into one kind of error."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"data {error.filename or path} cannot be read: {error.strerror or error}. "
            "Check its permissions"
        ) from error
    except pa.ArrowException as error:
        raise ValueError(f"{path} is not a readable Parquet file: {error}") from error


def _blocks(path: Path) -> Iterator[bytes]:
    with _readable(path), path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            yield block


def _source_tokens(path: Path) -> Iterator[Ids]:
    """Bytes as they are: a few source files of the standard library are not UTF-8, on purpose."""
    is_empty = True
    for block in _blocks(path):
        is_empty = False
        yield np.frombuffer(block, dtype=np.uint8).astype(np.uint16)
    if not is_empty:
        yield np.array([END_OF_TEXT], dtype=np.uint16)


def _text_tokens(path: Path) -> Iterator[Ids]:
    _check_utf8(path)
    return _source_tokens(path)


def _check_utf8(path: Path) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")()
    num_read = 0
    try:
        for block in _blocks(path):
            num_read += len(block)
            decoder.decode(block)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        offset = num_read - len(error.object) + error.start
        raise ValueError(
            f"{path} is not UTF-8 text: byte {error.object[error.start]:#04x} at offset {offset} "
            f"({error.reason}). Convert it to UTF-8, or keep it out of the data folder"
        ) from error


def _parquet_batches(path: Path, column: str) -> Iterator[pa.Array]:
    with _readable(path), pq.ParquetFile(path, memory_map=True) as parquet:
        for batch in parquet.iter_batches(columns=[column]):
            yield batch.column(0)


def _parquet_text_tokens(path: Path) -> Iterator[Ids]:
    for number, texts in enumerate(_parquet_batches(path, "text")):
        texts = texts.cast(pa.large_string())
        try:
            texts.validate(full=True)
        except pa.ArrowInvalid as error:
            raise ValueError(
                f"{path}, batch {number}: column text is not UTF-8: {error}"
            ) from error
        yield _joined(texts.filter(pc.greater(pc.binary_length(texts), 0)))


def _joined(texts: pa.LargeStringArray) -> Ids:
    """The bytes of all texts, END_OF_TEXT after each."""
    if not len(texts):
        return np.empty(0, dtype=np.uint16)
    _, offset_buffer, data_buffer = texts.buffers()
    offsets = np.frombuffer(offset_buffer, dtype=np.int64)
    offsets = offsets[texts.offset : texts.offset + len(texts) + 1]
    data = np.frombuffer(data_buffer, dtype=np.uint8)[offsets[0] : offsets[-1]]
    return np.insert(data.astype(np.uint16), offsets[1:] - offsets[0], END_OF_TEXT)


def _parquet_tokens(path: Path) -> Iterator[Ids]:
    for number, values in enumerate(_parquet_batches(path, "tokens")):
        if not pa.types.is_integer(values.type):
            values = pc.list_flatten(values)
        if values.null_count:
            raise ValueError(f"{path}, batch {number}: column tokens has nulls, expected integers")
        ids = values.to_numpy(zero_copy_only=False)
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < 2**31:
            raise ValueError(
                f"{path}, batch {number}: token ids run from {ids.min()} to {ids.max()}, "
                "expected 0 .. 2**31 - 1"
            )
        yield ids.astype(np.uint32)
