"""Feeds: one reader for all who look at the same run or list, and what it read last.

A feed reads while somebody looks, and for a moment after. Must import neither ray nor torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator
from dataclasses import asdict
from typing import Any, Protocol

from elastic.dashboard.page.evidence import is_contained
from elastic.dashboard.page.run_document import RunPage
from elastic.dashboard.text import finite
from elastic.storage.filesystem import Filesystem

POLL_S = 0.3
POLL_OBJECTS_S = 0.7
# A driver that says nothing is gone: the document changes then, though nothing has come.
_REBUILD_S = 5.0
# A document that is dear to make is made less often, so that looking costs the run next to nothing.
_REST_PER_WORK = 2.0
_KEEP_ALIVE_S = 10.0


class Source(Protocol):
    """What a feed reads."""

    def mark(self) -> object:
        """Cheap, and another value once something has come."""

    def document(self, now_s: float) -> Any:
        """What is shown now."""


class RunSource:
    """One run."""

    def __init__(self, reader: RunPage) -> None:
        self._reader = reader

    def mark(self) -> object:
        events = self._reader.events()
        return len(events), id(events)

    def document(self, now_s: float) -> Any:
        return self._reader.document(now_s)


class ListSource:
    """All runs below a root."""

    def __init__(self, root: Filesystem) -> None:
        self._root = root
        self._readers: dict[str, RunPage] = {}

    def mark(self) -> object:
        return [(name, self._size(name)) for name in self._names()]

    def document(self, now_s: float) -> Any:
        names = self._names()
        self._readers = {name: self._reader(name) for name in names}
        found = [self._readers[name].row(now_s) for name in names]
        rows = [row for row in found if row is not None]
        rows.sort(key=lambda row: (row.last_word_age_s is None, row.last_word_age_s or 0.0))
        return {"storage": self._root.url, "runs": [_row(asdict(row), now_s) for row in rows]}

    def _names(self) -> list[str]:
        found = [entry.name for entry in self._root.list() if entry.is_dir]
        return [name for name in found if is_contained(self._root, name)]

    def _reader(self, name: str) -> RunPage:
        return self._readers.get(name) or RunPage(self._root.sub(name), name)

    def _size(self, name: str) -> object:
        try:
            return [(entry.name, entry.bytes) for entry in self._root.list(f"{name}/ledger")]
        except OSError:
            return None


def _row(row: dict[str, Any], now_s: float) -> dict[str, Any]:
    """With moments, which stand still, in the place of ages."""
    for age, moment in (("age_s", "created_s"), ("last_word_age_s", "last_word_s")):
        value = row.pop(age)
        row[moment] = None if value is None else round(now_s - value, 1)
    return row


class Feed:
    """The newest document of one source, as JSON, for any number of viewers."""

    def __init__(self, source: Source, *, poll_s: float) -> None:
        self._source = source
        self._poll_s = poll_s
        self._num_viewers = 0
        self._latest = ""
        self._problem: Exception | None = None
        self._changed = asyncio.Condition()
        self._reading = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._mark: object = None
        self._made_s = -_REBUILD_S

    async def now(self) -> str:
        """The document as it is now. Raises what reading raises."""
        async with self._reading:
            await asyncio.to_thread(self._refresh)
        return self._latest

    async def changes(self) -> AsyncGenerator[str, None]:
        """The document, and again each time it has changed; "" now and then while it has not."""
        self._num_viewers += 1
        if self._task is None:
            self._task = asyncio.create_task(self._go_on())
        try:
            told = await self.now()
            yield told
            while self._problem is None:
                async with self._changed:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._changed.wait(), _KEEP_ALIVE_S)
                newest = self._latest
                yield "" if newest == told else newest
                told = newest
        finally:
            self._num_viewers -= 1

    async def _go_on(self) -> None:
        """Reads until nobody looks any more."""
        try:
            while self._num_viewers > 0:
                began_s = time.monotonic()
                before = self._latest
                async with self._reading:
                    await asyncio.to_thread(self._refresh)
                if self._latest != before:
                    await self._wake()
                worked_s = time.monotonic() - began_s
                await asyncio.sleep(max(self._poll_s, _REST_PER_WORK * worked_s))
        except Exception as error:  # noqa: BLE001 - told to the viewers, who ask again
            self._problem = error
            await self._wake()
        finally:
            self._task = None

    async def _wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _refresh(self) -> None:
        mark = self._source.mark()
        if mark == self._mark and time.monotonic() - self._made_s < _REBUILD_S:
            return
        document = finite(self._source.document(time.time()))
        # On one line: with indentation it would be made by slow code.
        latest = json.dumps(document, allow_nan=False)
        self._latest, self._mark, self._made_s = latest, mark, time.monotonic()
