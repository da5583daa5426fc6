"""Pins: the checkpoints that somebody wants kept for ever, a small file for each of their steps.

What a pin file holds is for people; that it is there is what counts, so that a damaged pin still
keeps its checkpoint. Must not import ray or torch.
"""

from __future__ import annotations

import json

from elastic.storage.checkpoints import Catalog, NotComplete
from elastic.storage.completeness import DIR, STEP_NAME
from elastic.storage.filesystem import Filesystem

_PINS = f"{DIR}/pins"
FORMAT_VERSION = 1


def pinned_steps(fs: Filesystem) -> set[int]:
    """The steps pinned in the run at the root `fs`, whether or not there is a checkpoint."""
    matches = (STEP_NAME.fullmatch(entry.name) for entry in fs.list(_PINS))
    return {int(matched[1]) for matched in matches if matched}


def pin(catalog: Catalog, step: int, *, time_s: float) -> bool:
    """Keeps the checkpoint of `step` until it is unpinned; False if it was pinned before.

    Raises `NotComplete` if there is none, or if it was being removed just now; `UnsupportedFormat`.
    """
    catalog.manifest(step)
    if step in pinned_steps(catalog.fs):
        return False
    pinned = {"format_version": FORMAT_VERSION, "step": step, "time_s": time_s}
    catalog.fs.write_bytes(_path(step), (json.dumps(pinned) + "\n").encode())
    try:
        # Retention looks at the pins before each removal; one that it had begun shows here.
        catalog.manifest(step)
    except NotComplete:
        catalog.fs.remove_tree(_path(step))
        raise
    return True


def unpin(fs: Filesystem, step: int) -> bool:
    """Leaves the step to retention again; False if it was not pinned."""
    if step not in pinned_steps(fs):
        return False
    fs.remove_tree(_path(step))
    return True


def _path(step: int) -> str:
    return f"{_PINS}/step-{step}"
