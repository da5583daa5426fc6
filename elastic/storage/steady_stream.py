"""Steady streams: what `SteadyStore` gives to read from and to write to.

A piece that could not be read is read again from a stream opened anew. A piece that could not be
written spoils the file, and nothing of it is to be published. Must not import ray or torch.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from types import TracebackType
from typing import Any, BinaryIO, Protocol, TypeVar

__all__ = ["SteadyInput", "SteadyOutput"]

T = TypeVar("T")

Reads = Callable[[Callable[[], bytes], int], bytes]


class Once(Protocol):
    """Does a work that moves so many bytes within its time; raises what it raises."""

    def __call__(self, work: Callable[[], T], num_bytes: int, /) -> T: ...


class SteadyInput(io.BufferedIOBase):
    """A seekable stream over `opened`; `reopen` gives another one like it.

    `read` performs a work, several times if need be.
    """

    def __init__(self, opened: BinaryIO, reopen: Callable[[], BinaryIO], read: Reads) -> None:
        self._stream: BinaryIO | None = opened
        self._reopen = reopen
        self._steadily = read
        self._position = 0

    def read(self, size: int | None = -1, /) -> bytes:
        return self._read(lambda stream: stream.read(-1 if size is None else size), size or 0)

    def read1(self, size: int = -1, /) -> bytes:
        return self.read(size)

    def readline(self, size: int | None = -1, /) -> bytes:
        return self._read(lambda stream: stream.readline(-1 if size is None else size), 0)

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer).cast("B")
        data = self.read(len(view))
        view[: len(data)] = data
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        if whence == io.SEEK_END:
            offset += self._open().seek(0, io.SEEK_END)
        elif whence == io.SEEK_CUR:
            offset += self._position
        if offset < 0:
            raise ValueError(f"seek to {offset}, before the start of the file")
        self._position = offset
        return offset

    def tell(self) -> int:
        return self._position

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        if not self.closed:
            stream, self._stream = self._stream, None
            super().close()
            if stream is not None:
                stream.close()

    def _read(self, piece: Callable[[BinaryIO], bytes], num_bytes: int) -> bytes:
        if self.closed:
            raise ValueError("read from a closed file")

        def work() -> bytes:
            stream, self._stream = self._open(), None
            stream.seek(self._position)
            data = piece(stream)
            # Only now: one that failed, or has not come back, may be anywhere.
            self._stream = stream
            return data

        data = self._steadily(work, max(0, num_bytes))
        self._position += len(data)
        return data

    def _open(self) -> BinaryIO:
        if self._stream is None:
            self._stream = self._reopen()
        return self._stream


class SteadyOutput:
    """A stream to `opened`, whose close is what makes it durable.

    Left with an exception, the file is not made, where the store makes it only at its end.
    """

    def __init__(self, opened: BinaryIO, once: Once) -> None:
        self._stream = opened
        self._once = once
        self._num_bytes = 0
        self._is_spoilt = False

    def write(self, data: Any) -> int:
        self._num_bytes += memoryview(data).nbytes
        return self._do(lambda: self._stream.write(data))

    def flush(self) -> None:
        self._do(self._stream.flush)

    def close(self) -> None:
        if self._is_spoilt:
            self._drop()
        else:
            self._do(self._stream.close)

    def __enter__(self) -> SteadyOutput:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self._drop()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _do(self, work: Callable[[], T]) -> T:
        try:
            return self._once(work, self._num_bytes)
        except BaseException:
            self._is_spoilt = True
            raise

    def _drop(self) -> None:
        """Closes without finishing; why it is so is on its way to the caller already."""

        def drop() -> None:
            discard = getattr(self._stream, "discard", None)
            if discard is None:
                self._stream.close()
                return
            discard()
            self._stream.closed = True  # type: ignore[misc]  # so that nobody finishes it later

        with contextlib.suppress(Exception):
            self._once(drop, 0)
