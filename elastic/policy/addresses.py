"""Addresses that a page is served at: `HOST:PORT` as a person gives it, and who can reach it."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

_MOST_PORT = 65535


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where to listen. `port` 0 takes a free one."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """From `127.0.0.1:0` or `[::1]:8266`. Raises `ValueError`."""
        host, colon, port = text.rpartition(":")
        bare = host.removeprefix("[").removesuffix("]")
        is_number = port.isascii() and port.isdigit() and int(port) <= _MOST_PORT
        is_v6_bare = ":" in bare and bare == host
        if not colon or not bare or is_v6_bare or not is_number:
            raise ValueError(
                f"expected HOST:PORT such as 127.0.0.1:8266, with port 0 for a free one; "
                f"found {text!r}"
            )
        return cls(host=bare, port=int(port))

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches it."""
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that is bound to it."""
    if host == "localhost":
        return True
    return is_number(host) and ipaddress.ip_address(host).is_loopback


def is_number(host: str) -> bool:
    """Whether it is an IP address, as opposed to a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def in_url(host: str, machine: str) -> str:
    """As a browser is given it; `machine` is the name of one that listens on all its addresses."""
    shown = machine if is_any(host) else host
    return f"[{shown}]" if ":" in shown else shown


def is_any(host: str) -> bool:
    """Whether it stands for all addresses of the machine."""
    return is_number(host) and ipaddress.ip_address(host).is_unspecified
