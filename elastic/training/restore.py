"""Restoring the group: the checkpoint the driver chose, or the next older one with sound bytes.

The driver decides, all ranks are told, all confirm. No rank lists storage to choose for itself.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist

from elastic.storage.checkpoints import Catalog, Manifest
from elastic.storage.local_tier import LocalTier
from elastic.training.checkpoint import (
    CheckpointCorrupt,
    LoadFailed,
    Restored,
    load,
    unchecked,
    verify_share,
)
from elastic.training.coordinator import Coordinator, NoSoundCheckpoint
from elastic.training.foreign import load_weights
from elastic.training.local_files import tell_read, tidy
from elastic.training.membership import Membership
from elastic.training.node_memory import NodeMemory, PieceLost
from elastic.training.snapshot_reader import load_snapshot
from elastic.training.state import TrackedState

logger = logging.getLogger("elastic")

T = TypeVar("T")

VISIBLE_S = 60.0
_LOOK_AGAIN_S = 0.2


class CheckpointNotVisible(RuntimeError):
    """A rank could not see, within its time, a checkpoint that the driver found complete."""


def begin(
    state: TrackedState,
    member: Membership,
    *,
    load_from: str | None,
    catalog: Catalog,
    coordinator: Coordinator,
    control: dist.ProcessGroup,
    memory: NodeMemory | None = None,
    on_size: Callable[[int], None] = lambda _: None,
    local: LocalTier | None = None,
) -> Restored | None:
    """What was restored into `state`; None at step 0, where only foreign weights may be loaded.

    `on_size` is told how many bytes this rank reads, before it does. Raises what `restore` and
    `load_weights` raise.
    """
    if member.snapshot is not None:
        assert memory is not None
        member, restored = _from_memory(state, member, memory, control)
        if restored is not None:
            tidy(local, member)
            return restored
    if member.resume_step is not None:
        restored = restore(
            state,
            member,
            catalog=catalog,
            coordinator=coordinator,
            control=control,
            on_size=on_size,
            local=local,
        )
        tidy(local, member)
        return restored
    tidy(local, member)
    if load_from is not None:
        source = load_weights(load_from, state, control)
        coordinator.notify("weights_loaded", {"from": source})
    return None


def _from_memory(
    state: TrackedState, member: Membership, memory: NodeMemory, control: dist.ProcessGroup
) -> tuple[Membership, Restored | None]:
    """What was restored from a snapshot; None, and the checkpoint to resume, if none can be.

    A snapshot that no copy of is sound, or that cannot be read any more, is given up, and the
    driver names what is next.
    """
    while (snapshot := member.snapshot) is not None:
        name = f"the snapshot of step {snapshot.step}"
        sources = memory.sources(snapshot)
        try:
            return member, load_snapshot(sources, name, state, control)
        except (CheckpointCorrupt, PieceLost, LoadFailed) as error:
            told = _decided(partial(memory.reject, snapshot, str(error)), member, control)
        member = replace(member, resume_step=told.step, snapshot=told.snapshot)
    return member, None


def restore(
    state: TrackedState,
    member: Membership,
    *,
    catalog: Catalog,
    coordinator: Coordinator,
    control: dist.ProcessGroup,
    visible_s: float = VISIBLE_S,
    on_size: Callable[[int], None] = lambda _: None,
    local: LocalTier | None = None,
) -> Restored:
    """What was restored into `state`, the same checkpoint on all ranks.

    Starts from `member.resume_step`. A checkpoint whose bytes are bad on any rank is handed to the
    driver, which quarantines it and names the next older one. Bytes that are only not visible yet,
    as on a network file system, are waited for, up to `visible_s` seconds. Files that lie in this
    node's `local` tier are read there; damage there says nothing about the checkpoint.

    Raises:
        NoSoundCheckpoint: none is left.
        CheckpointNotVisible: see `visible_s`; says nothing about the bytes.
        StateMismatch: it does not fit the objects.
    """
    assert member.resume_step is not None
    step = member.resume_step
    while True:
        _gather(_wait_until_visible(catalog, step, visible_s), control, CheckpointNotVisible)
        manifest, path = catalog.manifest(step), catalog.data_path(step)
        on_size(sum(file.bytes for file in manifest.files) // member.world_size)
        fs = catalog.fs if local is None else local.to_read(path, manifest)
        files = unchecked(manifest, member.world_size)
        problems = verify_share(fs, path, files, member.world_rank, member.world_size)
        bad = _gather(problems, control)
        if not bad:
            try:
                restored = load(fs, path, manifest, state, control)
            except CheckpointCorrupt as error:
                bad = [str(error)]
            else:
                tell_read(local, step, member, coordinator, control)
                return restored
        if _was_local(local, manifest, control):
            continue
        step = _step_back(step, "; ".join(bad), member, coordinator, control)


def _wait_until_visible(catalog: Catalog, step: int, visible_s: float) -> list[str]:
    until_s = time.monotonic() + visible_s
    is_told = False
    while True:
        found = catalog.inspect(step)
        if found.complete:
            return []
        if not is_told:
            words = "step-%d of %s is not complete here: looking again for %g s; %s"
            logger.warning(words, step, catalog.fs.url, visible_s, found.reason)
            is_told = True
        if time.monotonic() > until_s:
            problem = (
                f"step-{step} of {catalog.fs.url}, which the driver found complete, is not so "
                f"here after {visible_s:g} s: {found.reason}. Every node must see the same storage"
            )
            return [problem]
        time.sleep(_LOOK_AGAIN_S)


def _was_local(local: LocalTier | None, manifest: Manifest, control: dist.ProcessGroup) -> bool:
    """Whether any rank read files of its node's disk, which is not to be trusted as it was."""
    if _gather([] if local is None else local.drop_damaged(manifest), control):
        return True
    was_read = local is not None and local.leave_out()
    return bool(_gather(["read from the local tier"] * was_read, control))


def _gather(
    problems: Sequence[str],
    control: dist.ProcessGroup,
    error: type[Exception] | None = None,
) -> list[str]:
    """The problems of all ranks, on all ranks; raised as `error` if one is given."""
    everyone: list[Any] = [None] * dist.get_world_size(control)
    dist.all_gather_object(everyone, list(problems), group=control)
    found = [f"rank {rank}: {problem}" for rank, told in enumerate(everyone) for problem in told]
    if found and error is not None:
        raise error("; ".join(found))
    return found


def _step_back(
    step: int,
    reason: str,
    member: Membership,
    coordinator: Coordinator,
    control: dist.ProcessGroup,
) -> int:
    def ask() -> int | None:
        return coordinator.next_checkpoint(step, reason)

    older = _decided(ask, member, control)
    if older is None:
        raise NoSoundCheckpoint(f"nothing is left below step {step}: {reason}")
    return int(older)


def _decided(ask: Callable[[], T], member: Membership, control: dist.ProcessGroup) -> T:
    """Rank 0 asks the driver, and all are told: one decision for the group."""
    answer: list[Any] = [None, ""]
    if member.world_rank == 0:
        try:
            answer[0] = ask()
        except NoSoundCheckpoint as error:
            answer[1] = str(error)
    dist.broadcast_object_list(answer, group_src=0, group=control)
    if answer[1]:
        raise NoSoundCheckpoint(answer[1])
    found: T = answer[0]
    return found
