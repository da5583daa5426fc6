"""The loop of `bench page`: blocks of steps, each begun when the viewer has come or gone.

Its `main` is a driver script whose argument is a `Plan`.
"""

from __future__ import annotations

import dataclasses
import json
import time
from dataclasses import dataclass
from pathlib import Path

import ray.train
import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_

import elastic
from jobs.bench import workload
from jobs.bench.engine_process import connect
from jobs.bench.events import EventLog

GLOBAL_BATCH = 32
# The first steps are slow, and say nothing of how many steps a block has.
NUM_COLD, NUM_TRIED = 20, 20


@dataclass(frozen=True, kw_only=True)
class Plan:
    """`num_blocks` blocks of about `block_s`, all of one number of steps."""

    directory: str
    address: str
    name: str
    num_blocks: int
    block_s: float
    num_workers: int

    def log(self, name: str) -> EventLog:
        return EventLog(Path(self.directory) / name)


class Blocks:
    """The measured stretches of the run, as rank 0 tells of them."""

    def __init__(self, plan: Plan, world_rank: int) -> None:
        self._plan = plan
        self._is_first = world_rank == 0
        self._log, self._answers = plan.log("events.jsonl"), plan.log("viewer.jsonl")
        self.num_done = -2
        self._num_steps = self._num_left = NUM_COLD
        self._begun_s = time.perf_counter()

    def before_step(self) -> None:
        """Called when a step begins, by all ranks alike."""
        if self._num_left == 0:
            self._end_block()
        self._num_left -= 1

    def _end_block(self) -> None:
        step_s = (time.perf_counter() - self._begun_s) / self._num_steps
        if self.num_done >= 0 and self._is_first:
            told = {"is_open": self.num_done % 2 == 1, "num_steps": self._num_steps}
            self._log.write("block", block=self.num_done, step_s=step_s, **told)
        if self.num_done == -2:
            self._num_steps = NUM_TRIED
        if self.num_done == -1:
            self._num_steps = _agreed(max(1, round(self._plan.block_s / step_s)))
        self.num_done += 1
        if self._is_first and 0 <= self.num_done < self._plan.num_blocks:
            self._log.write("ready", block=self.num_done)
            while not any(one["block"] == self.num_done for one in self._answers.read()):
                time.sleep(0.02)
        dist.barrier()
        self._num_left = self._num_steps
        self._begun_s = time.perf_counter()


def _agreed(number: int) -> int:
    told = torch.tensor(number)
    dist.broadcast(told, src=0)
    return int(told)


def train(run: elastic.Run) -> None:
    torch.set_num_threads(1)
    plan = Plan(**run.config)
    model = workload.build_model(run.mesh)
    optimizer = workload.build_optimizer(model)
    run.track(model=model, optimizer=optimizer)
    loader = run.loader(
        workload.Samples(), global_batch=GLOBAL_BATCH, micro_batch=GLOBAL_BATCH // run.world_size
    )
    blocks = Blocks(plan, run.world_rank)
    for step in run.steps(loader, until=10**9):
        blocks.before_step()
        if blocks.num_done == plan.num_blocks:
            return
        for batch in step:
            loss = workload.loss_sum(model, batch) / step.num_valid_tokens
            loss.backward()
            step.log(loss=loss)
        step.grad_norm = clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def main(argument: str) -> None:
    from elastic import ElasticConfig  # here, for no worker needs the trainer

    plan = Plan(**json.loads(argument))
    connect(plan.address)
    elastic.ElasticTrainer(
        train,
        train_loop_config=dataclasses.asdict(plan),
        scaling_config=ray.train.ScalingConfig(num_workers=plan.num_workers),
        run_config=ray.train.RunConfig(name=plan.name, storage_path=plan.directory),
        elastic_config=ElasticConfig(save_every=None),
    ).fit()
