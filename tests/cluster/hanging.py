"""Training functions that stand still, each in its own way, for tests on a real cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import elastic

SAVE_EVERY = 5


class Numbers:
    """Map-style, 600 items. `stuck_at` deadlocks the process that reads that item or a later one;
    `slow_s` holds up the first item that a process reads.
    """

    def __init__(self, stuck_at: int | None = None, slow_s: float = 0.0) -> None:
        self.stuck_at = stuck_at
        self.slow_s = slow_s

    def __len__(self) -> int:
        return 600

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.stuck_at is not None and index >= self.stuck_at:
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        if self.slow_s and index > 0:  # the first item is also looked at when the loader is made
            time.sleep(self.slow_s)
            self.slow_s = 0.0
        return {"x": torch.ones(4), "labels": torch.tensor(index % 3)}


class Slow:
    """State that takes its time to be saved and loaded."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def state_dict(self) -> dict[str, Any]:
        time.sleep(self._seconds)
        return {"seconds": self._seconds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        time.sleep(self._seconds)


def _steps(run: elastic.Run, dataset: Numbers, until: int, num_workers: int = 0, **tracked: Any):
    model = nn.Linear(4, 20)  # at all sizes each rank holds some of it, and has a file
    fully_shard(model, mesh=run.mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer, **tracked)
    loader = run.loader(
        dataset, global_batch=12, micro_batch=4, num_workers=num_workers, shuffle=False
    )
    for step in run.steps(loader, until=until):
        yield step
        for batch in step:
            loss = nn.functional.cross_entropy(model(batch["x"]), batch["labels"], reduction="sum")
            (loss / step.num_valid_tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.02)


def in_turn(run: elastic.Run) -> None:
    """The last rank of each of the first four generations hangs, each in another way."""
    is_last = run.world_rank == run.world_size - 1
    ways = ["loops", "storage", "data", "stopped", ""]
    way = ways[run.generation] if is_last else ""
    begun = run.step  # nothing yet: it is told by `run.track`
    dataset = Numbers(stuck_at=300 if way == "data" else None)
    for number, _ in enumerate(
        _steps(run, dataset, run.config["until"], num_workers=int(way == "data"))
    ):
        if number == 0:
            begun = run.step
        if number == 2 and way == "loops":
            spin()
        if number == 2 and way == "stopped":
            have_a_child(run)
            os.kill(os.getpid(), signal.SIGSTOP)
        if number == 1 and way == "storage":
            block_next_save(run, begun)


def spin() -> None:
    """An endless loop."""
    while True:
        pass


def have_a_child(run: elastic.Run) -> None:
    """One that outlives its parent, in a session of its own."""
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    Path(run.config["url"], "child").write_text(str(child.pid))
    time.sleep(1.5)  # so that it is known; one that is younger may escape


def block_next_save(run: elastic.Run, begun: int) -> None:
    """Whoever opens a pipe that nobody reads waits, as on a file system that does not answer."""
    step = begun + SAVE_EVERY
    folder = Path(run.config["url"], f"checkpoints/step-{step}.tmp-{run.generation}-1")
    folder.mkdir(parents=True, exist_ok=True)
    os.mkfifo(folder / f"__{run.world_rank}_0.distcp")


def slow_but_sound(run: elastic.Run) -> None:
    """Load, save and first batch take far longer than a step may; then rank 1 sleeps in one."""
    seconds = run.config["slow_s"]
    steps = _steps(run, Numbers(slow_s=seconds), run.config["until"], slow=Slow(seconds))
    for step in steps:
        if step.number == 8 and run.generation == 0 and run.world_rank == 1:
            Path(run.config["mark"]).write_text(str(time.time()))
            time.sleep(1000)


def slow_to_load(run: elastic.Run) -> None:
    """Loading takes two seconds; every step is written down, with its generation and time."""
    begun = time.time()
    for step in _steps(run, Numbers(), run.config["until"], slow=Slow(run.config["slow_s"])):
        told = f"{run.generation} {step.number} {begun} {time.time()}\n"
        with Path(run.config["url"], f"steps-{os.getpid()}").open("a") as file:
            file.write(told)
        begun = time.time()
