"""Training functions that do one thing wrong, for tests on a real cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import elastic


class Ones:
    """Map-style, 64 items."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.ones(4), "labels": torch.tensor(index % 3)}


def steps(run: elastic.Run, until: int = 1000):
    """A tiny model's steps, about 20 ms each."""
    model = nn.Linear(4, 3)
    fully_shard(model, mesh=run.mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    loader = run.loader(Ones(), global_batch=12, micro_batch=4)
    for step in run.steps(loader, until=until):
        for batch in step:
            logits = model(batch["x"])
            loss = nn.functional.cross_entropy(logits, batch["labels"], reduction="sum")
            (loss / step.num_valid_tokens).backward()
            step.log(loss=loss.detach() / step.num_valid_tokens)
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.02)
        yield step


def plain(run: elastic.Run) -> None:
    """Nothing wrong."""
    for _ in steps(run, run.config.get("until", 30)):
        pass


def boom_when_told(run: elastic.Run) -> None:
    """Goes on until a file is there; then rank 0 raises."""
    for _ in steps(run, 1_000_000):
        if run.world_rank == 0 and Path(run.config["boom"]).exists():
            raise ValueError("bad sample 7")


def boom_beside_a_collective(run: elastic.Run) -> None:
    """Rank 2 raises while the others are in a collective that would wait for 300 s."""
    for step in steps(run):
        if step.number == 3:
            if run.world_rank == 2:
                raise ValueError("boom-7f")
            dist.all_reduce(torch.ones(1))


def boom_at_a_step(run: elastic.Run) -> None:
    """Rank 1 raises at the same step each time."""
    for step in steps(run):
        if step.number == run.config["step"] and run.world_rank == 1:
            raise ValueError(f"bad sample {os.getpid()}")


def spoilt_from(run: elastic.Run) -> None:
    """Logs a loss that is no number in the steps that a file names for the step resumed."""
    import json

    spoilt = json.loads(Path(run.config["spoilt"]).read_text())
    resumed = None
    for step in steps(run, run.config["until"]):
        resumed = step.number - 1 if resumed is None else resumed
        if step.number in spoilt.get(str(resumed), ()):
            step.log(loss=float("nan"))


def too_large_for(run: elastic.Run) -> None:
    """Rank 0 runs out of CUDA memory in the first step at this size, as if it had a GPU."""
    for _ in steps(run, 30):
        if run.world_size == run.config["size"] and run.world_rank == 0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def boom_told_late(run: elastic.Run) -> None:
    """Rank 2 is at fault; its peers see its connection go a second before its own word comes."""
    for step in steps(run):
        if step.number == 3:
            if run.world_rank == 2:
                dist.destroy_process_group()
                time.sleep(1.0)
                raise ValueError("boom-7f")
            dist.all_reduce(torch.ones(1))


def swallows_exceptions(run: elastic.Run) -> None:
    """A user's broad except around the body of the loop, and a mark for each call."""
    Path(run.config["marks"], f"{run.generation}-{run.world_rank}-{os.getpid()}").touch()
    iterator = steps(run, 60)
    while True:
        try:
            next(iterator)
        except StopIteration:
            return
        except Exception:  # noqa: BLE001
            continue


def tells_ranks(run: elastic.Run) -> None:
    """Writes down what the environment and Ray say of this rank, in every generation."""
    import json

    import ray.train

    context = ray.train.get_context()
    told = {
        "world_rank": run.world_rank,
        "world_size": run.world_size,
        "local_rank": run.local_rank,
        "env": [os.environ[key] for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK")],
        "ray": [context.get_world_rank(), context.get_world_size(), context.get_local_rank()],
        "dist": [dist.get_rank(), dist.get_world_size()],
    }
    path = Path(run.config["marks"], f"{run.generation}-{run.world_rank}.json")
    path.write_text(json.dumps(told))
    for _ in steps(run, run.config["until"]):
        pass


def speaks_and_dies(run: elastic.Run) -> None:
    """Rank 1 of the first generation says something in three ways, and is gone at once."""
    print(f"rank {run.world_rank} of generation {run.generation} begins")
    for step in steps(run, 10):
        if step.number == 3 and run.generation == 0 and run.world_rank == 1:
            print("printed, and\x1b[2J gone")
            print("to stderr", file=sys.stderr)
            os.write(2, b"raw, without end")
            os.kill(os.getpid(), signal.SIGKILL)


def speaks_and_raises(run: elastic.Run) -> None:
    """Rank 1 says something and raises."""
    for step in steps(run, 10):
        if step.number == 3 and run.world_rank == 1:
            print("the loss looks odd")
            raise ValueError("boom-3c")


def starts_a_program(run: elastic.Run) -> None:
    """Which goes on when rank and shell are gone; and a mark with its process id."""
    words = ["sh", "-c", "sleep 600 & echo $!; wait"]
    shell = subprocess.Popen(words, stdout=subprocess.PIPE)
    assert shell.stdout is not None
    pid = int(shell.stdout.readline())
    Path(run.config["marks"], f"{run.generation}-{run.world_rank}-{pid}").touch()
    for _ in steps(run, 100_000):
        pass


def kill(pid: int) -> None:
    """As the kernel does it when memory runs out."""
    os.kill(pid, signal.SIGKILL)
