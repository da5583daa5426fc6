"""A deadline for calls that cannot be interrupted: each runs on a thread that may be left behind.

Threads are daemons and kept for the next call, so that neither a call that never comes back nor the
end of the process waits for one. Must not import ray or torch.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

from elastic.storage.store_errors import StoreStuck

__all__ = ["MOST_LEFT_BEHIND", "call", "num_left_behind", "works_for"]

MOST_LEFT_BEHIND = 64
"""So many calls may be out at once in a process; one more is refused at once."""
_MOST_IDLE = 32

T = TypeVar("T")


class _Call:
    """One call: `over` is released when it has ended."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work = work
        self.over = threading.Lock()
        self.over.acquire()
        self.result: Any = None
        self.error: BaseException | None = None
        self.ended = False
        self.is_left = False
        self.thread_id: int | None = None
        """The thread that does the work, once one has begun."""

    def run(self) -> None:
        self.thread_id = threading.get_ident()
        try:
            self.result = self.work()
        except BaseException as error:  # noqa: BLE001 - the caller gets it, whatever it is
            self.error = error
        self.ended = True
        self.over.release()
        if self.is_left and hasattr(self.result, "close"):
            with contextlib.suppress(Exception):  # a file that nobody waits for any more
                self.result.close()

    def wait(self, seconds: float) -> bool:
        """Whether it has ended within that time."""
        if self.over.acquire(timeout=seconds):
            self.over.release()
        return self.ended


class _Threads:
    def __init__(self) -> None:
        self.idle: deque[SimpleQueue[_Call]] = deque()
        self.left: dict[tuple[str, ...], _Call] = {}
        """Calls that were left behind, by what they may yet change."""
        self.waited_for: dict[int, _Call] = {}
        """By the thread that waits."""

    def start(self, call: _Call) -> None:
        try:
            queue = self.idle.pop()
        except IndexError:
            queue = SimpleQueue()
            threading.Thread(
                target=self._serve, args=(queue,), name="elastic-store", daemon=True
            ).start()
        queue.put(call)

    def _serve(self, queue: SimpleQueue[_Call]) -> None:
        while True:
            call = queue.get()
            call.run()
            del call  # its result is the caller's alone
            if len(self.idle) >= _MOST_IDLE:
                return
            self.idle.append(queue)


_threads = _Threads()


def call(work: Callable[[], T], seconds: float, what: str, changes: tuple[str, ...] = ()) -> T:
    """What `work` returns or raises, if it does so within that time.

    `what` is for people; `changes` names what it writes to, a path by its parts. A call that was
    left behind may yet take effect, so that nothing else is written there, above or below before
    it has ended. Raises `StoreStuck`.
    """
    _let_end(changes, seconds, what)
    if num_left_behind() >= MOST_LEFT_BEHIND:
        raise StoreStuck(
            f"{what}: not begun, {MOST_LEFT_BEHIND} calls to storage have not come back yet"
        )
    asked = _Call(work)
    _threads.waited_for[threading.get_ident()] = asked
    _threads.start(asked)
    came_back = False
    try:
        came_back = asked.wait(seconds)
    finally:
        _threads.waited_for.pop(threading.get_ident(), None)
        if not came_back:
            asked.is_left = True
            _threads.left[(*changes, f"\0{id(asked)}")] = asked
    if not came_back:
        raise StoreStuck(f"{what}: no answer within {seconds:.3g} s")
    if asked.error is not None:
        try:
            raise asked.error
        finally:
            asked.error = None  # else error and frame would hold each other
    result: T = asked.result
    return result


def works_for(thread_id: int) -> int | None:
    """The thread that does the call that this one waits for; None where it waits for none."""
    asked = _threads.waited_for.get(thread_id)
    return None if asked is None else asked.thread_id


def num_left_behind() -> int:
    """Calls of this process that were left behind and have not ended yet."""
    for key, left in list(_threads.left.items()):
        if left.ended:
            _threads.left.pop(key, None)
    return len(_threads.left)


def _let_end(changes: tuple[str, ...], seconds: float, what: str) -> None:
    if not changes:
        return
    for key, left in list(_threads.left.items()):
        place = key[:-1]
        num_common = min(len(place), len(changes))
        if place and place[:num_common] == changes[:num_common] and not left.wait(seconds):
            raise StoreStuck(
                f"{what}: not begun, an earlier call that may still write there has not come back"
            )


def _forget() -> None:
    """A forked child has none of the threads."""
    global _threads  # noqa: PLW0603 - one for the process
    _threads = _Threads()


os.register_at_fork(after_in_child=_forget)
