"""Failed saves: what becomes of the files of a save that is no checkpoint.

They are removed at once, so that the next save has their room. Where storage is full, checkpoints
that retention would remove after that save go before it; the newest complete one never does. Must
not import ray.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

from elastic.policy.retention import Retention
from elastic.storage import retention
from elastic.storage.checkpoints import AlreadyComplete, Catalog
from elastic.storage.store_errors import is_full
from elastic.training.coordinator import Shard

__all__ = ["FULL", "clean_up"]

logger = logging.getLogger("elastic")

FULL = "storage is full"
"""Why a checkpoint went early, in the ledger."""


def clean_up(
    catalog: Catalog,
    shard: Shard,
    reason: str,
    keep: Retention,
    protected: Collection[int],
    check_right: Callable[[], object],
) -> list[int]:
    """Steps of the checkpoints that were removed to make room, oldest first.

    `shard` is any of the save's, once no rank writes to it any more; `reason` is why it failed.
    `check_right` raises if this process may write to the run no longer. Raises nothing: storage
    that fails a save may well fail this too.
    """
    try:
        check_right()
        catalog.discard(shard.path)
        if not is_full(reason):
            return []
        removed = retention.make_room(catalog, keep, shard.step, protected)
    except AlreadyComplete:
        return []  # it was published, and only the word of it was lost
    except Exception as error:  # noqa: BLE001 - storage clients raise classes of their own
        logger.warning("cannot remove what a failed save left in %s: %s", shard.path, error)
        return []
    logger.error(
        "storage %s is full: the save of step %d failed, %s",
        catalog.fs.url,
        shard.step,
        f"removed the checkpoints of steps {removed}" if removed else "and nothing can be removed",
    )
    return removed
