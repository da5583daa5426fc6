"""The picture of a run: its status, restarts, tries, saves and goodput, from one reading of it.

What page, terminal view and metrics show, so that no figure is computed twice. Reads only. Must
import neither ray nor torch.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from elastic.dashboard.goodput import DAMAGED_METRICS
from elastic.dashboard.restarts import Restart, number, restarts_of
from elastic.dashboard.status import RunStatus, driver_seen_gone, summarise
from elastic.dashboard.tries_left import TriesLeft, tries_left
from elastic.policy.goodput import Goodput, goodput
from elastic.storage.checkpoints import Catalog
from elastic.storage.filesystem import Filesystem
from elastic.storage.ledger import LedgerEvent
from elastic.storage.ledger_follower import LedgerFollower
from elastic.storage.metrics import MetricsFollower
from elastic.storage.run_file import RUN_FILE, RunFile, load_run_file

_NUM_PARALLEL_READS = 8


@dataclass(frozen=True, kw_only=True)
class Saves:
    """What the ledger tells of a run's saves, in all its lives."""

    committed: int
    failed: int
    """Saves that could not be published."""
    quarantined: int
    """Checkpoints whose bytes were found bad when they were to be resumed."""
    stall_s: float
    """For which all of them together stopped training."""
    last_stall_s: float | None
    last_duration_s: float | None


@dataclass(frozen=True, kw_only=True)
class RunPicture:
    """One run as it stands, with all that was told of it."""

    directory: str
    """Its name below the storage root."""
    status: RunStatus
    restarts: list[Restart]
    tries: list[TriesLeft] | None
    """None where the rules of the run are not recorded."""
    saves: Saves
    complete: frozenset[int]
    """The steps of the complete checkpoints that are there."""
    events: list[LedgerEvent]
    """In ledger order."""


@dataclass(frozen=True, kw_only=True)
class Unreadable:
    """A run directory that could not be read, and why."""

    directory: str
    problem: str


class RunReader:
    """Reads the run at the root of `fs` on and on: what has not changed is not read again.

    Not for several threads at once.
    """

    def __init__(self, fs: Filesystem) -> None:
        self.fs = fs
        self._ledger = LedgerFollower(fs)
        self._metrics = MetricsFollower(fs)
        self._goodput: Goodput | None = None
        self._goodput_of: object = None

    def events(self) -> list[LedgerEvent]:
        """See `LedgerFollower.read`: the same list while nothing has come."""
        return self._ledger.read()

    def goodput(self, events: list[LedgerEvent]) -> Goodput | None:
        """None where the metrics are damaged, which must not hide all else.

        A driver that writes metrics also writes events: those of the same `events` are not looked
        at again.
        """
        if events is not self._goodput_of:
            try:
                self._goodput = goodput(events, self._metrics.step_times())
            except DAMAGED_METRICS:
                self._goodput = None
            self._goodput_of = events
        return self._goodput

    def current_metrics(self) -> dict[int, dict[str, float]]:
        """By step, each with its newest values; nothing where they are damaged."""
        try:
            return self._metrics.current_metrics()
        except DAMAGED_METRICS:
            return {}

    def picture(
        self, run_file: RunFile, *, now_s: float, goodput: Goodput | None = None
    ) -> RunPicture:
        """The run at the wall time `now_s`.

        `goodput` is what was found a moment ago, for who looks often: it takes all metrics to find
        it. Raises `UnsupportedFormat`.
        """
        whole = [one for one in Catalog(self.fs, run_file.run_id).list() if one.complete]
        highest = whole[-1] if whole else None
        gone = driver_seen_gone(self.fs)
        events = self.events()
        url = self.fs.url
        told = summarise(run_file, events, highest, storage=url, now_s=now_s, gone=gone)
        return RunPicture(
            directory=os.path.basename(url.rstrip("/")),
            status=replace(told, goodput=goodput or self.goodput(events)),
            restarts=restarts_of(events),
            tries=tries_left(events),
            saves=saves_of(events),
            complete=frozenset(one.step for one in whole),
            events=events,
        )


class Readers:
    """Reads the run at `root`, or all runs directly below it, on and on."""

    def __init__(self, root: Filesystem) -> None:
        self._root = root
        self._readers: dict[str, RunReader] = {}
        self._lock = threading.Lock()

    def pictures(self, now_s: float) -> list[RunPicture | Unreadable]:
        """By name; other directories are passed over. Raises what listing `root` raises."""
        with self._lock:
            names = self._names()
            self._readers = {name: self._reader(name) for name in names}
            with ThreadPoolExecutor(_NUM_PARALLEL_READS) as pool:
                found = list(pool.map(lambda name: self._look(name, now_s), names))
        return [one for one in found if one is not None]

    def _names(self) -> list[str]:
        if self._root.exists(RUN_FILE):
            return [""]
        return sorted(entry.name for entry in self._root.list() if entry.is_dir)

    def _reader(self, name: str) -> RunReader:
        return self._readers.get(name) or RunReader(self._root.sub(name) if name else self._root)

    def _look(self, name: str, now_s: float) -> RunPicture | Unreadable | None:
        reader = self._readers[name]
        try:
            run_file = load_run_file(reader.fs)
            return None if run_file is None else reader.picture(run_file, now_s=now_s)
        except Exception as error:  # noqa: BLE001 - one bad directory must not hide the others
            problem = f"{type(error).__name__}: {error}"
            return Unreadable(directory=os.path.basename(reader.fs.url), problem=problem)


def saves_of(events: Sequence[LedgerEvent]) -> Saves:
    """Their sum; what is not told counts as nothing."""
    kinds = Counter(event.kind for event in events)
    committed = [event for event in events if event.kind == "checkpoint_committed"]
    stalls = list(_told(committed, "stall_s"))
    durations = list(_told(committed, "duration_s"))
    return Saves(
        committed=len(committed),
        failed=kinds["checkpoint_failed"],
        quarantined=kinds["checkpoint_quarantined"],
        stall_s=sum(stalls),
        last_stall_s=stalls[-1] if stalls else None,
        last_duration_s=durations[-1] if durations else None,
    )


def _told(events: Sequence[LedgerEvent], name: str) -> Iterator[float]:
    for event in events:
        value = number(event.data.get(name))
        if value is not None and value >= 0:
            yield value
