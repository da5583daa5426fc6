"""The metrics of runs as text for Prometheus, from their directories alone.

The text is made by `prometheus_client`, which escapes label values: names that users give are data.
How many series there are is bounded: so many runs, and of each only causes, phases, buckets and
budgets that are known here. Reads only. Must import neither ray nor torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from elastic.dashboard.restarts import UNKNOWN
from elastic.dashboard.run_picture import Readers, RunPicture, Unreadable
from elastic.dashboard.status import TERMINAL, RunStatus
from elastic.policy.causes import Cause
from elastic.policy.goodput import BUCKETS

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MOST_RUNS = 200
"""Runs that are told of, those that spoke last; `elastic_runs_left_out` counts the others."""

STATES = ("WAITING", "STARTING", "RUNNING", "STOPPED", "FINISHED", "FAILED", "UNKNOWN", "DAMAGED")
CAUSES = (*map(str, Cause), "drain", "growth", "stop", "capacity", UNKNOWN)
PHASES = (
    *("diagnose", "take_over", "join", "stop", "place", "start", "connect", "build", "load"),
    *("first_step", "wait"),
)
OTHER = "other"
"""The label of what is not known here."""

# Name, kind, help, and the labels that a series has besides the run.
_FAMILIES: tuple[tuple[str, type[Metric], str, tuple[str, ...]], ...] = (
    ("elastic_run_state", GaugeMetricFamily, "1 for the state the run is in, else 0.", ("state",)),
    (
        "elastic_last_word_age_seconds",
        GaugeMetricFamily,
        "Since the driver of the run has said anything.",
        (),
    ),
    ("elastic_world_size", GaugeMetricFamily, "Workers of the newest generation.", ()),
    ("elastic_generation", GaugeMetricFamily, "Number of the newest generation, from 0.", ()),
    ("elastic_step", GaugeMetricFamily, "The step that the run has reached.", ()),
    ("elastic_loss", GaugeMetricFamily, "The loss that was told last.", ()),
    ("elastic_tokens_per_second", GaugeMetricFamily, "Tokens a second, as told last.", ()),
    (
        "elastic_restarts_total",
        CounterMetricFamily,
        "Failures that were restarted, and groups formed anew for growth or drains, by cause.",
        ("cause",),
    ),
    (
        "elastic_lost_steps_total",
        CounterMetricFamily,
        "Finished steps that were done again after a restart.",
        (),
    ),
    (
        "elastic_reform_seconds_total",
        CounterMetricFamily,
        "Time from the detection to the end of the first new step, of all re-forms, by phase.",
        ("phase",),
    ),
    ("elastic_goodput_ratio", GaugeMetricFamily, "Useful slot-seconds of all, 0 to 1.", ()),
    (
        "elastic_slot_seconds",
        GaugeMetricFamily,
        "Slot-seconds held so far, by what for. A gauge: lost steps turn useful to recomputed.",
        ("bucket",),
    ),
    (
        "elastic_without_slots_seconds",
        GaugeMetricFamily,
        "Time in which the run held no slot: it waited for capacity or for its driver.",
        (),
    ),
    (
        "elastic_checkpoint_age_seconds",
        GaugeMetricFamily,
        "Since the newest complete checkpoint was committed.",
        (),
    ),
    ("elastic_checkpoint_step", GaugeMetricFamily, "Step of the newest complete checkpoint.", ()),
    (
        "elastic_snapshot_age_seconds",
        GaugeMetricFamily,
        "Since the newest snapshot in memory was kept by every rank.",
        (),
    ),
    ("elastic_snapshot_step", GaugeMetricFamily, "Step of the newest snapshot in memory.", ()),
    (
        "elastic_checkpoints_committed_total",
        CounterMetricFamily,
        "Checkpoints that were committed.",
        (),
    ),
    (
        "elastic_checkpoints_failed_total",
        CounterMetricFamily,
        "Saves that could not be published.",
        (),
    ),
    (
        "elastic_checkpoints_quarantined_total",
        CounterMetricFamily,
        "Checkpoints put aside because their bytes were bad.",
        (),
    ),
    (
        "elastic_save_stall_seconds_total",
        CounterMetricFamily,
        "For which saves have stopped training.",
        (),
    ),
    (
        "elastic_save_interval_seconds",
        GaugeMetricFamily,
        "How often the run saves, where that is a time.",
        (),
    ),
    (
        "elastic_save_interval_steps",
        GaugeMetricFamily,
        "How often the run saves, where that is a number of steps.",
        (),
    ),
    (
        "elastic_budget_left",
        GaugeMetricFamily,
        "Failures that the run still forgives, by budget; those without a limit are left out.",
        ("budget",),
    ),
    (
        "elastic_budget_granted",
        GaugeMetricFamily,
        "Failures that the run forgives in all, by budget.",
        ("budget",),
    ),
    ("elastic_nodes_kept_out", GaugeMetricFamily, "Nodes on which the run starts nothing.", ()),
)
NAMES = frozenset(name for name, *_ in _FAMILIES) | {"elastic_runs_left_out"}
"""Every metric that the text may have."""

Sample = tuple[str, Mapping[str, str], float | None]


def metrics_text(runs: Readers, now_s: float) -> bytes:
    """The runs in Prometheus' text format.

    `now_s` is wall time, for ages. One run that cannot be read has the state DAMAGED and hides no
    other. Raises what `Readers.pictures` raises.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Runs(runs.pictures(now_s)))
    return generate_latest(registry)


