"""Ray metrics: what the driver tells its ledger, as gauges and counters of `ray.util.metrics`.

Ray exports them on each node as `ray_elastic_...` beside its own, for as long as the driver lives;
what outlives it is `elastic.dashboard.prometheus`. Whatever goes wrong here ends the metrics alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from ray.util.metrics import Counter, Gauge

from elastic.policy.causes import Cause
from elastic.policy.events import Record

logger = logging.getLogger("elastic")

PLANNED = "planned"
"""The cause of a re-form that was nobody's fault: growth, or a node that was left in time."""
OTHER = "other"

_CAUSES = frozenset(map(str, Cause))
_PHASES = frozenset(
    {
        *("diagnose", "take_over", "join", "stop", "place", "start", "connect", "build", "load"),
        *("first_step", "wait"),
    }
)

GAUGES = {
    "elastic_world_size": "Workers of the newest generation.",
    "elastic_step": "The step that the run has reached.",
    "elastic_loss": "The loss that was told last.",
    "elastic_tokens_per_second": "Tokens a second, as told last.",
    "elastic_checkpoint_age_seconds": "Since the newest checkpoint was committed.",
    "elastic_save_interval_seconds": "How often the run saves, where that is a time.",
}
COUNTERS = {
    "elastic_restarts_total": ("Restarts by cause, since the driver began.", "cause"),
    "elastic_lost_steps_total": ("Finished steps that were done again.", ""),
    "elastic_reform_seconds_total": ("Time of re-forms, by phase.", "phase"),
    "elastic_checkpoints_committed_total": ("Checkpoints that were committed.", ""),
    "elastic_checkpoints_failed_total": ("Saves that could not be published.", ""),
    "elastic_save_stall_seconds_total": ("For which saves have stopped training.", ""),
}


class RayMetrics:
    """Of one run, in its driver's process. Raises nothing."""

    def __init__(self, run_name: str) -> None:
        self._is_over = False
        self._committed_s: float | None = None
        self._has_failed = False
        self._values: dict[str, float] = {}
        self._gauges: dict[str, Gauge] = {}
        self._counters: dict[str, Counter] = {}
        self._guarded(lambda: self._make(run_name))

    def heard(self, record: Record, time_s: float) -> None:
        """One word of the ledger, at a wall time."""
        listen = _LISTENERS.get(record.kind)
        if listen is not None and not self._is_over:
            self._guarded(lambda: listen(self, record, time_s))

    def _make(self, run_name: str) -> None:
        named = {"run": run_name}
        for name, told in GAUGES.items():
            self._gauges[name] = Gauge(name, told, ("run",)).set_default_tags(named)
        for name, (told, label) in COUNTERS.items():
            keys = ("run", label) if label else ("run",)
            self._counters[name] = Counter(name, told, keys).set_default_tags(named)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - figures for people must never end a run
            self._is_over = True
            logger.warning("no more metrics through Ray: %s: %s", type(error).__name__, error)

    def _add(self, name: str, value: object, **labels: str) -> None:
        if isinstance(value, int | float) and value > 0:
            self._counters[name].inc(float(value), labels)

    # --- one method for each kind of word --------------------------------------------------------

    def _progressed(self, record: Record, time_s: float) -> None:
        """Ray drops gauges that nobody sets again."""
        values = self._values
        values["elastic_step"] = record.step
        for key, name in (
            ("loss", "elastic_loss"),
            ("tokens_per_s", "elastic_tokens_per_second"),
        ):
            told = record.data.get(key)
            if isinstance(told, int | float):
                values[name] = told
        if self._committed_s is not None:
            values["elastic_checkpoint_age_seconds"] = max(0.0, time_s - self._committed_s)
        for name, value in values.items():
            if name != "elastic_step" or value >= 0:
                self._gauges[name].set(float(value))

    def _grouped(self, record: Record, time_s: float) -> None:
        self._values["elastic_world_size"] = float(str(record.data["world_size"]))

    def _failed(self, record: Record, time_s: float) -> None:
        if record.data.get("then", "restart") == "restart":
            self._has_failed = True
            self._add("elastic_restarts_total", 1, cause=_known(record.data.get("cause"), _CAUSES))

    def _taken_over(self, record: Record, time_s: float) -> None:
        self._has_failed = True
        self._add("elastic_restarts_total", 1, cause=str(Cause.DRIVER))

    def _recovered(self, record: Record, time_s: float) -> None:
        if not self._has_failed:
            self._add("elastic_restarts_total", 1, cause=PLANNED)
        self._has_failed = False
        self._add("elastic_lost_steps_total", record.data.get("lost_steps"))
        took = record.data.get("phases_s")
        for phase, took_s in took.items() if isinstance(took, Mapping) else ():
            self._add("elastic_reform_seconds_total", took_s, phase=_known(phase, _PHASES))

    def _saved(self, record: Record, time_s: float) -> None:
        self._committed_s = time_s
        self._add("elastic_checkpoints_committed_total", 1)
        self._add("elastic_save_stall_seconds_total", record.data.get("stall_s"))

    def _not_saved(self, record: Record, time_s: float) -> None:
        self._add("elastic_checkpoints_failed_total", 1)

    def _interval(self, record: Record, time_s: float) -> None:
        every_s = record.data.get("seconds")
        if isinstance(every_s, int | float):
            self._values["elastic_save_interval_seconds"] = every_s
        else:
            self._values.pop("elastic_save_interval_seconds", None)


_LISTENERS: Mapping[str, Callable[[RayMetrics, Record, float], None]] = {
    "progress": RayMetrics._progressed,
    "generation_started": RayMetrics._grouped,
    "failure_decided": RayMetrics._failed,
    "driver_took_over": RayMetrics._taken_over,
    "recovered": RayMetrics._recovered,
    "checkpoint_committed": RayMetrics._saved,
    "checkpoint_failed": RayMetrics._not_saved,
    "save_interval": RayMetrics._interval,
}


def _known(told: Any, names: frozenset[str]) -> str:
    return str(told) if str(told) in names else OTHER
