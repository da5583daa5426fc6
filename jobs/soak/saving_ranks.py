"""Ranks that save small tensors when told to, in a gloo group, on storage that fails."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard as Split
from torch.distributed.tensor import distribute_tensor

from elastic.storage.filesystem import Filesystem
from elastic.storage.local_store import LocalStore
from elastic.storage.steady_store import Patience, SteadyStore
from elastic.training.checkpoint import AsyncSaver, describe
from elastic.training.coordinator import Shard
from jobs.soak.failing_store import FailingStore, ObjectsOnDisk

__all__ = ["HASTY", "WORLD_SIZE", "RanksGone", "SavingRanks", "Task", "filesystem", "values"]

WORLD_SIZE = 2
HASTY = Patience(
    call_s=0.3, s_per_mb=0.0, tries=4, first_wait_s=0.002, longest_wait_s=0.02, give_up_s=0.5
)
"""What a run waits minutes for, a soak waits parts of a second for."""
_HANG_S = 0.5
_ANSWER_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Task:
    """One save."""

    url: str
    step: int
    generation: int
    attempt: int
    path: str
    seed: str


class RanksGone(Exception):
    """They were killed, or do not answer."""


def filesystem(url: str, *, may_crash: bool) -> tuple[Filesystem, FailingStore]:
    """The root, on a disk or after `objects://` on an object store, and what makes it fail."""
    scheme, _, path = url.rpartition("://")
    store = ObjectsOnDisk() if scheme else LocalStore()
    failing = FailingStore(store, hang_s=_HANG_S, may_crash=may_crash)
    return Filesystem(SteadyStore(failing, HASTY), path), failing


def values(step: int, generation: int, attempt: int) -> dict[str, torch.Tensor]:
    """The whole tensors that this save, and no other, has."""
    generator = torch.Generator().manual_seed(hash((step, generation, attempt)) % (1 << 62))
    return {
        "model.weight": torch.randn(30, 16, generator=generator),
        "model.bias": torch.randn(7, generator=generator, dtype=torch.float64),
        "optimizer.count": torch.randint(1 << 40, (3,), generator=generator),
    }


class SavingRanks:
    """The processes. Start them with `running`."""

    def __init__(self, processes: list[BaseProcess], pipes: list[Connection]) -> None:
        self._processes = processes
        self._pipes = pipes
        self.injected: Counter[str] = Counter()

    def save(self, task: Task, kill_after_s: float | None = None) -> list[Shard]:
        """The shard of each rank. Raises `RanksGone`, and always if they are to be killed."""
        for pipe in self._pipes:
            pipe.send(task)
        if kill_after_s is not None:
            time.sleep(kill_after_s)
            self.kill()
            raise RanksGone("killed in the middle of a save")
        shards = []
        for pipe in self._pipes:
            if not pipe.poll(_ANSWER_S):
                raise RanksGone(f"no answer within {_ANSWER_S:g} s to {task}")
            shard, injected = pipe.recv()
            shards.append(shard)
            self.injected += injected
        return shards

    def kill(self) -> None:
        for process in self._processes:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
            process.join(10)


@contextlib.contextmanager
def running() -> Iterator[SavingRanks]:
    """A group of ranks, new processes all of them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    port = _free_port()
    processes, pipes = [], []
    for rank in range(WORLD_SIZE):
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, rank, port), daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(ours)
    ranks = SavingRanks(processes, pipes)
    try:
        yield ranks
    finally:
        ranks.kill()


def _serve(pipe: Connection, rank: int, port: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.TCPStore("127.0.0.1", port, WORLD_SIZE, is_master=rank == 0)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=WORLD_SIZE, timeout=timedelta(seconds=_ANSWER_S)
    )
    saver = AsyncSaver(dist.group.WORLD)
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        pipe.send(_save(saver, mesh, rank, task))


def _save(saver: AsyncSaver, mesh: Any, rank: int, task: Task) -> tuple[Shard, Counter[str]]:
    fs, failing = filesystem(task.url, may_crash=False)
    whole = values(task.step, task.generation, task.attempt)
    tensors = {
        name: distribute_tensor(tensor, mesh, [Split(0)]) if name.startswith("model") else tensor
        for name, tensor in whole.items()
    }
    begun_s = time.monotonic()
    failing.strike(f"{task.seed}/{rank}")
    handle = saver.save(
        fs, task.path, tensors, plain={"step": task.step}, rank_plain={"rank": rank}, rank=rank
    )
    files, failure = [], ""
    try:
        files = handle.files(_ANSWER_S)
    except Exception as error:  # noqa: BLE001 - a failed save is what this is about
        failure = f"rank {rank}: {type(error).__name__}: {error}"
    failing.rest()
    shard = Shard(
        generation=task.generation,
        attempt=task.attempt,
        step=task.step,
        world_rank=rank,
        world_size=WORLD_SIZE,
        path=task.path,
        files=tuple(files),
        failure=failure,
        counters={"step": task.step},
        tensors=describe(tensors) if rank == 0 else {},
        stall_s=handle.stall_s,
        write_s=time.monotonic() - begun_s,
    )
    return shard, failing.injected


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
