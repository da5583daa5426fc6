"""Hangs: how long each phase of a rank may take, and when a group stands still.

A group stands still when every rank is over the limit of what it is doing, so that ranks which
wait for one in a long phase prove nothing. Limits are floors that the run's own slowest phases
raise. Who is at fault is another question: see `elastic.policy.culprits`. Pure: time comes in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

FIRST_PHASES = frozenset({"build", "first batch", "first step", "compile", "end"})
STORAGE_PHASES = frozenset({"load", "save"})
EVALUATION = "evaluation"

# A driver that was itself kept from running for longer than this takes nobody's silence for a sign.
_LAG_S = 1.0


@dataclass(frozen=True, kw_only=True)
class HangLimits:
    """How long a rank may stay in one phase before it is taken to hang. Times are in seconds.

    Each is a floor: the limit is `times_slowest` times the slowest such phase that has ended so
    far in the run, if that is more.
    """

    step_s: float = 300.0
    """Data, forward and backward, optimizer; and silence: a rank that sends no heartbeat."""
    first_s: float = 1800.0
    """Building the model, the first batch and the first step of a generation, compiling, and what
    comes after the last step."""
    storage_s: float = 600.0
    """Saving and loading, beside the time for their bytes."""
    slowest_bytes_per_s: float = 10e6
    """Storage at this speed is slow, and no hang: bytes of one rank add to `storage_s`."""
    evaluation_s: float = 1800.0
    """Inside of `run.evaluation()`."""
    times_slowest: float = 10.0
    most_s: float = math.inf
    """No limit is above this."""

    def __post_init__(self) -> None:
        for name in (
            *("step_s", "first_s", "storage_s", "evaluation_s"),
            *("slowest_bytes_per_s", "most_s"),
        ):
            if not getattr(self, name) > 0:
                raise ValueError(f"HangLimits.{name} must be above 0; found {getattr(self, name)}")
        if not self.times_slowest >= 1:
            raise ValueError(
                f"HangLimits.times_slowest must be 1 or more; found {self.times_slowest}"
            )

    def limit_s(self, phase: str, slowest_s: float = 0.0, num_bytes: int = 0) -> float:
        """The limit of a phase whose slowest so far took `slowest_s`, and moves `num_bytes`."""
        if phase in STORAGE_PHASES:
            floor_s = self.storage_s + num_bytes / self.slowest_bytes_per_s
        elif phase == EVALUATION:
            floor_s = self.evaluation_s
        elif phase in FIRST_PHASES:
            floor_s = self.first_s
        else:
            floor_s = self.step_s
        return min(max(floor_s, self.times_slowest * slowest_s), self.most_s)


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """What a rank says of itself several times a second."""

    phase: str
    age_s: float
    """How long it has been in this phase."""
    slowest_s: Mapping[str, float] = field(default_factory=dict)
    """The slowest of each phase that has ended in this generation."""
    num_bytes: int = 0
    """What this rank saves or loads."""
    save_age_s: float | None = None
    """How long its save in flight has been on its way; None without one."""


@dataclass
class _Rank:
    beat: Heartbeat
    heard_s: float
    has_ended: bool = False


class HangWatch:
    """Hears the heartbeats of one generation after another, and tells when all stand still.

    Times come from one monotonic clock.
    """

    def __init__(self, limits: HangLimits) -> None:
        self._limits = limits
        self._ranks: dict[int, _Rank] = {}
        self._slowest_s: dict[str, float] = {}
        self._looked_s: float | None = None
        self._granted_s = 0.0

    def begin(self, world_size: int, time_s: float) -> None:
        """From now on a new generation is heard, of which no rank has spoken yet."""
        silent = Heartbeat(phase="build", age_s=0.0)
        self._ranks = {rank: _Rank(beat=silent, heard_s=time_s) for rank in range(world_size)}
        self._looked_s = time_s
        self._granted_s = 0.0

    def grant(self) -> bool:
        """Let every rank take as long as a first step for what it is doing now; False if it was
        granted before, and has been used up."""
        before, self._granted_s = self._granted_s, self._limits.first_s
        return before == 0.0

    def heard(self, world_rank: int, beat: Heartbeat, time_s: float) -> None:
        """A heartbeat has come."""
        if world_rank not in self._ranks:
            return
        rank = self._ranks[world_rank]
        if beat.age_s < rank.beat.age_s:
            self._granted_s = 0.0  # somebody goes on
        rank.beat, rank.heard_s = beat, time_s
        for phase, seconds in beat.slowest_s.items():
            self._slowest_s[phase] = max(seconds, self._slowest_s.get(phase, 0.0))

    def ended(self, world_rank: int) -> None:
        """The rank has finished, left or failed: it owes no more word."""
        if world_rank in self._ranks:
            self._ranks[world_rank].has_ended = True

    def limit_s(self, beat: Heartbeat) -> float:
        """How long a rank may be in the phase it tells of."""
        slowest_s = self._slowest_s.get(beat.phase, 0.0)
        return self._limits.limit_s(beat.phase, slowest_s, beat.num_bytes)

    def stall(self, time_s: float) -> str:
        """Why the group is taken to stand still, in words; empty while it is not.

        To be called often: a long gap between two calls counts as the caller's own.
        """
        self._forgive_own_lag(time_s)
        active = {n: rank for n, rank in self._ranks.items() if not rank.has_ended}
        if not active:
            return ""
        overdue = {n: self._overdue(rank, time_s) for n, rank in active.items()}
        saves = [self._stuck_save(rank, time_s) for rank in active.values()]
        stuck_saves = [text for text in saves if text]
        if not all(overdue.values()) and not stuck_saves:
            return ""
        told = [f"rank {n} {text}" for n, text in overdue.items() if text]
        return "; ".join([*told, *stuck_saves[:1]])

    def _overdue(self, rank: _Rank, time_s: float) -> str:
        silent_s = time_s - rank.heard_s
        beat = rank.beat
        silence_s = max(self._limits.step_s, self._granted_s)
        if silent_s > silence_s:
            return f"silent for {silent_s:.1f} s in {beat.phase} (limit {silence_s:g} s)"
        standing_s, limit_s = beat.age_s + silent_s, max(self.limit_s(beat), self._granted_s)
        if standing_s > limit_s:
            return f"in {beat.phase} for {standing_s:.1f} s (limit {limit_s:g} s)"
        return ""

    def _stuck_save(self, rank: _Rank, time_s: float) -> str:
        beat = rank.beat
        if beat.save_age_s is None:
            return ""
        age_s = beat.save_age_s + time_s - rank.heard_s
        slowest_s = self._slowest_s.get("save", 0.0)
        limit_s = max(self._limits.limit_s("save", slowest_s, beat.num_bytes), self._granted_s)
        if age_s <= limit_s:
            return ""
        return f"a save in flight for {age_s:.1f} s (limit {limit_s:g} s)"

    def _forgive_own_lag(self, time_s: float) -> None:
        if self._looked_s is not None and time_s - self._looked_s > _LAG_S:
            for rank in self._ranks.values():
                rank.heard_s += time_s - self._looked_s
        self._looked_s = time_s
