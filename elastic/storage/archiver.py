"""The archiver: takes what belongs in the archive there, in the background, one after another.

It keeps no list of what is to do: the checkpoints themselves are it, so that what could not be
taken is tried again at the next commit, by the next life of the driver too. Must not import ray or
torch.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from elastic.policy.retention import Retention
from elastic.storage.archive import Archive
from elastic.storage.checkpoints import Catalog, NotComplete
from elastic.storage.copying import CopyDamaged, CopyStopped, give_way

__all__ = ["ARCHIVED_S", "Archiver"]

logger = logging.getLogger("elastic")

ARCHIVED_S = 600.0
"""How long the end of a finished run waits for what is still to be taken to the archive."""

Tell = Callable[[str, int, str, dict[str, Any]], None]


class Archiver:
    """One thread at low priority, and at most one copy at a time."""

    def __init__(
        self,
        catalog: Catalog,
        archive: Archive,
        policy: Retention,
        *,
        tell: Tell,
        before_publishing: Callable[[], object],
    ) -> None:
        """`tell(kind, step, reason, data)` gets the ledger's words, from this thread.

        `before_publishing` raises where this process may write no more.
        """
        self._catalog = catalog
        self._archive = archive
        self._policy = policy
        self._tell = tell
        self._before_publishing = before_publishing
        self._changed = threading.Condition()
        self._is_wanted = True  # what an earlier life has left is taken first
        self._is_closed = False
        self._is_ending = False
        self._told: dict[int, str] = {}
        self._thread = threading.Thread(target=self._run, name="elastic-archive", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """A checkpoint was committed."""
        with self._changed:
            self._is_wanted = True
            self._changed.notify_all()

    def holding(self, steps: Sequence[int]) -> set[int]:
        """Those of the steps whose checkpoint of this run the archive has too."""
        return self._archive.holding(self._catalog, steps, self._policy)

    def close(self, wait_s: float = 0.0) -> bool:
        """Ends the thread, once all is taken or `wait_s` is over; whether all was.

        What is left stays in the run's own storage, where retention does not remove it.
        """
        with self._changed:
            self._is_ending = True
            self._changed.notify_all()
        self._thread.join(wait_s)
        is_done = not self._thread.is_alive()
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        return is_done

    def _run(self) -> None:
        give_way()
        while self._is_asked():
            try:
                self._take_all()
            except CopyStopped:
                return
            except Exception as error:  # noqa: BLE001 - storage clients raise classes of their own
                self._failed(-1, error)

    def _is_asked(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._is_wanted or self._is_ending or self._is_closed)
            is_asked = self._is_wanted and not self._is_closed
            self._is_wanted = False
            return is_asked

    def _take_all(self) -> None:
        self._archive.claim()
        self._told.pop(-1, None)
        complete = self._catalog.complete_steps()
        for step in self._policy.to_archive(complete, self.holding(complete)):
            try:
                size_bytes = self._archive.take(
                    self._catalog,
                    step,
                    is_stopped=lambda: self._is_closed,
                    before_publishing=self._before_publishing,
                )
            except CopyStopped:
                raise
            except Exception as error:  # noqa: BLE001 - see above
                self._failed(step, error)
                if not isinstance(error, CopyDamaged | NotComplete):
                    return  # most likely the others would fare alike
                continue
            self._told.pop(step, None)
            self._say("checkpoint_archived", step, "", {"bytes": size_bytes})

    def _failed(self, step: int, error: Exception) -> None:
        """Told once for a step and a reason, however often it is tried; step -1 is the place."""
        why = f"{type(error).__name__}: {error}"
        if self._told.get(step) == why:
            return
        self._told[step] = why
        reason = f"{why}; tried again after the next commit, and kept in the run's storage so long"
        what = "nothing" if step < 0 else f"not the checkpoint of step {step}"
        logger.warning("the archive %s takes %s: %s", self._archive.fs.url, what, reason)
        self._say("archive_failed", step, reason, {})

    def _say(self, kind: str, step: int, reason: str, data: dict[str, Any]) -> None:
        with self._changed:
            if not self._is_closed:  # else the ledger is closed too
                self._tell(kind, step, reason, {"archive": self._archive.fs.url, **data})
