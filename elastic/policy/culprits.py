"""Who is at fault when a group stands still: the rank that its peers wait for.

Ranks count the collectives they have begun in each of their process groups. Those that wait for a
peer are one ahead of it; a rank that is behind, and is not itself inside a collective, is what the
others wait for. One that does not even answer needs no further proof. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

PEERS, DATA, STORAGE, DRIVER, OWN = "peers", "data", "storage", "driver", "own"
"""What a training thread waits for, or stands in: `OWN` is code that is the user's, or unknown."""


@dataclass(frozen=True, kw_only=True)
class RankLook:
    """What was seen of one rank of a group that stands still."""

    world_rank: int
    phase: str = ""
    answers: bool = True
    """The process says what it does; else only its process was looked at."""
    process_state: str = ""
    """Linux's letter: R runs, S sleeps, D waits for a device, T stopped, Z dead; empty: unknown."""
    num_begun: Mapping[str, int] = field(default_factory=dict)
    """Collectives begun, by process group."""
    waits_for: str = OWN
    place: str = ""
    """Where the training thread stands: `train.py:42 in forward`."""
    is_running: bool = False
    """The training thread uses a processor, or waits for one that others use."""
    children: Sequence[str] = ()
    """Child processes, as `pid 123 (stopped)`."""
    save_waits_for: str = ""
    """As `waits_for`, of a save in the background; empty when none is on its way."""
    save_place: str = ""


@dataclass(frozen=True, kw_only=True)
class Culprit:
    """A rank that holds up the group, the kind of its hang, and the same in words."""

    world_rank: int
    kind: str
    """stopped, silent, loop, blocked, data or storage."""
    text: str


def are_all_at_work(looks: Sequence[RankLook], culprits: Sequence[Culprit]) -> bool:
    """Whether no rank is held up by another: each is in code, data or storage of its own.

    That may be a hang of all of them, and is more likely an evaluation that nobody told of, or
    storage that is slow for everyone: ending all would not mend it.
    """
    return len(culprits) == len(looks) and all(one.kind != "stopped" for one in culprits)


def find_culprits(looks: Sequence[RankLook]) -> tuple[Culprit, ...]:
    """The ranks to blame; none when all wait inside collectives, or for the driver."""
    silent = [look for look in looks if not look.answers]
    if silent:
        return tuple(_silent(look) for look in silent)
    behind = _behind(looks)
    suspects = [look for look in looks if look.world_rank in behind] or list(looks)
    found = [culprit for look in suspects if (culprit := _at_fault(look))]
    return tuple(found)


def _behind(looks: Sequence[RankLook]) -> set[int]:
    groups = {name for look in looks for name in look.num_begun}
    found: set[int] = set()
    for name in groups:
        begun = {look.world_rank: look.num_begun[name] for look in looks if name in look.num_begun}
        furthest = max(begun.values())
        found |= {rank for rank, num in begun.items() if num < furthest}
    return found


def _silent(look: RankLook) -> Culprit:
    if look.process_state in ("T", "t"):
        text = "its process is stopped (SIGSTOP, or a debugger)"
        return Culprit(world_rank=look.world_rank, kind="stopped", text=text)
    state = {
        "R": "runs, but none of its Python threads does: something holds the interpreter lock",
        "D": "waits in the kernel for a device or a network disk",
        "S": "sleeps, and none of its Python threads answers",
    }.get(look.process_state, "could not be looked at")
    text = f"it does not answer; its process {state}"
    kind = "storage" if look.process_state == "D" else "silent"
    return Culprit(world_rank=look.world_rank, kind=kind, text=text)


def _at_fault(look: RankLook) -> Culprit | None:
    """What the rank does instead of coming to its peers; None if it is with them."""

    def blame(kind: str, text: str) -> Culprit:
        return Culprit(world_rank=look.world_rank, kind=kind, text=text)

    if look.waits_for == STORAGE:
        return blame("storage", f"it waits for storage during {look.phase}, at {look.place}")
    if look.save_waits_for == STORAGE:
        return blame("storage", f"its save waits for storage, at {look.save_place}")
    if look.waits_for in (PEERS, DRIVER):
        return None
    if look.waits_for == DATA or look.phase in ("data", "first batch"):
        loaders = f"; its loader processes: {', '.join(look.children)}" if look.children else ""
        return blame("data", f"it waits for data, at {look.place}{loaders}")
    if look.is_running:
        return blame("loop", f"its training thread runs on in {look.phase}, at {look.place}")
    return blame("blocked", f"its training thread stands still in {look.phase}, at {look.place}")
