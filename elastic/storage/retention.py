"""Retention, performed: removes the checkpoints that the policy no longer wants.

The rule is `elastic.policy.retention`. Must not import ray or torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from elastic.policy.retention import Retention
from elastic.storage.checkpoints import Catalog
from elastic.storage.pins import pinned_steps


def apply(
    catalog: Catalog,
    policy: Retention,
    protected: Collection[int],
    archived: Callable[[Sequence[int]], Collection[int]] = lambda steps: (),
) -> list[int]:
    """Steps of the checkpoints that were removed, oldest first; to be called after a commit.

    Only complete checkpoints are counted and removed. `protected` steps stay: those a reader holds,
    and the last one that was verified. So do pinned ones, for ever. `archived` tells which of some
    steps an archive holds.
    """
    removed = []
    complete = catalog.complete_steps()
    for step in policy.to_remove(complete, protected, archived(complete)):
        # Asked anew each time: a pin may be set while the others are being removed.
        if step not in pinned_steps(catalog.fs):
            catalog.remove(step)
            removed.append(step)
    return removed
