"""The ledger: the append-only record of what happened to a run, in all lives of its driver.

A life is one file, an Arrow IPC stream that grows by one record batch an event, or on an object
store one small stream an event. Readers need no lock and no end of file. Must not import ray or
torch, and decides nothing.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, BinaryIO

import pyarrow as pa

from elastic.importing import collector_paused
from elastic.storage.filesystem import Filesystem
from elastic.storage.format import check_format
from elastic.storage.redaction import redacted, redacted_text

FORMAT_VERSION = 1
DIR = "ledger"
_LIFE = re.compile(r"(\d{6,})-([A-Za-z0-9_-]+)(\.arrows)?")
_LIFE_ID = re.compile(r"[A-Za-z0-9_-]+")
_SEGMENT = re.compile(r"(\d{9,})\.arrows")
_NUM_BATCHES_AT_ONCE = 100
_SCHEMA = pa.schema(
    [
        ("seq", pa.int64()),
        ("time_s", pa.float64()),
        ("kind", pa.utf8()),
        ("generation", pa.int32()),
        ("step", pa.int64()),
        ("world_rank", pa.int32()),
        ("reason", pa.utf8()),
        ("data", pa.utf8()),
    ],
    metadata={"format_version": str(FORMAT_VERSION)},
)


@dataclass(frozen=True, kw_only=True)
class LedgerEvent:
    """One thing that happened; -1 where generation, step or world rank do not apply.

    `time_s` is wall time; `seq` counts from 0 in each life of the driver.
    """

    life: int
    seq: int
    time_s: float
    kind: str
    generation: int = -1
    step: int = -1
    world_rank: int = -1
    reason: str = ""
    data: dict[str, Any] = field(default_factory=dict)


class LedgerBroken(Exception):
    """An event was half written and could not be cut off: this life takes no more events."""


class LedgerWriter:
    """Appends the events of one life of the driver.

    `life_id` tells apart two drivers that believe to be the same life. Raises `FileExistsError` if
    this very life has been written before, `ValueError` for an id with other characters than
    letters, digits, "_" and "-". Not for use by several threads at once.
    """

    def __init__(self, fs: Filesystem, life: int, life_id: str) -> None:
        if life < 0 or not _LIFE_ID.fullmatch(life_id):
            raise ValueError(
                "a life is a number from 0 and an id of letters, digits, _ and -, "
                f"found {life!r} and {life_id!r}"
            )
        self.life = life
        self._fs = fs
        self._path = f"{DIR}/{life:06d}-{life_id}"
        self._next_seq = 0
        self._broken = False
        if fs.exists(self._path) or fs.exists(self._path + ".arrows"):
            raise FileExistsError(
                f"ledger {self._path} of {fs.url} is written already: "
                "a new driver takes a new life and id"
            )
        self._file: BinaryIO | None = None
        if fs.is_local:
            self._file = fs.open_append(self._path + ".arrows")
            self._extend(self._file, _SCHEMA.serialize().to_pybytes())

    def append(
        self,
        kind: str,
        *,
        time_s: float,
        generation: int = -1,
        step: int = -1,
        world_rank: int = -1,
        reason: str = "",
        data: Mapping[str, Any] | None = None,
    ) -> LedgerEvent:
        """The event as written, secret-like texts left out; it is durable when this returns.

        Raises `TypeError` for data that is not JSON, and whatever the storage raises; the ledger is
        then as it was. `LedgerBroken` if an earlier event spoilt the file.
        """
        event = LedgerEvent(
            life=self.life,
            seq=self._next_seq,
            time_s=time_s,
            kind=kind,
            generation=generation,
            step=step,
            world_rank=world_rank,
            reason=_encodable(redacted_text(reason)),
            data=redacted(json.loads(json.dumps(dict(data or {})))),
        )
        batch = _batch(event).serialize().to_pybytes()
        if self._file is not None:
            self._extend(self._file, batch)
        else:
            segment = f"{self._path}/{event.seq:09d}.arrows"
            self._fs.write_bytes(segment, _SCHEMA.serialize().to_pybytes() + batch)
        self._next_seq += 1
        return event

    def close(self) -> None:
        """Frees the file; readers need no close."""
        if self._file is not None:
            self._file.close()

    def _extend(self, file: BinaryIO, data: bytes) -> None:
        if self._broken:
            raise LedgerBroken(
                f"an event before this one was left half-written in {self._path}: start a new life"
            )
        start = file.seek(0, os.SEEK_END)
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[file.write(rest) :]
            os.fsync(file.fileno())
        except BaseException:
            # Else every later event would lie behind half an event, where no reader gets to.
            self._broken = True
            file.truncate(start)
            self._broken = False
            raise


def read_ledger(fs: Filesystem) -> list[LedgerEvent]:
    """All events of all lives, ordered by (life, seq); also while a driver is writing.

    A half-written event at the end of a life, as a crash leaves it, is no event. One that rotted on
    the disk is left out and shows as a gap in `seq`. Raises `UnsupportedFormat`.
    """
    events: list[LedgerEvent] = []
    for life, name in lives(fs):
        path = f"{DIR}/{name}"
        if name.endswith(".arrows"):
            events += _events(life, path, fs.read_bytes(path))
        else:
            events += _read_segments(fs, life, path)
    return events


def next_life(fs: Filesystem) -> int:
    """One more than the highest life in the ledger, 0 when there is none."""
    return max((life for life, _ in lives(fs)), default=-1) + 1


def lives(fs: Filesystem) -> list[tuple[int, str]]:
    """(life, name of its file or folder in `DIR`) of each, in order."""
    found = []
    for entry in fs.list(DIR):
        matched = _LIFE.fullmatch(entry.name)
        if matched and entry.is_dir == (matched[3] is None):
            found.append((int(matched[1]), entry.name))
    return sorted(found)


def segments_of(fs: Filesystem, path: str) -> list[str]:
    """Paths of the segments of one life on an object store, in order."""
    matches = (_SEGMENT.fullmatch(entry.name) for entry in fs.list(path) if not entry.is_dir)
    numbered = sorted((int(matched[1]), matched[0]) for matched in matches if matched)
    return [f"{path}/{name}" for _, name in numbered]


def next_events(
    life: int, path: str, data: bytes, *, is_start: bool
) -> tuple[list[LedgerEvent], int]:
    """The whole events in `data`, and how many of its bytes they take.

    Unless `is_start`, the data goes on after an event that was read before. Raises
    `UnsupportedFormat`.
    """
    head = b"" if is_start else _SCHEMA.serialize().to_pybytes()
    buffer = pa.BufferReader(head + data)
    batches, end = [], len(head)
    for batch in _batches(path, buffer):
        batches.append(batch)
        end = buffer.tell()
    return _events_in(life, batches), end - len(head)


def _read_segments(fs: Filesystem, life: int, path: str) -> list[LedgerEvent]:
    segments = segments_of(fs, path)
    pairs = zip(segments, fs.read_all(segments), strict=True)
    return [event for segment, data in pairs for event in _events(life, segment, data)]


def _events(life: int, path: str, data: bytes) -> list[LedgerEvent]:
    return _events_in(life, _batches(path, pa.BufferReader(data)))


def _events_in(life: int, batches: Iterable[pa.RecordBatch]) -> list[LedgerEvent]:
    batches = iter(batches)
    tables: list[pa.Table] = []
    # Some at a time: all of them together would have left the processor's caches before each pass.
    while some := list(islice(batches, _NUM_BATCHES_AT_ONCE)):
        if sound := _sound(some):
            tables.append(pa.Table.from_batches(sound).select(_SCHEMA.names).combine_chunks())
    if not tables:
        return []
    columns = pa.concat_tables(tables).to_pydict()
    with collector_paused():  # it would walk through all of them again and again, and they stay
        columns["data"] = _objects(columns["data"])
        return list(_rows_of(life, columns))


def _objects(texts: Sequence[str | None]) -> list[Any]:
    """What each text says, None for one that is no JSON object."""
    try:
        # In one go, since to begin with each text takes longer than to read most of them.
        found = json.loads(f"[{','.join(texts)}]")  # type: ignore[arg-type]
        if len(found) == len(texts) and all(type(value) is dict for value in found):
            return list(found)
    except (ValueError, TypeError, RecursionError):
        pass
    return [_object(text) for text in texts]


def _object(text: str | None) -> Any:
    try:
        return dict(json.loads(text))  # type: ignore[arg-type]
    except (ValueError, TypeError, RecursionError):
        return None


def _rows_of(life: int, columns: Mapping[str, list[Any]]) -> Iterator[LedgerEvent]:
    for row in zip(*columns.values(), strict=True):
        seq, time_s, kind, generation, step, world_rank, reason, data = row
        if None not in row and math.isfinite(time_s):
            yield LedgerEvent(
                life=life,
                seq=seq,
                time_s=time_s,
                kind=kind,
                generation=generation,
                step=step,
                world_rank=world_rank,
                reason=reason,
                data=data,
            )


def _batches(path: str, data: pa.BufferReader) -> Iterator[pa.RecordBatch]:
    try:
        stream = pa.ipc.open_stream(data)
        version = (stream.schema.metadata or {}).get(b"format_version", b"0")
        number = int(version) if version.isdigit() else version
        check_format(f"ledger {path}", number, FORMAT_VERSION)
        if any(stream.schema.get_all_field_indices(name) == [] for name in _SCHEMA.names):
            found = ", ".join(stream.schema.names)
            raise ValueError(f"ledger {path} is none: it has the columns {found}")
        while True:
            yield stream.read_next_batch()
    except (StopIteration, pa.ArrowException, OSError):
        # The bytes are in memory, so this is no trouble in reading but the end of what was written.
        return


def _sound(batches: Sequence[pa.RecordBatch]) -> Sequence[pa.RecordBatch]:
    try:
        pa.Table.from_batches(batches).validate(full=True)
    except pa.ArrowInvalid:
        return [batch for batch in batches if _is_sound(batch)]
    return batches


def _is_sound(batch: pa.RecordBatch) -> bool:
    try:
        # After a power cut the last event may have its length but zeros for part of its content.
        batch.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _batch(event: LedgerEvent) -> pa.RecordBatch:
    row = {name: getattr(event, name) for name in _SCHEMA.names}
    row["data"] = json.dumps(event.data)
    return pa.RecordBatch.from_pylist([row], schema=_SCHEMA)


def _encodable(text: str) -> str:
    # An odd byte in an error message must not keep the event that reports it out of the ledger.
    return text.encode("utf-8", "backslashreplace").decode()
