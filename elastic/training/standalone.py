"""Training without Ray: the same training function, checkpoints, commit and resume under torchrun.

Rank 0's process plays the driver's part in a commit and writes ledger and metrics. The ranks speak
through the c10d store. There is nobody to watch deaths and re-form the group: that is torchrun's.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from elastic.policy.retention import Retention
from elastic.storage.access import StorageRefused, check_access
from elastic.storage.checkpoints import FileDigest, TensorInfo
from elastic.storage.claim import RunSpec
from elastic.storage.filesystem import Filesystem
from elastic.training import process_group, storage_probe
from elastic.training.book import Book, Launcher
from elastic.training.coordinator import CommitResult, Coordinator, Orders, Reform, Shard
from elastic.training.membership import Membership, TrainingConfig
from elastic.training.process_group import Groups
from elastic.training.run import Run

logger = logging.getLogger("elastic")

_START_S = 600.0


class NotStarted(RuntimeError):
    """Rank 0 could not begin the run; the cause is raised there."""


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
    launcher: Launcher | None = None,
    make_run: Callable[..., Run] = Run,
) -> Run:
    """Train from the highest complete checkpoint to the end; the run as it then stands.

    Called on every rank, with a store that is new to this start of the group. Ends early, with the
    state of that step saved, when `launcher` asks any rank to stop.

    Raises:
        StorageRefused: rank 0 can write nothing in the run directory; the same words on all ranks.
        StorageNotShared: not every rank sees the run directory.
        NotStarted: on the other ranks, when rank 0 raised what follows.
        LeaseHeld, IdentityMismatch, NoSoundCheckpoint and so on: what `claim` and `Book` raise.
        Exception: whatever `train` raises.
    """
    launcher = launcher or Launcher()
    config = dataclasses.replace(config, accept_changes=tuple(spec.accepted))
    make_book = functools.partial(_book, config, spec, keep, launcher)
    book, (run_id, generation, resume_step) = _begin(store, make_book, world_rank)
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
    with launcher.training(generation, world_rank):
        return _train_as(member, train, config, store, book, launcher, make_run)


def _train_as(
    member: Membership,
    train: Callable[[Run], None],
    config: TrainingConfig,
    store: dist.Store,
    book: Book | None,
    launcher: Launcher,
    make_run: Callable[..., Run],
) -> Run:
    run: Run | None = None
    try:
        coordinator = StoreCoordinator(store, member, book, launcher)
        run, groups = _join(config, member, store, coordinator, make_run)
        if book is not None:
            book.begin(member.world_size)
        outcome = _serve(train, run)
        # Rank 0 may hold the store that the others still ask for the last commit's outcome.
        dist.barrier(group=groups.control)
    except BaseException as error:
        if run is not None:
            run.close()
        if book is not None:
            reason = f"{type(error).__name__}: {error}"
            book.end("failed", -1 if run is None else run.step, reason)
        raise
    if book is not None:
        if outcome == "finished" and run.step == member.resume_step:
            logger.warning(
                "%s is finished at step %d already: there was nothing to do",
                config.run_url,
                run.step,
            )
        book.end(outcome, run.step, f"all ranks {outcome} at step {run.step}")
    process_group.disconnect()
    return run


def _book(config: TrainingConfig, spec: RunSpec, keep: Retention, launcher: Launcher) -> Book:
    check_access(Filesystem.at(config.run_url), "rank 0")
    return Book(config, spec, keep, launcher)


def _begin(
    store: dist.Store, make_book: Callable[[], Book], world_rank: int
) -> tuple[Book | None, tuple[str, int, int | None]]:
    """Run id, generation and step to resume: rank 0 decides, the others are told, also of a no."""
    if world_rank == 0:
        book: Book | None = None
        try:
            book = make_book()
            chosen = book.choose()
        except BaseException as error:
            kind = "storage" if isinstance(error, StorageRefused) else "refused"
            words = str(error) if kind == "storage" else f"{type(error).__name__}: {error}"
            store.set("elastic/start", json.dumps({kind: words}))
            if book is not None:
                book.end("failed", -1, f"{type(error).__name__}: {error}")
            raise
        store.set("elastic/start", json.dumps({"chosen": chosen}))
        return book, chosen
    store.wait(["elastic/start"], timedelta(seconds=_START_S))
    told = json.loads(store.get("elastic/start"))
    if "storage" in told:
        raise StorageRefused(told["storage"])
    if "refused" in told:
        raise NotStarted(f"rank 0 could not begin the run: {told['refused']}")
    run_id, generation, step = told["chosen"]
    return None, (run_id, generation, step)


def _join(
    config: TrainingConfig,
    member: Membership,
    store: dist.Store,
    coordinator: Coordinator,
    make_run: Callable[..., Run],
) -> tuple[Run, Groups]:
    """This rank's handle of the run, once all ranks are connected and see the same storage."""
    device = _device(config, member.local_rank)
    groups = process_group.connect(
        member,
        use_cuda=config.use_cuda,
        timeout_s=config.collective_timeout_s,
        mesh=config.mesh,
        server=store,
    )
    kept: dict[str, Any] = {}
    storage_probe.probe(Filesystem.at(config.run_url), member, groups.control, kept)
    torch.manual_seed(config.seed)
    run = make_run(
        member=member,
        config=config,
        coordinator=coordinator,
        groups=groups,
        device=device,
        kept=kept,
    )
    return run, groups


def _device(config: TrainingConfig, local_rank: int) -> torch.device:
    if not config.use_cuda:
        return torch.device("cpu")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def _serve(train: Callable[[Run], None], run: Run) -> str:
    """Train, and say whether the run came to its end or was asked to stop."""
    try:
        train(run)
        run.finish()
    except Reform:
        run.close()
        return "stopped"
    return "finished"


class StoreCoordinator:
    """A rank's line to rank 0's process, through the store."""

    def __init__(
        self, store: dist.Store, member: Membership, book: Book | None, launcher: Launcher
    ) -> None:
        self._store = store
        self._member = member
        self._book = book
        self._launcher = launcher

    def notify(self, kind: str, data: Mapping[str, Any]) -> None:
        """Rank 0's words go into its ledger and metrics; nobody asks for the others'."""
        if self._book is not None:
            self._book.hear(kind, data)

    def orders(self) -> Orders:
        """From the launcher to any rank, from people to rank 0; the ranks agree on them."""
        asked = Orders() if self._book is None else self._book.orders()
        if not self._launcher.is_stop_asked():
            return asked
        # Whoever sent the signal kills soon after.
        return dataclasses.replace(asked, leave=True, cut_evaluation=True, drop_step=True)

    def is_over(self) -> bool:
        """Never: a group under torchrun has no next generation."""
        return False

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

    def doubt(self, loaded_step: int, loss_step: int, loss: str) -> tuple[str, str]:
        """Rank 0 alone asks."""
        assert self._book is not None
        return self._book.doubt(loaded_step, loss_step, loss)


def _shard(text: bytes) -> Shard:
    tree = json.loads(text)
    tree["files"] = [FileDigest(**file) for file in tree["files"]]
    tree["tensors"] = {name: TensorInfo(**info) for name, info in tree["tensors"].items()}
    return Shard(**tree)
