"""Rollback: back to an earlier checkpoint, the newer ones set aside with the reason, none deleted.

Only the holder of the run's lease may do it. Must not import ray or torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from elastic.storage import quarantine
from elastic.storage.archive import Archive
from elastic.storage.checkpoints import Catalog
from elastic.storage.ledger import LedgerWriter, read_ledger
from elastic.storage.readmission import last_set_aside
from elastic.storage.suspects import lift


@dataclass(frozen=True, kw_only=True)
class Rollback:
    """What one rollback has done: complete checkpoints that no longer count, by step."""

    to_step: int
    set_aside: dict[int, str]
    """Where each one's files, or its marker, lie now, relative to the run's root."""
    trusted: bool = False
    """Checkpoints that were suspect are so no more."""


class RollbackRefused(Exception):
    """There is no complete checkpoint at the step to go back to; none was touched."""

    def __init__(self, url: str, step: int, why: str) -> None:
        super().__init__(url, step, why)
        self.url = url
        self.step = step
        self.why = why

    def __str__(self) -> str:
        return (
            f"cannot take {self.url} back to step {self.step}: {self.why}. "
            "No checkpoint was touched"
        )


def roll_back(
    catalog: Catalog,
    ledger: LedgerWriter,
    to_step: int,
    reason: str,
    *,
    time_s: float,
    archive: Archive | None = None,
) -> Rollback:
    """Make the complete checkpoint of `to_step` the highest, so that it is resumed next.

    One that only the archive has is brought back first, and none is suspect after it. The ledger is
    told before any newer one is set aside, and of nothing if nothing changes. They go highest
    first: cut short, the run is at one of them, and rolling back again ends it. Raises
    `RollbackRefused`, `UnsupportedFormat`, and what `Archive.bring_back` does.
    """
    newer = steps_above(catalog, to_step, archive)
    is_back = archive is not None and not catalog.inspect(to_step).complete
    if archive is not None and is_back:
        archive.bring_back(to_step, catalog)
    # Who names a checkpoint to go back to trusts it.
    trusted = lift(catalog.fs)
    if newer or is_back or trusted:
        data: dict[str, object] = {"set_aside": newer}
        if archive is not None and is_back:
            data["from_archive"] = archive.fs.url
        ledger.append("rolled_back", step=to_step, reason=reason, data=data, time_s=time_s)
    why = f"rolled back to step {to_step}: {reason}"
    return Rollback(
        to_step=to_step,
        set_aside={step: catalog.quarantine(step, why) for step in newer},
        trusted=trusted,
    )


def steps_above(catalog: Catalog, to_step: int, archive: Archive | None = None) -> list[int]:
    """The complete checkpoints that a rollback would set aside, highest first.

    Raises `RollbackRefused` if that of `to_step` is not complete, in the archive neither;
    `UnsupportedFormat`.
    """
    complete = catalog.complete_steps()
    if to_step not in complete:
        try:
            is_archived, trouble = archive is not None and archive.has(to_step), ""
        except Exception as error:  # noqa: BLE001 - storage clients raise classes of their own
            is_archived, trouble = False, f"; the archive cannot be read: {error}"
        if not is_archived:
            why = _why_not(catalog, to_step, complete) + trouble
            raise RollbackRefused(catalog.fs.url, to_step, why)
    return [step for step in reversed(complete) if step > to_step]


def _why_not(catalog: Catalog, step: int, complete: list[int]) -> str:
    why = _in_quarantine(catalog, step) or catalog.inspect(step).reason
    if not complete:
        return f"it has no complete checkpoint (step {step}: {why})"
    steps = ", ".join(map(str, complete[-10:]))
    more = f" and {len(complete) - 10} older" if len(complete) > 10 else ""
    return (
        f"it is not one of its complete checkpoints, which are those of the steps {steps}{more} "
        f"(step {step}: {why})"
    )


def _in_quarantine(catalog: Catalog, step: int) -> str:
    """Where it lies, since when and why, and what brings it back; "" if it was not set aside."""
    path = last_set_aside(catalog, step)
    if path is None:
        return ""
    (reason,) = (one.reason for one in quarantine.checkpoints(catalog.fs) if one.path == path)
    return (
        f"in the quarantine, {path},{_since(catalog, step)} {reason}; `elastic checkpoints restore "
        f"{catalog.fs.url} --step {step}` brings it back if its bytes are sound"
    )


def _since(catalog: Catalog, step: int) -> str:
    """When the ledger says that it was set aside, "" if it does not."""
    times = [
        event.time_s
        for event in read_ledger(catalog.fs)
        if (event.kind == "checkpoint_quarantined" and event.step == step)
        or (event.kind == "rolled_back" and step in event.data.get("set_aside", []))
    ]
    return f" since {datetime.fromtimestamp(times[-1], UTC):%Y-%m-%d %H:%M} UTC," if times else ""
