"""Where a run stands, as the driver knows it, and the rules it was given. Plain frozen data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from elastic.policy.budgets import Budgets, check_by_cause
from elastic.policy.departure import Pace
from elastic.policy.events import RankError, WorkerDied
from elastic.policy.fitting import Fitting
from elastic.policy.growth import PRIOR_COST_S
from elastic.policy.mesh import Mesh


class Phase(StrEnum):
    """What the driver is doing. FINISHED, STOPPED and FAILED are final."""

    LOOKING = "LOOKING"
    WAITING = "WAITING"
    STARTING = "STARTING"
    REFORMING = "REFORMING"
    HOLDING = "HOLDING"
    RUNNING = "RUNNING"
    GATHERING = "GATHERING"
    LEAVING = "LEAVING"
    STOPPING = "STOPPING"
    FINISHED = "FINISHED"
    STOPPED = "STOPPED"
    FAILED = "FAILED"


FINAL = frozenset({Phase.FINISHED, Phase.STOPPED, Phase.FAILED})


class Then(StrEnum):
    """What follows once the group is gone."""

    RESTART = "restart"
    REFORM = "re-form"
    FINISH = "finish"
    STOP = "stop"
    FAIL = "fail"


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What the owner of the run wants. Times are in seconds."""

    min_workers: int
    max_workers: int
    max_failures: int = 0
    """Restarts granted for exceptions of the user's function; -1 for no limit."""
    max_failures_without_progress: int = 5
    """Failures in a row, with no new checkpoint between them, before the run is given up. Lost
    nodes and preemptions do not count: they say nothing about the run."""
    max_failures_by_cause: Mapping[str, int] = field(default_factory=dict)
    """Restarts granted for single classes of failure, which are then counted alone; -1 for no
    limit."""
    backoff_s: float = 1.0
    """How long the start after the second failure in a row waits; each further one twice as long,
    up to a minute. Survivors that re-form do not wait."""
    wait_for_capacity_s: float = 300.0
    hold_s: float = 60.0
    """For how long of it survivors that are too few keep their processes and places."""
    grow_interval_s: float = 60.0
    """A generation lives at least this long before it is ended in order to grow; twice as long for
    each growth before it that was soon lost again, so that a node that comes and goes causes few
    re-forms."""
    gather_s: float = 3.0
    """How long victims' errors wait for the word of the rank at fault."""
    leave_s: float = 600.0
    """How long an ordered save and leave may take."""
    warm: bool = False
    """Survivors of a death keep their processes; without, every failure starts all anew."""
    mesh: Mesh = field(default_factory=Mesh)
    """How the workers are laid out: some numbers of them cannot be."""

    def __post_init__(self) -> None:
        if not 1 <= self.min_workers <= self.max_workers:
            raise ValueError(
                "the number of workers must be at least 1 and the smallest not above the largest; "
                f"found {self.min_workers}:{self.max_workers}"
            )
        least = self.mesh.smallest(self.min_workers)
        if least > self.max_workers:
            raise ValueError(
                f"no number of workers from {self.min_workers} to {self.max_workers} can be laid "
                f"out as {self.mesh}: the next is {least}. Allow so many, or take another "
                "Mesh(shard=, tensor=)"
            )
        if self.max_failures < -1:
            raise ValueError(f"max_failures is -1 or more; found {self.max_failures}")
        check_by_cause(self.max_failures_by_cause)
        for name in (
            *("wait_for_capacity_s", "hold_s", "grow_interval_s"),
            *("gather_s", "leave_s", "backoff_s"),
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} cannot be negative; found {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class Situation:
    """All that the policy remembers. Times come from one monotonic clock."""

    phase: Phase = Phase.LOOKING
    generation: int = -1
    world_size: int = 0
    since_s: float = 0.0
    waiting_since_s: float | None = None
    step: int = -1
    committed_step: int = -1
    heard_first: tuple[int, int] = (-1, -1)
    """The newest generation that told its step, and the first one that it told: where it resumed,
    or later."""
    stepped_generation: int = -1
    """The newest generation that has begun to make steps."""
    ceiling: int | None = None
    """Size that the next start must not exceed, after one that found its resources gone."""
    is_joining: bool = False
    """New workers were asked for and have not answered."""
    num_joiners: int = 0
    """New workers that are warm and wait for the next re-form."""
    tried_to_grow_s: float = float("-inf")
    is_growing: bool = False
    """The next generation will be larger than this one."""
    grown_s: float | None = None
    """When this generation began, if it is larger than the one before it and has lost nobody."""
    num_flaps: int = 0
    """Growths in a row that were lost again before they had lasted as long as was waited for."""
    growth_lifetimes_s: tuple[float, ...] = ()
    """How long the last growths lasted until a worker was lost."""
    growth_cost_s: float = PRIOR_COST_S
    """For how long the last growth held training up."""
    growing_since_s: float | None = None
    """When the group was asked to leave in order to grow, until the larger one has made a step."""
    lost_s: float = float("-inf")
    """When a worker was lost last."""
    declined: str = ""
    """Why the last chance to grow was not taken."""
    errors: tuple[RankError, ...] = ()
    deaths: tuple[WorkerDied, ...] = ()
    draining: frozenset[int] = frozenset()
    """Ranks whose nodes are about to go, and which take no part in the next generation."""
    gone_by_s: float | None = None
    """When the first of these nodes goes; None if that is not told."""
    leave_by_s: float | None = None
    """When the group has to have left: then it is ended or re-formed as it is."""
    owes_growth: bool = False
    """The group shrank because a node was drained: whatever takes its place is taken in at once."""
    drain_detail: str = ""
    awaits_commit: bool = False
    """The group leaves without a save of its own, as soon as the one under way is complete."""
    pace: Pace = field(default_factory=Pace)
    save_begun_s: float | None = None
    """Since when a save is on its way."""
    left: frozenset[int] = frozenset()
    finished: frozenset[int] = frozenset()
    then: Then = Then.RESTART
    stop_reason: str = ""
    is_stalled: bool = False
    """The group stands still, and its ranks are being looked at, or ended."""
    save_asked_at: int | None = None
    """The step at which somebody asked for a save, until one above it is committed."""
    reason: str = ""
    error: RankError | None = None
    budgets: Budgets = field(default_factory=Budgets)
    """What failures have used up."""
    not_before_s: float = float("-inf")
    """The next group is not started sooner."""
    fitting: Fitting = field(default_factory=Fitting)
    """At which sizes the model fits in its GPUs' memory."""
