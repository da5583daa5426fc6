"""What the owner of an elastic run may set beyond Ray Train's own configuration."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from elastic.cluster import own_page
from elastic.cluster.notices.sources import checked
from elastic.policy.budgets import check_by_cause
from elastic.policy.durations import parse_duration_s
from elastic.policy.hangs import HangLimits
from elastic.policy.mesh import Mesh, checked_mesh
from elastic.policy.saves import AUTO, SaveInterval
from elastic.policy.strikes import StrikeRules
from elastic.training.foreign import check_trust
from elastic.training.loggers.logger import Logger, check_loggers

_BELOW = 0.9
_RAYS_GRACE_S = 3.0


@dataclass(frozen=True, kw_only=True)
class ElasticConfig:
    """What an elastic run has beyond Ray Train's own configuration."""

    seed: int = 0
    """Of the order of samples, of first values and of all that is random; it never changes."""
    save_every: str | int | SaveInterval | None = AUTO
    """`"auto"`: computed from what this run measures. Or `"60s"`, `"100steps"`, `100`, or None for
    both ends only."""
    mtbf: str | float | None = None
    """What is believed of the time between failures before the run has seen any, for `auto`:
    `"8h"`, or a number of seconds. None takes 8 h, or less for thousands of workers."""
    save_behind: str = "skip"
    """`skip` (and count) or `wait` when a save is due while one is still being written."""
    snapshot_every: int | None = None
    """Steps from one snapshot in the memories of the nodes to the next; None takes none."""
    keep: int | None = None
    """Complete checkpoints to keep; -1 for all. None takes `CheckpointConfig.num_to_keep`, or 3."""
    keep_every: int | None = None
    """Steps divisible by this are kept for ever."""
    archive: str | None = None
    """A path or URL, such as `s3://bucket/archive`, that those steps are copied to, and then need
    no longer be kept in the run's own storage."""
    local: str | None = None
    """A directory on each node's own disk, such as `/nvme/elastic`. Saves are written there first,
    and copied to storage beside training; restores read there what it has."""
    mesh: Mesh = field(default_factory=Mesh)
    """How the workers are laid out: all as one shard group, in replicas, in tensor-parallel groups.
    Numbers of workers that do not make whole ones are not used."""
    recovery: str = "warm"
    """`warm`: survivors of a death keep their processes, and a larger group is taken in beside the
    one that trains. `cold`: every failure and every growth starts all processes anew."""
    mix_accelerators: bool = False
    """One generation may have workers on GPUs, or other accelerators, of several types."""
    max_failures_without_progress: int = 5
    """Failures in a row with no new checkpoint in between; lost nodes and preemptions are none."""
    max_failures_by_cause: Mapping[str, int] = field(default_factory=dict)
    """Restarts granted for single causes, which are then counted alone: `{"nccl_error": 20}`.
    -1 for no limit; exceptions and data over the whole submission, others until a checkpoint."""
    wait_for_capacity_s: float = 300.0
    """How long the run waits for its least number of workers before it fails."""
    stop_grace_s: float | None = None
    """Seconds from SIGTERM to the script until it is killed, for the save and all: None takes
    RAY_JOB_STOP_WAIT_TIME_S from the environment, or 3, as `ray job stop` does."""
    hangs: HangLimits | None = HangLimits()
    """How long a rank may stay in one phase before it is taken to hang; None: for ever."""
    node_strikes: int = 3
    """Failures put down to one node before it is kept out; 0: none ever is."""
    node_strikes_expire_s: float = 3600.0
    """Strikes count for so long, and a node that is kept out is let back in after it."""
    notices: str | Sequence[str] = "auto"
    """Where each node hears that it will be taken, and is left in time: one or several of `aws`,
    `aws-rebalance`, `gcp` and `file:PATH`. `auto` is the cloud that the firmware of the machine
    names, and nothing elsewhere; `none` asks nobody."""
    loggers: Sequence[Logger] = ()
    """Who else is told the values of each step, and each restart: `elastic.TensorBoardLogger(DIR)`,
    or an object of yours with the methods of `elastic.Logger`."""
    page: str = "127.0.0.1:0"
    """Where the driver serves the run's page, on its node: `HOST:PORT`, port 0 takes a free one;
    `none` for no page. Any other than a loopback address needs `ELASTIC_PAGE_TOKEN` to be set."""
    collective_timeout_s: float = 3600.0
    """How long a rank waits in one collective for the others before it raises."""
    from_scratch: bool = False
    """Start at step 0 although the run has committed checkpoints that cannot be found. One that is
    complete is resumed all the same: take another name for a run of its own."""
    from_step: int | None = None
    """Go back to this complete checkpoint first; newer ones are set aside, and none is deleted."""
    identity: dict[str, Any] | None = None
    """Fields that must match when the name is used again. None takes all of `train_loop_config`
    but what is only operational (`steps`, `until` and alike); the seed always counts."""
    accept_changes: Sequence[str] = ()
    """Identity fields that may differ this once, from then on with their new value."""
    load_from: str | None = None
    """A run, a checkpoint or a DCP directory whose weights the model begins with at step 0."""
    trust_foreign: bool = False
    """Whoever can write to `load_from` is trusted; without this it is refused."""
    env_vars: dict[str, str] = field(default_factory=dict)
    """Environment variables of driver and workers."""

    def __post_init__(self) -> None:
        checked_mesh(self.mesh)
        check_trust(self.load_from, self.trust_foreign)
        SaveInterval.parse(self.save_every)
        try:
            _ = self.mtbf_s
        except ValueError as error:
            raise ValueError(f"mtbf: {error}") from error
        check_by_cause(self.max_failures_by_cause)
        StrikeRules(limit=self.node_strikes, expire_s=self.node_strikes_expire_s)
        checked(self.notices)
        check_loggers(self.loggers)
        own_page.checked(self.page, os.environ)
        if self.snapshot_every is not None and self.snapshot_every < 1:
            raise ValueError(
                f"snapshot_every is at least 1 step, or None for no snapshots; found "
                f"{self.snapshot_every}"
            )
        if self.from_step is not None and self.from_step < 0:
            raise ValueError(f"from_step is the step of a checkpoint; found {self.from_step}")
        if self.from_step is not None and self.from_scratch:
            raise ValueError("from_step and from_scratch cannot both be asked for")
        if self.stop_grace_s is not None and not self.stop_grace_s > 0:
            raise ValueError(f"stop_grace_s is above 0 seconds; found {self.stop_grace_s}")

    def grace_s(self, environ: Mapping[str, str]) -> float:
        """`stop_grace_s`, or what the environment tells of Ray's own."""
        if self.stop_grace_s is not None:
            return self.stop_grace_s
        try:
            return float(environ["RAY_JOB_STOP_WAIT_TIME_S"])
        except (KeyError, ValueError):
            return _RAYS_GRACE_S

    @property
    def mtbf_s(self) -> float | None:
        """`mtbf` in seconds."""
        return None if self.mtbf is None else parse_duration_s(str(self.mtbf), bare_unit="s")

    @property
    def strikes(self) -> StrikeRules:
        """When a node is kept out, and for how long."""
        return StrikeRules(limit=self.node_strikes, expire_s=self.node_strikes_expire_s)

    @property
    def capped_hangs(self) -> HangLimits | None:
        """`hangs`, below what a collective may take: peers of a rank at fault wait in one."""
        if self.hangs is None:
            return None
        return dataclasses.replace(self.hangs, most_s=_BELOW * self.collective_timeout_s)
