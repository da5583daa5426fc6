"""A whole small run on gloo ranks, without Ray: data, FSDP2, random noise, checkpoints, metrics."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_

from elastic.policy.retention import Retention
from elastic.policy.saves import SaveInterval
from elastic.storage.checkpoints import Catalog
from elastic.storage.claim import RunSpec
from elastic.storage.filesystem import Filesystem
from elastic.storage.metrics import current_metrics
from elastic.storage.run_file import load_run_file
from elastic.training import process_group
from elastic.training.membership import TrainingConfig
from elastic.training.padding import IGNORED_LABEL
from elastic.training.run import Run
from elastic.training.standalone import train_standalone
from tests.dist.processes import run_ranks


class Numbers:
    """Map-style: item i is a vector that only i decides, and its class."""

    def __init__(self, num_items: int) -> None:
        self.num_items = num_items

    def __len__(self) -> int:
        return self.num_items

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(6, generator=generator, dtype=torch.float64)
        return {"x": x, "labels": torch.tensor(index % 5), "index": index, "epoch": -1}


class Passes:
    """The same items without random access, in an order that each pass has of its own."""

    def __init__(self, num_items: int) -> None:
        self.items = Numbers(num_items)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        num_items = len(self.items)
        for place in range(num_items):
            index = (place * 37 + self.epoch) % num_items
            yield {**self.items[index], "index": place, "epoch": self.epoch}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One call of a run: what is asked of it and what is done to it."""

    root: str
    until: int
    save_every: int = 10
    behind: str = "wait"
    keep: int = -1
    optimizer: str = "adamw"
    dtype: str = "float64"
    noise: float = 0.0
    global_batch: int = 12
    source: Callable[[int], Any] = Numbers
    num_items: int = 100
    num_workers: int = 0
    die_at: int | None = None
    die_rank: int | None = None
    slow_write_s: float = 0.0
    hide_from_rank_1_s: float = 0.0
    load_from: str | None = None
    local: str | None = None
    keep_every: int | None = None
    spec: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)


def config_of(recipe: Recipe) -> TrainingConfig:
    return TrainingConfig(
        run_url=recipe.root,
        config={"recipe": recipe},
        save=SaveInterval(steps=recipe.save_every),
        save_behind=recipe.behind,
        collective_timeout_s=30.0,
        load_from=recipe.load_from,
        local=recipe.local,
    )


def run(world_size: int, recipe: Recipe, **options: Any) -> list[dict[str, Any]]:
    """By rank: where it resumed, where it ended, and the sample indices it saw by step."""
    return run_ranks(_rank, world_size, recipe, **options)


def catalog(root: str) -> Catalog:
    filesystem = Filesystem.at(root)
    run_file = load_run_file(filesystem)
    assert run_file is not None
    return Catalog(filesystem, run_file.run_id)


def curve(root: str, name: str = "loss") -> list[float]:
    """The values of a metric by step, in the history that counts."""
    steps = current_metrics(Filesystem.at(root))
    assert sorted(steps) == list(range(1, len(steps) + 1))
    return [steps[step][name] for step in sorted(steps)]


def _rank(rank: int, world_size: int, recipe: Recipe) -> dict[str, Any]:
    store = own_store(rank)
    _sabotage(recipe, rank)
    seen: dict[str, Any] = {"steps": {}, "counter": {"calls": 0}}

    def train(run: Run) -> None:
        _train(run, seen)

    ended = train_standalone(
        train,
        config_of(recipe),
        RunSpec(name="small", seed=0, **recipe.spec),
        Retention(keep=recipe.keep, keep_every=recipe.keep_every),
        world_rank=rank,
        world_size=world_size,
        local_rank=rank,
        local_world_size=world_size,
        store=store,
    )
    return {**seen, "step": ended.step, "samples": ended.samples, "epoch": ended.epoch}


def own_store(rank: int) -> dist.Store:
    """A store of this start's own, in place of the helper's group."""
    server = process_group.open_store("127.0.0.1") if rank == 0 else None
    port = [server.port if server else 0]
    dist.broadcast_object_list(port, src=0)
    dist.barrier()
    dist.destroy_process_group()
    return server or dist.TCPStore("127.0.0.1", port[0], is_master=False, wait_for_workers=False)


