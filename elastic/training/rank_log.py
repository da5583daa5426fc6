"""The rank log: this process's whole output, sent to the log of one rank of one generation.

Descriptors 1 and 2 themselves are led there, so that C++ and child processes are in it too, and so
that a write that returned is in the file, whatever happens to the process next. A thread copies it
on to where the output went before. Writes no value of the environment. Must not import ray.
"""

from __future__ import annotations

import atexit
import faulthandler
import fcntl
import logging
import os
import threading
import time

from elastic.storage import log_lines
from elastic.storage.filesystem import Filesystem
from elastic.storage.rank_logs import log_path
from elastic.training import output_buffers
from elastic.training.log_target import LogTarget, open_log

logger = logging.getLogger("elastic")

_COPY_S = 0.2
_KEEP_S = 1.0
_JOIN_S = 5.0
_PIECE_BYTES = 64 * 1024


class RankLog:
    """Where this process's output goes. One per process, used by one thread."""

    def __init__(self, fs: Filesystem) -> None:
        self._fs = fs
        self._originals: tuple[int, int] | None = None
        self._pump: _Pump | None = None
        self._pid = os.getpid()

    def switch(self, generation: int, world_rank: int) -> None:
        """From now on all output goes to this rank's log, what was written before to the old one.

        Stack dumps of fatal signals go there too, without the values of locals. Where the log
        cannot be opened the output goes where it went at first, and says so: no run ends for that.
        """
        try:
            target = open_log(self._fs, generation, world_rank)
        except OSError as error:
            self.restore()
            path = f"{self._fs.url}/{log_path(generation, world_rank)}"
            logger.warning("no rank log: %s cannot be opened (%s)", path, error)
            return
        if self._originals is None:
            self._originals = _duplicate(1), _duplicate(2)
            atexit.register(self._at_exit)
        output_buffers.buffer_by_line()
        self._lead_to(target.write_fd, target.write_fd)
        self._pump = _Pump(target, self._originals[0])
        faulthandler.enable(file=2, all_threads=True)

    def restore(self) -> None:
        """Lead the output where it went before the first switch; nothing if there was none."""
        if self._originals is None:
            return
        atexit.unregister(self._at_exit)
        self._lead_to(*self._originals)
        for descriptor in self._originals:
            os.close(descriptor)
        self._originals = None

    def end(self, last_word: str) -> None:
        """Lead the output back, after a last word that goes to the log alone."""
        if self._pump is not None and last_word:
            self.keep()
            self._pump.is_copying = False
            os.write(2, last_word.encode(errors="backslashreplace"))
        self.restore()

    def keep(self, wait_s: float = 2.0) -> None:
        """Make all that was written so far outlive this process, or give up after `wait_s`.

        For use before a last word, after which the process may be ended at any time.
        """
        if self._pump is not None:
            self._pump.keep(wait_s)

    def last_lines(self) -> list[str]:
        """What this rank wrote last in this generation: at most 20 lines, and 4 kB in all."""
        output_buffers.flush()
        return [] if self._pump is None else self._pump.last_lines()

    def _lead_to(self, stdout: int, stderr: int) -> None:
        output_buffers.flush()
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        if self._pump is not None:
            self._pump.close()
            self._pump = None

    def _at_exit(self) -> None:
        # A forked child has neither the thread nor a say in what is to be kept.
        if os.getpid() == self._pid:
            self.restore()


class _Pump:
    """The thread that brings a log to storage, and copies it to a descriptor, until closed."""

    def __init__(self, target: LogTarget, copy_to: int) -> None:
        self._target = target
        self._copy_to = copy_to
        self._copied = self._kept = target.start
        # A log that was led into itself would grow for ever.
        self.is_copying = not os.path.sameopenfile(copy_to, target.read_fd)
        self._told_of_failure = False
        self._changed = threading.Condition()
        self._is_closed = False
        self._num_asked = self._num_served = 0
        self._thread = threading.Thread(target=self._run, name="elastic-log", daemon=True)
        self._thread.start()

    def keep(self, wait_s: float) -> None:
        with self._changed:
            self._num_asked += 1
            mine = self._num_asked
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._num_served >= mine, wait_s)

    def close(self) -> None:
        """Bring the rest to its place and end. Nothing may be written to the log any more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(timeout=_JOIN_S)
        if not self._thread.is_alive():
            self._target.close()

    def last_lines(self) -> list[str]:
        end = os.fstat(self._target.read_fd).st_size
        start = max(self._target.start, end - log_lines.TAIL_BYTES)
        tail = os.pread(self._target.read_fd, end - start, start)
        return log_lines.last_lines(tail, is_whole=start == self._target.start)

    def _run(self) -> None:
        kept_s = time.monotonic()
        is_closed = False
        while not is_closed:
            with self._changed:
                self._changed.wait_for(self._is_wanted, _COPY_S)
                is_closed, num_asked = self._is_closed, self._num_asked
            output_buffers.flush()
            self._copy()
            is_asked = num_asked > self._num_served
            if self._target.outlives_process:
                self._serve(num_asked)
            if is_closed or is_asked or time.monotonic() - kept_s >= _KEEP_S:
                self._keep()
                kept_s = time.monotonic()
            self._serve(num_asked)

    def _serve(self, num_asked: int) -> None:
        with self._changed:
            self._num_served = num_asked
            self._changed.notify_all()

    def _is_wanted(self) -> bool:
        return self._is_closed or self._num_asked > self._num_served

    def _copy(self) -> None:
        try:
            while self.is_copying:
                piece = os.pread(self._target.read_fd, _PIECE_BYTES, self._copied)
                if not piece:
                    return
                self._copied += os.write(self._copy_to, piece)
        except BlockingIOError:
            return
        except OSError:
            # Nobody reads there any more, or that disk is full; the log itself has everything.
            self.is_copying = False

    def _keep(self) -> None:
        size = os.fstat(self._target.read_fd).st_size
        if size == self._kept:
            return
        try:
            self._target.keep()
        except Exception as error:  # noqa: BLE001 - storage clients raise classes of their own
            if not self._told_of_failure:
                self._told_of_failure = True
                logger.warning("the rank log could not be brought to storage yet: %s", error)
            return
        self._kept, self._told_of_failure = size, False


def _duplicate(descriptor: int) -> int:
    """Another descriptor for the same file, which no child inherits."""
    lowest = 3
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, lowest)
