"""What a run's archive still lacks, as the ledger tells: which steps, since when, and why. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from elastic.dashboard.text import age, count
from elastic.storage.ledger import LedgerEvent

__all__ = ["ArchiveLag", "archive_lag", "archive_text"]

_MOST_STEPS = 4
_MOST_WORDS = 200


@dataclass(frozen=True, kw_only=True)
class ArchiveLag:
    """How far the archive has come. The steps are of checkpoints that belong there."""

    url: str
    newest_step: int | None
    """The last that was taken there; None where none was."""
    missing_steps: list[int]
    """Those that were committed and are not there yet, ascending."""
    failing_since_s: float | None
    """The first failure of those that were not made good, a time of day; None where there is
    none."""
    why: str
    """The newest failure in its own words, "" where there is none."""


@dataclass
class _Fold:
    newest_step: int | None = None
    missing: set[int] = field(default_factory=set)
    failed: dict[int, tuple[float, str]] = field(default_factory=dict)

    def hear(self, event: LedgerEvent, url: str, every: int) -> None:
        kind, step = event.kind, event.step
        if kind in ("checkpoint_committed", "checkpoint_restored"):
            self.missing |= {step} if step % every == 0 else set()
        elif kind == "checkpoint_archived" and event.data.get("archive") == url:
            self.newest_step = step
            self._settle(step)
        elif kind in ("checkpoint_removed", "checkpoint_quarantined"):
            self._settle(step)
        elif kind == "rolled_back":
            self.missing = {one for one in self.missing if one <= step}
        elif kind == "archive_failed":
            since_s, _ = self.failed.get(step, (event.time_s, ""))
            self.failed[step] = since_s, event.reason
        elif kind == "run_started":  # which tries again at once
            self.failed.clear()

    def _settle(self, step: int) -> None:
        self.missing.discard(step)
        self.failed.pop(step, None)
        self.failed.pop(-1, None)  # the place as a whole


def archive_lag(
    operational: Mapping[str, object], events: Iterable[LedgerEvent]
) -> ArchiveLag | None:
    """What these events, in ledger order, tell; None without an archive.

    Contacts no archive. What `elastic checkpoints prune` removes is in no ledger, and counted on.
    """
    url, every = operational.get("archive"), operational.get("keep_every")
    if not isinstance(url, str) or not isinstance(every, int) or every < 1:
        return None
    fold = _Fold()
    for event in events:
        fold.hear(event, url, every)
    return ArchiveLag(
        url=url,
        newest_step=fold.newest_step,
        missing_steps=sorted(fold.missing),
        failing_since_s=min((since_s for since_s, _ in fold.failed.values()), default=None),
        why=next((why for _, why in reversed(fold.failed.values())), ""),
    )


def archive_text(lag: ArchiveLag, failing_for_s: float | None) -> str:
    """One line of it, `failing_for_s` after the first failure; not yet fit for a terminal."""
    newest = "nothing taken yet" if lag.newest_step is None else f"up to step {lag.newest_step}"
    if failing_for_s is None:
        return f"{lag.url}, {newest}"
    steps = lag.missing_steps
    more = ", ..." if len(steps) > _MOST_STEPS else ""
    which = f" (steps {', '.join(map(str, steps[:_MOST_STEPS]))}{more})" if steps else ""
    return (
        f"LAGS by {count(len(steps), 'checkpoint')}{which}, fails for {age(failing_for_s)}: "
        f"{lag.why[:_MOST_WORDS]}; {lag.url}, {newest}"
    )
