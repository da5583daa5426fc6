"""Copying: a checkpoint, or one file of it, to another place, its digests checked on the way.

Nothing is called copied whose bytes were not seen to be those that were saved. Must not import ray
or torch.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import Any, BinaryIO, cast

from elastic.storage.checkpoints import AlreadyComplete, Catalog, Checkpoint
from elastic.storage.completeness import digest_problem, home
from elastic.storage.filesystem import Filesystem
from elastic.storage.manifest import FileDigest
from elastic.storage.store import Store

__all__ = ["CopyDamaged", "CopyStopped", "copy_checkpoint", "copy_file", "give_way"]

_NICE = 10

IsStopped = Callable[[], bool]


class CopyDamaged(Exception):
    """The bytes that were to be copied, or those that arrived, are not those that were saved."""


class CopyStopped(Exception):
    """Nobody wants the copy any more."""


def give_way() -> None:
    """From here on this thread, and no other, takes the processor only where others leave it.

    Nothing happens on a system whose threads have no priority of their own.
    """
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def copy_file(
    source: Filesystem,
    source_path: str,
    target: Filesystem,
    target_path: str,
    file: FileDigest,
    is_stopped: IsStopped = lambda: False,
) -> None:
    """The file of the one directory in the other as well, durably.

    Raises `CopyDamaged` if the source is not what `file` says, `CopyStopped`, and what the stores
    raise; what was copied of it until then may be left.
    """

    def look(num_bytes: int) -> None:
        if is_stopped():
            raise CopyStopped(f"{source_path}/{file.path}")

    with target.open_output(f"{target_path}/{file.path}") as out:
        # What is checked is what is copied: the bytes are read once.
        tee = Filesystem(_Tee(source.store, out), source.root)
        problem = digest_problem(tee, source_path, file, look)
    if problem:
        raise CopyDamaged(f"{source_path} of {source.url}: {problem}")


class _Tee:
    """A store whose files are written on to `out` as they are read, from their beginning on."""

    def __init__(self, store: Store, out: BinaryIO) -> None:
        self.scheme = store.scheme
        self._store = store
        self._out = out

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def open_input(self, path: str) -> BinaryIO:
        return cast(BinaryIO, _TeeStream(self._store.open_input(path), self._out))


class _TeeStream:
    def __init__(self, stream: BinaryIO, out: BinaryIO) -> None:
        self._stream = stream
        self._out = out

    def __enter__(self) -> _TeeStream:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def read(self, num_bytes: int) -> bytes:
        piece = self._stream.read(num_bytes)
        self._out.write(piece)
        return piece


def copy_checkpoint(
    source: Catalog,
    step: int,
    target: Catalog,
    *,
    is_stopped: IsStopped = lambda: False,
    before_publishing: Callable[[], object] = lambda: None,
) -> Checkpoint:
    """The checkpoint of `step`, complete at the target too; read there again before it is so.

    One of the same step that another attempt saved is put aside there. Raises `NotComplete` if the
    source has none, `CopyDamaged`, `CopyStopped`, and what the stores and `before_publishing`
    raise.
    """
    manifest, path = source.manifest(step), source.data_path(step)
    attempt_path = target.attempt_path(step, manifest.generation, manifest.attempt)
    try:
        target.discard(attempt_path)
    except AlreadyComplete:
        return target.inspect(step)
    for file in manifest.files:
        copy_file(source.fs, path, target.fs, attempt_path, file, is_stopped)
    for file in manifest.files:
        if is_stopped():
            raise CopyStopped(attempt_path)
        problem = digest_problem(target.fs, attempt_path, file)
        if problem:
            raise CopyDamaged(f"{home(step)} as it arrived in {target.fs.url}: {problem}")
    before_publishing()
    return target.adopt(manifest, attempt_path, replace=True)
