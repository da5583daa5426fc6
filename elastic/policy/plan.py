"""How large the group can be: counting workers on nodes. Pure arithmetic, no ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

# What every machine has; a worker that needs more than these needs an accelerator.
_ORDINARY = frozenset({"CPU", "memory", "object_store_memory"})
# Ray keeps resources in ten-thousandths; a float just below a whole number is that number.
_EPSILON = 1e-4


@dataclass(frozen=True, kw_only=True)
class NodeCapacity:
    """What one living node has to offer now. Resources are in Ray's units (CPUs, GPUs, bytes)."""

    node_id: str
    available: Mapping[str, float] = field(default_factory=dict)
    total: Mapping[str, float] = field(default_factory=dict)
    num_held: int = 0
    """Workers of this run that hold resources there; they are free for a new generation."""
    accelerator: str = ""
    """The type of its accelerators, "" where it has none or none is told."""


def workers_on(node: NodeCapacity, per_worker: Mapping[str, float]) -> int:
    """How many workers fit on a node, those that run there already included.

    Never more than its total allows: workers that have just ended are counted as held, and what
    they used may be counted as available too.
    """
    needs = {name: amount for name, amount in per_worker.items() if amount > 0}
    if not needs:
        raise ValueError(
            "a worker must need some resource, or any number would fit on one node; "
            f"found resources_per_worker={dict(per_worker)}: give it at least a fraction of a CPU"
        )
    return min(node.num_held + _fit(node.available, needs), _fit(node.total, needs))


def could_ever_fit(node: NodeCapacity, per_worker: Mapping[str, float]) -> bool:
    """Whether one worker would fit on the node if nothing else were there."""
    return _fit(node.total, {name: amount for name, amount in per_worker.items() if amount > 0}) > 0


def _fit(resources: Mapping[str, float], needs: Mapping[str, float]) -> int:
    return max(
        0,
        min(int((resources.get(name, 0.0) + _EPSILON) // need) for name, need in needs.items()),
    )


def count_workers(nodes: Sequence[NodeCapacity], per_worker: Mapping[str, float]) -> int:
    """How many workers fit on all these nodes together."""
    return sum(workers_on(node, per_worker) for node in nodes)


def of_one_accelerator(
    nodes: Sequence[NodeCapacity], per_worker: Mapping[str, float]
) -> list[NodeCapacity]:
    """The nodes of one accelerator type, for a group is as fast as its slowest rank.

    The type on which the run's workers are, or else the one with room for most workers. All nodes
    where a worker needs no accelerator.
    """
    if all(name in _ORDINARY for name, amount in per_worker.items() if amount > 0):
        return list(nodes)
    by_type: dict[str, list[NodeCapacity]] = {}
    for node in nodes:
        by_type.setdefault(node.accelerator, []).append(node)

    def worth(alike: list[NodeCapacity]) -> tuple[int, int]:
        return sum(node.num_held for node in alike), count_workers(alike, per_worker)

    return max(by_type.values(), key=worth, default=[])


def describe(nodes: Sequence[NodeCapacity], per_worker: Mapping[str, float]) -> str:
    """What was found, in words, for a person who wonders why the run waits."""
    need = ", ".join(f"{name} {amount:g}" for name, amount in sorted(per_worker.items()))
    found = "; ".join(
        f"node {node.node_id[:8]} fits {workers_on(node, per_worker)}" for node in nodes
    )
    return f"each worker needs {need}; {found or 'no living node offers any'}"
