"""The state that `bench checkpoint` saves, and the step that goes on beside it.

An FSDP2 model that trains for real, and as much more state, which stands still: a step that moved
gigabytes of it would take longer than what is to be seen.
"""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from elastic.training import process_group
from elastic.training.membership import Membership
from elastic.training.process_group import Groups
from elastic.training.state import TrackedState
from jobs.bench import workload

__all__ = ["Job", "join"]

_TRIAL_SAMPLES = 16


def join(directory: Path, name: str, rank: int, num_ranks: int) -> tuple[Membership, Groups, Any]:
    """This rank's place, its groups and the store that they were formed with."""
    torch.set_num_threads(1)
    store = _store(directory / f"port-{name}", rank)
    member = Membership(
        run_id="bench",
        generation=1,
        world_rank=rank,
        world_size=num_ranks,
        local_rank=rank,
        local_world_size=num_ranks,
        node_rank=0,
        store_host="",
        store_port=0,
        resume_step=None,
    )
    groups = process_group.connect(member, use_cuda=False, timeout_s=600.0, server=store)
    return member, groups, store


def _store(port_file: Path, rank: int) -> dist.TCPStore:
    """Rank 0's, whose port the others learn from the file."""
    wait = timedelta(seconds=120)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, None, True, wait, wait_for_workers=False)
        half = port_file.with_suffix(".half")
        half.write_text(str(store.port))
        half.rename(port_file)
        return store
    until_s = time.monotonic() + wait.total_seconds()
    while not port_file.exists():
        if time.monotonic() > until_s:
            raise TimeoutError(f"rank 0 has not written {port_file} within {wait}")
        time.sleep(0.05)
    return dist.TCPStore("127.0.0.1", int(port_file.read_text()), None, False, wait)


class Job:
    """Model and optimizer with so many bytes of state in all, and short steps of training."""

    def __init__(self, groups: Groups, state_bytes: int) -> None:
        self._control = groups.control
        self._model = workload.build_model(groups.mesh, state_bytes=state_bytes)
        self._optimizer = workload.build_optimizer(self._model)
        self._samples = workload.Samples()
        self._batch: dict[str, torch.Tensor] = {}
        self._take(_TRIAL_SAMPLES)
        workload.train_step(self._model, self._optimizer, self._batch)  # all have state now
        for bulk in self._model.bulks():
            bulk.weight.grad = bulk._gradient = None
        self.state = TrackedState(model=self._model, optimizer=self._optimizer)

    def calibrate(self, step_s: float) -> None:
        """Take as many samples a step as make it about so long, the same on every rank."""
        for _ in range(3):
            self.step(is_over=True)
        took = torch.tensor(min(self._timed() for _ in range(5)))
        dist.all_reduce(took, op=dist.ReduceOp.MAX, group=self._control)
        self._take(max(1, round(_TRIAL_SAMPLES * step_s / took.item())))
        for _ in range(3):
            self.step(is_over=True)

    def step(self, *, is_over: bool) -> bool:
        """One optimizer step; whether all ranks have said so."""
        workload.loss_sum(self._model, self._batch).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        said = torch.tensor(int(is_over))
        dist.all_reduce(said, op=dist.ReduceOp.MIN, group=self._control)
        return bool(said.item())

    def _timed(self) -> float:
        begun_s = time.perf_counter()
        self.step(is_over=True)
        return time.perf_counter() - begun_s

    def _take(self, num_samples: int) -> None:
        items = [self._samples[i % len(self._samples)] for i in range(num_samples)]
        self._batch = torch.utils.data.default_collate(items)
