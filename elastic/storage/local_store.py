"""The local store: POSIX files whose writes survive a power cut once the call has returned.

Data is synced before a name points to it, and a directory is synced after a name in it changed.
Must not import ray or torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from typing import BinaryIO, cast

from elastic.storage.direct_file import DirectFile
from elastic.storage.store import Entry


class LocalStore:
    """`Store` on a mounted filesystem: local disk, NFS, Lustre, anything with an atomic rename."""

    scheme = ""

    def open_input(self, path: str) -> BinaryIO:
        with _loops_are_missing():
            return open(path, "rb")

    def read_files(self, paths: Sequence[str]) -> list[bytes]:
        # Not in threads: on a local disk they stand in each other's way.
        return [self._read_file(path) for path in paths]

    def _read_file(self, path: str) -> bytes:
        with self.open_input(path) as file:
            return file.read()

    def read_range(self, path: str, start: int, num_bytes: int) -> bytes:
        with self.open_input(path) as file:
            file.seek(start)
            return file.read(num_bytes)

    def list(self, path: str) -> list[Entry]:
        try:
            scan = os.scandir(path)
        except FileNotFoundError:
            return []
        with scan:
            return sorted(_entries(scan), key=lambda entry: entry.name)

    def entry(self, path: str) -> Entry | None:
        try:
            with _loops_are_missing():
                is_dir = os.path.isdir(path)
                num_bytes = 0 if is_dir else os.stat(path).st_size
        except (FileNotFoundError, NotADirectoryError):
            return None
        return Entry(name=os.path.basename(path), is_dir=is_dir, bytes=num_bytes)

    def write_bytes(self, path: str, data: bytes) -> None:
        with self._written_beside(path, data) as temporary:
            os.replace(temporary, path)

    def create_new(self, path: str, data: bytes) -> bool:
        with self._written_beside(path, data) as temporary:
            try:
                os.link(temporary, path)
            except FileExistsError:
                return False
            finally:
                os.unlink(temporary)
        return True

    @contextlib.contextmanager
    def _written_beside(self, path: str, data: bytes) -> Iterator[str]:
        """A durable file beside `path`, to be moved there; the directory is synced after."""
        parent, name = os.path.split(path)
        self.make_dirs(parent)
        temporary = os.path.join(parent, f".{name[:100]}.{uuid.uuid4().hex}.tmp")
        try:
            with _DurableWriter(io.FileIO(temporary, "wb")) as file:
                file.write(data)
            yield temporary
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        _sync_dir(parent)

    def open_output(self, path: str) -> BinaryIO:
        self.make_dirs(os.path.dirname(path))
        return cast(BinaryIO, _DurableWriter(DirectFile(path)))

    def open_append(self, path: str) -> BinaryIO:
        self.make_dirs(os.path.dirname(path))
        # Unbuffered: bytes that failed to be written must not be tried again by `close`.
        file = io.FileIO(path, "ab")
        _sync_dir(os.path.dirname(path))
        return cast(BinaryIO, file)

    def rename(self, src: str, dst: str) -> None:
        self.make_dirs(os.path.dirname(dst))
        os.rename(src, dst)
        _sync_dir(os.path.dirname(dst))
        _sync_dir(os.path.dirname(src))

    def exchange(self, one: str, other: str) -> bool:
        if not _exchange(one, other):
            return False
        _sync_dir(os.path.dirname(one))
        _sync_dir(os.path.dirname(other))
        return True

    def remove_tree(self, path: str) -> None:
        try:
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path)
            else:
                os.unlink(path)
        except (FileNotFoundError, NotADirectoryError):
            if os.path.lexists(path):
                raise
            return
        _sync_dir(os.path.dirname(path))

    def make_dirs(self, path: str) -> None:
        missing = []
        while not os.path.isdir(path):
            missing.append(path)
            path = os.path.dirname(path)
        for directory in reversed(missing):
            with contextlib.suppress(FileExistsError):
                os.mkdir(directory)
            if not os.path.isdir(directory):
                raise NotADirectoryError(f"{directory!r} is needed as a directory but is a file")
            _sync_dir(os.path.dirname(directory))

    def free_bytes(self, path: str) -> int | None:
        """Of the file system that holds `path`, or what there is of the way to it."""
        while not os.path.isdir(path):
            path = os.path.dirname(path)
        return shutil.disk_usage(path).free

    def rebuild(self) -> None:
        """Nothing to make anew: no credentials are kept here."""


class _DurableWriter(io.BufferedWriter):
    """A file that is on the medium, not in the page cache, once `close` has returned."""

    def close(self) -> None:
        if self.closed:
            return
        try:
            self.flush()
            os.fsync(self.fileno())
        finally:
            super().close()


def _entries(scan: Iterator[os.DirEntry[str]]) -> Iterator[Entry]:
    for found in scan:
        # A name that vanishes between the listing and the look at it counts as gone before.
        with contextlib.suppress(FileNotFoundError), _loops_are_missing():
            is_dir = found.is_dir()
            num_bytes = 0 if is_dir else found.stat().st_size
            yield Entry(name=found.name, is_dir=is_dir, bytes=num_bytes)


@contextlib.contextmanager
def _loops_are_missing() -> Iterator[None]:
    """A link that leads to itself is a file that is missing: one stray link must not stop a run."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise FileNotFoundError(
            errno.ENOENT, "a link that leads to itself", error.filename
        ) from error


def _exchange(one: str, other: str) -> bool:
    """Each gets the other's name at once; False where system or file system cannot do that."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if call(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), one, None, other)


def _sync_dir(path: str) -> None:
    descriptor = os.open(path or "/", os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
