"""A held checkpoint: one that is read while the run goes on, its files kept from going.

On a disk every file that is needed is opened at once: retention may then delete it, its bytes stay
until they are read. An object store has no such thing, there a file that goes is missed by name.
Needs no process group. Must not import ray.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, BinaryIO, cast

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from elastic.storage.checkpoints import Catalog, NotComplete
from elastic.storage.filesystem import Entry, Filesystem
from elastic.storage.verification import BAD, GOOD, Tell, check_files
from elastic.training import jsonable
from elastic.training.saving import STATE
from elastic.training.shard_reader import CheckpointCorrupt, ShardReader
from elastic.training.tensor_file import Stored

__all__ = ["CheckpointCorrupt", "CheckpointGone", "HeldCheckpoint", "Unreadable", "hold"]


class CheckpointGone(Exception):
    """The checkpoint was removed or replaced by the run before all of it could be opened."""

    def __init__(self, step: int) -> None:
        super().__init__(step)
        self.step = step

    def __str__(self) -> str:
        return (
            f"the checkpoint of step {self.step} was removed or replaced while it was being read: "
            "choose a newer one, or pin it first with `elastic checkpoints pin`"
        )


class Unreadable(Exception):
    """Storage did not give the bytes, which says nothing about them."""


class HeldCheckpoint:
    """The tensors of one checkpoint by name, and the plain rest; made by `hold`.

    Raises `CheckpointCorrupt` where the bytes are not those that were saved, `CheckpointGone` when
    whatever went wrong did because the run took the checkpoint away.
    """

    def __init__(self, catalog: Catalog, step: int, fs: Filesystem) -> None:
        self._catalog = catalog
        self._step = step
        self._fs = fs
        self._manifest = catalog.manifest(step)
        self._path = catalog.data_path(step)
        self._reader = ShardReader(fs, self._path, self._manifest.files)
        self.tensors: dict[str, Stored] = {}
        with self._reading():
            entries = self._reader.read_metadata().state_dict_metadata
            self.plain: dict[str, Any] = jsonable.loads(self._reader.read_checked(STATE))
        for name, entry in entries.items():
            if not isinstance(entry, TensorStorageMetadata):
                raise ValueError(
                    f"{name!r} in {self._path} is pickled and not a tensor: no save of ours"
                )
            self.tensors[name] = Stored(name, tuple(entry.size), entry.properties.dtype)

    def verify(self, names: Collection[str], tell: Tell) -> None:
        """Opens the files of these tensors, and reads them to their ends: their digests are right.

        Raises `Unreadable` too.
        """
        with self._reading():
            files = self._reader.files_of(names)
            for file in files:
                self._fs.open_input(f"{self._path}/{file.path}").close()
            found = check_files(self._fs, [(self._path, file) for file in files], tell)
            bad = [problem for result, problem in found if result == BAD]
            if bad:
                raise CheckpointCorrupt(self._path, "; ".join(bad))
            problems = "; ".join(problem for result, problem in found if result != GOOD)
            if problems:
                raise Unreadable(f"{self._path} cannot be read: {problems}")

    def read(self, stored: Stored) -> torch.Tensor:
        """The whole tensor, of the dtype that `stored` says; of a file that was verified."""
        with self._reading():
            return self._reader.read_tensor(stored.name, stored.dtype)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (CheckpointCorrupt, Unreadable, OSError) as error:
            try:
                unchanged = self._catalog.manifest(self._step) == self._manifest
            except NotComplete:
                unchanged = False
            if unchanged:
                raise
            raise CheckpointGone(self._step) from error


@contextmanager
def hold(catalog: Catalog, step: int) -> Iterator[HeldCheckpoint]:
    """The complete checkpoint of `step`, for as long as the context lasts.

    Raises `NotComplete`, `UnsupportedFormat`, and what `HeldCheckpoint` raises.
    """
    with ExitStack() as stack:
        yield HeldCheckpoint(catalog, step, _held(catalog.fs, stack))


def _held(fs: Filesystem, stack: ExitStack) -> Filesystem:
    return Filesystem(cast(Any, _HeldStore(fs.store, stack)), fs.root) if fs.is_local else fs


class _HeldStore:
    """A disk of which each file, once opened, can be opened again whatever became of its name."""

    def __init__(self, inner: Any, stack: ExitStack) -> None:
        self._inner = inner
        self._stack = stack
        self._files: dict[str, BinaryIO] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def open_input(self, path: str) -> BinaryIO:
        if path not in self._files:
            self._files[path] = self._stack.enter_context(self._inner.open_input(path))
        # The copies of a descriptor share their position: one reader of a file at a time.
        stream = os.fdopen(os.dup(self._files[path].fileno()), "rb")
        stream.seek(0)
        return stream

    def entry(self, path: str) -> Entry | None:
        if path not in self._files:
            return cast("Entry | None", self._inner.entry(path))
        num_bytes = os.fstat(self._files[path].fileno()).st_size
        return Entry(name=os.path.basename(path), is_dir=False, bytes=num_bytes)
