"""Late visibility: what the ledger knows and a listing does not show yet is waited for.

A network file system may show a name to another node half a minute late. To resume from what is to
be seen at once would lose the newest work in silence. Must not import ray or torch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from elastic.storage.checkpoints import Catalog
from elastic.storage.ledger import LedgerEvent

__all__ = ["VISIBLE_S", "newest_committed", "wait_until_visible"]

logger = logging.getLogger("elastic")

VISIBLE_S = 35.0
"""How late a store may show what was committed."""
_LOOK_AGAIN_S = 0.5


def newest_committed(past: Iterable[LedgerEvent]) -> int | None:
    """The highest step of those that were committed, and not taken away again, as the ledger tells.

    None if there is none.
    """
    there: set[int] = set()
    for event in past:
        if event.kind == "checkpoint_committed":
            there.add(event.step)
        elif event.kind in ("checkpoint_removed", "checkpoint_quarantined"):
            there.discard(event.step)
        elif event.kind == "rolled_back":
            there = {step for step in there if step <= event.step}
    return max(there, default=None)


def wait_until_visible(
    catalog: Catalog,
    past: Iterable[LedgerEvent],
    *,
    visible_s: float | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Whether the newest checkpoint that was committed, or a higher one, is to be seen.

    Looks again for `VISIBLE_S`, unless `visible_s` says otherwise, and returns False then. One that
    is there and damaged is not waited for, and True. Raises as `Catalog.highest`.
    """
    step = newest_committed(past)
    if step is None:
        return True
    visible_s = VISIBLE_S if visible_s is None else visible_s
    until_s = time.monotonic() + visible_s
    is_told = False
    while not _is_seen(catalog, step):
        if not is_told:
            words = "step-%d of %s was committed and is not to be seen: looking again for %g s"
            logger.warning(words, step, catalog.fs.url, visible_s)
            is_told = True
        if time.monotonic() >= until_s:
            return False
        sleep(_LOOK_AGAIN_S)
    return True


def _is_seen(catalog: Catalog, step: int) -> bool:
    if catalog.knows(step):
        return True
    highest = catalog.highest()
    return highest is not None and highest.step >= step
