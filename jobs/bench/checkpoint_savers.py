"""The ways to save that `bench checkpoint` compares: each begins a save and tells when it is over.

Each is given the same live tensors. What DCP's ways would spend to collect them is not charged to
them; what ours spends is.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.tensor import DTensor

from elastic.policy.retention import Retention
from elastic.storage.checkpoints import Catalog
from elastic.storage.filesystem import Filesystem
from elastic.training.book import Launcher
from elastic.training.checkpoint import AsyncSaver
from elastic.training.coordinator import CommitResult, Orders, Shard
from elastic.training.membership import Membership, TrainingConfig
from elastic.training.process_group import Groups
from elastic.training.publishing import publish
from elastic.training.reporter import Reporter
from elastic.training.saves import Saves
from elastic.training.standalone import StoreCoordinator
from elastic.training.state import TrackedState
from jobs.bench import checkpoint

__all__ = ["Saver", "savers"]


class Saver(Protocol):
    """One way. After `clear` the next save finds what the first one found, on disk."""

    def begin(self) -> None: ...

    def is_over(self) -> bool: ...

    def clear(self) -> None: ...


class Nothing:
    """No save at all, which shows how far the measure is to be trusted."""

    def begin(self) -> None:
        pass

    def is_over(self) -> bool:
        return True

    def clear(self) -> None:
        pass


class Memcpy(Nothing):
    """The floor: a copy into memory that is there already."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._sources = [
            t.to_local() if isinstance(t, DTensor) else t.detach() for t in tensors.values()
        ]
        self._copies = [torch.zeros_like(source) for source in self._sources]

    @torch.no_grad()
    def begin(self) -> None:
        for copy, source in zip(self._copies, self._sources, strict=True):
            copy.copy_(source)


class Dcp:
    """Stock DCP; `save` is given the state and the directory, and may return a future."""

    def __init__(
        self, folder: Path, state: Mapping[str, Any], save: Callable[..., Any], **options: Any
    ) -> None:
        self._folder = folder
        self._state = dict(state)
        self._save = save
        # Its own group: collectives of a save run beside those of the steps.
        self._options = {**options, "process_group": dist.new_group(backend="gloo")}
        self._future: Any = None

    def begin(self) -> None:
        self._future = self._save(self._state, checkpoint_id=str(self._folder), **self._options)

    def is_over(self) -> bool:
        future, self._future = self._future, None
        if future is None or not hasattr(future, "done"):
            return True
        if not future.done():
            self._future = future
            return False
        future.result()
        return True

    def clear(self) -> None:
        _give_back()
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(self._folder)
        dist.barrier()


def _give_back() -> None:
    """Lets the system have the copies of a finished save: all ways' at once may not fit."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):  # the C library of another system
        ctypes.CDLL(None).malloc_trim(0)


class Ours:
    """As the service saves: captured, staged, written, digested and committed."""

    def __init__(
        self, folder: Path, state: TrackedState, member: Membership, groups: Groups, store: Any
    ) -> None:
        self._folder = folder
        self._state = state
        fs = Filesystem.at(str(folder))
        book = _Book(Catalog(fs, member.run_id)) if member.world_rank == 0 else None
        coordinator = StoreCoordinator(store, member, book, Launcher())  # type: ignore[arg-type]
        self._reporter = Reporter(coordinator, world_size=member.world_size)
        self._saver = AsyncSaver(groups.saves)
        self._saves = Saves(
            member=member,
            config=TrainingConfig(run_url=str(folder)),
            coordinator=coordinator,
            groups=groups,
            filesystem=fs,
            saver=self._saver,
            reporter=self._reporter,
            positions=dict,
        )
        self._step = 0

    def begin(self) -> None:
        self._step += 1
        counters = {"step": self._step, "samples": 0, "tokens": 0, "epoch": 0}
        # In a run the sum at the start of each step has told; here it is the watch that knows.
        self._saves.save_or_skip(self._state, counters, is_free=True)

    def is_over(self) -> bool:
        if self._saves.is_in_flight:
            return False
        self._saves.settle()
        assert self._saves.committed_step == self._step, "the save failed: see events.jsonl"
        return True

    def clear(self) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(self._folder / "checkpoints")
        dist.barrier()


class _Book:
    """Rank 0's part of a commit, with no ledger."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def hear(self, kind: str, data: Mapping[str, Any]) -> None:
        pass

    def orders(self) -> Orders:
        return Orders()

    def commit(self, shards: Sequence[Shard]) -> CommitResult:
        if failures := [shard.failure for shard in shards if shard.failure]:
            return CommitResult(committed=False, reason=failures[0])
        publish(self._catalog, shards, Retention(keep=1), ())
        return CommitResult(committed=True)


def savers(
    folder: Path, state: TrackedState, member: Membership, groups: Groups, store: Any
) -> dict[str, Saver]:
    """All ways by name, on the same state."""
    tensors = state.capture().tensors
    kept = DefaultStager(StagingOptions(False, False, False, False))
    process = AsyncCheckpointerType.PROCESS
    ways: dict[str, Saver] = {
        checkpoint.NONE: Nothing(),
        checkpoint.MEMCPY: Memcpy(tensors),
        "dcp.save": Dcp(folder / "save", tensors, dcp.save),
        checkpoint.PLAIN: Dcp(folder / "async", tensors, dcp.async_save),
        checkpoint.REUSED: Dcp(folder / "reused", tensors, dcp.async_save, async_stager=kept),
        "dcp.async_save.process": Dcp(
            folder / "process", tensors, dcp.async_save, async_checkpointer_type=process
        ),
        checkpoint.OURS: Ours(folder / "elastic", state, member, groups, store),
    }
    assert tuple(ways) == checkpoint.WAYS
    return ways
