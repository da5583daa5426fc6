"""Retention, performed: removes the checkpoints that the policy no longer wants.

The rule is `elastic.policy.retention`. Must not import ray or torch.
"""

from __future__ import annotations

from collections.abc import Collection

from elastic.policy.retention import Retention
from elastic.storage.checkpoints import Catalog


def apply(catalog: Catalog, policy: Retention, protected: Collection[int]) -> list[int]:
    """Steps of the checkpoints that were removed, oldest first; to be called after a commit.

    Only complete checkpoints are counted and removed. `protected` steps stay: those a reader holds,
    and the last one that was verified.
    """
    removed = policy.to_remove(catalog.complete_steps(), protected)
    for step in removed:
        catalog.remove(step)
    return removed
