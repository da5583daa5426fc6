"""A filesystem: a root and the paths below it, the same on a local disk and on an object store.

The only module that reads a storage URL. Paths are data: no character in them has a meaning but
"/". Must not import ray or torch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import BinaryIO

from elastic.storage.local_store import LocalStore
from elastic.storage.steady_store import SteadyStore
from elastic.storage.store import Entry, Store

__all__ = ["Entry", "Filesystem"]

_SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.\-]*)://(.*)", re.DOTALL)
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
_ACCOUNT_SCHEMES = ("abfs", "abfss", "wasb", "wasbs")  # container@account, which is no secret


class Filesystem:
    """Files below one root, which no path given to it can leave.

    Every path argument is relative, its components separated by "/"; "" is the root itself. Raises
    `ValueError` for a path that is absolute or has a component that is empty, "." or "..". A call
    that does not come back in time raises `StoreStuck`: see `steady_store`.
    """

    def __init__(self, store: Store, root: str) -> None:
        self.store = store
        self.root = root

    @classmethod
    def at(cls, url: str) -> Filesystem:
        """The filesystem rooted at `/mnt/runs`, `file:///mnt/runs`, `s3://bucket/runs` or alike.

        Nothing is created and nothing is contacted. Text is taken literally: `%20` is three
        characters. Raises `ValueError` for a relative path, for a "..", for options or credentials
        in the URL, and for a scheme whose package is not installed.
        """
        scheme, path = _split(url)
        if not scheme:
            return cls(SteadyStore(LocalStore()), "/" + "/".join(_root_parts(path, url)))
        path = "/".join(_object_parts(path, url))
        from elastic.storage.object_store import ObjectStore  # fsspec takes as long as all of ours

        try:
            return cls(SteadyStore(ObjectStore(scheme)), path)
        except (ImportError, ValueError) as error:
            extra = _extra(scheme) if isinstance(error, ImportError) else ""
            raise ValueError(f"no access to {url!r}: {error}{extra}") from error

    @property
    def url(self) -> str:
        """Text from which `at` makes this filesystem again: an absolute path if it is local."""
        return f"{self.store.scheme}://{self.root}" if self.store.scheme else self.root

    @property
    def is_local(self) -> bool:
        """Whether files can be appended to and renamed."""
        return not self.store.scheme

    @property
    def local_root(self) -> str | None:
        """The root as an absolute path of this machine, None on an object store."""
        return self.root if self.is_local else None

    def sub(self, path: str) -> Filesystem:
        """The filesystem rooted at `path`, on the same store."""
        return Filesystem(self.store, self._full(path))

    def read_bytes(self, path: str) -> bytes:
        """The whole content. Raises `FileNotFoundError`."""
        with self.open_input(path) as file:
            return file.read()

    def read_all(self, paths: Sequence[str]) -> list[bytes]:
        """The whole content of each, in order: for many small files, faster than one by one.

        Raises `FileNotFoundError`.
        """
        return self.store.read_files([self._full(path) for path in paths])

    def open_input(self, path: str) -> BinaryIO:
        """A seekable stream to read from; the caller closes it. Raises `FileNotFoundError`."""
        return self.store.open_input(self._full(path))

    def read_range(self, path: str, start: int, num_bytes: int) -> bytes:
        """So many bytes from `start` on, fewer where the file ends; one request on an object store.

        Raises `FileNotFoundError`.
        """
        return self.store.read_range(self._full(path), start, num_bytes)

    def write_bytes(self, path: str, data: bytes) -> None:
        """Replaces the file at once and durably, parents made.

        A reader, or a crash, meets the old content or the new, never a part.
        """
        self.store.write_bytes(self._file(path), data)

    def create_new(self, path: str, data: bytes) -> bool:
        """Makes the file, whole and durably, if there is none; whether this call has made it.

        Of several callers at once one makes it. `data` is to be the caller's own, with an id in it:
        who finds it there has made it, by a call whose answer was lost. An object store that
        ignores conditional writes gives no such promise.
        """
        return self.store.create_new(self._file(path), data)

    def open_output(self, path: str) -> BinaryIO:
        """A stream to a new or emptied file, parents made.

        Durable once closed; it may be torn if the process dies before.
        """
        return self.store.open_output(self._file(path))

    def open_append(self, path: str) -> BinaryIO:
        """An unbuffered stream to the end of a file, made if missing.

        Raises `io.UnsupportedOperation` unless `is_local`.
        """
        return self.store.open_append(self._file(path))

    def list(self, path: str = "") -> list[Entry]:
        """What is directly in `path`, by name; [] when there is no such directory."""
        return self.store.list(self._full(path))

    def size(self, path: str) -> int | None:
        """Bytes of the file, None when there is no such file."""
        entry = self.store.entry(self._full(path))
        return None if entry is None or entry.is_dir else entry.bytes

    def exists(self, path: str) -> bool:
        """Whether a file or a directory is there."""
        return self.store.entry(self._full(path)) is not None

    def rename(self, src: str, dst: str) -> None:
        """Moves a file or directory at once and durably, parents of `dst` made.

        Raises `OSError` if `dst` is there and not empty, `io.UnsupportedOperation` unless
        `is_local`.
        """
        self.store.rename(self._file(src), self._file(dst))

    def exchange(self, one: str, other: str) -> bool:
        """Whether the two directories have changed names, at once and durably.

        False, and nothing is done, where the file system has no such operation. Raises
        `FileNotFoundError`.
        """
        return self.store.exchange(self._file(one), self._file(other))

    def remove_tree(self, path: str) -> None:
        """Removes a file or a directory with all it holds; nothing happens when it is missing."""
        self.store.remove_tree(self._file(path))

    def make_dirs(self, path: str = "") -> None:
        """Makes the directory and its parents durably; nothing to make on an object store."""
        self.store.make_dirs(self._full(path))

    def free_bytes(self) -> int | None:
        """What may yet be written below the root; None where that is not to be known."""
        return self.store.free_bytes(self.root)

    def missing_bucket(self) -> str | None:
        """The bucket's URL, when the store says that there is none of that name.

        None on a local disk, and for who may not ask.
        """
        bucket = self.root.split("/", 1)[0]
        try:
            is_there = self.is_local or self.store.entry(bucket) is not None
        except PermissionError:
            return None
        return None if is_there else f"{self.store.scheme}://{bucket}"

    def _full(self, path: str) -> str:
        if not path:
            return self.root
        for part in path.split("/"):
            if part in ("", ".", "..") or "\0" in part:
                raise ValueError(
                    f"{path!r} is not a relative path inside {self.url!r}: "
                    f"its component {part!r} is not allowed"
                )
        return f"{self.root.rstrip('/')}/{path}"

    def _file(self, path: str) -> str:
        if not path:
            raise ValueError(
                f"the root {self.url!r} itself cannot be written, renamed or removed: "
                "name a path inside it"
            )
        return self._full(path)

    def __repr__(self) -> str:
        return f"Filesystem({self.url!r})"


def _extra(scheme: str) -> str:
    name = _EXTRAS.get(scheme)
    if name is None:
        return ""
    return f": pip install 'elastic-ray[{name}]' (in a checkout -e '.[{name}]')"


def _split(url: str) -> tuple[str, str]:
    matched = _SCHEME.fullmatch(url)
    scheme, path = (matched[1].lower(), matched[2]) if matched else ("", url)
    if scheme in ("file", "local"):
        scheme = ""
    if not scheme and not path.startswith("/"):
        raise ValueError(
            f"storage must be an absolute path or a URL such as s3://bucket/runs, found {url!r}: "
            "a relative path would be another place on every node"
        )
    return scheme, path


def _root_parts(path: str, url: str) -> list[str]:
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts or "\0" in path:
        raise ValueError(
            f"storage {url!r} has a '..' or a zero byte, neither is allowed: write the path out"
        )
    return parts


def _object_parts(path: str, url: str) -> list[str]:
    container = path.split("/", 1)[0]
    user, at, _ = container.rpartition("@")
    scheme = url.split("://", 1)[0].lower()
    if at and (":" in user or scheme not in _ACCOUNT_SCHEMES):
        # The text itself stays out of the message: it goes to logs.
        raise ValueError(
            f"the {scheme}:// storage URL holds credentials before an '@': take them out and give "
            "them to the machines through their environment or role"
        )
    if "?" in path:
        raise ValueError(
            f"the {scheme}:// storage URL holds options after a '?': they are not read, set them "
            "in the environment of every node (for an S3 endpoint AWS_ENDPOINT_URL)"
        )
    parts = path.rstrip("/").split("/")
    if any(part in ("", ".", "..") or "\0" in part for part in parts) or container.endswith(":"):
        raise ValueError(
            f"storage {url!r} must read {scheme}://<bucket>/<path>, "
            "with no empty, '.' or '..' component"
        )
    return parts
