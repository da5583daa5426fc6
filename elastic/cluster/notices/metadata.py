"""A cloud's metadata service: one short question over HTTP to this machine's own address for it.

Never through a proxy, which would answer for itself, and never on to where it is redirected.
"""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from email.message import Message
from typing import Any

ADDRESS = "http://169.254.169.254"
"""Where AWS and GCP both have it, without asking a name server."""
SHORT_S = 2.0
_MOST_BYTES = 64 * 1024


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Whatever came back, also when it is a refusal."""

    status: int
    headers: Message
    """Names are found in any case."""
    text: str


class UnexpectedAnswer(ValueError):
    """The metadata service said what its documents do not say; nothing follows from it."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def ask(
    url: str, headers: Mapping[str, str], *, method: str = "GET", timeout_s: float = SHORT_S
) -> Answer:
    """The answer. Raises `OSError` when there is none within `timeout_s`."""
    request = urllib.request.Request(url, method=method, headers=dict(headers))
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect())
    try:
        with opener.open(request, timeout=timeout_s) as found:
            text = found.read(_MOST_BYTES).decode("utf-8", errors="replace")
            return Answer(status=found.status, headers=found.headers, text=text)
    except urllib.error.HTTPError as refusal:
        with refusal:
            return Answer(status=refusal.code, headers=refusal.headers, text="")
