"""Filesystems that are slow or broken on purpose, for tests of saves and loads."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, BinaryIO, cast

from elastic.storage.filesystem import Filesystem

__all__ = ["faulty"]

Strike = Callable[[str, str], None]


def faulty(url: str, strike: Strike) -> Filesystem:
    """The filesystem at `url`; before each read or write `strike(operation, path)` may raise or
    wait. Operations: "write" for each piece of a stream, "write_bytes", "open_output", "read".
    """
    return _at(Filesystem.at(url), strike)


def _at(inner: Filesystem, strike: Strike) -> Filesystem:
    return Filesystem(cast(Any, _Store(inner.store, strike)), inner.root)


def delay(seconds: float) -> Strike:
    """Every new stream takes so long to open."""

    def strike(operation: str, path: str) -> None:
        if operation == "open_output":
            time.sleep(seconds)

    return strike


class _Store:
    def __init__(self, inner: Any, strike: Strike) -> None:
        self._inner = inner
        self._strike = strike

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def open_output(self, path: str) -> BinaryIO:
        self._strike("open_output", path)
        return cast(BinaryIO, _Stream(self._inner.open_output(path), self._strike, path))

    def write_bytes(self, path: str, data: bytes) -> None:
        self._strike("write_bytes", path)
        self._inner.write_bytes(path, data)

    def open_input(self, path: str) -> BinaryIO:
        self._strike("read", path)
        return self._inner.open_input(path)


class _Stream:
    def __init__(self, inner: Any, strike: Strike, path: str) -> None:
        self._inner = inner
        self._strike = strike
        self._path = path

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self._inner.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def write(self, data: Any) -> int:
        self._strike("write", self._path)
        return self._inner.write(data)
