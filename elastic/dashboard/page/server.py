"""The server of the page: GET only, one thread of its own, started and stopped like a lamp.

`elastic dashboard` serves a storage root with it, and a driver may serve its own. Reads storage,
changes nothing. Must import neither ray nor torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self
from urllib.parse import quote

from aiohttp import web

from elastic.dashboard.page.guard import Guard
from elastic.dashboard.page.routes import application
from elastic.policy.addresses import in_url, is_any, is_loopback
from elastic.storage.filesystem import Filesystem

LOOPBACK = "127.0.0.1"
_START_S = 30.0
_STOP_S = 10.0


class PageServer:
    """Serves the runs below `root` until `stop`; also a context manager.

    `port` 0 takes a free one. Every address but a loopback one needs `token`. `names` are further
    host names under which browsers may ask. `texts` are more pages, each a path and the function
    that gives its plain text, such as `/metrics`; they are guarded like all else. `listening` is
    a socket that is bound to `host` already.
    """

    def __init__(
        self,
        root: Filesystem,
        *,
        host: str = LOOPBACK,
        port: int = 0,
        token: str = "",
        names: frozenset[str] = frozenset(),
        texts: Mapping[str, Callable[[], str]] | None = None,
        listening: socket.socket | None = None,
    ) -> None:
        """Raises `ValueError` for an address without the token it needs."""
        own = is_loopback(host)
        if not own:
            names |= {socket.gethostname(), socket.getfqdn()}
        self._guard = Guard(
            is_loopback=own, token=token, names=names if is_any(host) else names | {host}
        )
        self._root = root
        self._texts = dict(texts or {})
        self._host, self._port, self._token = host, port, token
        self._listening = listening
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: asyncio.Event | None = None
        self._thread: threading.Thread | None = None
        self._ready = threading.Event()
        self._problem: BaseException | None = None

    @property
    def port(self) -> int:
        """The one that is listened on, once started."""
        return self._port

    @property
    def url(self) -> str:
        """Where a browser finds the page, with the token if there is one."""
        host = in_url(self._host, socket.gethostname())
        query = f"?token={quote(self._token, safe='')}" if self._token else ""
        return f"http://{host}:{self._port}/{query}"

    def start(self) -> Self:
        """Listens once this returns. Raises `OSError` where the address cannot be had."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        listening = self._listening or socket.create_server(
            (self._host, self._port), family=family, backlog=64
        )
        self._port = int(listening.getsockname()[1])
        self._thread = threading.Thread(
            target=self._serve, args=(listening,), name="elastic-page", daemon=True
        )
        self._thread.start()
        if not self._ready.wait(_START_S) or self._problem is not None:
            listening.close()
            raise OSError(f"the page could not be served on port {self._port}: {self._problem}")
        return self

    def stop(self) -> None:
        """Ends every connection and frees the port; nothing happens the second time."""
        if self._loop is not None and self._end is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                self._loop.call_soon_threadsafe(self._end.set)
        if self._thread is not None:
            self._thread.join(_STOP_S)

    def wait(self) -> None:
        """Returns when it was stopped."""
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(1.0)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _serve(self, listening: socket.socket) -> None:
        try:
            asyncio.run(self._run(listening))
        except Exception as error:  # noqa: BLE001 - told to whoever waits in start
            self._problem = error
        finally:
            self._ready.set()

    async def _run(self, listening: socket.socket) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        app = application(self._root, self._guard, self._texts)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        await web.SockSite(runner, listening).start()
        self._ready.set()
        try:
            await self._end.wait()
        finally:
            await runner.cleanup()
