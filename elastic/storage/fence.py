"""The fence: the oldest generation of a run that may still write checkpoints.

Whoever takes over raises it first, so that a process that was only thought dead can publish nothing
more. Must not import ray or torch.
"""

from __future__ import annotations

import json

from elastic.storage.completeness import DIR, read_if_there
from elastic.storage.filesystem import Filesystem
from elastic.storage.format import check_format
from elastic.storage.manifest import parse

FORMAT_VERSION = 1
_FENCE = f"{DIR}/fence.json"


class StaleGeneration(Exception):
    """A process of an older generation tried to write although a newer one has taken over."""

    def __init__(self, generation: int, fence: int) -> None:
        super().__init__(generation, fence)
        self.generation = generation
        self.fence = fence

    def __str__(self) -> str:
        return (
            f"generation {self.generation} may write no checkpoint, generation {self.fence} has "
            "taken over: this process is a leftover and should exit"
        )


def raise_fence(fs: Filesystem, generation: int) -> None:
    """From here on no older generation than this one passes. Raises as `check_fence` does."""
    check_fence(fs, generation)
    tree = {"format_version": FORMAT_VERSION, "generation": generation}
    fs.write_bytes(_FENCE, json.dumps(tree).encode())


def check_fence(fs: Filesystem, generation: int) -> None:
    """Nothing, if that generation may write to the run at the root `fs`.

    Raises `StaleGeneration` if a newer one has taken over, `UnsupportedFormat`.
    """
    text = read_if_there(fs, _FENCE)
    if text is None:
        return
    tree = parse(text)
    # One without a format version is of version 1.
    check_format(f"{_FENCE} of {fs.url}", tree.get("format_version", 1), FORMAT_VERSION)
    fence = int(tree["generation"])
    if generation < fence:
        raise StaleGeneration(generation, fence)
