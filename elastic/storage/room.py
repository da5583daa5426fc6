"""Room: whether storage has enough of it for what a run saves, told once before it is needed.

Must not import ray or torch.
"""

from __future__ import annotations

import logging
import os
import uuid

from elastic.storage.filesystem import Filesystem
from elastic.storage.store_errors import is_full

__all__ = ["NUM_CHECKPOINTS", "NoRoom", "RoomWatch", "check_room"]

logger = logging.getLogger("elastic")

NUM_CHECKPOINTS = 2
"""So many more are to fit: the next one is written before an older one goes."""

_START_BYTES = 1 << 16


class NoRoom(ValueError):
    """Storage is so full that a run cannot even begin."""


def check_room(fs: Filesystem) -> None:
    """Makes the root `fs`, and sees that it takes a little more than a run begins with.

    Leaves nothing else. Raises `NoRoom` where there is none for that, and any other trouble
    as it comes.
    """
    path = f".probe-{uuid.uuid4().hex}"
    try:
        fs.make_dirs()
        fs.write_bytes(path, os.urandom(_START_BYTES))
        fs.remove_tree(path)
    except OSError as error:
        if not is_full(str(error)):
            raise
        raise NoRoom(
            f"storage is full: the run directory {fs.url} does not take {_START_BYTES} bytes more "
            f"({error}){_free(fs)}. Nothing was started: free room there, or choose another storage"
        ) from error


def _free(fs: Filesystem) -> str:
    try:
        free_bytes = fs.free_bytes()
    except OSError:
        return ""
    return "" if free_bytes is None else f"; {free_bytes} bytes are free for this user"


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
