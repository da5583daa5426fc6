"""Connecting one rank to its generation: a store of its own, then the process groups.

Rank 0 binds the store's port first and only then tells it, so that no port is chosen early and
found taken late. Every generation has a new store, a new port and a new prefix: a rank of an older
generation cannot join by accident.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_

from elastic.policy.mesh import Mesh, MeshShape
from elastic.training.group_sockets import GroupSockets
from elastic.training.membership import Membership
from elastic.training.meshes import forget_meshes, make_mesh

_STORE_S = 30.0
_MOST_PORTS = 16
_LOOK_UP = timedelta(milliseconds=200)
# Gloo tries five times.
_JOIN_S = 1.0
_JOIN_S_PER_RANK = 0.05


_sockets = GroupSockets()


@dataclass(frozen=True, kw_only=True)
class Groups:
    """The process groups of one generation. The default group carries the training collectives."""

    control: dist.ProcessGroup
    """CPU group for the small agreements at step boundaries."""
    saves: dist.ProcessGroup
    """CPU group for saves alone: their collectives run beside the training ones."""
    mesh: DeviceMesh
    """Over all ranks, by named dimensions."""
    shape: MeshShape
    """Of the mesh."""


def open_store(host: str, timeout_s: float = 60.0) -> dist.TCPStore:
    """A store that listens on a port the system chose; `.port` tells which."""
    store = dist.TCPStore(
        host_name=host,
        port=0,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
    )
    _sockets.spare(store.port)
    return store


class Superseded(Exception):
    """A newer generation was planned while the ranks of this one were still joining."""


def connect(
    member: Membership,
    *,
    use_cuda: bool,
    timeout_s: float,
    mesh: Mesh | None = None,
    server: dist.Store | None = None,
    is_superseded: Callable[[], bool] = lambda: False,
) -> Groups:
    """Join the generation's process groups, those of the mesh's dimensions among them.

    `server` is rank 0's own store; the others connect to it. `timeout_s` bounds each collective.
    Raises:
        ValueError: so many ranks cannot be laid out as `mesh`.
        Superseded: `is_superseded` said so while not all ranks were there.
    """
    shape = (mesh or Mesh()).shape(member.world_size)
    _sockets.begin()
    try:
        return _connect(member, use_cuda, timeout_s, shape, server, is_superseded)
    except BaseException:
        _sockets.forget()
        raise


def _connect(
    member: Membership,
    use_cuda: bool,
    timeout_s: float,
    shape: MeshShape,
    server: dist.Store | None,
    is_superseded: Callable[[], bool],
) -> Groups:
    store = server or _reach_store(member, is_superseded)
    store = dist.PrefixStore(f"generation-{member.generation}", store)
    _meet(store, member, timeout_s, is_superseded)
    # All are there, so that joining takes no time; and a peer that dies meanwhile is waited for,
    # since it may be one that has yet to connect to us.
    joining_s = min(timeout_s, _JOIN_S + _JOIN_S_PER_RANK * member.world_size)
    joining = timedelta(seconds=joining_s)
    dist.init_process_group(
        backend="cpu:gloo,cuda:nccl" if use_cuda else "gloo",
        store=store,
        rank=member.world_rank,
        world_size=member.world_size,
        timeout=joining,
    )
    control = dist.new_group(backend="gloo", timeout=joining)
    saves = dist.new_group(backend="gloo", timeout=joining)
    # Now, not when it is first used: what has no deadline of ours here, and no socket that we know,
    # would wait in vain for a peer that is gone.
    mesh = make_mesh(
        shape,
        device_type="cuda" if use_cuda else "cpu",
        generation=member.generation,
        new_group=lambda ranks: _dimension(ranks, joining),
    )
    _sockets.find(lambda mine: _all_ports(mine, control))
    for group in {dist.group.WORLD, control, saves, *mesh.get_all_groups()}:
        distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)
    return Groups(control=control, saves=saves, mesh=mesh, shape=shape)


def _dimension(ranks: list[int], timeout: timedelta) -> dist.ProcessGroup:
    """The group of these ranks. Only they take part in its making."""
    if len(ranks) == dist.get_world_size():
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    group: dist.ProcessGroup = dist.new_group(
        ranks, timeout=timeout, use_local_synchronization=True
    )
    return group


def _reach_store(member: Membership, is_superseded: Callable[[], bool]) -> dist.TCPStore:
    """A connection to rank 0's store. Tried again and again: one try cannot be called off."""
    until_s = time.monotonic() + _STORE_S
    try_s = 0.25
    while True:
        try:
            store = dist.TCPStore(
                host_name=member.store_host,
                port=member.store_port,
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=try_s),
            )
        except (dist.DistNetworkError, dist.DistStoreError):
            if is_superseded():
                raise Superseded(f"generation {member.generation}") from None
            if time.monotonic() > until_s:
                raise
            try_s *= 2.0
        else:
            store.set_timeout(timedelta(seconds=_STORE_S))
            return store


def _all_ports(mine: Sequence[int], control: dist.ProcessGroup) -> set[int]:
    padded = torch.zeros(_MOST_PORTS, dtype=torch.int64)
    padded[: len(mine)] = torch.tensor(mine[:_MOST_PORTS], dtype=torch.int64)
    found = [torch.zeros_like(padded) for _ in range(control.size())]
    dist.all_gather(found, padded, group=control)
    return {int(port) for ports in found for port in ports if port}


def _meet(
    store: dist.Store, member: Membership, timeout_s: float, is_superseded: Callable[[], bool]
) -> None:
    """Wait until all ranks are there: joining proper cannot be called off, so it comes after."""
    if store.add("here", 1) == member.world_size:
        store.set("all", "1")
    until_s = time.monotonic() + timeout_s
    while True:
        try:
            store.wait(["all"], _LOOK_UP)
            return
        except dist.DistStoreError:
            if is_superseded():
                raise Superseded(f"generation {member.generation}") from None
            if time.monotonic() > until_s:
                raise


def rehearse(device: torch.device) -> None:
    """Make a process group of this process alone, train one step of a sharded model, and end it.

    What is slow the first time (lazy imports, kernels, allocators) is not so the second time.
    """
    use_cuda = device.type == "cuda"
    dist.init_process_group(
        backend="cpu:gloo,cuda:nccl" if use_cuda else "gloo",
        store=dist.HashStore(),
        rank=0,
        world_size=1,
    )
    mesh = init_device_mesh(device.type, (1,), mesh_dim_names=("shard_rehearsal",))
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU()).to(device)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 8, device=device)).sum().backward()
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    del model, optimizer, mesh
    disconnect()
    forget_meshes()


def wake() -> int:
    """End what this process waits for in its process groups; how many gloo sockets it took.

    From any thread. The groups are of no use afterwards.
    """
    _abort_nccl()
    return _sockets.shut_down()


def _abort_nccl() -> None:
    """End NCCL collectives that wait for a peer. Untested: it needs GPUs."""
    if not (torch.cuda.is_available() and dist.is_initialized()):
        return
    groups: dict[Any, Any] = distributed_c10d._world.pg_map
    for group in list(groups):
        with contextlib.suppress(RuntimeError):
            group._get_backend(torch.device("cuda")).abort()


def disconnect() -> None:
    """Leave the process groups without asking the peers, who may be gone or stand still."""
    wake()
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