class _Runs(Collector):
    """What `prometheus_client` asks for the families of metrics."""

    def __init__(self, found: Sequence[RunPicture | Unreadable]) -> None:
        kept = sorted(found, key=_silence)[:MOST_RUNS]
        self._kept = sorted(kept, key=lambda one: one.directory)
        self._num_left_out = len(found) - len(kept)

    def collect(self) -> Iterator[Metric]:
        families = {
            name: (kind(name, told, labels=("run", *labels)), labels)  # type: ignore[call-arg]
            for name, kind, told, labels in _FAMILIES
        }
        for run in self._kept:
            for name, labels, value in _samples(run):
                family: Any
                family, keys = families[name]
                if value is not None:
                    named = [_encodable(run.directory), *(labels[key] for key in keys)]
                    family.add_metric(named, value)
        yield from (family for family, _ in families.values())
        told = "Runs below the storage root that are not told of, as they spoke longest ago."
        yield GaugeMetricFamily("elastic_runs_left_out", told, value=self._num_left_out)


def _silence(one: RunPicture | Unreadable) -> float:
    return one.status.last_word_age_s if isinstance(one, RunPicture) else 0.0


def _samples(run: RunPicture | Unreadable) -> Iterator[Sample]:
    state = run.status.state if isinstance(run, RunPicture) else "DAMAGED"
    for name in STATES:
        yield "elastic_run_state", {"state": name}, float(name == state)
    if isinstance(run, Unreadable):
        return
    yield from _now(run)
    yield from _what_it_cost(run)
    yield from _saves(run)
    for one in run.tries or ():
        budget = {"budget": one.budget}
        yield "elastic_budget_left", budget, one.left
        yield "elastic_budget_granted", budget, one.granted


def _now(run: RunPicture) -> Iterator[Sample]:
    status = run.status
    yield "elastic_last_word_age_seconds", {}, status.last_word_age_s
    yield "elastic_world_size", {}, status.world_size
    yield "elastic_generation", {}, status.generation
    yield "elastic_step", {}, status.step
    yield "elastic_loss", {}, status.loss
    yield "elastic_tokens_per_second", {}, status.tokens_per_s
    yield "elastic_nodes_kept_out", {}, len(status.kept_out)


def _what_it_cost(run: RunPicture) -> Iterator[Sample]:
    status = run.status
    for cause, num in _known(status.restarts_by_cause.items(), CAUSES).items():
        yield "elastic_restarts_total", {"cause": cause}, num
    yield "elastic_lost_steps_total", {}, status.lost_steps
    took = (pair for one in run.restarts for pair in one.phases_s.items())
    for phase, took_s in _known(took, PHASES).items():
        yield "elastic_reform_seconds_total", {"phase": phase}, took_s
    if status.goodput is not None:
        yield "elastic_goodput_ratio", {}, status.goodput.share
        yield "elastic_without_slots_seconds", {}, status.goodput.without_slots_s
        for bucket in BUCKETS:
            held_s = status.goodput.slot_seconds[bucket]
            yield "elastic_slot_seconds", {"bucket": bucket}, held_s


def _saves(run: RunPicture) -> Iterator[Sample]:
    status, saves = run.status, run.saves
    interval = status.save_interval or {}
    yield "elastic_checkpoint_age_seconds", {}, status.checkpoint_age_s
    yield "elastic_checkpoint_step", {}, status.checkpoint_step
    yield from _snapshots(status)
    yield "elastic_checkpoints_committed_total", {}, saves.committed
    yield "elastic_checkpoints_failed_total", {}, saves.failed
    yield "elastic_checkpoints_quarantined_total", {}, saves.quarantined
    yield "elastic_save_stall_seconds_total", {}, saves.stall_s
    yield "elastic_save_interval_seconds", {}, _number(interval.get("seconds"))
    yield "elastic_save_interval_steps", {}, _number(interval.get("steps"))


def _snapshots(status: RunStatus) -> Iterator[Sample]:
    if status.snapshots is not None and status.state not in TERMINAL:
        yield "elastic_snapshot_age_seconds", {}, status.snapshot_age_s
        yield "elastic_snapshot_step", {}, status.snapshots["step"]


def _known(pairs: Iterable[tuple[str, float]], names: Sequence[str]) -> dict[str, float]:
    """Summed by name, all of `names`, so that a first one is a step from 0; others are one."""
    sums: Counter[str] = Counter()
    for name, value in pairs:
        sums[name if name in names else OTHER] += value  # type: ignore[assignment]
    told = dict.fromkeys(names, 0.0)
    return told | {name: float(value) for name, value in sums.items()}


def _encodable(text: str) -> str:
    # Names of files may hold bytes that are no text, which would end the whole answer.
    return text.encode("utf-8", "backslashreplace").decode()


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None
