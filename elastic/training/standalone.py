"""Training without Ray: the same training function, checkpoints, commit and resume under torchrun.

Rank 0's process plays the driver's part in a commit and writes ledger and metrics. The ranks speak
through the c10d store. There is nobody to watch deaths and re-form the group: that is torchrun's.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from elastic.policy.retention import Retention
from elastic.storage.checkpoints import Catalog, FileDigest, TensorInfo
from elastic.storage.claim import RunSpec, claim
from elastic.storage.filesystem import Filesystem
from elastic.storage.ledger import LedgerWriter, next_life, read_ledger
from elastic.storage.metrics import MetricsWriter
from elastic.training import process_group
from elastic.training.coordinator import CommitResult, NoSoundCheckpoint, Orders, Reform, Shard
from elastic.training.membership import Membership, TrainingConfig
from elastic.training.publishing import publish
from elastic.training.run import Run

logger = logging.getLogger("elastic")


def train_standalone(
    train: Callable[[Run], None],
    config: TrainingConfig,
    spec: RunSpec,
    keep: Retention,
    *,
    world_rank: int,
    world_size: int,
    local_rank: int,
    local_world_size: int,
    store: dist.Store,
) -> Run:
    """Train from the highest complete checkpoint to the end; the run as it then stands.

    Called on every rank, with a store that is new to this start of the group. Raises whatever
    `train` raises, and on rank 0 what `claim` raises.
    """
    book = _Book(config, spec, keep) if world_rank == 0 else None
    run_id, generation, resume_step = _told(store, book)
    member = Membership(
        run_id=run_id,
        generation=generation,
        world_rank=world_rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        node_rank=world_rank // local_world_size,
        store_host="",
        store_port=0,
        resume_step=resume_step,
    )
    device = torch.device("cuda", local_rank) if config.use_cuda else torch.device("cpu")
    if config.use_cuda:
        torch.cuda.set_device(device)
    groups = process_group.connect(
        member, use_cuda=config.use_cuda, timeout_s=config.collective_timeout_s, server=store
    )
    torch.manual_seed(config.seed)
    run = Run(
        member=member,
        config=config,
        coordinator=StoreCoordinator(store, member, book),
        groups=groups,
        device=device,
        kept={},
    )
    try:
        if book is not None:
            book.begin(generation, world_size)
        train(run)
        run.finish()
        # Rank 0 may hold the store that the others still ask for the last commit's outcome.
        dist.barrier(group=groups.control)
    except Reform:
        run.close()
    except BaseException as error:
        run.close()
        if book is not None:
            book.end("failed", run.step, f"{type(error).__name__}: {error}")
        raise
    if book is not None:
        book.end("finished", run.step, f"all ranks finished at step {run.step}")
    process_group.disconnect()
    return run


def _told(store: dist.Store, book: _Book | None) -> tuple[str, int, int | None]:
    """The run's id, generation and step to resume: rank 0 decides, the others are told."""
    if book is not None:
        store.set("elastic/start", json.dumps(book.choose()))
    run_id, generation, step = json.loads(store.get("elastic/start"))
    return str(run_id), int(generation), None if step is None else int(step)


class StoreCoordinator:
    """A rank's line to rank 0's process, through the store."""

    def __init__(self, store: dist.Store, member: Membership, book: _Book | None) -> None:
        self._store = store
        self._member = member
        self._book = book

    def notify(self, kind: str, data: Mapping[str, Any]) -> None:
        """Rank 0's words go into its ledger and metrics; nobody asks for the others'."""
        if self._book is not None:
            self._book.hear(kind, data)

    def orders(self) -> Orders:
        """Nobody gives any."""
        return Orders()

    def commit(self, shard: Shard, timeout_s: float) -> CommitResult:
        """Rank 0 gathers the shards and publishes; the others wait for what it says."""
        key = f"elastic/{shard.generation}/{shard.attempt}"
        wait = timedelta(seconds=timeout_s)
        try:
            if self._book is None:
                self._store.set(f"{key}/{shard.world_rank}", json.dumps(asdict(shard)))
                self._store.wait([f"{key}/result"], wait)
                return CommitResult(**json.loads(self._store.get(f"{key}/result")))
            others = [f"{key}/{rank}" for rank in range(1, shard.world_size)]
            if others:
                self._store.wait(others, wait)
            shards = [shard, *(_shard(self._store.get(other)) for other in others)]
            result = self._book.commit(shards)
            self._store.set(f"{key}/result", json.dumps(asdict(result)))
            return result
        except Exception as error:  # noqa: BLE001 - a peer that is gone is a failed save
            return CommitResult(committed=False, reason=f"{type(error).__name__}: {error}")

    def next_checkpoint(self, rejected_step: int, reason: str) -> int | None:
        """Rank 0 alone is asked."""
        assert self._book is not None
        return self._book.step_back(rejected_step, reason)


