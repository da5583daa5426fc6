"""The archive of a run: its sparse checkpoints under a second root, such as an object store.

It is laid out as a run directory with the same run file, so that whatever reads a run reads it as
well. Another run's archive is never written to. Must not import ray or torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
from collections.abc import Callable, Iterable, Sequence

from elastic.policy.retention import Retention
from elastic.storage.checkpoints import Catalog, Checkpoint, NotComplete
from elastic.storage.copying import copy_checkpoint
from elastic.storage.filesystem import Filesystem
from elastic.storage.ledger import LedgerEvent
from elastic.storage.run_file import RUN_FILE, RunFile, load_run_file
from elastic.storage.store_errors import is_transient

__all__ = [
    "Archive",
    "ArchiveRefused",
    "ArchiveTaken",
    "ArchiveUnusable",
    "archive_of",
    "check_archive",
]

_PROBE = ".probe"
_PROBE_BYTES = 1 << 20
"""A full disk takes an empty file."""


logger = logging.getLogger("elastic")


class ArchiveRefused(Exception):
    """That place cannot be the archive of this run, and no step was trained."""


class ArchiveTaken(ArchiveRefused):
    """Another run has its archive at that place; nothing was written there."""

    def __init__(self, url: str, run_id: str, found: str) -> None:
        super().__init__(url, run_id, found)
        self.url = url
        self.run_id = run_id
        self.found = found

    def __str__(self) -> str:
        return (
            f"the archive {self.url} is that of run {self.found}, not of this run {self.run_id}: "
            "give archive= another place, or the run another name"
        )


class ArchiveUnusable(ArchiveRefused):
    """The place takes nothing, and never has taken anything of this run."""

    def __init__(self, url: str, problem: str) -> None:
        super().__init__(url, problem)
        self.url = url
        self.problem = problem

    def __str__(self) -> str:
        return (
            f"the archive {self.url} takes nothing: expected a place where the run's driver can "
            f"make this directory and write in it, found {self.problem}. Mend that, give archive= "
            "another place, or leave archive out; nothing was trained"
        )


def check_archive(archive: str | None, storage: str, keep_every: int | None) -> None:
    """Raises `ValueError` for an archive that cannot be one; nothing is contacted."""
    if archive is None:
        return
    if keep_every is None:
        raise ValueError(
            "archive= is where the checkpoints of each keep_every steps go, and keep_every is not "
            "set: set it, or leave archive out"
        )
    place, runs = Filesystem.at(archive).url, Filesystem.at(storage).url
    if f"{place}/".startswith(f"{runs}/"):
        raise ValueError(
            f"archive {archive!r} lies in the storage of the runs, {storage!r}: expected another "
            "place, since what is lost with the one must not be lost with the other"
        )


def archive_of(run_file: RunFile) -> Archive | None:
    """The archive of that run; None if it was last submitted without one."""
    url = run_file.operational.get("archive")
    return Archive(Filesystem.at(url), run_file) if isinstance(url, str) else None


class Archive:
    """The archive of one run at the root `fs`. One process writes to it at a time."""

    def __init__(self, fs: Filesystem, run_file: RunFile) -> None:
        self.fs = fs
        self.catalog = Catalog(fs, run_file.run_id)
        self._run_file = run_file
        self._is_claimed = False
        self._held: dict[int, tuple[int, int] | None] = {}
        """Generation and attempt of those that were seen to be complete there."""

    def check(self, past: Iterable[LedgerEvent] = (), *, is_again: bool = False) -> None:
        """Writes a probe. Raises `ArchiveTaken` if the place is another run's, `ArchiveUnusable` if
        it takes nothing.

        That is only a warning where it may pass, as when a store does not answer, where the ledger
        `past` tells that the place has taken checkpoints before, and where a run that was not
        refused goes on by itself, `is_again`: then the archiver tries again, and tells.
        """
        try:
            self.claim()
            self.fs.write_bytes(_PROBE, bytes(_PROBE_BYTES))
            with contextlib.suppress(OSError):  # some archives let nobody remove anything
                self.fs.remove_tree(_PROBE)
        except ArchiveTaken:
            raise
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            if not (is_again or is_transient(error) or self._has_taken(past)):
                raise ArchiveUnusable(self.fs.url, problem) from error
            logger.warning("the archive %s takes nothing now: %s", self.fs.url, problem)

    def _has_taken(self, past: Iterable[LedgerEvent]) -> bool:
        return any(
            event.kind == "checkpoint_archived" and event.data.get("archive") == self.fs.url
            for event in past
        )

    def claim(self) -> None:
        """Makes the place this run's, once. Raises `ArchiveTaken`, and what the store raises."""
        if self._is_claimed:
            return
        ours = self._run_file
        text = json.dumps(dataclasses.asdict(ours), indent=1, sort_keys=True) + "\n"
        if not self.fs.exists(RUN_FILE):
            self.fs.create_new(RUN_FILE, text.encode())
        found = load_run_file(self.fs)
        if found is not None and found.run_id != ours.run_id:
            raise ArchiveTaken(self.fs.url, ours.run_id, found.run_id)
        for step in self.catalog.complete_steps():
            self._saw(step)
        self._is_claimed = True

    def take(
        self,
        source: Catalog,
        step: int,
        *,
        is_stopped: Callable[[], bool] = lambda: False,
        before_publishing: Callable[[], object] = lambda: None,
    ) -> int:
        """Copies that checkpoint here; its bytes. Raises what `claim` and `copy_checkpoint` do."""
        self.claim()
        done = copy_checkpoint(
            source,
            step,
            self.catalog,
            is_stopped=is_stopped,
            before_publishing=before_publishing,
        )
        self._saw(step)
        return done.bytes

    def holding(self, source: Catalog, steps: Sequence[int], policy: Retention) -> set[int]:
        """Those of the steps whose checkpoint at the source is complete here, as last seen.

        A step that was trained again is held when its new checkpoint is.
        """
        asked = [step for step in steps if policy.archives(step) and step in self._held]
        found = {step: _attempt_of(source, step) for step in asked}
        return {step for step, attempt in found.items() if attempt and attempt == self._held[step]}

    def has(self, step: int) -> bool:
        """Whether that step is complete here now."""
        return self.catalog.inspect(step).complete

    def checkpoints(self) -> dict[int, Checkpoint]:
        """The complete checkpoints here by step, their paths whole, as URLs or absolute paths."""
        return {
            one.step: dataclasses.replace(one, path=f"{self.fs.url}/{one.path}")
            for one in self.catalog.list()
            if one.complete
        }

    def bring_back(self, step: int, target: Catalog) -> None:
        """Copies that checkpoint to the run's own storage; for the holder of the lease alone.

        Raises what `copy_checkpoint` does.
        """
        copy_checkpoint(self.catalog, step, target)

    def _saw(self, step: int) -> None:
        self._held[step] = _attempt_of(self.catalog, step)


def _attempt_of(catalog: Catalog, step: int) -> tuple[int, int] | None:
    """None where retention, or a person, has just removed it."""
    try:
        manifest = catalog.manifest(step)
    except NotComplete:
        return None
    return manifest.generation, manifest.attempt
