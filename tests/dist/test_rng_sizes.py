"""Random streams of a whole run that changes its size: none restarts, and no two are the same."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from elastic.policy.retention import Retention
from elastic.policy.saves import SaveInterval
from elastic.storage.claim import RunSpec
from elastic.training.membership import TrainingConfig
from elastic.training.run import Run
from elastic.training.standalone import train_standalone
from tests.dist.processes import run_ranks
from tests.dist.standalone_run import own_store

Drawn = dict[int, list[tuple[float, ...]]]  # by step: of each micro-batch, one of each stream


def life(rank: int, world_size: int, root: str, until: int) -> Drawn:
    drawn: Drawn = {}

    def train(run: Run) -> None:
        own = generators(100 + rank)
        run.track(model=nn.Linear(1, 1), counter={}, **own)
        loader = run.loader([{"labels": i} for i in range(24)], global_batch=12, micro_batch=2)
        for step in run.steps(loader, until=until):
            drawn[step.number] = [draw() + draw_from(own) for _ in step]

    train_standalone(
        train,
        TrainingConfig(run_url=root, config={}, save=SaveInterval(steps=100)),
        RunSpec(name="small", seed=0),
        Retention(),
        world_rank=rank,
        world_size=world_size,
        local_rank=rank,
        local_world_size=world_size,
        store=own_store(rank),
    )
    return drawn


def draw() -> tuple[float, ...]:
    dropped = torch.nn.functional.dropout(torch.arange(1.0, 60.0))
    return (random.random(), float(np.random.rand()), float(torch.rand(())), float(dropped.sum()))


def generators(seed: int) -> dict[str, Any]:
    return {
        "torch": torch.Generator().manual_seed(seed),
        "numpy": np.random.default_rng(seed),
        "older": np.random.RandomState(seed),
        "python": random.Random(seed),
    }


def draw_from(own: dict[str, Any]) -> tuple[float, ...]:
    return (
        float(torch.rand((), generator=own["torch"])),
        float(own["numpy"].normal()),
        float(own["older"].randn()),
        own["python"].random(),
    )


def copied(root: Path, name: str) -> str:
    shutil.copytree(root, root.with_name(name))
    return str(root.with_name(name))


def all_different(*lives: list[Drawn]) -> bool:
    rows = [row for found in lives for rank in found for step in rank.values() for row in step]
    return all(len({*column}) == len(column) for column in zip(*rows, strict=True))


def test_growth_shrinkage_and_growth_again(tmp_path: Path) -> None:  # B26
    """All of one history is drawn from streams that nothing else of it draws from."""
    root = tmp_path / "two"
    begun = run_ranks(life, 2, str(root), 2)
    four = [run_ranks(life, 4, copied(root, name), 4) for name in ("four", "again")]
    assert four[0] == four[1], "a second resume draws the same"
    assert all_different(begun, four[0])

    path = copied(root, "three")
    smaller = run_ranks(life, 1, path, 4)
    larger = run_ranks(life, 3, path, 6)
    assert all_different(begun, smaller, larger)
    assert [sorted(found[0]) for found in (begun, smaller, larger)] == [[1, 2], [3, 4], [5, 6]]


def test_the_same_size_continues_every_stream(tmp_path: Path) -> None:  # B24
    whole = run_ranks(life, 2, str(tmp_path / "whole"), 5)
    path = str(tmp_path / "parts")
    parts = [run_ranks(life, 2, path, until) for until in (2, 3, 5)]
    for rank in range(2):
        assert {step: row for found in parts for step, row in found[rank].items()} == whole[rank]
