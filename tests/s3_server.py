"""A real S3 server for tests: rclone, on the loopback device, over a directory of its own.

In front of it stands a gate that lets faults in, and that gives what a bucket has and rclone has
not: writes on the condition that there is no such object, and overwriting at once.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, ClientTimeout, web
from yarl import URL

from elastic.storage.object_store import forget_clients
from jobs.bench import s3_server as rclone

__all__ = ["Fault", "S3Server", "s3_server"]

_BUCKET = "bucket"
_READY_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What the gate does with one request in place of passing it on.

    With `code` it answers so, as `status`; with `is_lost` it says that all went well and does
    nothing; with `is_cut` the connection ends without an answer, once what was asked is done;
    `hold_s` it waits before any of that.
    """

    status: int = 0
    code: str = ""
    is_lost: bool = False
    is_cut: bool = False
    hold_s: float = 0.0


Strike = Callable[[str, str], "Fault | None"]


class S3Server:
    """The server. `folder` is what lies in its one bucket, file by file: to look at, not to touch.

    `strike(method, key)` is asked for a fault before each request; `requests` counts those by
    method.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "objects" / _BUCKET
        self.folder.mkdir(parents=True)
        self.url = f"s3://{_BUCKET}"
        self.port = 0
        self.strike: Strike = lambda method, key: None
        self.requests: Counter[str] = Counter()
        self._rclone = rclone.S3Server(self.folder.parent)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._runner: web.AppRunner | None = None

    @property
    def environment(self) -> Mapping[str, str]:
        """What a process needs to find it: nothing of that is ever in a URL."""
        return rclone.environment(self.port)

    def start(self) -> None:
        """Both listen when this returns."""
        self._rclone.start()
        self._thread.start()
        self._in_loop(self._open_gate())

    def stop(self) -> None:
        """Ends both; the objects stay."""
        if self._thread.is_alive():
            self._in_loop(self._close_gate())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10)
        self._rclone.stop()

    async def _open_gate(self) -> None:
        self._one_at_a_time = asyncio.Lock()
        self._client = ClientSession(auto_decompress=False, timeout=ClientTimeout(total=60))
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{key:.*}", self._pass)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def _close_gate(self) -> None:
        await self._client.close()
        assert self._runner is not None
        await self._runner.cleanup()

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        key = request.path.lstrip("/").removeprefix(f"{_BUCKET}/")
        self.requests[request.method] += 1
        fault = self.strike(request.method, key) or Fault()
        if fault.hold_s:
            await asyncio.sleep(fault.hold_s)
        if fault.code:
            return _refusal(fault.status, fault.code)
        if fault.is_lost:
            return web.Response(headers={"ETag": '"d41d8cd98f00b204e9800998ecf8427e"'})
        answer = await self._ask(request, body)
        if fault.is_cut and request.transport is not None:
            request.transport.abort()
        return answer

    async def _ask(self, request: web.Request, body: bytes) -> web.Response:
        # An object that is overwritten is gone for a moment, in rclone.
        async with self._one_at_a_time:
            if request.headers.get("If-None-Match") == "*" and self._is_there(request.path):
                return _refusal(412, "PreconditionFailed")
            target = URL(f"http://127.0.0.1:{self._rclone.port}{request.raw_path}", encoded=True)
            # With the host that the client has signed for. The body is here, and not to wait for.
            left_out = ("Content-Length", "Expect", "Connection")
            headers = {k: v for k, v in request.headers.items() if k not in left_out}
            sent = self._client.request(
                request.method, target, headers=headers, data=body, allow_redirects=False
            )
            async with sent as response:
                text = await response.read()
                kept = {
                    name: value
                    for name, value in response.headers.items()
                    if name not in ("Transfer-Encoding", "Connection")
                    and (name != "Content-Length" or request.method == "HEAD")
                }
                return web.Response(status=response.status, headers=kept, body=text)

    def _is_there(self, path: str) -> bool:
        return self.folder.parent.joinpath(path.lstrip("/")).is_file()

    def _in_loop(self, work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(_READY_S)


def _refusal(status: int, code: str) -> web.Response:
    text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}</Message></Error>"
    return web.Response(status=status, text=text, content_type="application/xml")


@pytest.fixture
def s3_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """A server that this process, and those it starts from here on, find by their environment."""
    server = S3Server(tmp_path / "s3")
    try:
        server.start()
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        _forget_clients()
        yield server
    finally:
        server.stop()
        _forget_clients()


def _forget_clients() -> None:
    """A client is kept by its scheme, which is the same for the next server."""
    forget_clients("s3")