def sharded_model(dtype: torch.dtype, mesh: DeviceMesh) -> nn.Sequential:
    """The model, of which tests/fixtures hold checkpoints: it stays as it is."""
    model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5, bias=False)).to(dtype)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _train(run: Run, seen: dict[str, Any]) -> None:
    recipe: Recipe = run.config["recipe"]
    multiprocessing.current_process().daemon = False  # or it could have no loader processes
    dtype = getattr(torch, recipe.dtype)
    model = sharded_model(dtype, run.mesh)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if recipe.optimizer == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    counter = seen["counter"]
    run.track(model=model, optimizer=optimizer, scheduler=scheduler, counter=counter)
    seen["resumed"] = run.step
    loader = run.loader(
        recipe.source(recipe.num_items),
        global_batch=recipe.global_batch,
        micro_batch=2,
        num_workers=recipe.num_workers,
    )
    notes = _notes(recipe.root) / f"{run.generation}-{run.world_rank}.jsonl"
    for step in run.steps(loader, until=recipe.until):
        seen["steps"][step.number] = []
        used: list[list[list[int]]] = []
        for batch in step:
            seen["steps"][step.number] += batch["index"].tolist()
            used.append(_ids(batch))
            x = batch["x"].to(dtype)
            x = x + recipe.noise * torch.randn(x.shape, dtype=dtype)
            logits = model(x)
            loss = nn.functional.cross_entropy(logits, batch["labels"], reduction="sum")
            loss = loss / step.num_valid_tokens
            if step.number in recipe.extra.get("spoilt", {}).get(seen["resumed"], ()):
                loss = loss * math.nan
            loss.backward()
            step.log(loss=loss)
        step.grad_norm = clip_grad_norm_(model.parameters(), 1.0)
        step.record(lr=scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        counter["calls"] += 1
        _note(notes, step.number, used)
        if step.number == recipe.die_at and recipe.die_rank in (None, run.world_rank):
            os.kill(os.getpid(), signal.SIGKILL)


def _ids(batch: dict[str, Any]) -> list[list[int]]:
    """(epoch, index) of what weighs something in a micro-batch."""
    columns = (batch[name].tolist() for name in ("epoch", "index", "labels"))
    return [[e, i] for e, i, label in zip(*columns, strict=True) if label != IGNORED_LABEL]


def _notes(root: str) -> Path:
    return Path(f"{root}.trained")  # beside the run: nothing of ours lies in its directory


def _note(path: Path, step: int, used: list[list[list[int]]]) -> None:
    """A line for each step; a SIGKILL right after it takes nothing back."""
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps([step, [batch for batch in used if batch]]) + "\n")


def trained(root: str) -> dict[int, list[list[list[list[int]]]]]:
    """What the ranks themselves have trained on, by step, rank and micro-batch: what counts."""
    by_place = {}
    for path in _notes(root).iterdir():
        generation, rank = map(int, path.stem.split("-"))
        for line in path.read_text().splitlines():
            step, used = json.loads(line)
            by_place[step, generation, rank] = used
    found: dict[int, dict[int, Any]] = {}
    for step, generation, rank in sorted(by_place):
        newest = max(g for s, g, _ in by_place if s == step)
        if generation == newest:
            found.setdefault(step, {})[rank] = by_place[step, generation, rank]
    return {step: [ranks[rank] for rank in sorted(ranks)] for step, ranks in found.items()}


def _sabotage(recipe: Recipe, rank: int) -> None:
    """Real faults of storage at this rank: slow writes, or files that appear late."""
    if recipe.slow_write_s:
        write = Filesystem.open_output

        def slow(self: Filesystem, path: str) -> Any:
            time.sleep(recipe.slow_write_s)
            return write(self, path)

        Filesystem.open_output = slow  # type: ignore[method-assign]
    if recipe.hide_from_rank_1_s and rank == 1:
        read, until_s = Filesystem.read_bytes, time.monotonic() + recipe.hide_from_rank_1_s
        newest = f"step-{recipe.extra['newest']}/"

        def hidden(self: Filesystem, path: str) -> bytes:
            if newest in path and time.monotonic() < until_s:
                raise FileNotFoundError(path)
            return read(self, path)

        Filesystem.read_bytes = hidden  # type: ignore[method-assign]


def files_of(root: str, step: int) -> list[Path]:
    """The files of a checkpoint that its manifest names, largest first."""
    found = catalog(root)
    base = Path(root) / found.data_path(step)
    manifest = found.manifest(step)
    return [base / file.path for file in sorted(manifest.files, key=lambda file: -file.bytes)]