def _shard(text: bytes) -> Shard:
    tree = json.loads(text)
    tree["files"] = [FileDigest(**file) for file in tree["files"]]
    tree["tensors"] = {name: TensorInfo(**info) for name, info in tree["tensors"].items()}
    return Shard(**tree)


class _Book:
    """Ledger, metrics and catalog of the run, in rank 0's hands."""

    def __init__(self, config: TrainingConfig, spec: RunSpec, keep: Retention) -> None:
        filesystem = Filesystem.at(config.run_url)
        self._claim = claim(filesystem, spec, "torchrun")
        self._past = read_ledger(filesystem)
        self._ledger = LedgerWriter(filesystem, next_life(filesystem), uuid.uuid4().hex[:8])
        self._metrics = MetricsWriter(filesystem)
        self._catalog = Catalog(filesystem, self._claim.run_file.run_id)
        self._keep = keep
        self._lock = threading.Lock()
        self._generation = max((event.generation for event in self._past), default=-1) + 1
        self._world_size = 0
        self._resumed: int | None = None
        self._protected: set[int] = set()

    def choose(self) -> tuple[str, int, int | None]:
        self._catalog.sweep(self._generation)
        found = self._catalog.highest()
        self._resumed = None if found is None else found.step
        lost = [event.step for event in self._past if event.kind == "checkpoint_committed"]
        if found is None and lost:
            raise NoSoundCheckpoint(
                f"{len(lost)} checkpoints were committed, the last at step {lost[-1]}, and none "
                "is complete now: restore them, or use another name"
            )
        self._protected = set() if found is None else {found.step}
        return self._claim.run_file.run_id, self._generation, self._resumed

    def begin(self, generation: int, world_size: int) -> None:
        self._world_size = world_size
        self._record("run_started", data={"under": "torchrun"})
        step = -1 if self._resumed is None else self._resumed
        self._record("generation_started", step=step, data={"world_size": world_size})

    def hear(self, kind: str, data: Mapping[str, Any]) -> None:
        if kind == "restored_state":
            step = int(data["step"])
            self._protected = set()
            with self._lock:
                self._metrics.start(self._generation, step + 1, time.time())
            self._record("resumed" if data["resumed"] else "started", step=step)
        elif kind == "progress":
            with self._lock:
                for row in data["rows"]:
                    self._metrics.add(self._generation, row["step"], row["time_s"], row["values"])
        elif kind == "save_skipped":
            self._record("checkpoint_skipped", step=int(data["step"]))

    def commit(self, shards: list[Shard]) -> CommitResult:
        failures = [shard.failure for shard in shards if shard.failure]
        step = shards[0].step
        if failures:
            self._record("checkpoint_failed", step=step, reason=failures[0])
            return CommitResult(committed=False, reason=failures[0])
        try:
            self._claim.lease.check()
            with self._lock:
                self._metrics.flush()
            done = publish(self._catalog, shards, self._keep, self._protected)
        except Exception as error:  # noqa: BLE001 - whatever storage raises fails the save
            reason = f"{type(error).__name__}: {error}"
            self._record("checkpoint_failed", step=step, reason=reason)
            return CommitResult(committed=False, reason=reason)
        self._record("checkpoint_committed", step=step, data=done.record())
        for old in done.removed:
            self._record("checkpoint_removed", step=old, reason="retention")
        return CommitResult(committed=True)

    def step_back(self, step: int, reason: str) -> int:
        self._record("checkpoint_quarantined", step=step, reason=reason)
        if self._catalog.inspect(step).complete:
            self._catalog.quarantine(step, reason)
        found = self._catalog.highest(below=step)
        if found is None:
            raise NoSoundCheckpoint(
                f"no checkpoint with sound bytes is left; the last tried, step {step}: {reason}"
            )
        self._protected = {found.step}
        return found.step

    def end(self, outcome: str, step: int, reason: str) -> None:
        with self._lock:
            self._metrics.flush()
        self._record(f"run_{outcome}", step=step, reason=reason)
        self._ledger.close()
        self._claim.lease.release()

    def _record(
        self, kind: str, *, step: int = -1, reason: str = "", data: Mapping[str, Any] | None = None
    ) -> None:
        with self._lock:
            self._ledger.append(
                kind,
                generation=self._generation,
                step=step,
                reason=reason,
                data=data,
                time_s=time.time(),
            )
