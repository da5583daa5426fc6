"""The two loops that `bench overhead` compares, in the same processes and on the same group.

Its `main` is a driver script whose argument is a `Plan`. Blocks of the service's steps and of the
bare loop's alternate inside one training function, so that both meet the same machine, the same
model and the same state of its caches.
"""

from __future__ import annotations

import dataclasses
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray.train
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, DistributedSampler

import elastic
from jobs.bench import workload
from jobs.bench.engine_process import connect
from jobs.bench.events import EventLog

GLOBAL_BATCH = 32


@dataclass(frozen=True, kw_only=True)
class Plan:
    """`num_blocks` blocks of the service's steps, each between two of the bare loop's."""

    directory: str
    address: str
    num_blocks: int
    steps_per_block: int
    num_workers: int = 2

    @property
    def log(self) -> EventLog:
        return EventLog(Path(self.directory) / "events.jsonl")


class BareLoop:
    """What a user writes without the service: FSDP2, a stock loader, a stock sampler.

    Gradients are summed rather than averaged, as the service does it, for the way they are reduced
    is the user's choice and no cost of the service.
    """

    def __init__(self, run: elastic.Run) -> None:
        self._model = workload.build_model(run.mesh)
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        self._optimizer = workload.build_optimizer(self._model)
        self._world_size = run.world_size
        samples = workload.Samples()
        sampler: DistributedSampler[dict[str, torch.Tensor]] = DistributedSampler(
            samples, run.world_size, run.world_rank, seed=run.seed
        )
        share = GLOBAL_BATCH // run.world_size
        self._loader = DataLoader(samples, batch_size=share, sampler=sampler, drop_last=True)
        self._batches = iter(self._loader)

    def do_steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            batch = self._next_batch()
            num_tokens = batch["labels"].numel() * self._world_size
            (workload.loss_sum(self._model, batch) / num_tokens).backward()
            clip_grad_norm_(self._model.parameters(), 1.0)
            self._optimizer.step()
            self._optimizer.zero_grad()

    def _next_batch(self) -> dict[str, torch.Tensor]:
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = iter(self._loader)
            return next(self._batches)


def train(run: elastic.Run) -> None:
    torch.set_num_threads(1)
    plan = Plan(**run.config)
    model = workload.build_model(run.mesh)
    optimizer = workload.build_optimizer(model)
    bare = BareLoop(run)
    run.track(model=model, optimizer=optimizer)
    loader = run.loader(
        workload.Samples(), global_batch=GLOBAL_BATCH, micro_batch=GLOBAL_BATCH // run.world_size
    )
    begun_s = 0.0
    # One step more than the blocks hold: the last block ends where the step after it begins, for
    # what the service does at a step's end happens when the next one is asked for.
    for step in run.steps(loader, until=plan.num_blocks * plan.steps_per_block + 1):
        if (step.number - 1) % plan.steps_per_block == 0:
            if step.number > 1:
                served_s = (time.perf_counter() - begun_s) / plan.steps_per_block
                _tell(plan, run, "served", served_s)
            _tell(plan, run, "bare", _timed(bare, plan.steps_per_block))
            dist.barrier()
            begun_s = time.perf_counter()
        for batch in step:
            loss = workload.loss_sum(model, batch) / step.num_valid_tokens
            loss.backward()
            step.log(loss=loss)
        step.grad_norm = clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def _tell(plan: Plan, run: elastic.Run, side: str, step_s: float) -> None:
    if run.world_rank == 0:
        plan.log.write(side, step_s=step_s)


def _timed(bare: BareLoop, num_steps: int) -> float:
    """Seconds per step of one block of the bare loop."""
    dist.barrier()
    begun_s = time.perf_counter()
    bare.do_steps(num_steps)
    return (time.perf_counter() - begun_s) / num_steps


def main(argument: str) -> None:
    from elastic.cluster.trainer import ElasticConfig  # here, for no worker needs the trainer

    plan = Plan(**json.loads(argument))
    connect(plan.address)
    config: dict[str, Any] = dataclasses.asdict(plan)
    elastic.ElasticTrainer(
        train,
        train_loop_config=config,
        scaling_config=ray.train.ScalingConfig(num_workers=plan.num_workers),
        run_config=ray.train.RunConfig(name="overhead", storage_path=plan.directory),
        elastic_config=ElasticConfig(save_every=None),
    ).fit()
