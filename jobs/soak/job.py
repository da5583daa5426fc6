"""A run of `jobs.pretrain` on a soak's cluster: started, watched through its ledger, and ended."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from elastic.storage.filesystem import Filesystem
from elastic.storage.ledger import LedgerEvent, read_ledger
from elastic.storage.requests import FAULT, STOP, ask

PATIENCE_S = 120.0


class SoakFailed(RuntimeError):
    """The run did not get where it had to get; the message has the end of its output."""


class SoakJob:
    """One run under `storage`, which is made. Its flags come with `going_on`."""

    def __init__(self, address: str, storage: Path, *, save_takes_s: float = 0.0) -> None:
        """With `save_takes_s` its storage is slow: see `jobs.soak.slow_pretrain`."""
        self._address = address
        self._module = "jobs.soak.slow_pretrain" if save_takes_s else "jobs.pretrain"
        self._save_takes_s = save_takes_s
        self._storage = storage
        self._process: subprocess.Popen[bytes] | None = None
        storage.mkdir()
        self.url = str(storage / "run")

    @property
    def filesystem(self) -> Filesystem:
        return Filesystem.at(self.url)

    @contextlib.contextmanager
    def going_on(self, *flags: str) -> Iterator[None]:
        """The run at work; what is left of it when the block ends is killed."""
        command = [sys.executable, "-m", self._module, "--quiet", "--name", "run", *flags]
        told = {"RAY_ADDRESS": self._address, "SAVE_TAKES_S": str(self._save_takes_s)}
        with (self._storage / "job.log").open("wb") as log:
            self._process = subprocess.Popen(
                [*command, "--storage", str(self._storage)],
                env={**os.environ, **told},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            yield
        finally:
            self._process.kill()
            self._process.wait()

    def events(self, *kinds: str) -> list[LedgerEvent]:
        """What the ledger holds so far, of these kinds, or of all."""
        found = read_ledger(self.filesystem) if Path(self.url).is_dir() else []
        return [event for event in found if not kinds or event.kind in kinds]

    def ranks(self) -> list[dict[str, Any]]:
        """The members of the newest generation, by world rank."""
        started = self.events("generation_started")
        found: list[dict[str, Any]] = started[-1].data["ranks"] if started else []
        return found

    def wait_for(
        self, what: str, condition: Callable[[], Any], patience_s: float = PATIENCE_S
    ) -> Any:
        """The first true answer of `condition`.

        Raises:
            SoakFailed: the run has ended, or the time is over.
        """
        until_s = time.monotonic() + patience_s
        while not (found := condition()):
            self.check_alive(what)
            if time.monotonic() > until_s:
                last = [f"{event.kind}: {event.reason}" for event in self.events()[-8:]]
                raise SoakFailed(f"no {what} within {patience_s:g} s: {last}")
            time.sleep(0.2)
        return found

    def check_alive(self, before: str) -> None:
        """Raises `SoakFailed` if the run has ended."""
        assert self._process is not None
        if self._process.poll() is not None:
            raise SoakFailed(f"the run ended before {before}: {self._log()}")

    def announce_fault(self) -> None:
        """Tell the run of a fault that comes at once: it counts as none of the cluster's own."""
        asked = ask(self.filesystem, FAULT, who="soak", time_s=time.time(), epoch=1)

        def is_heard() -> bool:
            return any(e.data.get("id") == asked.id for e in self.events("fault_announced"))

        self.wait_for("word that the fault is announced", is_heard)

    def stop(self) -> None:
        """Have it save and stop, and wait for its end."""
        ask(self.filesystem, STOP, who="soak", time_s=time.time(), epoch=1)
        self.wait_for_end()

    def wait_for_end(self, patience_s: float = PATIENCE_S) -> None:
        """Raises `SoakFailed` if it does not end well."""
        assert self._process is not None
        status = self._process.wait(patience_s)
        if status != 0:
            raise SoakFailed(f"the run ended with status {status}: {self._log()}")

    def _log(self) -> str:
        return (self._storage / "job.log").read_text(errors="replace")[-2000:]
