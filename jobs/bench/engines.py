"""The engines: how each rival is started. One entry of the table per name in `--engines`.

An engine is a module whose `main` is a driver script: it takes a `Plan` as JSON and leaves an event
log in the plan's directory. Must not import ray, torch or elastic at import time: the table is read
to parse a command line.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jobs.bench.events import EventLog


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What every engine of a measurement does: the same loop, as many steps, saves as often, on as
    many workers.
    """

    directory: str
    address: str = ""
    num_workers: int = 3
    num_steps: int = 2000
    save_every_steps: int = 20
    device_time_s: float = 0.05
    # Of model and optimizer together, over all ranks; 0 is the small model as it is.
    state_bytes: int = 0
    # How often a group that could be larger is looked at. This is Ray Train's default.
    grow_interval_s: float = 60.0
    # Of Ray Train alone, which asks each step whether a node is about to go, and then saves; our
    # service does so unasked.
    saves_on_preemption: bool = False
    # Of our service alone; rivals pass them by.
    recovery: str = "warm"
    snapshot_every: int | None = None
    hang_limit_s: float | None = None

    @property
    def kill_at_step(self) -> int:
        """Half-way between the second save and the third."""
        return 2 * self.save_every_steps + self.save_every_steps // 2

    @property
    def log(self) -> EventLog:
        return EventLog(Path(self.directory) / "events.jsonl")

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        return cls(**json.loads(text))


def _phases_from_ledger(directory: Path, killed_s: float) -> dict[str, float] | None:
    from jobs.bench.ledger_phases import phases_from_ledger

    return phases_from_ledger(directory, killed_s)


@dataclass(frozen=True, kw_only=True)
class Engine:
    """How one rival runs. `plan` has the fields of the Plan in which it differs from the others.

    `read_phases`, where the engine keeps a record of its own, gives the phases of the recovery from
    the fault at a given time, in seconds, or None while the record is not complete.
    """

    name: str
    module: str
    needs_cluster: bool = True
    fast_health_checks: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    plan: Mapping[str, Any] = field(default_factory=dict)
    read_phases: Callable[[Path, float], dict[str, float] | None] | None = None


ENGINES = {
    engine.name: engine
    for engine in (
        Engine(
            name="elastic",
            module="jobs.bench.engine_elastic",
            fast_health_checks=True,
            read_phases=_phases_from_ledger,
        ),
        Engine(
            name="elastic-cold",
            module="jobs.bench.engine_elastic",
            fast_health_checks=True,
            plan={"recovery": "cold"},
            read_phases=_phases_from_ledger,
        ),
        Engine(
            name="elastic-memory",
            module="jobs.bench.engine_elastic",
            fast_health_checks=True,
            plan={"snapshot_every": 2},
            read_phases=_phases_from_ledger,
        ),
        Engine(name="ray-train", module="jobs.bench.engine_ray_train"),
        Engine(
            name="ray-train-tuned",
            module="jobs.bench.engine_ray_train",
            fast_health_checks=True,
            environment={
                "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "5",
                "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.25",
            },
        ),
        Engine(name="torchrun", module="jobs.bench.engine_torchrun", needs_cluster=False),
    )
}
DEFAULT_ENGINES = ("elastic", "ray-train", "ray-train-tuned")
