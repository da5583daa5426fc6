"""A log being written: a file in the run directory, or one here that is brought to an object store.

Must not import ray or torch.
"""

from __future__ import annotations

import os
import tempfile
from typing import Protocol

from elastic.storage.filesystem import Filesystem
from elastic.storage.rank_logs import log_path, segment_path

_SEGMENT_BYTES = 1024 * 1024


class LogTarget(Protocol):
    """`start` is the size of the log when it was opened, in bytes."""

    write_fd: int
    read_fd: int
    start: int
    outlives_process: bool
    """Whether what is written needs nothing more done to survive the end of this process."""

    def keep(self) -> None:
        """Bring what was written to where others can read it. Raises what storage raises."""

    def close(self) -> None: ...


def open_log(fs: Filesystem, generation: int, world_rank: int) -> LogTarget:
    """The log of one rank, to be added to. Raises `OSError`."""
    kind = _File if fs.is_local else _Spool
    return kind(fs, generation, world_rank)


class _File:
    """On a mounted file system, written where it stays."""

    outlives_process = True

    def __init__(self, fs: Filesystem, generation: int, world_rank: int) -> None:
        path = log_path(generation, world_rank)
        self._output = fs.open_append(path)
        self._input = fs.open_input(path)
        self.write_fd, self.read_fd = self._output.fileno(), self._input.fileno()
        self.start = os.fstat(self.read_fd).st_size

    def keep(self) -> None:
        # Only what is synced is seen by other machines of a network file system, and outlives this.
        os.fdatasync(self.write_fd)

    def close(self) -> None:
        self._output.close()
        self._input.close()


class _Spool:
    """A nameless file of this machine, brought to an object store in segments."""

    start = 0
    outlives_process = False

    def __init__(self, fs: Filesystem, generation: int, world_rank: int) -> None:
        self._fs = fs
        self._log = generation, world_rank
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - open while written
        self.write_fd = self.read_fd = self._file.fileno()
        self._segment_start = self._kept = 0

    def keep(self) -> None:
        size = os.fstat(self.read_fd).st_size
        while self._kept < size:
            start = self._segment_start
            data = os.pread(self.read_fd, _SEGMENT_BYTES, start)
            self._fs.write_bytes(segment_path(*self._log, start), data)
            self._kept = start + len(data)
            if len(data) == _SEGMENT_BYTES:
                self._segment_start = self._kept

    def close(self) -> None:
        self._file.close()
