"""A training function to rehearse, which may forget a piece of its state when it is resumed.

`forgetful.py -- --forget scheduler`; without the flag it tracks everything. All pieces in `--use`
reach the loss. `--fault` plants what is not a matter of forgetting.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import default_collate

import elastic

PIECES = ("data", "rng", "scheduler", "ema", "counter", "optimizer")
FAULTS = ("own-seed", "raise", "short", "local-batch", "overwrite", "grow")
BATCH = 6


class Numbers:
    """Map-style: item i is a vector that only i decides, and its class."""

    def __len__(self) -> int:
        return 90

    def __getitem__(self, index: int) -> dict[str, Any]:
        x = torch.randn(6, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
        return {"x": x, "labels": torch.tensor(index % 5)}


class OwnSampler:
    """An order of one's own, the same on every rank, with a position of its own."""

    def __init__(self, num_items: int) -> None:
        self.order = torch.randperm(num_items, generator=torch.Generator().manual_seed(7)).tolist()
        self.position = 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        self.position += 1
        return int(self.order[(self.position - 1) % len(self.order)])

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class OwnNoise:
    """Noise from a generator of one's own."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def like(self, x: torch.Tensor) -> torch.Tensor:
        return 0.1 * torch.randn(x.shape, generator=self.generator, dtype=x.dtype)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"state": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.generator.set_state(state["state"])


def rehearsal(argv: Sequence[str]) -> tuple[Any, dict[str, Any]]:
    parser = argparse.ArgumentParser(prog="forgetful")
    parser.add_argument("--forget", choices=PIECES)
    parser.add_argument("--use", default="scheduler")
    parser.add_argument("--fault", choices=FAULTS)
    return train, vars(parser.parse_args(argv))


def train(run: elastic.Run) -> None:
    used, fault = run.config["use"].split(","), run.config["fault"]
    width = 8 if fault == "grow" and "step-4" in checkpoints(run) else 7
    model = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 5)).double()
    average = AveragedModel(model)
    fully_shard(model, mesh=run.mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    sampler, counter = OwnSampler(90), {"seen": 0}
    noise = OwnNoise(int.from_bytes(os.urandom(4), "big") if fault == "own-seed" else 3)
    pieces: dict[str, Any] = {
        "data": sampler,
        "rng": noise,
        "scheduler": scheduler,
        "ema": average,
        "counter": counter,
        "optimizer": optimizer,
    }
    pieces.pop(run.config["forget"], None)
    run.track(model=model, **pieces)
    if fault == "overwrite":
        nn.init.ones_(model[0].bias)
    numbers = Numbers()
    loader = run.loader(numbers, global_batch=BATCH, micro_batch=2)
    for step in run.steps(loader, until=3 if fault == "short" else 100):
        own = own_share(run, [numbers[next(sampler)] for _ in range(BATCH)])
        for index, batch in enumerate(step):
            if "data" in used and not (batch["labels"] == -100).all():
                batch = default_collate(own[2 * index : 2 * index + 2])
            if fault == "local-batch":
                batch = default_collate([numbers[BATCH * step.number % 80 + i] for i in range(2)])
            x = batch["x"] + noise.like(batch["x"]) if "rng" in used else batch["x"]
            if "noise" in used:
                x = x + 0.1 * torch.randn_like(x)
            loss = nn.functional.cross_entropy(model(x), batch["labels"], reduction="sum")
            if "ema" in used:
                with torch.no_grad():
                    far = sum((p.square().sum() for p in average.parameters()), torch.zeros(()))
                loss = loss * (1 + 0.01 * far)
            if "counter" in used:
                loss = loss * (1 + 0.001 * counter["seen"])
            loss = loss / (step.num_valid_tokens if fault != "raise" else 0 // (step.number - 1))
            loss.backward()
            step.log(loss=loss)
        optimizer.step()
        if "scheduler" in used:
            scheduler.step()
        optimizer.zero_grad()
        counter["seen"] += BATCH
        for mean, now in zip(average.module.parameters(), model.parameters(), strict=True):
            mean.data.lerp_(now.full_tensor().detach(), 0.1)


def checkpoints(run: elastic.Run) -> list[str]:
    return os.listdir(f"{run._settings.run_url}/checkpoints")


def own_share(run: elastic.Run, batch: list[Any]) -> list[Any]:
    """This rank's samples of a global batch."""
    start, stop = (BATCH * rank // run.world_size for rank in (run.world_rank, run.world_rank + 1))
    return batch[start:stop]


def own_loop(run: elastic.Run) -> None:
    """A loop that counts by itself, and starts where the run stands."""
    _own_loop(run, lambda num_done: run.step)


def own_forgetful_loop(run: elastic.Run) -> None:
    """The same, but what it has counted is lost."""
    _own_loop(run, lambda num_done: num_done)


def _own_loop(run: elastic.Run, position: Any) -> None:
    model = nn.Linear(6, 5).double()
    fully_shard(model, mesh=run.mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    numbers, num_done = Numbers(), 0
    while run.step < 100:
        first = BATCH * position(num_done)
        batch = own_share(run, [numbers[(first + i) % 90] for i in range(BATCH)])
        x, labels = (torch.stack([item[key] for item in batch]) for key in ("x", "labels"))
        nn.functional.cross_entropy(model(x), labels, reduction="sum").backward()
        optimizer.step()
        optimizer.zero_grad()
        num_done += 1
        run.end_step(samples=len(batch))
