"""Room: whether storage has enough of it for what a run saves, told once before it is needed.

Must not import ray or torch.
"""

from __future__ import annotations

import logging

from elastic.storage.filesystem import Filesystem

__all__ = ["NUM_CHECKPOINTS", "RoomWatch"]

logger = logging.getLogger("elastic")

NUM_CHECKPOINTS = 2
"""So many more are to fit: the next one is written before an older one goes."""


class RoomWatch:
    """The room that is left below the root `fs`."""

    def __init__(self, fs: Filesystem) -> None:
        self._fs = fs
        self._is_short = False

    def look(self, checkpoint_bytes: int) -> str:
        """What to tell people if there has come to be too little for two more checkpoints, else "".

        "" where it cannot be known, as on an object store.
        """
        try:
            free_bytes = self._fs.free_bytes()
        except OSError:
            return ""
        was_short = self._is_short
        self._is_short = free_bytes is not None and free_bytes < NUM_CHECKPOINTS * checkpoint_bytes
        if free_bytes is None or was_short or not self._is_short:
            return ""
        words = (
            f"{free_bytes / 1e9:.3g} GB are free at {self._fs.url}, less than "
            f"{NUM_CHECKPOINTS} checkpoints of {checkpoint_bytes / 1e9:.3g} GB take: "
            "keep fewer, or make room"
        )
        logger.warning("storage is short: %s", words)
        return words
