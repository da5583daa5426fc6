"""How large the group can be: counting workers on nodes. Pure arithmetic, no ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

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


def _fit(resources: Mapping[str, float], needs: Mapping[str, float]) -> int:
    return max(
        0,
        min(int((resources.get(name, 0.0) + _EPSILON) // need) for name, need in needs.items()),
    )


def count_workers(nodes: Sequence[NodeCapacity], per_worker: Mapping[str, float]) -> int:
    """How many workers fit on all these nodes together."""
    return sum(workers_on(node, per_worker) for node in nodes)


def describe(nodes: Sequence[NodeCapacity], per_worker: Mapping[str, float]) -> str:
    """What was found, in words, for a person who wonders why the run waits."""
    need = ", ".join(f"{name} {amount:g}" for name, amount in sorted(per_worker.items()))
    found = "; ".join(
        f"node {node.node_id[:8]} fits {workers_on(node, per_worker)}" for node in nodes
    )
    return f"each worker needs {need}; {found or 'no living node offers any'}"
