"""The wishes of people for a run without Ray: requests in its directory, looked at by rank 0.

Must not import ray or torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from elastic.storage import requests
from elastic.storage.filesystem import Filesystem
from elastic.storage.requests import Request


class Wishes:
    """What has been asked of the holder of the lease `epoch`. Use from one thread only."""

    def __init__(self, fs: Filesystem, epoch: int, record: Callable[..., None]) -> None:
        """`record` takes the kind, the reason and the data of an event for the ledger."""
        self._fs = fs
        self._epoch = epoch
        self._record = record
        self._handled: set[str] = set()
        self.stop = False
        """Whether the run shall save and stop."""
        self.saves = 0
        """How often a save was asked for."""

    def look(self) -> None:
        """Take what has come since the last look. Raises whatever the storage raises."""
        for request in requests.pending(self._fs):
            # One that could not be removed is found again. One for a later owner is its own.
            if request.id not in self._handled and request.epoch <= self._epoch:
                self._handled.add(request.id)
                self._take(request)
            if request.id in self._handled:
                requests.withdraw(self._fs, request.id)

    def _take(self, request: Request) -> None:
        flaw = request.flaw
        if request.epoch < self._epoch and not flaw:
            flaw = "it was meant for an earlier submission of the run"
        if request.kind == requests.ALLOW and not flaw:
            flaw = "without Ray no node is kept out"
        what = f"{request.kind or 'request'} asked by {request.who}"
        data: dict[str, Any] = {"id": request.id, "request": request.kind}
        if flaw:
            self._record("request_discarded", reason=f"{what}: {flaw}", data=data)
            return
        self._record("request_taken", reason=what, data=data)
        if request.kind == requests.STOP:
            self.stop = True
        else:
            self.saves += 1
