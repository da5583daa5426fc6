"""Facts that reach the driver, and the commands it may give.

Every value here is plain data. Facts carry the generation they speak of, so that word from an
older group is recognised as such. This module imports nothing but the standard library's types.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic.policy.culprits import Culprit


@dataclass(frozen=True, kw_only=True)
class RankError:
    """An exception that ended the training function of one rank."""

    world_rank: int
    type_name: str
    message: str
    traceback: str = ""
    is_victim: bool = False
    """The error only says that a peer went away: its cause lies with another rank."""
    last_lines: tuple[str, ...] = ()
    """What the rank wrote before it raised."""
    step: int = -1
    """The last step that the rank had finished; -1 where it was not told."""


# --- events -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Event:
    """A fact. `generation` is the group it is about, -1 when it is about none."""

    generation: int = -1


@dataclass(frozen=True, kw_only=True)
class CapacitySeen(Event):
    """How many workers could run now, those that run already included."""

    num_workers: int
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class GroupStarted(Event):
    """All workers of the generation are up and were told their rank."""

    world_size: int


@dataclass(frozen=True, kw_only=True)
class GroupStartFailed(Event):
    """The generation could not be started; nothing of it is left."""

    reason: str
    is_capacity: bool
    """The resources were not there after all, as opposed to a fault of a worker."""
    is_final: bool = False
    """None of the run's checkpoints is left to resume: trying again gives the same answer."""


@dataclass(frozen=True, kw_only=True)
class JoinersReady(Event):
    """New workers are up and warm, and wait to be taken into the group."""

    num: int
    took_s: float = 0.0
    """How long that has taken."""


@dataclass(frozen=True, kw_only=True)
class JoinersFailed(Event):
    """No new worker could be started; nothing of it is left."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class ReformFailed(Event):
    """The survivors did not all join the new generation in time; their processes still run."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class GroupStopped(Event):
    """No process of the generation runs any more and its resources are free."""


@dataclass(frozen=True, kw_only=True)
class WorkerDied(Event):
    """The process of one rank is gone; `node_lost` says that its node went with it."""

    world_rank: int
    node_lost: bool
    detail: str
    node_id: str = ""
    node_ip: str = ""
    last_lines: tuple[str, ...] = ()
    """What the rank wrote last."""
    hang: str = ""
    """Why it was ended by us: it held up the group."""
    told: str = ""
    """All that Ray says of the death; `detail` is its gist."""


@dataclass(frozen=True, kw_only=True)
class RankFailed(Event):
    """The training function of one rank raised; its process is alive."""

    error: RankError


@dataclass(frozen=True, kw_only=True)
class RankLeft(Event):
    """One rank has left the group at the agreed step, with that step's checkpoint committed."""

    world_rank: int
    step: int


@dataclass(frozen=True, kw_only=True)
class RankFinished(Event):
    """The training function of one rank returned, and its last step is committed."""

    world_rank: int
    step: int


@dataclass(frozen=True, kw_only=True)
class Progressed(Event):
    """The group has finished an optimizer step."""

    step: int
    step_s: float | None = None
    """How long the slowest of the newest steps took; None without word of it."""
    save_age_s: float | None = None
    """For how long a save has been on its way; None without one."""


@dataclass(frozen=True, kw_only=True)
class Committed(Event):
    """A checkpoint became complete."""

    step: int
    took_s: float | None = None
    """How long it took from the beginning of the save; None if it was made earlier."""


@dataclass(frozen=True, kw_only=True)
class Unrecoverable(Event):
    """Something that no restart can mend, such as no checkpoint left with sound bytes."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Stalled(Event):
    """Every rank is over the limit of what it is doing."""

    detail: str


@dataclass(frozen=True, kw_only=True)
class HangFound(Event):
    """The ranks of a group that stands still were looked at: who is at fault, if anyone is."""

    culprits: tuple[Culprit, ...]
    stacks: str
    """Where everyone's stacks lie in the run directory; empty if they could not be kept."""
    places: tuple[str, ...] = ()
    """Where each rank stands."""


@dataclass(frozen=True, kw_only=True)
class StallPassed(Event):
    """No reason to end anybody was found."""

    why: str


@dataclass(frozen=True, kw_only=True)
class NodesDraining(Event):
    """Nodes on which ranks of this group run are about to go."""

    world_ranks: frozenset[int]
    detail: str
    """Which nodes, and how much time they have."""
    remaining_s: float | None = None
    """How long the first of them will still be there; None where that is not told."""


@dataclass(frozen=True, kw_only=True)
class StopRequested(Event):
    """Somebody asked the run to save and stop."""

    reason: str
    within_s: float | None = None
    """The run's processes are killed after so long; None: they are left in peace."""


@dataclass(frozen=True, kw_only=True)
class SaveRequested(Event):
    """Somebody asked the run for a checkpoint now."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Tick(Event):
    """Nothing but the time has changed."""


# --- commands -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Command:
    """Something for the driver to do. The performer never decides, the policy never performs."""


@dataclass(frozen=True, kw_only=True)
class LookForCapacity(Command):
    """Find out what could run now, and answer with `CapacitySeen`."""


@dataclass(frozen=True, kw_only=True)
class StartGroup(Command):
    """Start a new generation of this size."""

    generation: int
    world_size: int


@dataclass(frozen=True, kw_only=True)
class StartJoiners(Command):
    """Start workers beside the group, which goes on training, and warm them up."""

    num: int


@dataclass(frozen=True, kw_only=True)
class Reform(Command):
    """Make a new generation of the processes that are alive, waiting joiners among them."""

    generation: int
    world_size: int
    reason: str = field(default="", compare=False)
    """For people; likewise the size that it had."""
    old_world_size: int = field(default=0, compare=False)
    without: frozenset[int] = frozenset()
    """World ranks of the old group that are left behind and ended, though they are alive."""


@dataclass(frozen=True, kw_only=True)
class StopGroup(Command):
    """End every process of the generation, at once."""

    generation: int


@dataclass(frozen=True, kw_only=True)
class Diagnose(Command):
    """Look at every rank and find the one at fault; answer with `HangFound` or `StallPassed`."""

    generation: int


@dataclass(frozen=True, kw_only=True)
class EndRanks(Command):
    """End these ranks' processes and their children; their deaths are told as any other's."""

    generation: int
    culprits: tuple[Culprit, ...]


@dataclass(frozen=True, kw_only=True)
class OrderLeave(Command):
    """Have all ranks save at one agreed step and leave."""

    generation: int
    reason: str
    has_deadline: bool = False
    """An evaluation is cut short."""
    drop_step: bool = False
    """What a long step has accumulated is dropped at the next micro-batch."""


@dataclass(frozen=True, kw_only=True)
class OrderSave(Command):
    """Have all ranks save at the next agreed step, and go on."""

    generation: int


@dataclass(frozen=True, kw_only=True)
class Record(Command):
    """Append this to the ledger, before any later command of the same decision is performed."""

    kind: str
    generation: int = -1
    world_rank: int = -1
    step: int = -1
    reason: str = ""
    data: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class End(Command):
    """The run is over: `outcome` is finished, stopped or failed."""

    outcome: str
    reason: str
    error: RankError | None = None
    cause_rank: int = -1
    """The rank at fault when the run has failed, and what it wrote last; -1 when there is none."""
    last_lines: tuple[str, ...] = ()
