"""The runs below one storage root, a row each; one that cannot be read is a row with its problem.

Reads only. Must import neither ray nor torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from elastic.dashboard.goodput import read_goodput
from elastic.dashboard.status import driver_seen_gone, summarise
from elastic.dashboard.text import age, table
from elastic.storage.checkpoints import Catalog
from elastic.storage.filesystem import Filesystem
from elastic.storage.ledger import LedgerEvent, read_ledger
from elastic.storage.run_file import RUN_FILE, RunFile, load_run_file

_NUM_PARALLEL_READS = 8
# Any of these makes a directory a run's, also when its run file is lost.
_PARTS = frozenset({RUN_FILE, "checkpoints", "ledger", "metrics", "lease"})
_UNSAID = "-"


@dataclass(frozen=True, kw_only=True)
class RunRow:
    """One run directory. None where the run has not said it, or where it cannot be read."""

    directory: str
    """Its name below the root."""
    problem: str = ""
    """Why it could not be read in full, "" if it could."""
    name: str | None = None
    state: str = "DAMAGED"
    step: int | None = None
    until: int | str | None = None
    loss: float | None = None
    world_size: int | None = None
    """Of the newest generation, also when it has ended."""
    restarts: int | None = None
    goodput: float | None = None
    age_s: float | None = None
    """Since the run was first submitted."""
    last_word_age_s: float | None = None


def list_runs(root: Filesystem, *, now_s: float) -> list[RunRow]:
    """The runs directly below `root`, the one that spoke last first, damaged ones at the end."""
    names = [entry.name for entry in root.list() if entry.is_dir]

    def look(name: str) -> RunRow | None:
        try:
            return _row(root.sub(name), name, now_s)
        except Exception as error:  # noqa: BLE001 - one bad directory must not hide the others
            return RunRow(directory=name, problem=f"{type(error).__name__}: {error}")

    with ThreadPoolExecutor(_NUM_PARALLEL_READS) as pool:
        rows = [row for row in pool.map(look, names) if row is not None]
    return sorted(rows, key=lambda row: (row.last_word_age_s is None, row.last_word_age_s or 0.0))


def _row(fs: Filesystem, directory: str, now_s: float) -> RunRow | None:
    """None for a directory that is not a run's."""
    run_file = load_run_file(fs)
    if run_file is None:
        return row_without_run_file(fs, directory)
    return _row_of(fs, directory, run_file, now_s)


def row_without_run_file(fs: Filesystem, directory: str) -> RunRow | None:
    """That of a damaged run; None for a directory that is not a run's."""
    if not _PARTS & {entry.name for entry in fs.list()}:
        return None
    return RunRow(directory=directory, problem=f"its {RUN_FILE} is missing")


def _row_of(fs: Filesystem, directory: str, run_file: RunFile, now_s: float) -> RunRow:
    gone = driver_seen_gone(fs)
    events = read_ledger(fs)
    return row_of(
        fs,
        directory,
        run_file,
        events,
        share=read_goodput(fs, events).share,
        gone=gone,
        now_s=now_s,
    )


def row_of(
    fs: Filesystem,
    directory: str,
    run_file: RunFile,
    events: Sequence[LedgerEvent],
    *,
    share: float | None,
    gone: str,
    now_s: float,
) -> RunRow:
    """The row that these facts add up to; `gone` is as `driver_seen_gone` says."""
    checkpoint = Catalog(fs, run_file.run_id).highest()
    status = summarise(run_file, events, checkpoint, storage=fs.url, now_s=now_s, gone=gone)
    return RunRow(
        directory=directory,
        name=status.name,
        state=status.state,
        step=status.step,
        until=status.until,
        loss=status.loss,
        world_size=status.world_size,
        restarts=status.restarts,
        goodput=share,
        age_s=max(0.0, now_s - run_file.created_s),
        last_word_age_s=status.last_word_age_s,
    )


def runs_text(rows: Sequence[RunRow]) -> str:
    """One run a line; a damaged one has its problem where the others have none."""
    if not rows:
        return "no runs"
    has_problem = any(row.problem for row in rows)
    header = ["NAME", "STATE", "STEP", "LOSS", "WORKERS", "RESTARTS", "GOODPUT", "AGE", "LAST WORD"]
    cells = [[*_cells(row), *([row.problem] if has_problem else [])] for row in rows]
    header += ["PROBLEM"] if has_problem else []
    return "\n".join(table(header, cells, right="STEP LOSS WORKERS RESTARTS GOODPUT"))


def _cells(row: RunRow) -> list[str]:
    step = _UNSAID if row.step is None else str(row.step)
    return [
        row.directory,
        row.state,
        step if row.step is None or row.until is None else f"{step}/{row.until}",
        _UNSAID if row.loss is None else f"{row.loss:.4f}",
        _UNSAID if row.world_size is None else str(row.world_size),
        _UNSAID if row.restarts is None else str(row.restarts),
        _UNSAID if row.goodput is None else f"{100 * row.goodput:.0f} %",
        _UNSAID if row.age_s is None else age(row.age_s),
        _UNSAID if row.last_word_age_s is None else f"{age(row.last_word_age_s)} ago",
    ]
