"""The steady store: any store, with a deadline for every call and a few more tries for some.

Tried again is what failed for a moment, never what is refused, missing or full. A call that may
have taken effect although it failed is tried again only where that can be told apart. Must not
import ray or torch.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import BinaryIO, TypeVar, cast

from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception,
    stop_after_attempt,
    stop_after_delay,
    wait_random_exponential,
)

from elastic.storage import deadline
from elastic.storage.steady_stream import SteadyInput, SteadyOutput
from elastic.storage.store import Entry, Store
from elastic.storage.store_errors import as_os_error, has_expired, is_transient

__all__ = ["Patience", "SteadyStore", "retries"]

logger = logging.getLogger("elastic")

retries: Counter[str] = Counter()
"""How often this process has tried a call to storage once more, by operation."""
_TELL_AGAIN_S = 60.0
_NUM_PARALLEL_READS = 16
_NUM_FILES_AT_ONCE = 64
"""Of a local disk, in one call: a deadline costs more than it takes to read a small file."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long a store is waited for.

    A call may take `call_s`, and `s_per_mb` for each MB that it moves. It is tried `tries` times
    at most, with random waits that double up to `longest_wait_s`, and not again once `give_up_s`
    are over.
    """

    call_s: float = 60.0
    s_per_mb: float = 0.1
    tries: int = 6
    first_wait_s: float = 0.2
    longest_wait_s: float = 10.0
    give_up_s: float = 120.0

    def for_bytes(self, num_bytes: int) -> float:
        """Seconds that a call may take which moves so many."""
        return self.call_s + self.s_per_mb * num_bytes / 1e6


class SteadyStore:
    """`Store` around another one. What it raises is what that one raised last, or `StoreStuck`."""

    def __init__(self, store: Store, patience: Patience = Patience()) -> None:
        self.inner = store
        self.scheme = store.scheme
        self.patience = patience

    def open_input(self, path: str) -> BinaryIO:
        opened = self._steadily("open_input", path, lambda: self.inner.open_input(path))
        if not self.scheme:
            return opened  # a file of the operating system, which others map and ask for its number

        def read(work: Callable[[], bytes], num_bytes: int) -> bytes:
            return self._steadily("read", path, work, num_bytes=num_bytes)

        return cast(BinaryIO, SteadyInput(opened, lambda: self.inner.open_input(path), read))

    def read_files(self, paths: Sequence[str]) -> list[bytes]:
        if self.scheme:
            with ThreadPoolExecutor(_NUM_PARALLEL_READS) as pool:
                return list(pool.map(self._read_file, paths))
        found: list[bytes] = []
        for start in range(0, len(paths), _NUM_FILES_AT_ONCE):
            some = paths[start : start + _NUM_FILES_AT_ONCE]
            found += self._steadily("read_files", some[0], partial(self.inner.read_files, some))
        return found

    def _read_file(self, path: str) -> bytes:
        with self.open_input(path) as file:
            return file.read()

    def read_range(self, path: str, start: int, num_bytes: int) -> bytes:
        def read() -> bytes:
            return self.inner.read_range(path, start, num_bytes)

        return self._steadily("read_range", path, read, num_bytes=num_bytes)

    def list(self, path: str) -> list[Entry]:
        return self._steadily("list", path, lambda: self.inner.list(path))

    def entry(self, path: str) -> Entry | None:
        return self._steadily("entry", path, lambda: self.inner.entry(path))

    def write_bytes(self, path: str, data: bytes) -> None:
        def write() -> None:
            self.inner.write_bytes(path, data)

        self._steadily("write_bytes", path, write, num_bytes=len(data), changes=True)

    def create_new(self, path: str, data: bytes) -> bool:
        tries = 0

        def create() -> bool:
            nonlocal tries
            tries += 1
            is_again = tries > 1
            if self.inner.create_new(path, data):
                return True
            # A client of an object store may have tried again by itself, and said nothing.
            return (is_again or self.scheme != "") and self._holds(path, data)

        return self._steadily("create_new", path, create, num_bytes=len(data), changes=True)

    def open_output(self, path: str) -> BinaryIO:
        opened = self._steadily(
            "open_output", path, lambda: self.inner.open_output(path), changes=True
        )

        def once(work: Callable[[], T], num_bytes: int) -> T:
            return self._once(f"write to {self._where(path)}", path, work, num_bytes, changes=True)

        return cast(BinaryIO, SteadyOutput(opened, once))

    def open_append(self, path: str) -> BinaryIO:
        return self._steadily("open_append", path, lambda: self.inner.open_append(path))

    def rename(self, src: str, dst: str) -> None:
        tries = 0

        def move() -> None:
            nonlocal tries
            tries += 1
            if tries > 1 and self.inner.entry(src) is None and self.inner.entry(dst) is not None:
                return
            self.inner.rename(src, dst)

        self._steadily("rename", src, move, changes=True)

    def exchange(self, one: str, other: str) -> bool:
        def work() -> bool:
            return self.inner.exchange(one, other)

        # Never again: done twice it would be undone.
        return self._once(f"exchange {self._where(one)}", one, work, 0, changes=True)

    def remove_tree(self, path: str) -> None:
        self._steadily("remove_tree", path, lambda: self.inner.remove_tree(path), changes=True)

    def make_dirs(self, path: str) -> None:
        self._steadily("make_dirs", path, lambda: self.inner.make_dirs(path))

    def free_bytes(self, path: str) -> int | None:
        return self._steadily("free_bytes", path, lambda: self.inner.free_bytes(path))

    def rebuild(self) -> None:
        """Makes the client anew, with the credentials that are there now."""
        self.inner.rebuild()

    def _holds(self, path: str, data: bytes) -> bool:
        """Whether what is there is what we wanted to make, when an earlier try may have."""
        with contextlib.suppress(FileNotFoundError), self.inner.open_input(path) as file:
            return file.read() == data
        return False

    def _steadily(
        self,
        operation: str,
        path: str,
        work: Callable[[], T],
        *,
        num_bytes: int = 0,
        changes: bool = False,
    ) -> T:
        what = f"{operation} {self._where(path)}"
        num_rebuilt = 0

        def may_try_again(error: BaseException) -> bool:
            nonlocal num_rebuilt
            if has_expired(error) and num_rebuilt < 2:
                num_rebuilt += 1
                self._rebuild(what, error)
                return True
            return is_transient(error)

        def count(state: RetryCallState) -> None:
            retries[operation] += 1
            _tell(operation, what, state)

        patience = self.patience
        retrying = Retrying(
            retry=retry_if_exception(may_try_again),
            stop=stop_after_attempt(patience.tries) | stop_after_delay(patience.give_up_s),
            wait=wait_random_exponential(patience.first_wait_s, patience.longest_wait_s),
            before_sleep=count,
            reraise=True,
        )
        try:
            found: T = retrying(self._once, what, path, work, num_bytes, changes)
            return found
        except Exception as error:
            told = as_os_error(error)
            if told is error:
                raise
            raise told from error

    def _once(
        self, what: str, path: str, work: Callable[[], T], num_bytes: int, changes: bool
    ) -> T:
        place = (self.scheme, *path.strip("/").split("/")) if changes else ()
        return deadline.call(work, self.patience.for_bytes(num_bytes), what, place)

    def _rebuild(self, what: str, error: BaseException) -> None:
        logger.warning("%s: credentials have expired (%s), the client is made anew", what, error)
        self._once("a new client", "", self.rebuild, 0, False)

    def _where(self, path: str) -> str:
        return f"{self.scheme}://{path}" if self.scheme else path


_told_s: dict[str, float] = {}


def _tell(operation: str, what: str, state: RetryCallState) -> None:
    """Once a minute for each operation: an outage has thousands of them."""
    now_s = time.monotonic()
    if now_s - _told_s.get(operation, -_TELL_AGAIN_S) < _TELL_AGAIN_S:
        return
    _told_s[operation] = now_s
    error = state.outcome.exception() if state.outcome is not None else None
    logger.warning(
        "storage: %s failed (%s: %s) and is tried again; %d such tries so far",
        what,
        type(error).__name__,
        error,
        retries[operation],
    )
