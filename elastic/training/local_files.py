"""Local files: this rank's part in the local tier, from its opening by all ranks to its end.

Must not import ray.
"""

from __future__ import annotations

import socket
import time
from typing import Any

import torch.distributed as dist

from elastic.storage.filesystem import Filesystem
from elastic.storage.local_tier import LocalTier, LocalUnusable
from elastic.training.coordinator import Coordinator
from elastic.training.membership import Membership, TrainingConfig

__all__ = ["open_tier", "tell_read", "tidy", "warn_of_space"]


def open_tier(
    config: TrainingConfig,
    member: Membership,
    coordinator: Coordinator,
    control: dist.ProcessGroup,
) -> LocalTier | None:
    """The run's directory on this node's disk; None where none is asked for or can be used.

    Every rank calls it. A node whose disk cannot be used is told, and its ranks write to the run's
    storage. Raises `LocalUnusable` on every rank if no node has such a disk and the run is new:
    then it is most likely misspelt.
    """
    root = config.local
    if root is None:
        return None
    host = socket.gethostname()

    def tell(kind: str, reason: str) -> None:
        told = {"kind": kind, "reason": f"on {host}: {reason}", "host": host}
        coordinator.notify("local_tier", told)

    tier, problem = None, ""
    try:
        tier = LocalTier(root, member.run_id, Filesystem.at(config.run_url))
        tier.tell = tell
    except LocalUnusable as error:
        problem = error.problem
    everyone: list[Any] = [None] * member.world_size
    dist.all_gather_object(everyone, problem, group=control)
    if all(everyone) and member.resume_step is None:
        raise LocalUnusable(root, "; ".join(sorted(set(everyone))))
    if problem:
        told = f"local={root!r} cannot be used: {problem}; saves go to storage directly"
        tell("local_disk_failed", told)
    return tier


def tell_read(
    tier: LocalTier | None,
    step: int,
    member: Membership,
    coordinator: Coordinator,
    control: dist.ProcessGroup,
) -> None:
    """Tells, where any rank has a tier, how much of the checkpoint of `step` came from the disks.

    Every rank calls it once it has loaded.
    """
    everyone: list[Any] = [None] * member.world_size
    dist.all_gather_object(everyone, None if tier is None else tier.num_read(), group=control)
    counts = [one for one in everyone if one is not None]
    if member.world_rank > 0 or not counts:
        return
    here, elsewhere = (sum(one[place] for one in counts) for place in (0, 1))
    without = member.world_size - len(counts)
    reason = (
        f"of the files that the ranks read of step {step}, each counted on each rank, {here} lay "
        f"on the nodes' own disks and {elsewhere} in storage"
        + (f"; {without} ranks have no disk and read in storage" if without else "")
    )
    told = {"kind": "local_disk_read", "reason": reason, "host": socket.gethostname()}
    coordinator.notify("local_tier", told)


def tidy(tier: LocalTier | None, member: Membership) -> None:
    """After the restore: what nobody needs any more on this node's disk goes."""
    if tier is not None and member.local_rank == 0:
        tier.sweep(member.generation, time.time())


def warn_of_space(tier: LocalTier, staged_bytes: int, member: Membership) -> None:
    """Tells if the disk has no room for two checkpoints of this size, which it is to hold."""
    free_bytes = tier.free_bytes()
    if free_bytes is None:
        return
    needed_bytes = 2 * staged_bytes * member.local_world_size
    if free_bytes + tier.held_bytes() < needed_bytes:
        tier.tell(
            "local_disk_small",
            f"{tier.root} has {free_bytes / 1e9:.3g} GB free, two checkpoints of this node's "
            f"{member.local_world_size} ranks need {needed_bytes / 1e9:.3g} GB: what finds no "
            "room goes to the run's storage directly",
        )
