"""The run's own page: an address from its start, and a process from the first look on.

The driver listens and does no more: the first connection starts `elastic.dashboard.page`, which
takes over the socket. So a page that nobody opens costs the run nothing, and one that is open costs
the driver's process nothing. Whatever goes wrong here ends the page alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from urllib.parse import quote

from elastic.policy.addresses import Address, in_url

logger = logging.getLogger("elastic")

TOKEN = "ELASTIC_PAGE_TOKEN"
"""The variable that holds what viewers must know."""
NONE = "none"
_MOST_TRIES = 3
_SHORT_S = 5.0


def checked(page: str, environ: Mapping[str, str]) -> Address | None:
    """Where the page is served, None for nowhere. Raises `ValueError`."""
    if page == NONE:
        return None
    try:
        address = Address.parse(page)
    except ValueError as error:
        raise ValueError(f"page: {error}, or {NONE!r} for no page") from error
    if not address.is_loopback and not environ.get(TOKEN):
        raise ValueError(
            f"page: other machines than the driver's reach {page!r}, so viewers must know a token: "
            f"set {TOKEN} where the run is submitted, or take a loopback address as 127.0.0.1:0"
        )
    return address


class OwnPage:
    """Of the run at `run_url`, with the other runs of its storage; closed with the driver."""

    def __init__(self, run_url: str, address: Address | None, token: str) -> None:
        """Raises nothing: where it cannot listen, `url` is "" and the log says why."""
        self.url = ""
        """Where a browser on the driver's node finds the run, without the token."""
        self._root, _, self._name = run_url.rpartition("/")
        self._token = token
        self._is_closed = False
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        if address is not None:
            try:
                self._listen(address)
            except OSError as error:
                logger.warning("the run has no page of its own: %s: %s", address, error)

    def where(self) -> dict[str, str]:
        """For the run's status: page_url, "" without a page, and page_host."""
        return {"page_url": self.url, "page_host": socket.gethostname()}

    def close(self) -> None:
        """The page ends, at once and without waiting for it."""
        if not self.url:
            return
        with self._lock:
            self._is_closed = True
            self._wake.close()
            if self._process is not None and self._process.stdin is not None:
                with contextlib.suppress(OSError):
                    self._process.stdin.close()

    def _listen(self, address: Address) -> None:
        host = address.host
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listening = socket.create_server((host, address.port), family=family, backlog=64)
        self._host, port = host, self._listening.getsockname()[1]
        shown = in_url(host, socket.gethostname())
        self._woken, self._wake = socket.socketpair()
        self.url = f"http://{shown}:{port}/runs/{quote(self._name, safe='')}"
        threading.Thread(target=self._serve, name="elastic-own-page", daemon=True).start()

    def _serve(self) -> None:
        num_short = 0
        with self._listening, self._woken:
            while num_short < _MOST_TRIES:
                select.select([self._listening, self._woken], [], [])
                if not self._start():
                    return
                began_s = time.monotonic()
                assert self._process is not None
                with self._process:  # which closes its stdin
                    code = self._process.wait()
                num_short = num_short + 1 if time.monotonic() - began_s < _SHORT_S else 0
                if not self._is_closed:
                    logger.warning("the process that serves the page has ended: exit %d", code)

    def _start(self) -> bool:
        """False once it is closed."""
        with self._lock:
            if self._is_closed:
                return False
            fd = self._listening.fileno()
            command = [sys.executable, "-m", "elastic.dashboard.page"]
            command += ["--storage", self._root, "--host", self._host, "--fd", str(fd)]
            path = os.pathsep.join(filter(None, sys.path))
            self._process = subprocess.Popen(
                command,
                env={**os.environ, "PYTHONPATH": path, TOKEN: self._token},
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=(fd,),
            )
            return True
