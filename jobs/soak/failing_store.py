"""A store that fails at random, by a seed, in every way that a soak of storage is about.

It lies beneath `SteadyStore`, where a client would. What it did is counted by kind.
"""

from __future__ import annotations

import contextlib
import errno
import io
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, BinaryIO, cast

from elastic.storage.local_store import LocalStore
from elastic.storage.store import Store

__all__ = ["KINDS", "Crashed", "FailingStore", "ObjectsOnDisk"]

KINDS = {
    "delay": 0.05,
    "error": 0.03,
    "lost answer": 0.01,
    "refusal": 0.004,
    "hang": 0.002,
    "lost write": 0.006,
    "torn write": 0.006,
    "full disk": 0.006,
    "crash": 0.004,
}
"""How often each strikes, of all calls that it can strike."""
_WRITES = ("write_bytes", "create_new", "open_output")
_CHANGES = (*_WRITES, "rename", "exchange", "remove_tree", "make_dirs")
_STRUCK = (*_CHANGES, "open_input", "read_files", "read_range", "list", "entry")
_LIES = ("lost write", "torn write")


class Crashed(BaseException):
    """The process is gone; nothing that it does from here on reaches storage."""


class ObjectsOnDisk(LocalStore):
    """What an object store can do, on a disk that several processes see: no rename, no append."""

    scheme = "objects"

    def exchange(self, one: str, other: str) -> bool:
        return False

    def rename(self, src: str, dst: str) -> None:
        raise io.UnsupportedOperation(f"{src} cannot be renamed")

    def open_append(self, path: str) -> BinaryIO:
        raise io.UnsupportedOperation(f"{path} cannot be appended to")


class FailingStore:
    """`Store` around another one. Nothing fails before `strike` and after `rest`.

    hang_s: how long a call hangs, before it is done after all
    may_crash: whether this process is one that may end in the middle of a call
    """

    def __init__(self, store: Store, *, hang_s: float, may_crash: bool) -> None:
        self.inner = store
        self.scheme = store.scheme
        self.injected: Counter[str] = Counter()
        self._hang_s = hang_s
        self._kinds = {kind: odds for kind, odds in KINDS.items() if may_crash or kind != "crash"}
        self._chance: random.Random | None = None
        self._is_dead = self._is_full = False
        self._lock = threading.Lock()

    def strike(self, seed: str) -> None:
        """From here on calls fail, as this seed has it."""
        self._chance = random.Random(seed)
        self._is_dead = self._is_full = False

    def rest(self) -> None:
        """From here on all is well."""
        self._chance = None
        self._is_dead = self._is_full = False

    def __getattr__(self, name: str) -> Any:
        act = getattr(self.inner, name)
        if name not in _STRUCK:
            return act

        def call(path: str, *args: Any) -> Any:
            kind = self._draw(name)
            return self._fail(kind, name, path, lambda: act(path, *args))

        return call

    def _draw(self, name: str) -> str:
        with self._lock:  # calls come from several threads
            if self._is_dead:
                raise Crashed
            if self._is_full and name in _WRITES:
                return "full disk"
            if self._chance is None:
                return ""
            place = self._chance.random()
            for kind, odds in self._kinds.items():
                place -= odds
                if place < 0:
                    return self._counted(kind, name)
            return ""

    def _counted(self, kind: str, name: str) -> str:
        can_strike = {
            "lost answer": name in _CHANGES,
            "lost write": name in ("write_bytes", "open_output"),
            "torn write": name == "open_output",
            "full disk": name in _WRITES,
            "crash": name in _CHANGES,
        }
        if not can_strike.get(kind, True):
            return ""
        self.injected[kind] += 1
        self._is_full |= kind == "full disk"
        self._is_dead |= kind == "crash"
        return kind

    def _fail(self, kind: str, name: str, path: str, act: Callable[[], Any]) -> Any:
        if kind in ("delay", "hang"):
            time.sleep(0.005 if kind == "delay" else self._hang_s)
        elif kind == "error":
            raise OSError(errno.ESTALE, "Stale file handle", path)
        elif kind == "refusal":
            raise PermissionError(errno.EACCES, "Permission denied", path)
        elif kind == "full disk":
            raise OSError(errno.ENOSPC, "No space left on device", path)
        elif kind == "crash":
            raise Crashed
        elif kind in _LIES:
            return self._lie(kind, name, act)
        found = act()
        if kind == "lost answer":
            with contextlib.suppress(AttributeError):
                found.close()
            raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer", path)
        return found

    def _lie(self, kind: str, name: str, act: Callable[[], Any]) -> Any:
        """Says that all went well."""
        if name == "write_bytes":
            return None
        return _Liar(act() if kind == "torn write" else None)


class _Liar:
    """A stream of which only the first half of the first piece arrives, or nothing."""

    def __init__(self, stream: BinaryIO | None) -> None:
        self._stream = stream
        self._has_written = False

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if self._stream is not None and not self._has_written:
            self._stream.write(view[: len(view) // 2])
            self._has_written = True
        return len(view)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        if self._stream is not None:
            cast(BinaryIO, self._stream).close()
