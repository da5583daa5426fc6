"""Segments: memory that one process owns and others on its machine can use, with no name left over.

An anonymous file that is opened through its owner's entry in /proc: it is gone when nobody has it
any more, however its owner ended. Linux only. Must not import ray or torch.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from dataclasses import dataclass
from io import FileIO, RawIOBase
from pathlib import Path
from typing import Any

import numpy as np

_MADV_POPULATE_WRITE = 23  # of Linux 5.14, which Python's mmap does not know


@dataclass(frozen=True)
class Place:
    """Where another process of the same user and machine finds a segment."""

    machine: str
    path: str
    inode: int
    """Tells it from what the path may lead to once its owner is gone."""
    num_bytes: int


class Segment:
    """So many bytes, taken from the machine at once. Raises `OSError` where there are none."""

    def __init__(self, num_bytes: int) -> None:
        fd = os.memfd_create("elastic-snapshot", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, max(1, num_bytes))
            self._map = _mapped(fd, num_bytes)
            with contextlib.suppress(OSError):  # an older kernel makes small pages, below
                self._map.madvise(_MADV_POPULATE_WRITE)
            # Taken now: a page that cannot be had later would kill whoever writes to it.
            os.posix_fallocate(fd, 0, max(1, num_bytes))
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd
        self.num_bytes = num_bytes

    @property
    def place(self) -> Place:
        """For others to map it."""
        path = f"/proc/{os.getpid()}/fd/{self._fd}"
        return Place(machine(), path, os.fstat(self._fd).st_ino, self.num_bytes)

    @property
    def view(self) -> memoryview:
        """All of it."""
        return memoryview(self._map)[: self.num_bytes]

    def close(self) -> None:
        """Give it up; whoever has mapped it keeps it until then."""
        os.close(self._fd)
        with contextlib.suppress(BufferError):  # a view of it is still in use, and goes with it
            self._map.close()


def map_place(place: Place) -> mmap.mmap:
    """The segment there, which stays as long as the map does, to be written to.

    Raises as `open_place`.
    """
    with open_place(place, "r+") as file:
        return _mapped(file.fileno(), place.num_bytes)


def _mapped(fd: int, num_bytes: int) -> mmap.mmap:
    """In large pages where the machine has them for shared memory: each costs to be found."""
    found = mmap.mmap(fd, max(1, num_bytes))
    with contextlib.suppress(OSError):
        found.madvise(mmap.MADV_HUGEPAGE)
    return found


def open_place(place: Place, mode: str = "r") -> FileIO:
    """The segment there as an unbuffered file, which stays until that is closed.

    To read it once nothing has to be mapped. Raises `OSError` when it is gone, or belongs to
    another user or machine.
    """
    if place.machine != machine():
        raise FileNotFoundError(f"{place.path} is on another machine, or in another container")
    file = FileIO(place.path, mode)
    if os.fstat(file.fileno()).st_ino != place.inode:
        file.close()
        raise FileNotFoundError(f"{place.path} is another file by now")
    return file


class MapStream(RawIOBase):
    """What is mapped already, as a stream to read: its pages need not be found once more."""

    def __init__(self, room: mmap.mmap) -> None:
        self._bytes = np.frombuffer(room, dtype=np.uint8)
        self._position = 0

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """To a place from the beginning."""
        assert whence == os.SEEK_SET
        self._position = offset
        return offset

    def readinto(self, buffer: Any) -> int:
        """Fills it as far as there is something; without the interpreter's lock."""
        found = self._bytes[self._position : self._position + len(buffer)]
        np.copyto(np.frombuffer(buffer, dtype=np.uint8)[: len(found)], found)
        self._position += len(found)
        return len(found)


def machine() -> str:
    """The machine and the container, as far as processes there can see one another."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def available_bytes() -> int:
    """What this machine, or the container, has left."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("MemAvailable:"))
    found = int(line.split()[1]) * 1024
    with contextlib.suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        most = int((group / "memory.max").read_text())
        found = min(found, most - int((group / "memory.current").read_text()))
    return max(0, found)
