"""How a run stands, told from its directory alone: while it lives, and after everything is gone.

Reads the run file, the ledger and the catalog of checkpoints, and changes none of them. The time
is an argument. Must import neither ray nor torch, so that a look at a run costs no cluster.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from elastic.dashboard.archive_lag import ArchiveLag, archive_lag
from elastic.dashboard.checkpoint_note import checkpoint_note
from elastic.dashboard.goodput import goodput_if_readable
from elastic.dashboard.kept_out import KeptOutNode, nodes_kept_out
from elastic.dashboard.last_lines import LastLines, last_lines_of_failure
from elastic.dashboard.text import age
from elastic.policy.goodput import Goodput
from elastic.storage import lease
from elastic.storage.checkpoints import Catalog, Checkpoint
from elastic.storage.filesystem import Filesystem
from elastic.storage.ledger import LedgerEvent, read_ledger
from elastic.storage.run_file import RunFile

STALE_AFTER_S = 30.0
"""A driver that lives says something far more often than this."""

TERMINAL = frozenset({"FINISHED", "FAILED", "STOPPED"})
AGES = frozenset({"last_word_age_s", "checkpoint_age_s", "snapshot_age_s", "archive_failing_for_s"})
"""The fields of a status that are others at each look, though nothing has happened."""

_SAVES_DUE = ("checkpoint_committed", "checkpoint_failed", "checkpoint_skipped")
_LATELY = 20

# The state that each kind of event leaves behind; every other kind leaves it as it was.
_STATE_AFTER = {
    "driver_lost": "STARTING",
    "run_started": "STARTING",
    "driver_took_over": "STARTING",
    "waiting": "WAITING",
    "generation_planned": "STARTING",
    "checkpoint_awaited": "STARTING",
    "start_failed": "STARTING",
    "generation_started": "STARTING",
    "started": "RUNNING",
    "resumed": "RUNNING",
    "recovered": "RUNNING",
    "leave_ordered": "RUNNING",
    "failure_decided": "STARTING",
    "generation_ended": "STARTING",
    "run_finished": "FINISHED",
    "run_failed": "FAILED",
    "run_stopped": "STOPPED",
}

# A progress event tells the driver's phase, which is finer than what an owner asks about.
_STATE_IN_PHASE = {
    "LOOKING": "STARTING",
    "WAITING": "WAITING",
    "STARTING": "STARTING",
    "RUNNING": "RUNNING",
    "REFORMING": "STARTING",
    "HOLDING": "WAITING",
    "GATHERING": "RUNNING",
    "LEAVING": "RUNNING",
    "STOPPING": "STARTING",
}


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """One run as it stands. None where the run has not said it (yet); ages are in seconds."""

    name: str
    run_id: str
    state: str
    """WAITING, STARTING, RUNNING, STOPPED, FINISHED, FAILED; UNKNOWN when the driver is gone
    or silent."""
    reason: str
    phase: str
    """What rank 0 does while the run is RUNNING: build, load, data, forward-backward, save."""
    generation: int | None
    world_size: int | None
    ranks: list[dict[str, Any]]
    """Where the workers of that generation live: world_rank, node_ip, pid and so on of each."""
    step: int | None
    until: int | str | None
    loss: float | None
    tokens_per_s: float | None
    checkpoint_step: int | None
    checkpoint_age_s: float | None
    checkpoint_note: str
    """Of the checkpoints that were committed and do not count now, in words; "" for none."""
    save_interval: dict[str, Any] | None
    """How often it saves, `seconds` or `steps` or neither, and `why` in words."""
    saves_due: dict[str, int]
    """Of all saves that were `due`, how many were `skipped` as the one before was still being
    written; of the `last` of them, how many were `skipped_lately`."""
    snapshots: dict[str, Any] | None
    """Of a run that keeps them in memory: `every` so many steps, `step` and `kept_s`, a time of
    day, of the newest that is kept (None without one), how many this driver saw `skipped`, and the
    `problem` of one that has failed since, or "". None where there are none."""
    snapshot_age_s: float | None
    restarts: int
    restarts_by_cause: dict[str, int]
    lost_steps: int
    submissions: int
    """1, and one more for each time it was submitted again."""
    last_word_age_s: float
    storage: str
    dashboard_url: str | None
    page_url: str | None
    """Where the driver serves this run's page, on `page_host`; None once it is over."""
    page_host: str | None
    kept_out: list[KeptOutNode]
    """Nodes on which nothing of this run starts, since it has failed there too often."""
    last_lines: LastLines | None
    """Of the rank that caused the newest failure, until the run goes on after it."""
    goodput: Goodput | None
    """Where the time of its slots went; None where the metrics are damaged."""
    archive: ArchiveLag | None
    """How far its archive has come; None where it has none."""
    archive_failing_for_s: float | None


