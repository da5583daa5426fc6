"""Where the stacks of ranks that stood still lie in a run directory. No ray, no torch."""

from __future__ import annotations

STACKS = "stacks"


def stacks_path(generation: int, number: int, world_rank: int | None = None) -> str:
    """The file of one rank, or the folder of all, of the dump that `number` tells from others."""
    folder = f"{STACKS}/g{generation}-{number}"
    return folder if world_rank is None else f"{folder}/rank{world_rank}.txt"
