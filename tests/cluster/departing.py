"""Training scripts that are hard to stop, each in its own way, for tests on a real cluster."""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ray.train import RunConfig, ScalingConfig
from torch import nn
from torch.distributed.fsdp import fully_shard

import elastic
from elastic.storage.filesystem import Filesystem
from tests.cluster.functions import Ones


def train(run: elastic.Run) -> None:
    """Steps of about 20 ms; what makes them hard to stop is told by `kind`."""
    kind: str = run.config["kind"]
    run.once("slow", lambda: write_slowly(Path(run.config["slow"]), run.config["slow_s"]))
    model = nn.Linear(4, 3)
    fully_shard(model, mesh=run.mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    loader = run.loader(
        Ones(), global_batch=12, micro_batch=2, num_workers=2 if kind == "children" else 0
    )
    for step in run.steps(loader, until=10**6):
        for batch in step:
            logits = model(batch["x"])
            loss = nn.functional.cross_entropy(logits, batch["labels"], reduction="sum")
            (loss / step.num_valid_tokens).backward()
            if kind == "long":
                time.sleep(1.0)
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.02)
        if kind == "evaluation" and step.number == 3:
            evaluate(run)


def evaluate(run: elastic.Run) -> None:
    """A minute of it."""
    Path(run.config["slow"]).touch()  # the test waits for it
    with run.evaluation() as evaluation:
        for _ in evaluation.batches(range(1200)):
            dist.all_reduce(torch.ones(1))
            time.sleep(0.05)


def write_slowly(while_there: Path, slow_s: float) -> None:
    """From now on each file that is written takes so long, while a file is there: a slow disk."""
    write = Filesystem.open_output

    def slow(self: Filesystem, path: str) -> Any:
        if slow_s and while_there.exists():
            time.sleep(slow_s)
        return write(self, path)

    Filesystem.open_output = slow  # type: ignore[method-assign]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--name")
    parser.add_argument("--storage")
    parser.add_argument("--json")
    parser.add_argument("--kind", default="plain")
    parser.add_argument("--slow-s", type=float, default=0.0)
    parser.add_argument("--save-every", default="1000000")
    parser.add_argument("--max-workers", type=int, default=2)
    arguments = parser.parse_args()
    config = {
        "kind": arguments.kind,
        "slow": f"{arguments.storage}/{arguments.name}.slow",
        "slow_s": arguments.slow_s,
    }
    trainer = elastic.ElasticTrainer(
        importlib.import_module("tests.cluster.departing").train,  # by name, not by its content
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=(1, arguments.max_workers)),
        run_config=RunConfig(name=arguments.name, storage_path=arguments.storage),
        elastic_config=elastic.ElasticConfig(save_every=arguments.save_every),
    )
    trainer.fit()
    return 0


if __name__ == "__main__":
    sys.exit(main())
