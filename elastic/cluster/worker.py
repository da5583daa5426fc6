"""In every worker process: the driver's mailbox, and the loop that serves one generation at a time.

The training function of Ray Train is `serve`, which runs in the worker's training thread. The
driver posts into the mailbox through the worker actor, whose main thread is free.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from elastic.importing import collector_paused

with collector_paused():
    import ray
    import torch

    from elastic import versions
    from elastic.cluster import ray_internals
    from elastic.cluster.memory_line import Keepers, Mapped, MemoryLine
    from elastic.policy.cause import is_victim
    from elastic.policy.culprits import RankLook
    from elastic.policy.suspicion import Doubt
    from elastic.storage.checkpoints import Catalog
    from elastic.storage.filesystem import Filesystem
    from elastic.training import collector, inspection, process_group, storage_probe
    from elastic.training.checkpoint import AsyncSaver
    from elastic.training.coordinator import (
        CommitResult,
        NoSoundCheckpoint,
        Orders,
        Reform,
        Shard,
    )
    from elastic.training.membership import Membership, TrainingConfig
    from elastic.training.meshes import forget_meshes
    from elastic.training.rank_log import RankLog
    from elastic.training.run import Run

_SAVE_ENDS_S = 2.0
# The end of a peer that died is known within milliseconds; that of one whose network is cut, never.
_COMES_BY_ITSELF_S = 0.1

TrainFunction = Callable[[Run], None]


class _Mailbox:
    """What the driver has posted to this process. One per process."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._member: Membership | None = None
        self._driver: Any = None
        self._keepers: Keepers | None = None
        self._orders: dict[int, Orders] = {}
        self._served = -1
        self.stores: dict[int, Any] = {}
        self.training_thread: inspection.TrainingThread | None = None

    def post_member(self, member: Membership, driver: Any, keepers: Keepers | None) -> None:
        with self._changed:
            self._member, self._driver, self._keepers = member, driver, keepers
            self._changed.notify_all()
        threading.Thread(target=self._wake, args=(member.generation,), daemon=True).start()

    def _wake(self, generation: int) -> None:
        """Free a training thread that waits for a peer which is gone without a word."""
        with self._changed:  # held to the end: the sockets of the next generation must not go too
            came = self._changed.wait_for(lambda: self._served >= generation, _COMES_BY_ITSELF_S)
            if not came and self._served >= 0:
                process_group.wake()

    def post_orders(self, generation: int, orders: Orders) -> None:
        with self._changed:
            self._orders = {generation: orders}

    def orders(self, generation: int) -> Orders:
        return self._orders.get(generation, Orders())

    def wait_for_member(self) -> None:
        """Wait until a newer generation than the last one served is known."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_newer_than(self._served))

    def is_newer_than(self, generation: int) -> bool:
        member = self._member
        return member is not None and member.generation > generation

    def next_member(self, after: int) -> tuple[Membership, Any, Keepers | None]:
        with self._changed:
            self._changed.wait_for(
                lambda: self._member is not None and self._member.generation > after
            )
            assert self._member is not None
            self._served = self._member.generation
            self._changed.notify_all()
            return self._member, self._driver, self._keepers


_mailbox = _Mailbox()


def post_member(member: Membership, driver: Any, keepers: Keepers | None) -> None:
    """Called in the worker by the driver: the rank's place in a generation."""
    _mailbox.post_member(member, driver, keepers)


def post_orders(generation: int, orders: Orders) -> None:
    """Called in the worker by the driver: what it wants of a generation."""
    _mailbox.post_orders(generation, orders)


def look_at_self(world_rank: int, phase: str) -> tuple[RankLook, str]:
    """Called in the worker by the driver: what the training thread does, and all stacks."""
    thread = _mailbox.training_thread or inspection.TrainingThread.current()
    return inspection.inspect(thread, world_rank, phase), inspection.stacks()


