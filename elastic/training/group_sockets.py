"""The sockets of a generation's gloo groups, found when made, to be shut down when it ends.

A peer that stands still, or whose network is cut, never closes its end: whoever waits for it in a
collective waits for the collective's timeout. Gloo cannot be told to stop waiting; the end of its
own sockets it notices at once. Linux only: elsewhere nothing is found, and nothing shut down. Must
not import torch or ray.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

_DESCRIPTORS = "/proc/self/fd"


@dataclass(frozen=True)
class _Found:
    descriptor: int
    inode: str
    local_port: int
    peer_port: int
    """0 where it listens."""


class GroupSockets:
    """Which of this process's sockets are gloo's."""

    def __init__(self) -> None:
        self._before: set[str] = set()
        self._of_groups: list[_Found] | None = []
        """None while the groups are being made."""
        self._spared_ports: set[int] = set()

    def begin(self) -> None:
        """Call before anything of the groups is made, their store included."""
        self._before = {found.inode for found in _tcp_sockets()}
        self._of_groups = None

    def spare(self, port: int) -> None:
        """Connections with this port, at either end, belong to another generation's store."""
        self._spared_ports.add(port)

    def forget(self) -> None:
        """The groups were not made after all."""
        self._of_groups = []

    def find(self, exchange: Callable[[Sequence[int]], Collection[int]]) -> None:
        """Call once the groups are made. `exchange` takes the ports on which this rank listens for
        its peers, and gives those of all ranks: what else was opened meanwhile has other ports."""
        new = [found for found in _tcp_sockets() if found.inode not in self._before]
        mine = sorted({found.local_port for found in new if not found.peer_port})
        ports = {*exchange(mine), *mine}
        self._of_groups = [
            found
            for found in new
            if found.peer_port and not ports.isdisjoint((found.local_port, found.peer_port))
        ]

    def __len__(self) -> int:
        return len(self._of_groups or ())

    def shut_down(self) -> int:
        """End both directions of each, from any thread; how many there were.

        Whoever waits on them gets an error at once. What was sent before still arrives. While the
        groups are being made it takes all that was opened since `begin` and is not spared: what
        else may be there has to bear the loss of a connection.
        """
        found_now = _tcp_sockets()
        if self._of_groups is None:
            ended = [one for one in found_now if self._may_be_ours(one)]
        else:
            open_now = {(found.descriptor, found.inode) for found in found_now}
            ended = [one for one in self._of_groups if (one.descriptor, one.inode) in open_now]
        for one in ended:
            with contextlib.suppress(OSError), _borrowed(one.descriptor) as handle:
                handle.shutdown(socket.SHUT_RDWR)
        self._of_groups = []
        return len(ended)

    def _may_be_ours(self, one: _Found) -> bool:
        is_new = bool(one.peer_port) and one.inode not in self._before
        return is_new and self._spared_ports.isdisjoint((one.local_port, one.peer_port))


def _tcp_sockets() -> list[_Found]:
    try:
        names = os.listdir(_DESCRIPTORS)
    except OSError:
        return []
    found = []
    for name in names:
        with contextlib.suppress(OSError):
            inode = os.readlink(f"{_DESCRIPTORS}/{name}")
            if inode.startswith("socket:"):
                found += _look_at(int(name), inode)
    return found


def _look_at(descriptor: int, inode: str) -> list[_Found]:
    with _borrowed(descriptor) as handle:
        is_tcp = handle.family in (socket.AF_INET, socket.AF_INET6)
        if not is_tcp or handle.type != socket.SOCK_STREAM:
            return []
        listens = handle.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        peer_port = 0 if listens else handle.getpeername()[1]
        return [_Found(descriptor, inode, handle.getsockname()[1], peer_port)]


@contextlib.contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    """A handle for a socket that is somebody else's, and stays open."""
    handle = socket.socket(fileno=os.dup(descriptor))
    try:
        yield handle
    finally:
        handle.close()
