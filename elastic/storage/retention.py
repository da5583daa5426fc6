"""Retention, performed: removes the checkpoints that the policy no longer wants.

The rule is `elastic.policy.retention`. Must not import ray or torch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence

from elastic.policy.retention import Retention
from elastic.storage.checkpoints import Catalog
from elastic.storage.pins import pinned_steps
from elastic.storage.suspects import trusted_steps

logger = logging.getLogger("elastic")


def apply(
    catalog: Catalog,
    policy: Retention,
    protected: Collection[int],
    archived: Callable[[Sequence[int]], Collection[int]] = lambda steps: (),
) -> list[int]:
    """Steps of the checkpoints that were removed, oldest first; to be called after a commit.

    Only complete checkpoints that are not suspect are counted and removed. `protected` steps stay:
    those a reader holds, and the last one that was verified. So do pinned ones, for ever.
    `archived` tells which of some steps an archive holds. Storage that fails leaves the rest to the
    next commit: it is no reason to take this one for failed.
    """
    removed = []
    try:
        complete = trusted_steps(catalog)
        for step in policy.to_remove(complete, protected, archived(complete)):
            # Asked anew each time: a pin may be set while the others are being removed.
            if step not in pinned_steps(catalog.fs):
                catalog.remove(step)
                removed.append(step)
    except OSError as error:
        logger.warning("retention left off at %s: %s", removed, error)
    return removed


def make_room(
    catalog: Catalog, policy: Retention, step: int, protected: Collection[int]
) -> list[int]:
    """Steps that were removed since `step`, which could not be saved, would have them removed.

    As `apply`, but before that save is there: the newest that is complete, and not suspect, stays
    in any case.
    """
    steps = trusted_steps(catalog)
    going = policy.to_remove([*steps, step], {*protected, *steps[-1:]})
    removed = []
    for old in going:
        if old in steps and old not in pinned_steps(catalog.fs):
            catalog.remove(old)
            removed.append(old)
    return removed
