"""The program behind `elastic node`: watches over its own node, or drains it now.

`python -m elastic.cluster.node_program REQUEST`, with the JSON of a `NodeRequest`. A program of its
own, since the command `elastic` must start without Ray; and Ray is loaded beside what it watches.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from elastic.cluster.node_request import NodeRequest
from elastic.cluster.notices.notice import Notice
from elastic.cluster.notices.sources import sources_of
from elastic.cluster.notices.watch import Watch

if TYPE_CHECKING:
    from elastic.cluster.own_node import Drained, OwnNode

_LOOK_S = 0.2
# A cluster that is gone as a whole must not hold up the end of its nodes.
_TRY_S = 5.0
# Ray may hold a question back for longer than there is time.
_LATE_S = 2.0
_GO_ON = "go on"
# `ray start --block` drains its node on SIGTERM, and waits for half a minute; here that was done.
_RAYS_OWN_DRAIN = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"


def main(argv: Sequence[str]) -> int:
    """The exit code: see the command's help."""
    request = NodeRequest.from_json(argv[0])
    tell = Teller(request.as_json)
    return NodeWatch(request, tell).run() if request.reason is None else drain(request, tell)


class Teller:
    """A line on stdout for everything that happens: text, or JSON with the same and more."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json

    def __call__(self, event: str, text: str, **facts: Any) -> None:
        said = json.dumps({"event": event, "time_s": time.time(), "text": text, **facts})
        click.echo(said if self._as_json else f"{event}: {text}")

    def trouble(self, text: str) -> None:
        """What keeps it from its duty, once."""
        self("trouble", text)

    def drained(self, notice: Notice, found: Drained) -> None:
        """What Ray was told."""
        when = f"{found.deadline_ms / 1000 - time.time():.0f} s" if found.deadline_ms else "no time"
        what = "drains now" if found.is_news else "drained already"
        text = f"node {found.node_id[:12]} {what}, {when} left: {notice.text}"
        self("draining", text, **found._asdict(), kind=notice.kind)

    def left(self, node_id: str, holders: Sequence[str]) -> None:
        """Whether the node was left in time."""
        where = f"node {node_id[:12]}"
        if holders:
            text = f"{where} was not left in time by {', '.join(holders)}"
            self("late", text, node_id=node_id, holders=list(holders))
        else:
            self("free", f"{where} was left", node_id=node_id)


def drain(request: NodeRequest, tell: Teller) -> int:
    """Drain the node now, and wait until it was left. 1: it was not, 2: there is no such node."""
    assert request.reason is not None
    node = _own_node(request)
    until_s = time.time() + request.grace_s
    notice = Notice(kind="asked", deadline_s=until_s, text=request.reason)
    try:
        found = node.drain(notice)
    except (LookupError, OSError, ValueError) as error:
        click.echo(f"Error: {error}", err=True)
        return 2
    except Exception as error:  # noqa: BLE001 - Ray has many errors; each is told
        click.echo(f"Error: {type(error).__name__}: {error}", err=True)
        return 1
    tell.drained(notice, found)
    holders = node.wait_until_free(found.node_id, until_s)
    tell.left(found.node_id, holders)
    return 1 if holders else 0


class NodeWatch:
    """Watches over its node until it is told to end; use `run` from the main thread."""

    def __init__(self, request: NodeRequest, tell: Teller) -> None:
        self._request = request
        self._tell = tell
        self._words: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._ended = threading.Event()
        self._child: subprocess.Popen[bytes] | None = None
        self._is_leaving = False
        self._goes_on = False
        self._was_left = False

    def run(self) -> int:
        """Until the child ends, with its status, or without one until SIGTERM or Ctrl-C."""
        for number, word in {signal.SIGTERM: "terminate", signal.SIGINT: "interrupt"}.items():
            signal.signal(number, lambda *_, word=word: self._words.put(word))
        if self._request.command:
            try:
                self._child = self._started(self._request.command)
            except OSError as error:
                click.echo(f"Error: cannot run {self._request.command[0]}: {error}", err=True)
                return 127
        watch = self._watch()
        # Ray takes seconds to load on a busy machine; they are not there when they are needed.
        threading.Thread(target=_own_node, args=(self._request,), daemon=True).start()
        try:
            return self._loop()
        finally:
            watch.end()
            self._ended.set()

    def _started(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        # In a session of its own: what a terminal sends comes here first.
        environment = {_RAYS_OWN_DRAIN: "0", **os.environ}
        return subprocess.Popen(command, env=environment, start_new_session=True)

    def _watch(self) -> Watch:
        sources = sources_of(self._request.sources, node_id=self._request.node_id)
        names = sorted({source.name for source in sources})
        what = ", ".join(names) or "SIGTERM alone: no source of notices is known or asked for"
        self._tell("watching", what, sources=names)
        return Watch(sources, self._on_notice, self._tell.trouble)

    def _on_notice(self, notice: Notice) -> None:
        self._tell("notice", notice.text, kind=notice.kind, deadline_s=notice.deadline_s)
        found = _own_node(self._request).drain_at_last(notice, self._ended, self._tell.trouble)
        if found is not None:
            self._tell.drained(notice, found)

    def _loop(self) -> int:
        while True:
            if self._child is not None and (status := self._child.poll()) is not None:
                return status if status >= 0 else 128 - status
            try:
                word = self._words.get(timeout=_LOOK_S)
            except queue.Empty:
                continue
            if word == "terminate" and not self._is_leaving:
                self._is_leaving = True
                threading.Thread(target=self._leave, daemon=True).start()
                self._after(self._request.grace_s + _LATE_S, lambda: self._words.put(_GO_ON))
                continue
            if word == _GO_ON:
                if self._goes_on:
                    continue
                self._goes_on = True
            # The node was left, or was not in time, or somebody cannot wait and asks once more.
            if self._child is None:
                return 130 if word == "interrupt" else int(not self._was_left)
            self._child.send_signal(signal.SIGINT if word == "interrupt" else signal.SIGTERM)

    def _leave(self) -> None:
        """Drain the node, and wait until it was left, or the grace is over."""
        until_s = time.time() + self._request.grace_s
        notice = Notice(kind="sigterm", deadline_s=until_s, text="SIGTERM to its agent")
        given_up = threading.Event()
        try:
            node = _own_node(self._request)
            self._after(_TRY_S, given_up.set)
            found = node.drain_at_last(notice, given_up, self._tell.trouble)
            if found is not None:
                self._tell.drained(notice, found)
                holders = node.wait_until_free(found.node_id, until_s)
                self._tell.left(found.node_id, holders)
                self._was_left = not holders
        finally:
            self._words.put(_GO_ON)

    @staticmethod
    def _after(wait_s: float, work: Callable[[], None]) -> None:
        timer = threading.Timer(wait_s, work)
        timer.daemon = True
        timer.start()


def _own_node(request: NodeRequest) -> OwnNode:
    from elastic.cluster.own_node import OwnNode

    return OwnNode(request.address, request.node_id)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
