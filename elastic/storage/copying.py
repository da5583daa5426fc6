"""Copying: a checkpoint, or one file of it, to another place, its digests checked on the way.

Nothing is called copied whose bytes were not seen to be those that were saved. Must not import ray
or torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Callable

from elastic.storage.checkpoints import AlreadyComplete, Catalog, Checkpoint
from elastic.storage.completeness import digest_problem, home
from elastic.storage.filesystem import Filesystem
from elastic.storage.manifest import FileDigest

__all__ = ["CopyDamaged", "CopyStopped", "copy_checkpoint", "copy_file", "give_way"]

_PIECE_BYTES = 4 << 20
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
    digest, num_bytes = hashlib.sha256(), 0
    stream = source.open_input(f"{source_path}/{file.path}")
    with stream, target.open_output(f"{target_path}/{file.path}") as out:
        while piece := stream.read(_PIECE_BYTES):
            if is_stopped():
                raise CopyStopped(f"{source_path}/{file.path}")
            out.write(piece)
            digest.update(piece)
            num_bytes += len(piece)
    found = f"sha256:{digest.hexdigest()}"
    if (num_bytes, found) != (file.bytes, file.digest):
        raise CopyDamaged(
            f"{source_path}/{file.path} of {source.url}: expected {file.bytes} bytes with "
            f"{file.digest}, found {num_bytes} with {found}"
        )


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