def read_status(fs: Filesystem, run_file: RunFile, *, now_s: float) -> RunStatus:
    """How the run whose directory is the root of `fs` stands at the wall time `now_s`.

    Raises:
        UnsupportedFormat: a newer version of elastic wrote this run.
    """
    checkpoint = Catalog(fs, run_file.run_id).highest()
    gone = driver_seen_gone(fs)
    events = read_ledger(fs)
    told = summarise(run_file, events, checkpoint, storage=fs.url, now_s=now_s, gone=gone)
    return replace(told, goodput=goodput_if_readable(fs, events))


def driver_seen_gone(fs: Filesystem) -> str:
    """Who holds the run though its process can be seen to be gone, in words; "" if nobody.

    Ask it before the ledger: a driver writes its last word before it lets go of the run. Raises
    `UnsupportedFormat`.
    """
    _, holder = lease.read(fs)
    if holder is None or holder.released or not lease.is_dead(holder):
        return ""
    return str(holder)


def summarise(
    run_file: RunFile,
    events: Sequence[LedgerEvent],
    checkpoint: Checkpoint | None,
    *,
    storage: str,
    now_s: float,
    gone: str = "",
) -> RunStatus:
    """The status that these facts add up to. `events` are in ledger order, `gone` is as
    `driver_seen_gone` says."""
    silent_s = max(0.0, now_s - last_word_s(events, run_file.created_s))
    state, reason = state_of(events, silent_s=silent_s, gone=gone)
    restarts = restarts_by_cause(events)
    progress = _last_data(events, "progress")
    group = _last_data(events, "generation_started")
    is_over = state in TERMINAL or state == "UNKNOWN"
    page_url = None if is_over else _text(_last_data(events, "run_started").get("page_url")) or None
    checkpoint_step = checkpoint.step if checkpoint is not None else None
    snapshots = _snapshots(events)
    archive = archive_lag(run_file.operational, events)
    return RunStatus(
        name=run_file.name,
        run_id=run_file.run_id,
        state=state,
        reason=reason,
        phase=_text(progress.get("phase")) if state == "RUNNING" else "",
        generation=_last_generation(events),
        world_size=_integer(group.get("world_size")),
        ranks=[rank for rank in _list(group.get("ranks")) if isinstance(rank, dict)],
        step=_last_step(events),
        until=_until(run_file, events),
        loss=_number(progress.get("loss")),
        tokens_per_s=_number(progress.get("tokens_per_s")),
        checkpoint_step=checkpoint_step,
        checkpoint_age_s=_age_s(_committed_s(events, checkpoint_step), now_s),
        checkpoint_note=checkpoint_note(events, checkpoint_step),
        save_interval=_save_interval(events),
        saves_due=_saves_due(events),
        snapshots=snapshots,
        snapshot_age_s=None if snapshots is None else _age_s(snapshots["kept_s"], now_s),
        restarts=sum(restarts.values()),
        restarts_by_cause=restarts,
        lost_steps=sum(_integer(e.data.get("lost_steps")) or 0 for e in _of(events, "recovered")),
        submissions=len({e.life for e in _of(events, "run_started") if "take_over" not in e.data}),
        last_word_age_s=silent_s,
        storage=storage,
        dashboard_url=_text(_last_data(events, "run_started").get("dashboard_url")) or None,
        page_url=page_url,
        page_host=_text(_last_data(events, "run_started").get("host")) or None,
        kept_out=nodes_kept_out(events, now_s),
        last_lines=last_lines_of_failure(events),
        goodput=None,
        archive=archive,
        archive_failing_for_s=None if archive is None else _age_s(archive.failing_since_s, now_s),
    )


def last_word_s(events: Sequence[LedgerEvent], created_s: float) -> float:
    """When a driver has spoken last, in wall time; `created_s` where none has.

    What people write down while nobody is at the run is no word of a driver: it does not make one
    that was killed look alive.
    """
    lives = {event.life for event in events if event.kind == "run_started"}
    spoken = [event for event in events if event.life in lives] or events
    return spoken[-1].time_s if spoken else created_s


