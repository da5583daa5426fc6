"""Mesh: how the workers of a group are laid out, which numbers of workers can be, and who waits.

A tensor-parallel group is never split, and beyond one replica all replicas are whole: workers that
make up neither wait until there are enough of them. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

REPLICATE, SHARD, TENSOR = "replicate", "shard", "tensor"


@dataclass(frozen=True, kw_only=True)
class MeshShape:
    """The mesh of one generation. Ranks count through `tensor` first, then `shard`."""

    dims: tuple[tuple[str, int], ...]
    """Name and size of each dimension, the outermost first."""

    def __getitem__(self, name: str) -> int:
        """The size of that dimension; 1 for one that the mesh does not have."""
        return dict(self.dims).get(name, 1)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the dimensions, the outermost first."""
        return tuple(name for name, _ in self.dims)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of the dimensions, the outermost first."""
        return tuple(size for _, size in self.dims)

    @property
    def data_names(self) -> tuple[str, ...]:
        """The dimensions over which the samples are split: those to give to `fully_shard`."""
        return tuple(name for name in self.names if name != TENSOR)

    @property
    def data_size(self) -> int:
        """How many parts a global batch is split into."""
        return self[REPLICATE] * self[SHARD]

    def data_rank(self, world_rank: int) -> int:
        """Whose samples this rank takes: the ranks of a tensor-parallel group take the same."""
        return world_rank // self[TENSOR]

    def tensor_rank(self, world_rank: int) -> int:
        """This rank's place in its tensor-parallel group."""
        return world_rank % self[TENSOR]

    def is_counted(self, world_rank: int) -> bool:
        """Whether this rank stands for its tensor-parallel group, whose ranks have one and the
        same: what they use and measure together is not to be summed over them."""
        return self.tensor_rank(world_rank) == 0

    def __str__(self) -> str:
        return " x ".join(f"{name} {size}" for name, size in self.dims)


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """How the owner of a run wants its workers laid out. By default all are one shard group.

    Raises ValueError for a size below 1.
    """

    shard: int | None = None
    """Data-parallel workers that hold one copy of the model's state together (HSDP): there are as
    many such replicas as there are workers for, and with fewer workers than for one replica, a
    smaller one. None: all workers hold one copy, whatever their number (FSDP)."""
    tensor: int = 1
    """Workers that compute one sample together: the size of a tensor-parallel group."""

    def __post_init__(self) -> None:
        for name, size in (("tensor", self.tensor), ("shard", self.shard)):
            is_number = isinstance(size, int) and not isinstance(size, bool)
            if size is not None and not (is_number and size >= 1):
                raise ValueError(f"Mesh({name}=...) is a number of workers, from 1; found {size!r}")

    def largest(self, most: int) -> int:
        """The largest number of workers up to `most` that can be a group; 0 where none can."""
        replica = self.tensor * (self.shard or 1)
        unit = replica if most >= replica else self.tensor
        return most - most % unit

    def smallest(self, least: int) -> int:
        """The smallest number of workers from `least` on that can be a group."""
        replica = self.tensor * (self.shard or 1)
        unit = self.tensor if least <= replica else replica
        return -(-least // unit) * unit

    def fits(self, num_workers: int) -> bool:
        """Whether so many workers can be a group, all of them."""
        return num_workers >= 1 and self.largest(num_workers) == num_workers

    def shape(self, world_size: int) -> MeshShape:
        """The mesh of a group of this size. It has the same dimensions at every size.

        Raises `ValueError` where `fits` is false.
        """
        if not self.fits(world_size):
            workers = "1 worker" if world_size == 1 else f"{world_size} workers"
            below = self.largest(max(0, world_size))
            before = f"the number before is {below}, and " if below else ""
            raise ValueError(
                f"{workers} cannot be laid out as {self}: {before}the next number is "
                f"{self.smallest(max(1, world_size))}. Take another number of workers, or another "
                "Mesh(shard=, tensor=)"
            )
        data = world_size // self.tensor
        shard = data if self.shard is None else min(data, self.shard)
        dims = [] if self.shard is None else [(REPLICATE, data // shard)]
        dims.append((SHARD, shard))
        if self.tensor > 1:
            dims.append((TENSOR, self.tensor))
        return MeshShape(dims=tuple(dims))

    def left_out(self, nodes: Sequence[str]) -> frozenset[int]:
        """Which of the workers on these nodes wait, by their index.

        As few as can be; and of those that could, the ones that would have a tensor-parallel group
        reach over two nodes, then those of the node with the fewest.
        """
        waiting: set[int] = set()
        counts = Counter(nodes)
        for _ in range(len(nodes) - self.largest(len(nodes))):
            node = min(counts, key=lambda one: (counts[one] % self.tensor == 0, counts[one], one))
            here = [index for index, one in enumerate(nodes) if one == node]
            waiting.add(max(set(here) - waiting))
            counts[node] -= 1
            counts += Counter()  # drops the nodes that are empty
        return frozenset(waiting)

    @property
    def note(self) -> str:
        """For a person who wonders why workers wait; empty where every number of them can be."""
        if self.tensor == 1 and self.shard in (None, 1):
            return ""
        return f"the workers are laid out as {self}"

    def __str__(self) -> str:
        groups = [] if self.shard is None else [f"whole replicas of shard {self.shard}"]
        if self.tensor > 1:
            groups.append(f"tensor-parallel groups of {self.tensor}")
        return " x ".join(groups) or "one shard group"


def checked_mesh(mesh: Any) -> Mesh:
    """The same mesh. Raises TypeError for what is none."""
    if not isinstance(mesh, Mesh):
        raise TypeError(
            "mesh must be an elastic.Mesh, such as elastic.Mesh(shard=8, tensor=2), which says how "
            f"workers are laid out at any number of them; found {mesh!r} of type "
            f"{type(mesh).__name__}"
        )
    return mesh
