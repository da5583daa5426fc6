"""What the driver is told at its birth."""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic.policy.addresses import Address
from elastic.policy.hangs import HangLimits
from elastic.policy.retention import Retention
from elastic.policy.saves import SaveInterval
from elastic.policy.situation import Rules
from elastic.policy.strikes import StrikeRules
from elastic.storage.claim import RunSpec
from elastic.training.loggers.logger import Logger


@dataclass(frozen=True, kw_only=True)
class TakeOver:
    """That another driver of the same job has died, and which."""

    number: int
    """Of the take-overs of this job, from 1."""
    cause: str
    noticed_s: float
    """Wall time on this machine, on which both have run."""
    lives: frozenset[int]
    """Of the ledger: those of the job's drivers so far."""


@dataclass(frozen=True, kw_only=True)
class DriverConfig:
    """The run as it was asked for, checked by the trainer."""

    run_url: str
    spec: RunSpec
    rules: Rules
    keep: Retention
    resources_per_worker: dict[str, float]
    save: SaveInterval = SaveInterval()
    mtbf_s: float | None = None
    """The owner's mean time between failures, for an interval that is computed."""
    snapshots: bool = False
    """The nodes of the run keep snapshots in memory."""
    label_selector: dict[str, str] | None = None
    mix_accelerators: bool = False
    hangs: HangLimits | None = None
    """None: nothing is taken for a hang."""
    strikes: StrikeRules = StrikeRules()
    notices: tuple[str, ...] = ()
    """The sources that say that a node will be taken: see `elastic.cluster.notices.sources`."""
    loggers: tuple[Logger, ...] = ()
    page: Address | None = None
    """Where the driver serves the run's page; None: nowhere."""
    page_token: str = field(default="", repr=False)
    from_scratch: bool = False
    """Checkpoints of an earlier history may be left alone, and the run start at step 0."""
    from_step: int | None = None
    """Go on from this complete checkpoint; newer ones are set aside."""
    take_over: TakeOver | None = None
    """None for the first driver of a job."""
