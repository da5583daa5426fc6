"""Host memory: whether every node has room for the copies that its ranks' saves are made from.

Asked once, before the first step: the same shortage would otherwise come hours later, as a process
that the kernel has killed. Must not import ray.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from elastic.training.node_name import node_name
from elastic.training.share import share_of

__all__ = [
    "HostMemoryShort",
    "available_bytes",
    "check_host_memory",
    "growth_bytes",
    "staging_bytes",
]

# What torch.save puts around a tensor.
_AROUND_BYTES = 2048
_PROBE = 32


class HostMemoryShort(Exception):
    """A node has no room for the copies of its ranks' state."""

    def __init__(self, node: str, num_ranks: int, needed_bytes: int, found_bytes: int) -> None:
        super().__init__(node, num_ranks, needed_bytes, found_bytes)
        self.node, self.num_ranks = node, num_ranks
        self.needed_bytes, self.found_bytes = needed_bytes, found_bytes

    def __str__(self) -> str:
        return (
            f"node {self.node} has too little host memory to save from: the copies of the "
            f"state of its {self.num_ranks} ranks take {self.needed_bytes / 1e9:.2f} GB, found "
            f"{self.found_bytes / 1e9:.2f} GB (the least of what the system and the control group "
            "have left). Use fewer ranks on a node, nodes with more memory, or more ranks in all, "
            "of which each holds less"
        )


def staging_bytes(
    tensors: Mapping[str, torch.Tensor], optimizers: Iterable[torch.optim.Optimizer], rank: int
) -> int:
    """What this rank's copies take, also of the state that optimizers make at their first step."""
    pieces, sources, _ = share_of(tensors, rank)
    coming_bytes, num_coming = growth_bytes(optimizers)
    here_bytes = sum(source.nbytes for source in sources)
    return here_bytes + coming_bytes + (len(pieces) + num_coming) * _AROUND_BYTES


def growth_bytes(optimizers: Iterable[torch.optim.Optimizer]) -> tuple[int, int]:
    """What optimizers will still add on this rank at their first step: bytes, and tensors."""
    total, num_parameters = 0, 0
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and not optimizer.state.get(parameter):
                    total += _state_bytes(optimizer, group, parameter)
                    num_parameters += 1
    return total, 3 * num_parameters


def check_host_memory(
    needed_bytes: int, node_rank: int, group: dist.ProcessGroup, found_bytes: int, peer: str = ""
) -> None:
    """Every rank of the group calls it, with what it needs beyond what it holds and what it finds.

    `peer` is a host that the others reach, too: a node is named by its address on the way there.

    Raises `HostMemoryShort`, on all ranks alike.
    """
    mine = torch.tensor([node_rank, needed_bytes, found_bytes], dtype=torch.int64)
    everyone = [torch.zeros_like(mine) for _ in range(group.size())]
    dist.all_gather(everyone, mine, group=group)
    nodes: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for rank, (node, needed, found) in enumerate(told.tolist() for told in everyone):
        nodes[node].append((rank, needed, found))
    for node, told in sorted(nodes.items()):
        needed, found = sum(one[1] for one in told), min(one[2] for one in told)
        if needed > found:  # which all ranks find alike
            names: list[Any] = [None] * group.size()
            dist.all_gather_object(names, node_name(peer), group=group)
            raise HostMemoryShort(f"{node}, {names[told[0][0]]},", len(told), needed, found)


def available_bytes(root: Path = Path("/")) -> int:
    """What may still be taken on this machine and in the control groups of this process."""
    rooms = [_system_bytes(root), *_group_rooms(root)]
    return min(rooms)


def _system_bytes(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) << 10
    return 1 << 62  # a kernel that does not tell


def _group_rooms(root: Path) -> list[int]:
    """Of each control group above this process that has a limit: the limit less what is used.

    Memory that only caches files counts as free: the kernel takes it back first.
    """
    rooms = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, limit, used = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            limit, used = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        parts = Path(path.lstrip("/")).parts
        for depth in range(len(parts) + 1):
            folder = mount.joinpath(*parts[:depth])
            bounds = [_read(folder / name).strip() for name in (limit, used)]
            if all(bound.isdecimal() for bound in bounds):
                rooms.append(int(bounds[0]) - int(bounds[1]) + _cached_bytes(folder))
    return rooms


def _cached_bytes(folder: Path) -> int:
    for line in _read(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _state_bytes(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameter: torch.Tensor
) -> int:
    """What the optimizer's first step will make for it on this rank."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    probe = torch.zeros([_PROBE] * min(local.dim(), 2), dtype=local.dtype)
    return math.ceil(local.nbytes * _ratio(type(optimizer), group, probe))


def _ratio(
    kind: Callable[..., torch.optim.Optimizer], group: Mapping[str, Any], probe: torch.Tensor
) -> float:
    """Bytes of state for each byte of a parameter, tried out on a small one.

    Nothing is tried with an optimizer that is not torch's own, whose making could do anything.
    """
    if not kind.__module__.startswith("torch.optim"):
        return 0.0
    plain = {"fused": False, "foreach": False, "capturable": False, "differentiable": False}
    settings = {name: plain.get(name, value) for name, value in group.items() if name in plain}
    others = {k: v for k, v in group.items() if k not in ("params", "param_names", *plain)}
    parameter = torch.nn.Parameter(probe)
    parameter.grad = torch.zeros_like(parameter)
    try:
        trial = kind([{"params": [parameter], **others, **settings}])
        _bare_step(trial)
    except (TypeError, ValueError, RuntimeError):
        return 0.0  # one that wants a closure, or parameters of another kind
    made: Sequence[torch.Tensor] = [
        value for value in trial.state[parameter].values() if isinstance(value, torch.Tensor)
    ]
    return sum(tensor.nbytes for tensor in made) / max(1, parameter.nbytes)


def _bare_step(optimizer: torch.optim.Optimizer) -> None:
    """Past torch's wrapper, which calls the hooks that people have on every optimizer's step."""
    step = type(optimizer).step
    with torch.no_grad():
        getattr(step, "__wrapped__", step)(optimizer)
