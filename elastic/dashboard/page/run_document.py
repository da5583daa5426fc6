"""What a run's page shows, as one bounded document; every figure is that of the reports.

Reads storage through followers, so that a look at a run that has not changed costs a listing. Must
import neither ray nor torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from elastic.dashboard import goodput as goodput_report
from elastic.dashboard.explanation import restart_text
from elastic.dashboard.page import lanes, saves, series
from elastic.dashboard.restarts import Restart, restarts_of, totals
from elastic.dashboard.run_list import RunRow, row_of, row_without_run_file
from elastic.dashboard.run_picture import RunReader
from elastic.dashboard.status import AGES, driver_seen_gone, last_word_s, summarise
from elastic.dashboard.tries_left import tries_left
from elastic.storage.checkpoints import Catalog
from elastic.storage.filesystem import Filesystem
from elastic.storage.ledger import LedgerEvent
from elastic.storage.pins import pinned_steps
from elastic.storage.run_file import RunFile, load_run_file

MOST_RESTARTS = 250
MOST_EVENTS = 60

_QUIET = frozenset({"driver_heartbeat", "progress"})
_LEFT_OUT = AGES | {"ranks"}


class NoRun(Exception):
    """There is no run in this directory."""


class RunPage:
    """The page of the run at the root of `fs`. Not for several threads at once."""

    def __init__(self, fs: Filesystem, directory: str) -> None:
        self._fs = fs
        self._directory = directory
        self._reader = RunReader(fs)

    def events(self) -> list[LedgerEvent]:
        """See `RunReader.events`."""
        return self._reader.events()

    def row(self, now_s: float) -> RunRow | None:
        """Its row in the list of runs; one that cannot be read says why. None for no run's."""
        try:
            run_file = load_run_file(self._fs)
            if run_file is None:
                return row_without_run_file(self._fs, self._directory)
            gone = driver_seen_gone(self._fs)
            events = self.events()
            found = self._reader.goodput(events)
            return row_of(
                self._fs,
                self._directory,
                run_file,
                events,
                share=None if found is None else found.share,
                gone=gone,
                now_s=now_s,
            )
        except Exception as error:  # noqa: BLE001 - one bad directory must not hide the others
            return RunRow(directory=self._directory, problem=f"{type(error).__name__}: {error}")

    def document(self, now_s: float) -> dict[str, Any]:
        """All that the page shows; times of day are seconds since 1970. Changes with its run only.

        Raises:
            NoRun: nothing was ever started in this directory.
            UnsupportedFormat: a newer version of elastic wrote this run.
        """
        run_file = self._run_file()
        gone = driver_seen_gone(self._fs)
        events = self.events()
        catalog = Catalog(self._fs, run_file.run_id)
        checkpoints = catalog.list()
        whole = [one for one in checkpoints if one.complete]
        status = summarise(
            run_file,
            events,
            whole[-1] if whole else None,
            storage=self._fs.url,
            now_s=now_s,
            gone=gone,
        )
        found = self._reader.goodput(events)
        restarts = restarts_of(events)
        committed = [event for event in events if event.kind == "checkpoint_committed"]
        return {
            "directory": self._directory,
            "status": {k: v for k, v in asdict(status).items() if k not in _LEFT_OUT},
            "created_s": run_file.created_s,
            "last_word_s": last_word_s(events, run_file.created_s),
            "checkpoint_s": next(
                (e.time_s for e in reversed(committed) if e.step == status.checkpoint_step), None
            ),
            "goodput": None if found is None else asdict(found),
            "goodput_text": goodput_report.share_text(found),
            "restarts": [_restart(one) for one in restarts[-MOST_RESTARTS:]],
            "num_restarts": len(restarts),
            "totals": asdict(totals(restarts)),
            "tries_left": _tries(events),
            "world_size": series.world_size(events),
            "steps": series.by_step(self._reader.current_metrics()),
            "marks": series.marks(restarts),
            "lanes": [asdict(lane) for lane in lanes.lanes_of(events)],
            "saves": [
                asdict(one)
                for one in saves.saves_of(
                    events,
                    checkpoints,
                    pinned=pinned_steps(self._fs),
                    retention=saves.retention_of(run_file.operational),
                )
            ],
            "events": [_event(event) for event in _loud(events)[-MOST_EVENTS:]],
        }

    def story(self, number: int, now_s: float) -> dict[str, Any] | None:
        """Restart `number` as `elastic explain` tells it; None if there is none."""
        events = self.events()
        restarts = restarts_of(events)
        if not 1 <= number <= len(restarts):
            return None
        one = restarts[number - 1]
        text = restart_text(one, len(restarts), tries_left(events), run=self._fs.url, now_s=now_s)
        return {"number": number, "text": text, "stacks": one.stacks, "generation": one.generation}

    def _run_file(self) -> RunFile:
        run_file = load_run_file(self._fs)
        if run_file is None:
            raise NoRun(f"no run in {self._directory}")
        return run_file


def _restart(one: Restart) -> dict[str, Any]:
    told = {k: v for k, v in vars(one).items() if k != "events"}
    return {**told, "is_failure": one.is_failure}


def _tries(events: Sequence[LedgerEvent]) -> list[dict[str, Any]] | None:
    found = tries_left(events)
    return None if found is None else [asdict(one) for one in found]


def _loud(events: Sequence[LedgerEvent]) -> list[LedgerEvent]:
    return [event for event in events if event.kind not in _QUIET]


def _event(event: LedgerEvent) -> dict[str, Any]:
    return {k: v for k, v in vars(event).items() if k not in ("data", "life", "seq")}
