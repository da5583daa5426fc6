"""A watch on a run: whether it still goes on, asked again and again.

Reads the lease, which is small, and the ledger only once the lease no longer beats. Must import
neither ray nor torch.
"""

from __future__ import annotations

import time

from elastic.dashboard.status import TERMINAL, last_word_s, state_of
from elastic.storage import lease
from elastic.storage.filesystem import Filesystem
from elastic.storage.ledger import read_ledger


class RunWatch:
    """Watches one run. `stale_s` is how long a lease may stand still before its owner is dead."""

    def __init__(self, fs: Filesystem, stale_s: float = lease.STALE_S) -> None:
        self._fs = fs
        self._stale_s = stale_s
        self._beat = (-1, -1)
        self._beat_seen_s = time.monotonic()

    def end(self) -> tuple[str, str] | None:
        """State and reason once it is over, UNKNOWN if its driver just vanished; else None.

        Raises:
            UnsupportedFormat: a newer version of elastic wrote this run.
        """
        epoch, holder = lease.read(self._fs)
        held = None if holder is None or holder.released else holder
        if held is not None and not self._stands_still(epoch, held.beats):
            return None
        events = read_ledger(self._fs)
        silent_s = max(0.0, time.time() - last_word_s(events, 0.0))
        state, reason = state_of(events, silent_s=silent_s)
        if state in TERMINAL or state == "UNKNOWN":
            return state, reason
        return None if held is None else ("UNKNOWN", f"its driver is gone; the last was {state}")

    def _stands_still(self, epoch: int, beats: int) -> bool:
        now_s = time.monotonic()
        if (epoch, beats) != self._beat:
            self._beat, self._beat_seen_s = (epoch, beats), now_s
        return now_s - self._beat_seen_s >= self._stale_s
