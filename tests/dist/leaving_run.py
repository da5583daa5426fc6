"""A run under gloo whose ranks are sent SIGTERM at places that a test chooses, or at any moment."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from elastic.policy.retention import Retention
from elastic.policy.saves import SaveInterval
from elastic.storage.claim import RunSpec
from elastic.training.membership import TrainingConfig
from elastic.training.run import Run
from elastic.training.standalone import train_standalone
from elastic.training.torchrun import Place, Torchrun
from tests.dist.standalone_run import Numbers, own_store


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Where rank `told` is sent SIGTERM: in a micro-batch of a step, or in its evaluation."""

    root: str
    until: int
    told: int = 1
    pause_s: float = 0.0
    at_step: int | None = None
    at_micro_batch: int | None = None
    at_evaluation_batch: int | None = None
    source: Callable[[int], Any] = Numbers


class Counted(nn.Module):
    """A layer behind a batch norm and dropout: its forward pass changes buffers and streams."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6, dtype=torch.float64)
        self.layer = nn.Linear(6, 5, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(nn.functional.dropout(self.norm(x), 0.2))


def launcher(rank: int, world_size: int) -> Torchrun:
    place = Place(
        job="job",
        restarts=0,
        max_restarts=0,
        world_rank=rank,
        world_size=world_size,
        local_rank=rank,
        local_world_size=world_size,
        host="127.0.0.1",
        port=1,
        has_agents_store=True,
    )
    found = Torchrun(place, dist.HashStore())
    found.listen()
    return found


def start(rank: int, world_size: int, plan: Plan, store: dist.Store) -> dict[str, Any]:
    """One start of the run on this rank: where it resumed and ended, and what it went through."""
    seen: dict[str, Any] = {"evaluated": 0, "is_cut": False, "micro": {}}
    config = TrainingConfig(
        run_url=plan.root,
        config={"plan": plan, "seen": seen},
        save=SaveInterval(),
        save_behind="wait",
        collective_timeout_s=30.0,
    )
    ended = train_standalone(
        train,
        config,
        RunSpec(name="leaving", seed=0),
        Retention(keep=-1),
        world_rank=rank,
        world_size=world_size,
        local_rank=rank,
        local_world_size=world_size,
        store=store,
        launcher=launcher(rank, world_size),
    )
    return {**seen, "step": ended.step, "samples": ended.samples}


def train(run: Run) -> None:
    plan: Plan = run.config["plan"]
    seen: dict[str, Any] = run.config["seen"]
    model = Counted()
    fully_shard(model.layer, mesh=run.mesh)
    fully_shard(model, mesh=run.mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer, counter=seen["micro"])
    seen["micro"].setdefault("batches", 0)
    seen["resumed"] = run.step
    loader = run.loader(plan.source(100), global_batch=12, micro_batch=2)
    for step in run.steps(loader, until=plan.until):
        for index, batch in enumerate(step):
            seen["micro"]["batches"] += 1
            loss = nn.functional.cross_entropy(model(batch["x"]), batch["labels"], reduction="sum")
            loss = loss / step.num_valid_tokens
            loss.backward()
            step.log(loss=loss)
            time.sleep(plan.pause_s)
            if run.world_rank == plan.told and (step.number, index) == (
                plan.at_step,
                plan.at_micro_batch,
            ):
                os.kill(os.getpid(), signal.SIGTERM)
        optimizer.step()
        optimizer.zero_grad()
        if step.number == plan.at_step and plan.at_evaluation_batch is not None:
            evaluate(run, plan, seen)


def evaluate(run: Run, plan: Plan, seen: dict[str, Any]) -> None:
    with run.evaluation() as evaluation:
        for index in evaluation.batches(range(1000)):
            seen["evaluated"] = index + 1
            dist.all_reduce(torch.ones(1))  # as a sharded model's forward pass
            time.sleep(0.02)
            if run.world_rank == plan.told and index == plan.at_evaluation_batch:
                os.kill(os.getpid(), signal.SIGTERM)
        seen["is_cut"] = evaluation.is_cut


def one_start(rank: int, world_size: int, plan: Plan) -> dict[str, Any]:
    return start(rank, world_size, plan, own_store(rank))


def many_starts(
    rank: int, world_size: int, plan: Plan, num: int, seed: int
) -> list[tuple[int, float]]:
    """The step at which each start ended, and how long after the signal; every start is told."""
    outer, random_s = own_store(rank), random.Random(seed)
    found = []
    for trial in range(num):
        after_s = random_s.uniform(0.0, 0.3)
        sent: list[float] = []

        def send(sent: list[float] = sent) -> None:
            sent.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGTERM)

        timer = threading.Timer(after_s, send)
        if rank == plan.told:
            timer.start()
        ended = start(rank, world_size, plan, dist.PrefixStore(f"trial-{trial}", outer))
        timer.join() if rank == plan.told else None
        found.append((ended["step"], time.monotonic() - sent[0] if sent else 0.0))
    return found
