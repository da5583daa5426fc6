"""Tiered stores: a run's storage, with a node's own disk before it for the files of a save.

Where the disk fails, storage takes over in the middle of a file: whoever writes or reads does not
notice. Must not import ray or torch.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO, cast

from elastic.storage.completeness import ATTEMPT_NAME, DIR
from elastic.storage.direct_file import DirectFile
from elastic.storage.filesystem import Filesystem
from elastic.storage.manifest import FileDigest
from elastic.storage.store import Entry, Store

__all__ = ["DiskFile", "LocalFirst", "Nearest"]

_PIECE_BYTES = 4 << 20


class LocalFirst:
    """What the attempts of saves hold is written to `local`; all else is the run's storage.

    `fail` is told of the first error of the disk; once `is_off`, all goes to storage.
    """

    def __init__(
        self,
        shared: Filesystem,
        local: Filesystem,
        *,
        fail: Callable[[OSError], None],
        is_off: Callable[[], bool],
    ) -> None:
        self.scheme = shared.store.scheme
        self._shared = shared.store
        self._local = local
        self._root = shared.root.rstrip("/")
        self._fail = fail
        self._is_off = is_off

    def __getattr__(self, name: str) -> Any:
        return getattr(self._shared, name)

    def write_bytes(self, path: str, data: bytes) -> None:
        local = self._of_attempt(path)
        if local is not None:
            try:
                self._local.write_bytes(local, data)
                return
            except OSError as error:
                self._fail(error)
        self._shared.write_bytes(path, data)

    def open_output(self, path: str) -> BinaryIO:
        local = self._of_attempt(path)
        if local is not None:
            try:
                self._local.make_dirs(os.path.dirname(local))
                place = f"{self._local.root}/{local}"
                return cast(BinaryIO, _Output(place, lambda: self._shared.open_output(path), self))
            except OSError as error:
                self._fail(error)
        return self._shared.open_output(path)

    def failed(self, error: OSError) -> None:
        """The disk has failed while a file was being written."""
        self._fail(error)

    def _of_attempt(self, path: str) -> str | None:
        """Where that file lies on the disk; None where it is not to."""
        below = path.removeprefix(f"{self._root}/{DIR}/")
        name, slash, _ = below.partition("/")
        if self._is_off() or not slash or not ATTEMPT_NAME.fullmatch(name):
            return None
        return f"{DIR}/{below}"


class _Output(io.RawIOBase):
    """A file on the disk, or, from the first error of the disk on, the same file in storage.

    Unbuffered, so that at an error all that was taken is in the file, to be read back. Durable
    once closed.
    """

    def __init__(self, path: str, storage: Callable[[], BinaryIO], store: LocalFirst) -> None:
        self._path = path
        self._storage = storage
        self._store = store
        self._stream: BinaryIO | None = None
        self._file: DirectFile | None = DirectFile(path)
        self._bytes = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        view = memoryview(data).cast("B")
        done = 0
        while self._file is not None and done < len(view):
            try:
                done += self._file.write(view[done:]) or 0
            except OSError as error:
                self._bytes += done
                self._go_on_in_storage(error)
                self._bytes -= done
        if self._stream is not None and done < len(view):
            self._stream.write(view[done:])
        self._bytes += len(view)
        return len(view)

    def close(self) -> None:
        if self.closed:
            return
        try:
            self._finish()
        finally:
            super().close()

    def _finish(self) -> None:
        if self._file is not None:
            try:
                os.fsync(self._file.fileno())
                self._file.close()
                return
            except OSError as error:
                self._go_on_in_storage(error)
        assert self._stream is not None
        self._stream.close()

    def __exit__(self, kind: Any, *rest: Any) -> None:
        if kind is not None and self._file is not None:
            self._file.close()  # whoever writes has failed: there is no file to make durable
            super().close()
            return
        self.close()

    def _go_on_in_storage(self, error: OSError) -> None:
        """What the disk has taken goes to storage, and the rest will."""
        assert self._file is not None
        self._store.failed(error)
        broken, self._file = self._file, None
        with contextlib.suppress(OSError):
            broken.close()
        with open(self._path, "rb", buffering=0) as file:
            self._stream = self._storage()
            left_bytes = self._bytes
            while left_bytes:
                piece = file.read(min(_PIECE_BYTES, left_bytes))
                if not piece:
                    raise OSError(
                        f"{self._path}: {left_bytes} bytes cannot be read back after {error}"
                    ) from error
                self._stream.write(piece)
                left_bytes -= len(piece)
        os.unlink(self._path)


class Nearest:
    """The files of one checkpoint come from `local` where they are there with their sizes."""

    def __init__(
        self,
        shared: Filesystem,
        path: str,
        local: Filesystem,
        local_path: str,
        files: Mapping[str, FileDigest],
    ) -> None:
        """`path` is where the checkpoint lies in the run's storage, `local_path` on the disk."""
        self.scheme = shared.store.scheme
        self._shared: Store = shared.store
        self._prefix = f"{shared.root.rstrip('/')}/{path}/"
        self._local_prefix = f"{local.root}/{local_path}/"
        self._files = files
        self.read: set[str] = set()
        """The names of the files that were read from the disk."""
        self.read_in_storage: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._shared, name)

    def open_input(self, path: str) -> BinaryIO:
        local = self._here(path)
        if local is not None:
            with contextlib.suppress(OSError):
                stream = io.BufferedReader(DiskFile(local))
                self.read.add(path.removeprefix(self._prefix))
                return cast(BinaryIO, stream)
        self.read_in_storage.add(path.removeprefix(self._prefix))
        return self._shared.open_input(path)

    def read_range(self, path: str, start: int, num_bytes: int) -> bytes:
        """So many bytes from `start` on, fewer where the file ends."""
        with self.open_input(path) as stream:
            stream.seek(start)
            return stream.read(num_bytes)

    def entry(self, path: str) -> Entry | None:
        if self._here(path) is None:
            return self._shared.entry(path)
        file = self._files[path.removeprefix(self._prefix)]
        return Entry(name=os.path.basename(path), is_dir=False, bytes=file.bytes)

    def _here(self, path: str) -> str | None:
        """Where that file lies on the disk, None if it is not there whole."""
        name = path.removeprefix(self._prefix)
        file = self._files.get(name)
        if file is None or not path.startswith(self._prefix):
            return None
        try:
            found = os.stat(f"{self._local_prefix}{name}")
        except OSError:
            return None
        return f"{self._local_prefix}{name}" if found.st_size == file.bytes else None


class DiskFile(io.FileIO):
    """A file on the disk; where it cannot be read it is missing, which blames no checkpoint."""

    def readinto(self, buffer: Any, /) -> int:
        with _unreadable_is_missing(self.name):
            return super().readinto(buffer) or 0

    def readall(self) -> bytes:
        with _unreadable_is_missing(self.name):
            return super().readall() or b""


@contextlib.contextmanager
def _unreadable_is_missing(path: object) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FileNotFoundError(f"{path!r} cannot be read: {error}") from error
