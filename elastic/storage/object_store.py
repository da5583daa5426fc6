"""The object store: S3, GCS and their like through fsspec. A write is whole or absent; no rename.

Only those fsspec calls are used that take a path literally: `rm`, `cat`, `cp` and `mv` expand `*`,
`?` and `[...]`. Listings are never cached, since another process may have written. Must not import
ray or torch.
"""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO, cast

import fsspec

from elastic.storage.store import Entry

_NUM_PARALLEL_DELETES = 16


class ObjectStore:
    """`Store` on an object store; `scheme` is the name fsspec knows it by, such as "s3"."""

    def __init__(self, scheme: str) -> None:
        self.scheme = scheme
        self._fs: Any = fsspec.filesystem(scheme, use_listings_cache=False)

    def open_input(self, path: str) -> BinaryIO:
        return cast(BinaryIO, self._fs.open(path, "rb"))

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
        except FileExistsError:
            return False
        return True

    def open_output(self, path: str) -> BinaryIO:
        return cast(BinaryIO, self._fs.open(path, "wb"))

    def open_append(self, path: str) -> BinaryIO:
        raise io.UnsupportedOperation(
            f"{self.scheme}://{path} cannot be appended to: write a new object instead"
        )

    def rename(self, src: str, dst: str) -> None:
        raise io.UnsupportedOperation(
            f"{self.scheme}://{src} cannot be renamed: write a marker that names it instead"
        )

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


def _entry(info: dict[str, Any]) -> Entry:
    is_dir = info["type"] == "directory"
    name = info["name"].rstrip("/").rsplit("/", 1)[-1]
    return Entry(name=name, is_dir=is_dir, bytes=0 if is_dir else int(info["size"] or 0))
