"""A network on this machine: a bridge, and Linux network namespaces on it whose links can be cut.

Each namespace is joined to the bridge by a veth pair, and reaches the others and this machine over
it. Needs iproute2 and root. When this process is killed outright the bridge and the namespaces are
left, which hurt nobody: the next network takes another number.

Must not import ray, torch or elastic.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

INTERFACE = "eth0"
"""What a namespace calls its end of the link."""


class NamespacesUnavailable(RuntimeError):
    """This machine cannot make network namespaces; the message says what to do."""


def why_unavailable() -> str:
    """Why no namespaces can be made here, found out by making one; empty when they can."""
    if problem := what_is_missing():
        return problem
    try:
        with opened_network() as network:
            network.add()
    except NamespacesUnavailable as error:
        return str(error)
    return ""


def what_is_missing() -> str:
    """What it takes to try at all and is not here; empty when all is."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        return "network namespaces need the command `ip` and root: install iproute2 and run as root"
    return ""


@dataclass(frozen=True, kw_only=True)
class Namespace:
    """A network namespace and the address by which all others and the head reach it."""

    name: str
    address: str
    link: str
    """The end of its veth pair that this machine holds."""


class Network:
    """A bridge on this machine, and namespaces on it."""

    def __init__(self) -> None:
        self._number = _claim_bridge()
        self._bridge = f"bench{self._number}"
        self._namespaces: list[Namespace] = []

    @property
    def address(self) -> str:
        """This machine's own, as the namespaces see it."""
        return f"10.200.{self._number}.1"

    def open(self) -> None:
        """Give the bridge its address. Not part of making it, so that `close` covers a failure."""
        _ip("addr", "add", f"{self.address}/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")

    def add(self) -> Namespace:
        """One namespace more, with a link of its own to the bridge."""
        index = len(self._namespaces) + 2
        namespace = Namespace(
            name=f"{self._bridge}-{index}",
            address=f"10.200.{self._number}.{index}",
            link=f"{self._bridge}.{index}",
        )
        # Listed before it is made: what was made in part is taken down as well.
        self._namespaces.append(namespace)
        inside = ("-n", namespace.name)
        _ip("netns", "add", namespace.name)
        peer = ("peer", "name", INTERFACE, "netns", namespace.name)
        _ip("link", "add", namespace.link, "type", "veth", *peer)
        _ip("link", "set", namespace.link, "master", self._bridge, "up")
        _ip(*inside, "addr", "add", f"{namespace.address}/24", "dev", INTERFACE)
        _ip(*inside, "link", "set", "lo", "up")
        _ip(*inside, "link", "set", INTERFACE, "up")
        # Leads nowhere; Ray asks which address it would take to the world, and names itself by it.
        _ip(*inside, "route", "add", "default", "via", self.address)
        # Torch asks for the names of the peers' addresses, and would wait ten seconds for each.
        for server in _name_servers():
            _ip(*inside, "route", "add", "unreachable", server, must=False)
        return namespace

    def cut(self, namespace: Namespace) -> None:
        """From here on nothing leaves the namespace, and nothing reaches it."""
        _ip("link", "set", namespace.link, "down")

    def heal(self, namespace: Namespace) -> None:
        _ip("link", "set", namespace.link, "up")

    def close(self) -> None:
        """Take everything down, whatever of it is there."""
        for namespace in self._namespaces:
            _ip("link", "del", namespace.link, must=False)
            _ip("netns", "del", namespace.name, must=False)
        _ip("link", "del", self._bridge, must=False)


@contextlib.contextmanager
def opened_network() -> Iterator[Network]:
    """A network without namespaces yet; on the way out it is gone, with all that were added.

    Raises:
        NamespacesUnavailable: it cannot be made here.
    """
    network = Network()
    try:
        network.open()
        yield network
    finally:
        network.close()


def _claim_bridge() -> int:
    """The number of a network that nobody had, and whose bridge exists now."""
    routes = _ip("route")
    numbers = random.Random(os.urandom(8)).sample(range(1, 255), k=20)
    for number in numbers:
        has_namespaces = any(Path("/run/netns").glob(f"bench{number}-*"))
        if f"10.200.{number}." in routes or has_namespaces:
            continue
        try:
            _ip("link", "add", f"bench{number}", "type", "bridge")
            return number
        except FileExistsError:
            continue
    raise NamespacesUnavailable(
        f"20 of the networks 10.200.1 to 10.200.254 were in use: {sorted(numbers)}; take down "
        "what is left of runs that were killed (`ip link`, `ip netns`)"
    )


def _ip(*arguments: str, must: bool = True) -> str:
    """What `ip` prints. Raises FileExistsError, or NamespacesUnavailable for all else."""
    found = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if found.returncode == 0 or not must:
        return found.stdout
    if "File exists" in found.stderr:
        raise FileExistsError(found.stderr.strip())
    raise NamespacesUnavailable(
        f"`ip {' '.join(arguments)}` failed: {found.stderr.strip()}; install iproute2 and run as "
        "root (in a container: with the capabilities NET_ADMIN and SYS_ADMIN)"
    )


def _name_servers() -> list[str]:
    with contextlib.suppress(OSError):
        lines = Path("/etc/resolv.conf").read_text().splitlines()
        words = [line.split() for line in lines if line.startswith("nameserver")]
        return [server for _, server, *_ in words]
    return []
