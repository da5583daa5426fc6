"""Meshes: the device mesh of a generation, and forgetting it when the generation is over.

DTensor caches by mesh, and takes two meshes of one shape for equal although this process's rank in
them differs; what it caches also keeps the old process groups alive, with their threads and
sockets. So the generation stands in the names of the dimensions, which are called by plain ones,
and the caches are cleared. Must not import ray.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, _redistribute
from torch.distributed.tensor._collective_utils import MeshTopoInfo
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from elastic.policy.mesh import SHARD, MeshShape

__all__ = ["RunMesh", "check_sharding", "forget_meshes", "make_mesh"]

NewGroup = Callable[[list[int]], dist.ProcessGroup]


class RunMesh(DeviceMesh):
    """A mesh whose dimensions go by plain names, `replicate`, `shard` and `tensor`.

    `mesh_dim_names` holds the true ones, with the generation in them; they are understood too.
    """

    plain_names: dict[str, str]
    """True names by plain ones."""

    def __getitem__(self, mesh_dim_names: str | tuple[str, ...]) -> DeviceMesh:
        """The part of the mesh over these dimensions, in the order of the whole."""
        names = (mesh_dim_names,) if isinstance(mesh_dim_names, str) else mesh_dim_names
        found = super().__getitem__(tuple(self.plain_names.get(name, name) for name in names))
        return _by_plain_names(found, self.plain_names)

    def _get_mesh_dim_by_name(self, mesh_dim_name: str) -> int:
        # Of torch: what get_group and get_local_rank look a name up with.
        return super()._get_mesh_dim_by_name(self.plain_names.get(mesh_dim_name, mesh_dim_name))


def _by_plain_names(mesh: DeviceMesh, plain_names: dict[str, str]) -> RunMesh:
    # What torch makes of groups, or of a part of a mesh, is a DeviceMesh and nothing else.
    mesh.__class__ = RunMesh
    assert isinstance(mesh, RunMesh)
    mesh.plain_names = plain_names
    return mesh


def make_mesh(
    shape: MeshShape, *, device_type: str, generation: int, new_group: NewGroup
) -> RunMesh:
    """The mesh of a generation over all its ranks, which all call it.

    `new_group` makes a group of this rank and the others of one dimension, or finds one.
    """
    ranks = torch.arange(dist.get_world_size(), dtype=torch.int).reshape(shape.sizes)
    place = (ranks == dist.get_rank()).nonzero()[0].tolist()
    groups = []
    for dim in range(ranks.ndim):
        index = tuple(slice(None) if one == dim else place[one] for one in range(ranks.ndim))
        groups.append(new_group(ranks[index].tolist()))
    plain_names = {name: f"{name}_g{generation}" for name in shape.names}
    mesh = DeviceMesh.from_group(
        groups, device_type, mesh=ranks, mesh_dim_names=tuple(plain_names.values())
    )
    return _by_plain_names(mesh, plain_names)


def check_sharding(model: nn.Module, mesh: DeviceMesh, shape: MeshShape) -> None:
    """Raises `ValueError` for an FSDP parameter whose gradient would not be that of all samples.

    Torch says nothing of it: replicas drift apart, or a tensor-parallel group's one gradient is
    summed several times. Parameters on meshes that are not the run's are the user's own affair.
    """
    plain_names = dict(zip(mesh.mesh_dim_names or (), shape.names, strict=True))
    seen: set[int] = set()
    for where, module in model.named_modules():
        for name, parameter in module.named_parameters(where):
            is_new = isinstance(module, FSDPModule) and id(parameter) not in seen
            if is_new and isinstance(parameter, DTensor):
                seen.add(id(parameter))
                _check_parameter(name, parameter, plain_names, shape.data_names)


def _check_parameter(
    name: str, parameter: DTensor, plain_names: dict[str, str], data: tuple[str, ...]
) -> None:
    names = [plain_names.get(one) for one in parameter.device_mesh.mesh_dim_names or ()]
    if None in names or not {*names} & {*data}:
        return
    lies = dict(zip(names, parameter.placements, strict=True))
    if {*data} <= lies.keys() and not lies[SHARD].is_replicate():
        return
    told = ", ".join(f"{dim}: {placement}" for dim, placement in lies.items())
    dims = ", ".join(map(repr, data))
    raise ValueError(
        f"{name} lies as ({told}), so that its gradient would not be the sum over {dims}, where "
        f"the samples are: expected fully_shard(..., mesh=run.data_mesh), or run.mesh[{dims}]"
    )


def forget_meshes() -> None:
    """Drop what DTensor has cached in this thread, which must be the one that trained."""
    _clear_sharding_prop_cache()
    _redistribute.clear_redistribute_planner_cache()
    _redistribute._gen_transform_infos.cache_clear()
    MeshTopoInfo.build_from_mesh.cache_clear()
    gc.collect()
