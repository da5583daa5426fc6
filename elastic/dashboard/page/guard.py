"""The guard: which requests the page answers at all. Pure; knows neither sockets nor aiohttp.

A page bound to loopback is reached by anything that a browser on this machine loads, so the name it
was asked under counts (DNS rebinding). Any other address needs a token.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection
from dataclasses import dataclass
from urllib.parse import urlsplit

from elastic.policy.addresses import is_number

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why a request is not answered, and the HTTP status that says so."""

    status: int
    why: str


@dataclass(frozen=True, kw_only=True)
class Guard:
    """`token` is "" for an address that only this machine reaches; `names` are further hosts."""

    is_loopback: bool
    token: str = ""
    names: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if not self.is_loopback and not self.token:
            raise ValueError("an address that other machines reach needs a token")

    @property
    def pass_word(self) -> str:
        """What a browser keeps once it has shown the token, in whose place it may be given."""
        return hmac.digest(self.token.encode(), b"elastic page", hashlib.sha256).hex()

    def refuse(
        self, *, method: str, host: str, origin: str | None, given: Collection[str]
    ) -> Refusal | None:
        """None if the request may be answered. `given` are the tokens and pass words that
        came with it."""
        if not self._is_ours(host):
            return Refusal(
                status=403,
                why=f"this page is not served under the name {host!r}: see its --name",
            )
        if origin is not None and not _is_same(origin, host):
            return Refusal(status=403, why=f"a page of {origin!r} may not ask this one")
        if self.token and not any(self._is_known(one) for one in given):
            return Refusal(
                status=401,
                why="this page needs its token, which was printed, in the address, where it was "
                "started: add ?token=... or Authorization: Bearer ...",
            )
        if method != "GET":
            return Refusal(status=405, why="this page only reads: GET")
        return None

    def _is_known(self, given: str) -> bool:
        told = given.encode("utf-8", "replace")
        known = (self.token, self.pass_word)
        return any(hmac.compare_digest(told, one.encode()) for one in known)

    def _is_ours(self, host: str) -> bool:
        name = _name(host)
        if name in LOOPBACK_NAMES | {one.lower() for one in self.names}:
            return True
        # Nobody can point another site's name at an address that the browser was given as numbers.
        return not self.is_loopback and is_number(name)


def _name(host: str) -> str:
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""


def _is_same(origin: str, host: str) -> bool:
    try:
        parts = urlsplit(origin)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and parts.netloc.lower() == host.lower()
