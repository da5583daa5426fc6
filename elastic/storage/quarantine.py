"""The quarantine: checkpoints that are none any more, their bytes kept, each with the reason.

On a disk a whole directory is moved there; on an object store the files stay where they are, and
what lies there is the marker that names them. Must not import ray or torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from elastic.storage.completeness import (
    DIR,
    QUARANTINED_NAME,
    Checkpoint,
    Pointer,
    file_sizes,
    home,
    read_if_there,
)
from elastic.storage.filesystem import Filesystem
from elastic.storage.manifest import MARKER, REASON

__all__ = ["checkpoints", "kept_data", "put_back", "set_aside", "steps"]

_QUARANTINE = f"{DIR}/quarantine"


def checkpoints(fs: Filesystem) -> list[Checkpoint]:
    """All that was set aside in the run at the root `fs`."""
    return [_checkpoint(fs, path) for path in _paths(fs)]


def steps(fs: Filesystem) -> set[int]:
    """The steps of which one was set aside, at least."""
    return {_step(path) for path in _paths(fs)}


def kept_data(fs: Filesystem) -> set[str]:
    """Attempt directories whose bytes a marker in here keeps."""
    return {elsewhere for path in _paths(fs) if (elsewhere := _pointed_to(fs, path)) is not None}


def set_aside(fs: Filesystem, step: int, reason: str, path: str = "") -> str:
    """The path that holds what was at the step, or at `path`, from now on.

    On an object store the marker in place remains for the caller to change.
    """
    taken = set(_paths(fs))
    count = 0
    while (target := f"{_QUARANTINE}/step-{step}-{count}") in taken:
        count += 1
    text = (reason + "\n").encode("utf-8", "backslashreplace")
    if fs.is_local:
        fs.rename(path or home(step), target)
        # A full disk must not keep a bad checkpoint in its place; the ledger has the reason.
        with contextlib.suppress(OSError):
            fs.write_bytes(f"{target}/{REASON}", text)
        return target
    marker = read_if_there(fs, f"{home(step)}/{MARKER}")
    if marker is not None:
        fs.write_bytes(f"{target}/{MARKER}", marker)
    fs.write_bytes(f"{target}/{REASON}", text)
    return target


def put_back(fs: Filesystem, step: int, path: str) -> None:
    """What was set aside at `path` is at its step again, where there must be nothing.

    A crash at any point leaves it in one of the two places, or on an object store in both.
    """
    if fs.is_local:
        fs.rename(path, home(step))
        with contextlib.suppress(OSError):
            fs.remove_tree(f"{home(step)}/{REASON}")
        return
    fs.write_bytes(f"{home(step)}/{MARKER}", fs.read_bytes(f"{path}/{MARKER}"))
    fs.remove_tree(path)


def _checkpoint(fs: Filesystem, path: str) -> Checkpoint:
    reason = read_if_there(fs, f"{path}/{REASON}") or b"no reason recorded"
    elsewhere = _pointed_to(fs, path)
    places = [path] if elsewhere is None else [path, elsewhere]
    return Checkpoint(
        step=_step(path),
        complete=False,
        bytes=sum(sum(file_sizes(fs, place).values()) for place in places),
        world_size=None,
        generation=None,
        path=path,
        reason=f"quarantined: {reason.decode(errors='replace').strip()}",
    )


def _paths(fs: Filesystem) -> Sequence[str]:
    entries = fs.list(_QUARANTINE)
    names = [each.name for each in entries if each.is_dir and QUARANTINED_NAME.fullmatch(each.name)]
    return [f"{_QUARANTINE}/{name}" for name in names]


def _pointed_to(fs: Filesystem, path: str) -> str | None:
    step = _step(path)
    marker = read_if_there(fs, f"{path}/{MARKER}")
    pointer = Pointer.from_json(marker, step) if marker is not None else None
    return pointer.path if pointer and pointer.path != home(step) else None


def _step(path: str) -> int:
    return int(path.rsplit("-", 2)[1])
