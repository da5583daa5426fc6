"""The routes of the page: static files, JSON, and streams of changes; each passes the guard.

Must import neither ray nor torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from aiohttp import web

from elastic.dashboard.page import evidence, feed, guard
from elastic.dashboard.page.run_document import NoRun, RunPage
from elastic.dashboard.text import to_json
from elastic.storage.filesystem import Filesystem

STATIC = Path(__file__).resolve().parent.parent / "static"
COOKIE = "elastic_page"
MOST_STREAMS = 100

_TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def application(
    root: Filesystem, keeper: guard.Guard, texts: Mapping[str, Callable[[], str]]
) -> web.Application:
    """All routes over the runs below `root`."""
    routes = _Routes(root)
    app = web.Application(middlewares=[_guarded(keeper)], client_max_size=1024)
    app.on_response_prepare.append(_with_headers)
    app.on_shutdown.append(routes.close)
    app.router.add_get("/", routes.page)
    app.router.add_get("/runs/{name}", routes.page)
    app.router.add_get("/static/{path:.+}", routes.static)
    app.router.add_get("/api/runs", routes.all_runs)
    app.router.add_get("/api/changes", routes.all_changes, allow_head=False)
    app.router.add_get("/api/runs/{name}", routes.run)
    app.router.add_get("/api/runs/{name}/changes", routes.run_changes, allow_head=False)
    app.router.add_get("/api/runs/{name}/restarts/{number:\\d{1,9}}", routes.restart)
    app.router.add_get("/api/runs/{name}/evidence", routes.evidence)
    app.router.add_get("/api/runs/{name}/logs/{generation:\\d{1,9}}/{rank:\\d{1,9}}", routes.log)
    app.router.add_get("/api/runs/{name}/stacks/{dump}/{file}", routes.stack)
    for path, text in texts.items():
        app.router.add_get(path, _text_page(text))
    return app


def _guarded(keeper: guard.Guard) -> Any:
    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        asked = request.query.get("token", "")
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
        refusal = keeper.refuse(
            method=request.method,
            host=request.headers.get("Host", ""),
            origin=request.headers.get("Origin"),
            given=[asked, bearer, request.cookies.get(_cookie(request), "")],
        )
        if refusal is not None:
            return web.Response(status=refusal.status, text=refusal.why + "\n")
        try:
            response = await handler(request)
        except NoRun as error:
            return web.Response(status=404, text=f"{error}\n")
        if not (keeper.token and asked) or response.prepared:
            return response
        if response.content_type == "text/html":
            # Neither the address bar nor the browser's history keeps the token.
            response = web.Response(status=303, headers={"Location": request.rel_url.raw_path})
        response.set_cookie(
            _cookie(request), keeper.pass_word, httponly=True, samesite="Strict", path="/"
        )
        return response

    return check


def _cookie(request: web.Request) -> str:
    """Browsers send a host's cookies to all of its ports."""
    return f"{COOKIE}_{request.url.port}"


async def _with_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(guard.HEADERS)
    response.headers.pop("Server", None)


def _text_page(text: Callable[[], str]) -> Handler:
    async def give(request: web.Request) -> web.StreamResponse:
        return web.Response(text=await asyncio.to_thread(text))

    return give


class _Routes:
    def __init__(self, root: Filesystem) -> None:
        self._root = root
        self._poll_s = feed.POLL_S if root.is_local else feed.POLL_OBJECTS_S
        self._list = feed.Feed(feed.ListSource(root), poll_s=self._poll_s)
        self._runs: dict[str, feed.Feed] = {}
        self._streams: set[asyncio.Task[Any]] = set()

    async def close(self, app: web.Application) -> None:
        for task in list(self._streams):
            task.cancel()

    async def page(self, request: web.Request) -> web.StreamResponse:
        return _file("index.html")

    async def static(self, request: web.Request) -> web.StreamResponse:
        return _file(request.match_info["path"])

    async def all_runs(self, request: web.Request) -> web.StreamResponse:
        return _json(await self._list.now())

    async def all_changes(self, request: web.Request) -> web.StreamResponse:
        return await self._stream(request, self._list)

    async def run(self, request: web.Request) -> web.StreamResponse:
        return _json(await (await self._feed(request)).now())

    async def run_changes(self, request: web.Request) -> web.StreamResponse:
        return await self._stream(request, await self._feed(request))

    async def restart(self, request: web.Request) -> web.StreamResponse:
        name = await self._name(request)
        reader = RunPage(self._root.sub(name), name)
        number = int(request.match_info["number"])
        return _found(await asyncio.to_thread(reader.story, number, time.time()))

    async def evidence(self, request: web.Request) -> web.StreamResponse:
        return _found(await asyncio.to_thread(evidence.listing, await self._fs(request)))

    async def log(self, request: web.Request) -> web.StreamResponse:
        generation, rank = (int(request.match_info[key]) for key in ("generation", "rank"))
        fs = await self._fs(request)
        return _found(await asyncio.to_thread(evidence.log_end, fs, generation, rank))

    async def stack(self, request: web.Request) -> web.StreamResponse:
        dump, file = (request.match_info[key] for key in ("dump", "file"))
        return _found(await asyncio.to_thread(evidence.stack, await self._fs(request), dump, file))

    async def _fs(self, request: web.Request) -> Filesystem:
        return self._root.sub(await self._name(request))

    async def _feed(self, request: web.Request) -> feed.Feed:
        name = await self._name(request)
        if name not in self._runs:
            source = feed.RunSource(RunPage(self._root.sub(name), name))
            self._runs[name] = feed.Feed(source, poll_s=self._poll_s)
        return self._runs[name]

    async def _name(self, request: web.Request) -> str:
        """The run's directory, which is one of those directly below the root. Raises `NoRun`."""
        name = request.match_info["name"]
        entries = await asyncio.to_thread(self._root.list)
        there = any(entry.is_dir and entry.name == name for entry in entries)
        if not there or not evidence.is_contained(self._root, name):
            raise NoRun("no such run below this storage root")
        return name

    async def _stream(self, request: web.Request, source: feed.Feed) -> web.StreamResponse:
        if len(self._streams) >= MOST_STREAMS:
            raise web.HTTPServiceUnavailable(text="too many viewers: close a page\n")
        task = asyncio.current_task()
        assert task is not None
        self._streams.add(task)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        try:
            await response.prepare(request)
            async with contextlib.aclosing(source.changes()) as changes:
                async for text in changes:
                    # An event ends at an empty line; this JSON is on one line.
                    told = f"data: {text}\n\n" if text else ": still here\n\n"
                    await response.write(told.encode())
        except ConnectionResetError:
            pass  # the viewer has left
        finally:
            self._streams.discard(task)
        return response


def _file(path: str) -> web.StreamResponse:
    """A file of the package, and nothing beside it."""
    found = (STATIC / path).resolve()
    if not found.is_relative_to(STATIC) or found.suffix not in _TYPES or not found.is_file():
        raise web.HTTPNotFound
    return web.Response(body=found.read_bytes(), content_type=_TYPES[found.suffix], charset="utf-8")


def _found(value: Any) -> web.StreamResponse:
    if value is None:
        raise web.HTTPNotFound
    return _json(to_json(value))


def _json(text: str) -> web.StreamResponse:
    return web.Response(text=text, content_type="application/json")
