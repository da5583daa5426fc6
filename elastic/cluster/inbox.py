"""The inbox: requests that people have put into the run's directory, turned into events.

It decides nothing: what a stop or a save means now is the policy's to say.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from elastic.cluster.inheritance import Inheritance
from elastic.cluster.injections import ANNOUNCED
from elastic.policy.events import Event, Record, SaveRequested, StopRequested
from elastic.storage import requests
from elastic.storage.filesystem import Filesystem
from elastic.storage.requests import Request

logger = logging.getLogger("elastic")


class Inbox:
    """The requests of the drivers of one job, of which this one holds the lease `epoch`.

    `in_order` does storage work off the event loop, `post` takes events, `allow` the id of a node
    that is let back in and the reason, `where` gives generation and step for the ledger. Use from
    the event loop only.
    """

    def __init__(
        self,
        fs: Filesystem,
        epoch: int,
        *,
        in_order: Callable[[Callable[[], Any]], Awaitable[Any]],
        post: Callable[[Event], None],
        allow: Callable[[str, str], None],
        record: Callable[[Record], None],
        where: Callable[[], tuple[int, int]],
        inheritance: Inheritance,
    ) -> None:
        self._fs = fs
        self._epoch = epoch
        self._epochs = inheritance.epochs | {epoch}
        self._in_order = in_order
        self._post = post
        self._allow = allow
        self._record = record
        self._where = where
        self._handled = set(inheritance.taken)
        self._is_looking = False
        self._is_closed = False
        for event in inheritance.unanswered():
            post(event)

    async def look(self) -> None:
        """Take what has come since the last look."""
        if self._is_looking:
            return
        self._is_looking = True
        try:
            found = await self._in_order(lambda: requests.pending(self._fs))
            for request in found:
                self._handle(request)
            if found:
                await self._in_order(self._clear)
        except Exception as error:  # noqa: BLE001 - storage clients raise classes of their own
            logger.warning("cannot look for requests of people: %s", error)
        finally:
            self._is_looking = False

    def close(self) -> None:
        """The run is over: whoever still asks finds nobody."""
        self._is_closed = True

    def _handle(self, request: Request) -> None:
        # A request that could not be removed is found again. One for a later owner is its own.
        if self._is_closed or request.id in self._handled or request.epoch > self._epoch:
            return
        self._handled.add(request.id)
        flaw = request.flaw
        if request.epoch not in self._epochs and not flaw:
            flaw = "it was meant for an earlier submission of the run"
        generation, step = self._where()
        what = f"{request.kind or 'request'} asked by {request.who}"
        taken = ANNOUNCED if request.kind == requests.FAULT else "request_taken"
        self._record(
            Record(
                kind="request_discarded" if flaw else taken,
                generation=generation,
                step=step,
                reason=f"{what}: {flaw}" if flaw else what,
                data={"id": request.id, "request": request.kind},
            )
        )
        if flaw or request.kind == requests.FAULT:
            return
        if request.kind == requests.ALLOW:
            self._allow(request.node, what)
        else:
            make = StopRequested if request.kind == requests.STOP else SaveRequested
            self._post(make(reason=what))

    def _clear(self) -> None:
        for request_id in self._handled:
            requests.withdraw(self._fs, request_id)
