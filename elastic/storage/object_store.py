"""The object store: S3, GCS and their like through fsspec. A write is whole or absent; no rename.

Only those fsspec calls are used that take a path literally: `rm`, `cat`, `cp` and `mv` expand `*`,
`?` and `[...]`. Listings are never cached, since another process may have written. Must not import
ray or torch.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO, cast

import fsspec

from elastic.storage.store import Entry
from elastic.storage.store_errors import is_taken, is_transient

__all__ = ["ObjectStore", "client_of", "forget_clients"]

_NUM_PARALLEL_DELETES = 16
_NUM_TRIES_OF_A_PART = 3
"""Parts of a stream are tried again by the client, since nobody else could send one by itself."""

_lock = threading.Lock()
_clients: dict[tuple[str, int, int], Any] = {}
"""Of this process, by scheme, by how often each tries, and by process: a child has its own."""


class ObjectStore:
    """`Store` on an object store; `scheme` is the name fsspec knows it by, such as "s3"."""

    def __init__(self, scheme: str) -> None:
        self.scheme = scheme
        self._client()

    @property
    def _fs(self) -> Any:
        return self._client()

    def _client(self, num_tries: int = 1) -> Any:
        key = (self.scheme, num_tries, os.getpid())
        with _lock:
            if key not in _clients:
                _clients[key] = _made(self.scheme, num_tries)
            return _clients[key]

    def rebuild(self) -> None:
        """The next call has a client made anew; whoever still reads or writes keeps the old one."""
        forget_clients(self.scheme)

    def open_input(self, path: str) -> BinaryIO:
        return cast(BinaryIO, self._fs.open(path, "rb"))

    def read_files(self, paths: Sequence[str]) -> list[bytes]:
        return [self._fs.cat_file(path) for path in paths]

    def read_range(self, path: str, start: int, num_bytes: int) -> bytes:
        data: bytes = self._fs.cat_file(path, start=start, end=start + num_bytes)
        return data

    def list(self, path: str) -> list[Entry]:
        try:
            found = self._fs.ls(path, detail=True)
        except FileNotFoundError:
            return []
        parent = path.strip("/") + "/"
        entries = {}
        for info in found:
            name = info["name"].strip("/")
            # Some stores list the prefix itself as an object in it.
            if name.startswith(parent):
                entry = _entry(info)
                entries[entry.name] = entry
        return sorted(entries.values(), key=lambda entry: entry.name)

    def entry(self, path: str) -> Entry | None:
        try:
            return _entry(self._fs.info(path))
        except FileNotFoundError:
            return None

    def write_bytes(self, path: str, data: bytes) -> None:
        self._fs.pipe_file(path, data)

    def create_new(self, path: str, data: bytes) -> bool:
        try:
            self._fs.pipe_file(path, data, mode="create")
        except Exception as error:
            if is_taken(error):
                return False
            raise
        return True

    def open_output(self, path: str) -> BinaryIO:
        return cast(BinaryIO, self._client(_NUM_TRIES_OF_A_PART).open(path, "wb"))

    def open_append(self, path: str) -> BinaryIO:
        raise io.UnsupportedOperation(
            f"{self.scheme}://{path} cannot be appended to: write a new object instead"
        )

    def rename(self, src: str, dst: str) -> None:
        raise io.UnsupportedOperation(
            f"{self.scheme}://{src} cannot be renamed: write a marker that names it instead"
        )

    def exchange(self, one: str, other: str) -> bool:
        """Not to be had."""
        return False

    def remove_tree(self, path: str) -> None:
        try:
            below = self._fs.find(path, withdirs=True, detail=True)
        except FileNotFoundError:
            return
        files = [name for name, info in below.items() if info["type"] == "file"]
        with ThreadPoolExecutor(_NUM_PARALLEL_DELETES) as pool:
            list(pool.map(self._fs.rm_file, files))

    def make_dirs(self, path: str) -> None:
        """Nothing to make: a prefix exists once an object below it does."""

    def free_bytes(self, path: str) -> int | None:
        """Not to be known."""
        return None


def client_of(scheme: str) -> Any:
    """A client of its own for whoever speaks fsspec; it pickles, and is made as all of ours are."""
    return _made(scheme, _NUM_TRIES_OF_A_PART)


def forget_clients(scheme: str) -> None:
    """Clients of this scheme are made anew, from the environment as it then is."""
    with _lock:
        for key in [key for key in _clients if key[0] == scheme]:
            del _clients[key]


def _made(scheme: str, num_tries: int) -> Any:
    options: dict[str, Any] = {}
    if scheme in ("s3", "s3a"):
        options["config_kwargs"] = {
            # Tried again in one place alone: three layers of six tries each are no bound.
            "retries": {"total_max_attempts": 1},
            # What is read is held against our own digests, and there are servers that answer a part
            # of an object with the sum of the whole.
            "response_checksum_validation": "when_required",
        }
    client = fsspec.filesystem(
        scheme, use_listings_cache=False, skip_instance_cache=True, **options
    )
    if scheme in ("s3", "s3a"):
        import s3fs

        client.retries = num_tries
        s3fs.core.set_custom_error_handler(is_transient)
    return client


def _entry(info: dict[str, Any]) -> Entry:
    is_dir = info["type"] == "directory"
    name = info["name"].rstrip("/").rsplit("/", 1)[-1]
    return Entry(name=name, is_dir=is_dir, bytes=0 if is_dir else int(info["size"] or 0))
