"""Shared memory in large pages, also where the machine gives none to those who ask plainly.

Most machines keep `memfd_create` to pages of 4 KiB, whose every one has to be found when it is
read. A tmpfs of one's own may have large ones. This one is mounted nowhere: nobody comes to it by
a path, and it is gone with the last descriptor of its files. It takes CAP_SYS_ADMIN, of this
process or in a user namespace that a child makes. Linux only, of 5.2 or later: see fsopen(2),
user_namespaces(7), and tmpfs(5) on `huge`. Must not import ray or torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

# The same numbers on every machine of Linux (asm-generic/unistd.h); the C library's own functions
# are younger than many of those in use.
_FSOPEN, _FSCONFIG, _FSMOUNT = 430, 431, 432
_SET_STRING, _CREATE = 1, 6
_CLOEXEC = 1
_NO_SUID, _NO_DEV, _NO_EXEC = 2, 4, 8
_NEW_NAMESPACES = 0x10000000 | 0x00020000  # of users and mounts
_OPTIONS = {"huge": "within_size", "size": "0", "mode": "0700"}  # 0: no bound, as a memfd's
_CHILD_S = 10.0
_LARGE_BYTES = 2 << 20
_NEARLY = 0.9

_numbers = itertools.count()


@contextlib.contextmanager
def file_in_large_pages(name: str) -> Iterator[int | None]:
    """Descriptor of a new, empty file, shown as `name` and a number; None where it cannot be had.

    It has a name until the end of the block, and none afterwards. Map it, and make its pages by
    that, before: to the kernel a map of a nameless file is no file's but memory that is shared,
    for which the machine's own choice of pages counts, and for a map it looks harder for them.
    """
    folder = _file_system()
    shown = f"{name}-{next(_numbers)}"
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        found = None if folder is None else os.open(shown, flags, 0o600, dir_fd=folder)
    except OSError:
        found = None
    try:
        yield found
    finally:
        if found is not None:
            os.unlink(shown, dir_fd=folder)


def is_in_large_pages(address: int, num_bytes: int) -> bool:
    """Whether nearly all of a map that begins there is: the kernel makes small ones when it has to.

    Without the last one, which may be a part of a large page.
    """
    try:
        maps = Path("/proc/self/smaps").read_text()
    except OSError:
        return False
    _, _, told = maps.partition(f"\n{address:08x}-")
    _, _, found = told.partition("ShmemPmdMapped:")
    large_bytes = int(found.split()[0]) << 10 if found else 0
    return large_bytes >= _NEARLY * (num_bytes // _LARGE_BYTES * _LARGE_BYTES) > 0


@functools.cache
def _file_system() -> int | None:
    """Its root, which this process keeps open."""
    for made in (_mount, _mount_by_child):
        with contextlib.suppress(OSError, subprocess.SubprocessError, AttributeError):
            return made()
    return None


def _mount() -> int:
    context = _call(_FSOPEN, b"tmpfs", _CLOEXEC)
    try:
        for key, value in _OPTIONS.items():
            _call(_FSCONFIG, context, _SET_STRING, key.encode(), value.encode(), 0)
        _call(_FSCONFIG, context, _CREATE, None, None, 0)
        return _call(_FSMOUNT, context, _CLOEXEC, _NO_SUID | _NO_DEV | _NO_EXEC)
    finally:
        os.close(context)


def _mount_by_child() -> int:
    """Only a process of one thread can enter a user namespace: one that makes it, and ends."""
    here, there = socket.socketpair()
    with here, there:
        here.settimeout(_CHILD_S)
        # This very file, without the packages around it: nothing else is loaded.
        subprocess.run(
            [sys.executable, "-I", "-S", __file__, str(there.fileno())],
            pass_fds=[there.fileno()],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_CHILD_S,
            check=True,
        )
        _, (descriptor,), *_ = socket.recv_fds(here, 1, 1)
    os.set_inheritable(descriptor, False)
    return descriptor


def _mount_in_namespace(channel: int) -> None:
    """In the child. The user stays who it is, and may do there what root may."""
    user, group = os.geteuid(), os.getegid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_NAMESPACES):
        raise OSError(ctypes.get_errno(), "unshare")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    with socket.socket(fileno=channel) as there:
        socket.send_fds(there, [b"."], [_mount()])


def _call(number: int, *arguments: bytes | int | None) -> int:
    found: int = ctypes.CDLL(None, use_errno=True).syscall(number, *arguments)
    if found < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"system call {number}: {os.strerror(error)}")
    return found


if __name__ == "__main__":
    _mount_in_namespace(int(sys.argv[1]))