def state_of(events: Sequence[LedgerEvent], *, silent_s: float, gone: str = "") -> tuple[str, str]:
    """State and reason after these events, when the last of them is `silent_s` old.

    A final state stays what it is for ever. Any other is worth only as much as the driver's last
    word: a driver that was killed cannot say so, and must not look as if it ran. `gone` is as
    `driver_seen_gone` says.
    """
    state, reason = "STARTING", "the run was created and its driver has not spoken yet"
    for event in events:
        after = _state_after(event)
        if after is None:
            continue
        if event.kind == "recovered":
            reason = ""  # it tells of a failure that is over
        elif after != state or event.reason:
            reason = event.reason
        state = after
    if state in TERMINAL or (not gone and silent_s <= STALE_AFTER_S):
        return state, reason
    why = f"its driver is gone, {gone}" if gone else f"no word for {age(silent_s)}"
    return "UNKNOWN", f"{why}; the last was {state}" + (f" ({reason})" if reason else "")


def _state_after(event: LedgerEvent) -> str | None:
    if event.kind == "progress":
        return _STATE_IN_PHASE.get(_text(event.data.get("state")), "RUNNING")
    return _STATE_AFTER.get(event.kind)


def restarts_by_cause(events: Iterable[LedgerEvent]) -> dict[str, int]:
    """How often the group was formed anew, by what made it so; `growth` was nobody's fault, and a
    `drain` is a node that was left before it went, `driver` the death of the driver.

    A failure counts when it is decided, growth when the larger group stands: a group that leaves
    because the run was asked to stop is no restart. Submitting again is none either.
    """
    counts: Counter[str] = Counter()
    planned, leaving = "growth", ""
    for event in events:
        if event.kind == "failure_decided":
            planned, leaving = "growth", ""
            if event.data.get("then", "restart") == "restart":
                counts[_text(event.data.get("cause")) or "unknown"] += 1
        elif event.kind == "driver_took_over":
            counts["driver"] += 1
        elif event.kind == "generation_started":
            counts[leaving] += bool(leaving)
            planned, leaving = "growth", ""
        elif event.kind == "drain_noticed":
            planned = "drain"
        elif event.kind in ("leave_ordered", "run_started"):
            leaving = planned if event.kind == "leave_ordered" else ""
    return {cause: counts[cause] for cause in sorted(counts) if counts[cause]}


def _of(events: Iterable[LedgerEvent], kind: str) -> list[LedgerEvent]:
    return [event for event in events if event.kind == kind]


def _last_data(events: Sequence[LedgerEvent], kind: str) -> Mapping[str, Any]:
    return next((event.data for event in reversed(events) if event.kind == kind), {})


def _last_generation(events: Sequence[LedgerEvent]) -> int | None:
    return next((e.generation for e in reversed(events) if e.generation >= 0), None)


def _last_step(events: Sequence[LedgerEvent]) -> int | None:
    """The step the run has reached: its latest word on that, which a rewind may have set back."""
    telling = ("progress", "started", "resumed", "rolled_back")
    ending = ("run_finished", "run_stopped", "run_failed")
    told = (e.step for e in reversed(events) if e.kind in telling + ending and e.step >= 0)
    return next(told, None)


def _until(run_file: RunFile, events: Sequence[LedgerEvent]) -> int | str | None:
    sources = (_last_data(events, "progress"), run_file.operational, run_file.config)
    found = (source.get(key) for source in sources for key in ("until", "steps"))
    return next((value for value in found if isinstance(value, int | str)), None)


def _committed_s(events: Sequence[LedgerEvent], step: int | None) -> float | None:
    times = [e.time_s for e in _of(events, "checkpoint_committed") if e.step == step]
    return times[-1] if times else None


def _age_s(time_s: float | None, now_s: float) -> float | None:
    return None if time_s is None else max(0.0, now_s - time_s)


def _save_interval(events: Sequence[LedgerEvent]) -> dict[str, Any] | None:
    told = next((event for event in reversed(events) if event.kind == "save_interval"), None)
    if told is None:
        return None
    often = ((key, told.data[key]) for key in ("seconds", "steps") if key in told.data)
    return dict(often) | {"why": told.reason}


def _saves_due(events: Iterable[LedgerEvent]) -> dict[str, int]:
    became = [event.kind for event in events if event.kind in _SAVES_DUE]
    lately = became[-_LATELY:]
    return {
        "due": len(became),
        "skipped": became.count("checkpoint_skipped"),
        "last": len(lately),
        "skipped_lately": lately.count("checkpoint_skipped"),
    }


def _snapshots(events: Sequence[LedgerEvent]) -> dict[str, Any] | None:
    told: Any = None
    for event in events:
        if event.kind == "run_started":
            told = None  # those of the driver before have gone with it
        elif event.kind == "progress":
            told = event.data.get("snapshots", told)
    if not isinstance(told, dict):
        return None
    return {
        "every": _integer(told.get("every")),
        "step": _integer(told.get("step")),
        "kept_s": _number(told.get("kept_s")),
        "skipped": _integer(told.get("skipped")) or 0,
        "problem": _text(told.get("problem")),
    }


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
