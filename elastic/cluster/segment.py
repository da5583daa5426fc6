"""Segments: memory that one process owns and others on its machine can map, with no name left over.

An anonymous file that is opened through its owner's entry in /proc: it is gone when nobody has it
any more, however its owner ended. Linux only. Must not import ray or torch.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from dataclasses import dataclass
from pathlib import Path


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
            # Taken now: a page that cannot be had later would kill whoever writes to it.
            os.posix_fallocate(fd, 0, max(1, num_bytes))
            self._map = mmap.mmap(fd, max(1, num_bytes))
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


def map_place(place: Place, *, writes: bool) -> mmap.mmap:
    """The segment there, which stays as long as the map does; changed by what `writes`, else not.

    Raises `OSError` when it is gone, or belongs to another user or machine.
    """
    if place.machine != machine():
        raise FileNotFoundError(f"{place.path} is on another machine, or in another container")
    fd = os.open(place.path, os.O_RDWR if writes else os.O_RDONLY)
    try:
        if os.fstat(fd).st_ino != place.inode:
            raise FileNotFoundError(f"{place.path} is another file by now")
        access = mmap.ACCESS_WRITE if writes else mmap.ACCESS_COPY
        return mmap.mmap(fd, max(1, place.num_bytes), access=access)
    finally:
        os.close(fd)


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
