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

from elastic.cluster.large_pages import file_in_large_pages, is_in_large_pages

_NAME = "elastic-snapshot"
_MADV_POPULATE_WRITE = 23  # of Linux 5.14, which Python's mmap does not know


@dataclass(frozen=True)
class Place:
    """Where another process of the same user and machine finds a segment."""

    machine: str
    path: str
    identity: str
    """Tells it from what the path may lead to once its owner is gone."""
    num_bytes: int
    is_large: bool = False
    """In large pages, which are mapped in no time."""


class Segment:
    """So many bytes, taken from the machine at once. Raises `OSError` where there are none."""

    def __init__(self, num_bytes: int) -> None:
        size = max(1, num_bytes)
        with file_in_large_pages(_NAME) as large:
            fd = os.memfd_create(_NAME, os.MFD_CLOEXEC) if large is None else large
            try:
                os.ftruncate(fd, size)
                self._map = _mapped(fd, num_bytes)
                with contextlib.suppress(OSError):  # an older kernel makes small pages, below
                    self._map.madvise(_MADV_POPULATE_WRITE)
                # Taken now: a page that cannot be had later would kill whoever writes to it.
                os.posix_fallocate(fd, 0, size)
            except BaseException:
                os.close(fd)
                raise
        self._fd = fd
        self._is_large = is_in_large_pages(_address(self._map), num_bytes)
        self.num_bytes = num_bytes

    @property
    def place(self) -> Place:
        """For others to map it."""
        path = f"/proc/{os.getpid()}/fd/{self._fd}"
        return Place(machine(), path, _identity(self._fd), self.num_bytes, self._is_large)

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


def stream_place(place: Place) -> RawIOBase:
    """The segment there as a stream to read, in the way that takes the least time.

    Small pages are found more quickly by the kernel than by a map. Raises as `open_place`.
    """
    file = open_place(place)
    if not place.is_large:
        return file
    with file:
        return MapStream(_mapped(file.fileno(), place.num_bytes, mmap.PROT_READ))


def _mapped(fd: int, num_bytes: int, access: int = mmap.PROT_READ | mmap.PROT_WRITE) -> mmap.mmap:
    """In large pages where the machine has them for shared memory: each costs to be found."""
    found = mmap.mmap(fd, max(1, num_bytes), prot=access)
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
    if _identity(file.fileno()) != place.identity:
        file.close()
        raise FileNotFoundError(f"{place.path} is another file by now")
    return file


def _address(room: mmap.mmap) -> int:
    return int(np.frombuffer(room, dtype=np.uint8).ctypes.data)


def _identity(fd: int) -> str:
    found = os.fstat(fd)
    return f"{found.st_dev}-{found.st_ino}"


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

    def take(self, num_bytes: int) -> memoryview | None:
        """The next so many bytes as they lie, without a copy; None where there are not so many."""
        found = self._bytes[self._position : self._position + num_bytes]
        if len(found) < num_bytes:
            return None
        self._position += num_bytes
        return found.data

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
