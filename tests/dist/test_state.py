"""Tracked state: capturing changes nothing, restoring is in place and complete."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from elastic.storage.checkpoints import Manifest
from elastic.training.state import TrackedState
from tests.dist.processes import run_ranks
from tests.dist.small_run import (
    Small,
    backward,
    content,
    restore,
    save,
    shard,
    small,
    train,
)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def journey(
    rank: int, world_size: int, folder: Path, arrive: tuple[str, Manifest] | None, leave: str
) -> tuple[dict[str, Any], Manifest, list[float]]:
    model = small(seed=world_size, sharded=True)
    optimizer = adamw(model)
    tracked = TrackedState(model=model, optimizer=optimizer)
    if arrive is None:
        train(model, optimizer, range(3))
    else:
        restore(folder, *arrive, tracked)
    manifest = save(folder, leave, tracked)
    return content(tracked), manifest, train(model, optimizer, range(3, 6))


def test_any_world_size_reads_what_any_other_wrote(tmp_path: Path) -> None:  # B40 B47
    content3, manifest, losses = run_ranks(journey, 3, tmp_path, None, "a")[0]
    here = ("a", manifest)
    for leave, world_size in [("b", 2), ("c", 3), ("d", 1), ("e", 4)]:
        found, manifest, again = run_ranks(journey, world_size, tmp_path, here, leave)[0]
        assert found == content3
        torch.testing.assert_close(again, losses, rtol=1e-5, atol=0)
        here = (leave, manifest)
