"""Readmission: a checkpoint that was set aside, in its place again, once all its bytes are sound.

Only the holder of the run's lease may do it. Must not import ray or torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from elastic.storage import quarantine
from elastic.storage.checkpoints import Catalog
from elastic.storage.completeness import Look, home, look_at
from elastic.storage.ledger import LedgerWriter
from elastic.storage.verification import GOOD, check_files

__all__ = ["BRING_BACK", "Readmission", "ReadmissionRefused", "last_set_aside", "readmit"]

BRING_BACK = (
    "Those that were set aside lie in checkpoints/quarantine of the run, as `elastic checkpoints "
    "list` shows: restore their files there from a copy, then `elastic checkpoints restore RUN "
    "--step N` brings one back"
)
"""What to do where no checkpoint is left."""


@dataclass(frozen=True, kw_only=True)
class Readmission:
    """One checkpoint that counts again, and where it lay, relative to the run's root."""

    step: int
    path: str
    bytes: int


class ReadmissionRefused(Exception):
    """That checkpoint stays in the quarantine, or there is none; nothing was changed."""

    def __init__(self, url: str, step: int, why: str) -> None:
        super().__init__(url, step, why)
        self.url = url
        self.step = step
        self.why = why

    def __str__(self) -> str:
        return f"cannot bring back step {self.step} of {self.url}: {self.why}. Nothing was changed"


def last_set_aside(catalog: Catalog, step: int) -> str | None:
    """Where the checkpoint of that step lies that was set aside last; None if none was."""
    found = [one.path for one in quarantine.checkpoints(catalog.fs) if one.step == step]
    return max(found, key=lambda path: int(path.rsplit("-", 1)[1]), default=None)


def readmit(
    catalog: Catalog,
    ledger: LedgerWriter,
    step: int,
    reason: str,
    *,
    time_s: float,
    tell: Callable[[int, int], None] = lambda done, all: None,
) -> Readmission:
    """The one of that step that was set aside last is complete in its place again.

    Every byte is read first; `tell` is called as in `verification.verify`. The ledger is told
    before anything moves. Raises `ReadmissionRefused` if none was set aside, if its bytes are not
    those that were saved, and if something is at the step already; `UnsupportedFormat`.
    """
    fs = catalog.fs

    def refused(why: str) -> ReadmissionRefused:
        return ReadmissionRefused(fs.url, step, why)

    path = last_set_aside(catalog, step)
    if path is None:
        raise refused("no checkpoint of it is in the quarantine")
    there = look_at(fs, catalog.run_id, step)
    if there.has_marker or (fs.is_local and fs.exists(home(step))):
        state = "a complete one" if there.complete else f"something else ({there.flaw})"
        raise refused(f"{state} is at {home(step)} already; the other one is at {path}")
    look = look_at(fs, catalog.run_id, step, path)
    if look.too_new:
        raise look.too_new
    problems = [look.flaw] if look.flaw else _problems(catalog, look, tell)
    if problems:
        raise refused(
            f"{path} is not what was saved ({'; '.join(problems)}): restore these files there from "
            "a copy first"
        )
    assert look.manifest is not None
    num_bytes = sum(file.bytes for file in look.manifest.files)
    data: dict[str, object] = {"path": path, "bytes": num_bytes}
    ledger.append("checkpoint_restored", step=step, reason=reason, data=data, time_s=time_s)
    quarantine.put_back(fs, step, path)
    return Readmission(step=step, path=path, bytes=num_bytes)


def _problems(catalog: Catalog, look: Look, tell: Callable[[int, int], None]) -> list[str]:
    assert look.manifest is not None
    files = [(look.path, file) for file in look.manifest.files]
    return [found for result, found in check_files(catalog.fs, files, tell) if result != GOOD]
