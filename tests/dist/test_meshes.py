"""The private names of torch that a re-form needs, and the trap of meshes that look alike."""

from __future__ import annotations

import inspect
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from elastic.policy.mesh import TENSOR, Mesh
from elastic.training.process_group import Groups
from elastic.training.state import TrackedState
from tests.dist.mesh_run import Layout, backward, built, generation
from tests.dist.processes import run_ranks


def test_private_names_of_torch_are_there():
    from torch.distributed.tensor import _redistribute
    from torch.distributed.tensor._collective_utils import MeshTopoInfo
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    for function in (_clear_sharding_prop_cache, _redistribute.clear_redistribute_planner_cache):
        assert not inspect.signature(function).parameters
    assert callable(_redistribute._gen_transform_infos.cache_clear)
    assert callable(MeshTopoInfo.build_from_mesh.cache_clear)
    assert list(inspect.signature(DeviceMesh._get_mesh_dim_by_name).parameters) == [
        "self",
        "mesh_dim_name",
    ]
    assert callable(torch._foreach_norm) and callable(torch._foreach_mul_)


ALL = (
    (Mesh(), ([0, 1, 2], [2, 1], [1, 0, 2], [1], [2, 0, 1])),
    (Mesh(shard=2), ([0, 1, 2, 3], [3, 1], [2, 3, 1, 0], [2, 0], [1, 0, 3, 2])),
    (Mesh(tensor=2), ([0, 1, 2, 3], [3, 1], [2, 3, 1, 0], [2, 0], [1, 0, 3, 2])),
    (Mesh(shard=1, tensor=2), ([0, 1, 2, 3], [3, 1], [2, 3, 1, 0], [2, 0], [1, 0, 3, 2])),
)


@pytest.mark.parametrize(("mesh", "rounds"), ALL, ids=lambda one: str(one) if one else "")
def test_renumbered_generations_hold_their_own_shards(
    tmp_path: Path, mesh: Mesh, rounds: tuple[list[int], ...]
):
    """To fewer ranks and back, and renumbered: full tensors are right in every generation."""
    found = run_ranks(_renumbered, 4, str(tmp_path), mesh, rounds, timeout_s=90)
    for number, ranks in enumerate(rounds):
        told = [found[process][number] for process in ranks]
        assert all(full == _expected(number) for full in told), number


def _expected(number: int) -> list[float]:
    return [float(value + number) for value in range(6 * 2)]


def _renumbered(
    process: int, world_size: int, folder: str, mesh: Mesh, rounds: tuple[list[int], ...]
) -> dict[int, list[float]]:
    full: dict[int, list[float]] = {}
    for number, ranks in enumerate(rounds):
        if process in ranks:
            layout = Layout(len(ranks), mesh)
            with generation(number, ranks.index(process), layout, folder) as groups:
                full[number] = _one_generation(number, groups)
    return full


def _one_generation(number: int, groups: Groups) -> list[float]:
    model = nn.Sequential(nn.Linear(2, 6, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.arange(12.0).reshape(6, 2) + number)
    if TENSOR in groups.shape.names:
        parallelize_module(model, groups.mesh[TENSOR], {"0": ColwiseParallel()})
    data_mesh = groups.mesh[groups.shape.data_names]
    fully_shard(model, mesh=data_mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    captured = TrackedState(model=model, optimizer=optimizer).capture()
    whole = data_mesh if TENSOR not in groups.shape.names else groups.mesh
    for tensor in captured.tensors.values():
        if isinstance(tensor, DTensor):
            assert tensor.device_mesh == whole
            assert tensor.device_mesh.get_coordinate() == whole.get_coordinate()
    weight: Any = captured.tensors["model.0.weight"]
    return [float(value) for value in weight.full_tensor().flatten().tolist()]


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(shard=1), Mesh(tensor=2)], ids=str)
def test_thirty_generations_leave_no_thread_and_no_descriptor(tmp_path: Path, mesh: Mesh):
    """With the generation in the mesh's name and the caches cleared, nothing piles up."""
    for counts in run_ranks(_thirty, 2, str(tmp_path), mesh, timeout_s=120):
        threads, descriptors = zip(*counts, strict=True)
        assert max(threads[-5:]) <= max(threads[2:5])
        assert max(descriptors[-5:]) <= max(descriptors[2:5])


def _thirty(rank: int, world_size: int, folder: str, mesh: Mesh) -> list[tuple[int, int]]:
    counts = []
    for number in range(30):
        with generation(number, (rank + number) % 2, Layout(2, mesh), folder) as groups:
            _one_generation(number, groups)
        os_threads = len(os.listdir("/proc/self/task"))
        assert os_threads >= threading.active_count()
        counts.append((os_threads, len(os.listdir("/proc/self/fd"))))
    return counts


def test_dimensions_go_by_plain_names_and_are_told_apart_by_generation(tmp_path: Path):
    run_ranks(_named, 4, str(tmp_path))


def _named(rank: int, world_size: int, folder: str) -> None:
    seen: list[DeviceMesh] = []
    for number in range(2):
        with generation(number, rank, Layout(4, Mesh(shard=1, tensor=2)), folder) as groups:
            mesh = groups.mesh
            assert mesh.mesh_dim_names == tuple(
                f"{name}_g{number}" for name in ("replicate", "shard", "tensor")
            )
            assert mesh["tensor"].get_group().size() == mesh.get_group("tensor").size() == 2
            assert mesh.get_local_rank("replicate") == rank // 2
            assert mesh["tensor"].get_local_rank() == rank % 2
            data = mesh["replicate", "shard"]
            assert data.shape == (2, 1) and data["replicate"] == mesh["replicate"]
            assert data.get_local_rank("replicate") == rank // 2
            assert mesh[mesh.mesh_dim_names[2]] == mesh["tensor"]  # torch asks by these
            with pytest.raises(KeyError, match="pipeline"):
                mesh["pipeline"]
            parts = [mesh, data, mesh["tensor"]]
            assert all(part != other for part in parts for other in seen)
            seen += parts


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(tensor=2)], ids=str)
def test_compiled_layers_have_the_same_gradients(tmp_path: Path, mesh: Mesh):
    """Torch traces meshes too, and must take ours for one of its own."""
    run_ranks(_compiled, 2, str(tmp_path), mesh)


def _compiled(rank: int, world_size: int, folder: str, mesh: Mesh) -> None:
    with generation(0, rank, Layout(2, mesh), folder) as groups:
        found = []
        for compiles in (False, True):
            model = built(groups, 0)
            for layer in (model.up, model.down) if compiles else ():
                layer.compile(backend="aot_eager")
            backward(model, 0, groups.shape, rank)
            gradients = [parameter.grad for parameter in model.parameters()]
            found.append([one.full_tensor() for one in gradients if isinstance(one, DTensor)])
        assert len(found[0]) == 9
        for plain, compiled in zip(*found, strict=True):
            torch.testing.assert_close(compiled, plain)
