"""Metrics: the values a run logged, by generation and step, in Parquet segments that never change.

Steps that were trained again appear in both generations; `current_metrics` tells which count. Must
not import ray or torch.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from elastic.storage.filesystem import Filesystem
from elastic.storage.format import check_format

FORMAT_VERSION = 1
_DIR = "metrics"
_SEGMENT = re.compile(r"g(\d{5,})-(\d{9,})(?:-(\d+))?\.parquet")
_START = ""  # the name in a row that says where its generation started; no value has it
_SCHEMA = pa.schema(
    [
        ("generation", pa.int32()),
        ("step", pa.int64()),
        ("time_s", pa.float64()),
        ("name", pa.utf8()),
        ("value", pa.float64()),
    ],
    metadata={"format_version": str(FORMAT_VERSION)},
)


Row = tuple[int, int, float, str, float]


class MetricsWriter:
    """Collects values in memory and writes them as one segment a generation on `flush`.

    Values may be added by one thread while another flushes.
    """

    def __init__(self, fs: Filesystem) -> None:
        self._fs = fs
        self._rows: dict[int, list[Row]] = {}
        self._adding = threading.Lock()
        self._flushing = threading.Lock()

    def start(self, generation: int, step: int, time_s: float) -> None:
        """Notes that `step` is the first this generation makes, whether or not it logs any value.

        Older generations' rows of this step and later ones are then superseded.
        """
        self._extend(generation, [(generation, step, time_s, _START, 0.0)])

    def add(self, generation: int, step: int, time_s: float, values: Mapping[str, float]) -> None:
        """Takes the values of one step; `time_s` is wall time. Raises `ValueError` for name ""."""
        if _START in values:
            raise ValueError(f"a metric needs a name, found '' in step {step}")
        self._extend(
            generation,
            [(generation, step, time_s, name, float(value)) for name, value in values.items()],
        )

    def flush(self) -> list[str]:
        """Paths of the segments written; [] if nothing was added since the last time.

        What could not be written is kept for the next flush.
        """
        with self._flushing:
            with self._adding:
                taken, self._rows = self._rows, {}
            written = []
            try:
                for generation in sorted(taken):
                    written.append(_write_segment(self._fs, generation, taken[generation]))
                    del taken[generation]
            finally:
                self._put_back(taken)
            return written

    def _extend(self, generation: int, rows: list[Row]) -> None:
        if rows:
            with self._adding:
                self._rows.setdefault(generation, []).extend(rows)

    def _put_back(self, rows: Mapping[int, list[Row]]) -> None:
        with self._adding:
            for generation, older in rows.items():
                self._rows[generation] = older + self._rows.get(generation, [])


def read_metrics(fs: Filesystem) -> pa.Table:
    """All values ever logged, a row each: generation, step, time_s, name, value.

    Ordered by generation, then as logged. Raises `UnsupportedFormat`.
    """
    table = _read_rows(fs)
    import pyarrow.compute as pc  # not at the top: `elastic status` would wait for it

    return table.filter(pc.not_equal(table["name"], _START))


def current_metrics(fs: Filesystem) -> dict[int, dict[str, float]]:
    """The values of each step by name, as of the history that counts; steps ascending.

    A generation that started at step s supersedes what older ones logged for s and later steps.
    """
    return _current(_read_rows(fs))


def _current(table: pa.Table) -> dict[int, dict[str, float]]:
    limits = _limits(table)
    current: dict[int, dict[str, float]] = {}
    columns = (table[name].to_pylist() for name in ("generation", "step", "name", "value"))
    for generation, step, name, value in zip(*columns, strict=True):
        if name != _START and (limits[generation] is None or step < limits[generation]):
            current.setdefault(step, {})[name] = value
    return dict(sorted(current.items()))


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """How long one step took in one generation."""

    generation: int
    step: int
    time_s: float
    """When the step was told, in wall time: mostly at the end of the one after it."""
    step_s: float
    counts: bool
    """No newer generation has started at this step or before it."""


def step_times(fs: Filesystem) -> list[StepTime]:
    """Each step of each generation that logged `step_s`, once. Raises `UnsupportedFormat`."""
    return _step_times(_read_rows(fs))


class MetricsFollower:
    """Metrics that are read on as they grow: each segment is read from storage once.

    Raises `UnsupportedFormat`, like the functions of the same names.
    """

    def __init__(self, fs: Filesystem) -> None:
        self._fs = fs
        self._known: dict[str, pa.Table] = {}

    def current_metrics(self) -> dict[int, dict[str, float]]:
        """See the function."""
        return _current(_read_rows(self._fs, self._known))

    def step_times(self) -> list[StepTime]:
        """See the function."""
        return _step_times(_read_rows(self._fs, self._known))


def _step_times(table: pa.Table) -> list[StepTime]:
    limits = _limits(table)
    # Not by `pyarrow.compute`, which would import pandas: that takes longer than all of this.
    order = ("generation", "step", "time_s", "name", "value")
    columns = (table[name].to_pylist() for name in order)
    found: dict[tuple[int, int], StepTime] = {}
    for generation, step, time_s, name, value in zip(*columns, strict=True):
        if name != "step_s":
            continue
        limit = limits[generation]
        found[generation, step] = StepTime(
            generation=generation,
            step=step,
            time_s=time_s,
            step_s=value,
            counts=limit is None or step < limit,
        )
    return list(found.values())


def _limits(table: pa.Table) -> dict[int, int | None]:
    """By generation the first step that a newer one has made, None if there is none."""
    starts: dict[int, int] = {}
    columns = (table[name].to_pylist() for name in ("generation", "step"))
    for generation, step in zip(*columns, strict=True):
        starts[generation] = min(step, starts.get(generation, step))
    limits: dict[int, int | None] = {}
    limit: int | None = None
    for generation, start in sorted(starts.items(), reverse=True):
        limits[generation] = limit
        limit = start if limit is None else min(limit, start)
    return limits


def _write_segment(fs: Filesystem, generation: int, rows: list[Row]) -> str:
    columns = zip(*rows, strict=True)
    arrays = [pa.array(column, kind.type) for column, kind in zip(columns, _SCHEMA, strict=True)]
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_arrays(arrays, schema=_SCHEMA), sink)
    base = f"{_DIR}/g{generation:05d}-{rows[0][1]:09d}"
    path, count = f"{base}.parquet", 0
    while fs.exists(path):
        count += 1
        path = f"{base}-{count}.parquet"
    fs.write_bytes(path, sink.getvalue().to_pybytes())
    return path


def _read_rows(fs: Filesystem, known: dict[str, pa.Table] | None = None) -> pa.Table:
    """What is in `known` by name is not read again, and what is read is put there."""
    known = {} if known is None else known
    found = []
    for entry in fs.list(_DIR):
        matched = _SEGMENT.fullmatch(entry.name)
        if matched and not entry.is_dir:
            found.append(([int(number or 0) for number in matched.groups()], entry.name))
    names = [name for _, name in sorted(found)]
    fresh = [name for name in names if name not in known]
    paths = [f"{_DIR}/{name}" for name in fresh]
    for name, path, data in zip(fresh, paths, fs.read_all(paths), strict=True):
        known[name] = _segment(path, data)
    tables = [known[name] for name in names]
    return pa.concat_tables(tables) if tables else _SCHEMA.empty_table()


def _segment(path: str, data: bytes) -> pa.Table:
    # `read_table` would import pandas.
    table = pq.ParquetFile(pa.BufferReader(data)).read(use_threads=False)
    version = (table.schema.metadata or {}).get(b"format_version", b"0")
    check_format(f"metrics {path}", int(version), FORMAT_VERSION)
    if table.schema == _SCHEMA:
        return table
    return table.select(_SCHEMA.names).cast(_SCHEMA)
