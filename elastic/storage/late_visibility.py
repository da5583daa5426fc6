"""Late visibility: what the ledger knows and a listing does not show yet is waited for.

A network file system may show a name to another node half a minute late. To resume from what is to
be seen at once would lose the newest work in silence. Must not import ray or torch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from elastic.policy.events import Record
from elastic.storage.checkpoints import Catalog
from elastic.storage.ledger import LedgerEvent

__all__ = ["AWAITED", "VISIBLE_S", "committed_steps", "wait_for"]

logger = logging.getLogger("elastic")

VISIBLE_S = 35.0
"""How late a store may show what was committed."""
AWAITED = "checkpoint_awaited"
"""The ledger's word for such a wait."""
_LOOK_AGAIN_S = 0.5


def committed_steps(past: Iterable[LedgerEvent]) -> set[int]:
    """Steps that were committed, and not taken away again, as the ledger tells."""
    there: set[int] = set()
    for event in past:
        if event.kind in ("checkpoint_committed", "checkpoint_restored"):
            there.add(event.step)
        elif event.kind in ("checkpoint_removed", "checkpoint_quarantined"):
            there.discard(event.step)
        elif event.kind == "rolled_back":
            there = {step for step in there if step <= event.step}
    return there


def wait_for(
    catalog: Catalog,
    step: int | None,
    *,
    tell: Callable[[Record], object] = lambda record: None,
    visible_s: float | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Whether the checkpoint of `step`, or a higher one, is to be seen; True for None.

    Looks again for `VISIBLE_S`, unless `visible_s` says otherwise, and returns False then; `tell`
    is called when such a wait begins. One that is there and damaged is not waited for, and True.
    Raises as `Catalog.highest`.
    """
    if step is None:
        return True
    visible_s = VISIBLE_S if visible_s is None else visible_s
    until_s = time.monotonic() + visible_s
    is_told = False
    while not _is_seen(catalog, step):
        if not is_told:
            url = catalog.fs.url
            words = f"step-{step} of {url} was committed and is not to be seen: looking again"
            logger.warning("%s for %g s", words, visible_s)
            tell(Record(kind=AWAITED, step=step, reason=f"{words} for {visible_s:g} s"))
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
