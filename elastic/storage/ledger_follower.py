"""A ledger that is read on as it grows: each event is read from storage once.

For those who look again and again. Must not import ray or torch. Not for several threads at once.
"""

from __future__ import annotations

from elastic.storage.filesystem import Filesystem
from elastic.storage.ledger import DIR, LedgerEvent, lives, next_events, segments_of


class LedgerFollower:
    """Follows the ledger of the run at the root of `fs`."""

    def __init__(self, fs: Filesystem) -> None:
        self._fs = fs
        self._read: dict[str, int] = {}
        """By file: bytes that were read as whole events."""
        self._seen: dict[str, set[str]] = {}
        self._by_life: dict[str, list[LedgerEvent]] = {}
        self._events: list[LedgerEvent] = []

    def read(self) -> list[LedgerEvent]:
        """All events so far, as `read_ledger` gives them; the very same list while none has come.

        Raises `UnsupportedFormat`.
        """
        found = [name for _, name in lives(self._fs)]
        changed = [self._read_on(name) for name in found]
        gone = self._by_life.keys() - set(found)
        for name in gone:
            self._forget(name)
        if gone or any(changed):
            self._events = [event for name in found for event in self._by_life.get(name, [])]
        return self._events

    def _read_on(self, name: str) -> bool:
        """Whether there is more of this life, or less."""
        path = f"{DIR}/{name}"
        if not name.endswith(".arrows"):
            return self._read_segments(name, path)
        num_bytes, start = self._fs.size(path) or 0, self._read.get(name, 0)
        is_cut = num_bytes < start
        if is_cut:
            self._forget(name)
            start = 0
        if num_bytes <= start:
            return is_cut
        try:
            with self._fs.open_input(path) as file:
                file.seek(start)
                data = file.read()
        except FileNotFoundError:
            return is_cut
        events, end = next_events(_life(name), path, data, is_start=start == 0)
        self._read[name] = start + end
        self._by_life.setdefault(name, []).extend(events)
        return bool(events) or is_cut

    def _read_segments(self, name: str, path: str) -> bool:
        seen = self._seen.setdefault(name, set())
        fresh = [segment for segment in segments_of(self._fs, path) if segment not in seen]
        for segment in fresh:
            data = self._fs.read_bytes(segment)
            events, _ = next_events(_life(name), segment, data, is_start=True)
            self._by_life.setdefault(name, []).extend(events)
            seen.add(segment)
        return bool(fresh)

    def _forget(self, name: str) -> None:
        self._read.pop(name, None)
        self._seen.pop(name, None)
        self._by_life.pop(name, None)


def _life(name: str) -> int:
    return int(name.split("-", 1)[0])