def open_store(generation: int, host: str) -> int:
    """Called in the worker by the driver: bind this generation's store; the port it got."""
    store = process_group.open_store(host)
    _mailbox.stores = {generation: store}
    return int(store.port)


def warm_up() -> None:
    """Called in a worker that is to join: do once what would cost the others their time.

    Imports, and a step of a sharded model at world size 1, on a process group that is gone after.
    """
    process_group.rehearse(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


class RayCoordinator:
    """A rank's line to the driver actor."""

    def __init__(self, driver: Any, member: Membership) -> None:
        self._driver = driver
        self._member = member

    def notify(self, kind: str, data: Mapping[str, Any]) -> None:
        """Send and forget: the driver's death is noticed elsewhere."""
        self._driver.rank_event.remote(
            self._member.generation, self._member.world_rank, kind, dict(data)
        )

    def orders(self) -> Orders:
        """What the driver has posted for this generation."""
        return _mailbox.orders(self._member.generation)

    def is_over(self) -> bool:
        """Whether the driver has posted a place in a newer generation."""
        return _mailbox.is_newer_than(self._member.generation)

    def commit(self, shard: Shard, timeout_s: float) -> CommitResult:
        """Hand in the shard; waits for the outcome."""
        try:
            result: CommitResult = ray.get(self._driver.commit.remote(shard), timeout=timeout_s)
            return result
        except Exception as error:  # noqa: BLE001 - no answer is a failed save
            return CommitResult(
                committed=False,
                reason=f"the driver did not answer: {type(error).__name__}: {error}",
            )

    def next_checkpoint(self, rejected_step: int, reason: str) -> int | None:
        """Have the driver quarantine the checkpoint and choose the next older one."""
        step, problem = ray.get(
            self._driver.step_back.remote(self._member.generation, rejected_step, reason)
        )
        if step is None:
            raise NoSoundCheckpoint(problem)
        return int(step)

    def doubt(self, loaded_step: int, loss_step: int, loss: str) -> tuple[str, str]:
        """Ask the driver what follows from a loss that is not finite."""
        doubt = Doubt(
            generation=self._member.generation,
            loaded_step=loaded_step,
            loss_step=loss_step,
            loss=loss,
        )
        answer: tuple[str, str] = ray.get(self._driver.doubt.remote(doubt))
        return answer


def serve(train: TrainFunction, config: TrainingConfig) -> None:
    """Call the user's function once for every generation this process belongs to."""
    kept: dict[str, Any] = {}
    mapped = Mapped()
    log = RankLog(Filesystem.at(config.run_url))
    collector.settle()
    _mailbox.training_thread = inspection.TrainingThread.current()
    generation = -1
    while True:
        member, driver, keepers = _mailbox.next_member(generation)
        generation = member.generation
        log.switch(generation, member.world_rank)
        memory = None if keepers is None else MemoryLine(keepers, member, driver, mapped)
        _serve_one(train, config, member, RayCoordinator(driver, member), kept, log, memory)
        _leave(kept)


def _serve_one(
    train: TrainFunction,
    config: TrainingConfig,
    member: Membership,
    coordinator: RayCoordinator,
    kept: dict[str, Any],
    log: RankLog,
    memory: MemoryLine | None,
) -> None:
    run: Run | None = None
    try:
        run = _join(config, member, coordinator, kept, memory)
        train(run)
        run.finish()
        # The process may be ended as soon as its last word is heard.
        log.keep()
        coordinator.notify("finished", {"step": run.step})
    except process_group.Superseded:
        return
    except Reform:
        assert run is not None
        run.close()
        log.keep()
        coordinator.notify("left", {"step": run.step})
    except BaseException as error:  # noqa: BLE001 - the user's: it becomes an event
        if run is not None:
            run.close()
        told = _describe(error, run)
        coordinator.notify("failed", {**told, "last_lines": _last_words(told, log)})
        # The frames hold the model and the optimizer.
        traceback.clear_frames(error.__traceback__)


def _leave(kept: dict[str, Any]) -> None:
    """Let go of all that belonged to the generation, in the thread that trained it.

    Not before the next one is known: a process that is to be ended need not, and may hang.
    """
    _mailbox.wait_for_member()
    saver: AsyncSaver | None = kept.get("elastic.saver")
    until_s = time.monotonic() + _SAVE_ENDS_S
    while saver is not None and saver.in_flight and time.monotonic() < until_s:
        time.sleep(0.01)  # its collectives fail as soon as the peer's end is known
    process_group.disconnect()
    forget_meshes()


def _join(
    config: TrainingConfig,
    member: Membership,
    coordinator: RayCoordinator,
    kept: dict[str, Any],
    memory: MemoryLine | None,
) -> Run:
    versions.check("ray", "torch")  # of this node, which may differ from the driver's
    _tell_the_truth(member, config)
    device = _device(config.use_cuda)
    begun_s = time.monotonic()
    groups = process_group.connect(
        member,
        use_cuda=config.use_cuda,
        timeout_s=config.collective_timeout_s,
        mesh=config.mesh,
        server=_mailbox.stores.get(member.generation),
        is_superseded=lambda: _mailbox.is_newer_than(member.generation),
    )
    coordinator.notify("connected", {"connect_s": time.monotonic() - begun_s})
    storage_probe.probe(Filesystem.at(config.run_url), member, groups.control, kept)
    # The same on every rank, so that a model built from it is the same at any world size.
    torch.manual_seed(config.seed)
    return Run(
        member=member,
        config=config,
        coordinator=coordinator,
        groups=groups,
        device=device,
        kept=kept,
        memory=memory,
    )


def _tell_the_truth(member: Membership, config: TrainingConfig) -> None:
    ray_internals.tell_rank(
        generation=member.generation,
        checkpoint=_local_checkpoint(member, config),
        world_rank=member.world_rank,
        world_size=member.world_size,
        local_rank=member.local_rank,
        local_world_size=member.local_world_size,
        node_rank=member.node_rank,
    )
    os.environ.update(
        RANK=str(member.world_rank),
        WORLD_SIZE=str(member.world_size),
        LOCAL_RANK=str(member.local_rank),
        LOCAL_WORLD_SIZE=str(member.local_world_size),
        NODE_RANK=str(member.node_rank),
        MASTER_ADDR=member.store_host,
        MASTER_PORT=str(member.store_port),
    )


def _local_checkpoint(member: Membership, config: TrainingConfig) -> str | None:
    """The directory that is resumed from, if it is one."""
    filesystem = Filesystem.at(config.run_url)
    if member.resume_step is None or member.snapshot or filesystem.local_root is None:
        return None
    path = Catalog(filesystem, member.run_id).data_path(member.resume_step)
    return f"{filesystem.local_root}/{path}"


def _device(use_cuda: bool) -> torch.device:
    """The worker's device. The CUDA branch is untested here: it needs a GPU."""
    if not use_cuda:
        return torch.device("cpu")
    device: torch.device = ray.train.torch.get_device()
    torch.cuda.set_device(device)
    return device


def _describe(error: BaseException, run: Run | None) -> dict[str, Any]:
    type_name, message = type(error).__name__, str(error)
    text = "".join(traceback.format_exception(error))
    return {
        "type_name": type_name,
        "message": message[:20_000],
        "traceback": text[-20_000:],
        "is_victim": is_victim(type_name, message, text),
        "step": -1 if run is None else run.step,
    }


def _last_words(told: Mapping[str, Any], log: RankLog) -> list[str]:
    """What the rank wrote before its exception. The exception itself is written after it."""
    lines = log.last_lines()
    text = f"{told['type_name']}: {told['message']}\n" if told["is_victim"] else told["traceback"]
    with contextlib.suppress(OSError):
        os.write(2, text.encode(errors="backslashreplace"))
    log.keep()
    return lines
