"""The picture of a run: its status, restarts, tries, saves and goodput, from one reading of it.

What the terminal view and the metrics show, so that no figure is computed twice. Reads only. Must
import neither ray nor torch.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from elastic.dashboard.goodput import goodput_if_readable
from elastic.dashboard.restarts import Restart, number, restarts_of
from elastic.dashboard.status import RunStatus, driver_seen_gone, summarise
from elastic.dashboard.tries_left import TriesLeft, tries_left
from elastic.policy.goodput import Goodput
from elastic.storage.checkpoints import Catalog
from elastic.storage.filesystem import Filesystem
from elastic.storage.ledger import LedgerEvent, read_ledger
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
    events: list[LedgerEvent]
    """In ledger order."""


@dataclass(frozen=True, kw_only=True)
class Unreadable:
    """A run directory that could not be read, and why."""

    directory: str
    problem: str


def read_picture(
    fs: Filesystem, run_file: RunFile, *, now_s: float, goodput: Goodput | None = None
) -> RunPicture:
    """Of the run at the root of `fs`, at the wall time `now_s`.

    `goodput` is what was found a moment ago, for who looks often: it takes all metrics to find it.
    Raises `UnsupportedFormat`.
    """
    highest = Catalog(fs, run_file.run_id).highest()
    gone = driver_seen_gone(fs)
    events = read_ledger(fs)
    told = summarise(run_file, events, highest, storage=fs.url, now_s=now_s, gone=gone)
    return RunPicture(
        directory=os.path.basename(fs.url.rstrip("/")),
        status=replace(told, goodput=goodput or goodput_if_readable(fs, events)),
        restarts=restarts_of(events),
        tries=tries_left(events),
        saves=saves_of(events),
        events=events,
    )


def read_pictures(root: Filesystem, *, now_s: float) -> list[RunPicture | Unreadable]:
    """Of the run at `root`, or of all directly below it, by name; other directories are passed
    over."""
    if root.exists(RUN_FILE):
        found = [_look(root, os.path.basename(root.url.rstrip("/")), now_s)]
    else:
        names = sorted(entry.name for entry in root.list() if entry.is_dir)
        with ThreadPoolExecutor(_NUM_PARALLEL_READS) as pool:
            found = list(pool.map(lambda name: _look(root.sub(name), name, now_s), names))
    return [one for one in found if one is not None]


def _look(fs: Filesystem, directory: str, now_s: float) -> RunPicture | Unreadable | None:
    try:
        run_file = load_run_file(fs)
        return None if run_file is None else read_picture(fs, run_file, now_s=now_s)
    except Exception as error:  # noqa: BLE001 - one bad directory must not hide the others
        return Unreadable(directory=directory, problem=f"{type(error).__name__}: {error}")


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
