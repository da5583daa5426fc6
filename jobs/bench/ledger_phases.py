"""The phases of one recovery as our service's ledger tells them.

Must not import ray or torch: it is read by the benchmark's own process while the run lives.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from elastic.storage.filesystem import Filesystem
from elastic.storage.ledger import LedgerEvent, read_ledger


def phases_from_ledger(directory: Path, killed_s: float) -> dict[str, float] | None:
    """Seconds per phase of the re-form from the fault at `killed_s`; None until it has ended."""
    return phases_of(read_ledger(Filesystem.at(str(directory / "bench"))), killed_s)


def phases_of(ledger: Sequence[LedgerEvent], killed_s: float) -> dict[str, float] | None:
    """The same from the events. `detect` runs from the kill to the first word of it in the ledger:
    that the group stands still, or the decision that came of the kill.

    The service cannot know when the kill was; its own phases begin with that word.
    """
    after = [event for event in ledger if event.time_s >= killed_s]
    words = ("stall_seen", "failure_decided")
    decided_s = next((e.time_s for e in after if e.kind in words), None)
    recovered = next((e for e in after if e.kind == "recovered"), None)
    if decided_s is None or recovered is None:
        return None
    return {"detect": decided_s - killed_s, **recovered.data["phases_s"]}
