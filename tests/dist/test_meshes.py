"""The private names of torch that a re-form needs, and the trap of meshes that look alike."""

from __future__ import annotations

import inspect
import os
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from elastic.training.meshes import forget_meshes
from elastic.training.state import TrackedState
from tests.dist.processes import run_ranks


def test_private_names_of_torch_are_there():
    from torch.distributed.tensor import _redistribute
    from torch.distributed.tensor._collective_utils import MeshTopoInfo
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    for function in (_clear_sharding_prop_cache, _redistribute.clear_redistribute_planner_cache):
        assert not inspect.signature(function).parameters
    assert callable(_redistribute._gen_transform_infos.cache_clear)
    assert callable(MeshTopoInfo.build_from_mesh.cache_clear)


ROUNDS = ([0, 1, 2], [2, 1], [1, 0, 2], [1], [2, 0, 1])


def test_renumbered_generations_hold_their_own_shards(tmp_path: Path):
    """3 to 2 to 3 to 1 to 3, with ranks renumbered: full tensors are right at every size."""
    found = run_ranks(_renumbered, 3, str(tmp_path), timeout_s=90)
    for generation, ranks in enumerate(ROUNDS):
        told = [found[process][generation] for process in ranks]
        assert all(full == told[0] for full in told), generation
        assert told[0] == _expected(generation)


def _expected(generation: int) -> list[float]:
    return [float(value + generation) for value in range(7 * 2)]


def _renumbered(process: int, world_size: int, folder: str) -> dict[int, list[float]]:
    dist.destroy_process_group()
    full: dict[int, list[float]] = {}
    for generation, ranks in enumerate(ROUNDS):
        if process not in ranks:
            continue
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(f"{folder}/{generation}", len(ranks)),
            rank=ranks.index(process),
            world_size=len(ranks),
            timeout=timedelta(seconds=60),
        )
        full[generation] = _one_generation(generation, len(ranks))
        dist.destroy_process_group()
        forget_meshes()
    return full


def _one_generation(generation: int, size: int) -> list[float]:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=(f"shard_g{generation}",))
    model = nn.Linear(2, 7, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.arange(14.0).reshape(7, 2) + generation)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    captured = TrackedState(model=model, optimizer=optimizer).capture()
    for tensor in captured.tensors.values():
        if isinstance(tensor, torch.distributed.tensor.DTensor):
            assert tensor.device_mesh == mesh
            assert list(tensor.device_mesh.get_coordinate() or ()) == [dist.get_rank()]
    weight: Any = captured.tensors["model.weight"]
    return [float(value) for value in weight.full_tensor().flatten().tolist()]


def test_thirty_generations_leave_no_thread_and_no_descriptor(tmp_path: Path):
    """With the generation in the mesh's name and the caches cleared, nothing piles up."""
    for counts in run_ranks(_thirty, 2, str(tmp_path), timeout_s=120):
        threads, descriptors = zip(*counts, strict=True)
        assert max(threads[-5:]) <= max(threads[2:5])
        assert max(descriptors[-5:]) <= max(descriptors[2:5])


def _thirty(rank: int, world_size: int, folder: str) -> list[tuple[int, int]]:
    dist.destroy_process_group()
    counts = []
    for generation in range(30):
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(f"{folder}/{generation}", 2),
            rank=(rank + generation) % 2,
            world_size=2,
            timeout=timedelta(seconds=60),
        )
        _one_generation(generation, 2)
        dist.destroy_process_group()
        forget_meshes()
        os_threads = len(os.listdir("/proc/self/task"))
        assert os_threads >= threading.active_count()
        counts.append((os_threads, len(os.listdir("/proc/self/fd"))))
    return counts
