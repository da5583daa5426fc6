"""A run's facts as a person reads them in a terminal. Pure: text from values, no clock, no file."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from itertools import chain
from types import MappingProxyType

from elastic.dashboard.archive_lag import archive_text
from elastic.dashboard.goodput import share_text
from elastic.dashboard.kept_out import kept_out_text
from elastic.dashboard.last_lines import LastLines, last_lines_told, quoted
from elastic.dashboard.status import TERMINAL, RunStatus
from elastic.dashboard.text import age, count, plain, size, table
from elastic.storage.checkpoints import Checkpoint
from elastic.storage.ledger import LedgerEvent

UNSAID = "-"
MOST_PIDS = 8

_MOST_DETAIL = 200


def status_text(status: RunStatus) -> str:
    """One fact a line; what the run has not said yet is a dash. Then what a dead rank said last."""
    lines = [f"{name:<12}{plain(fact)}" for name, fact in status_facts(status).items()]
    out = kept_out_text(status.kept_out, status.storage)
    lines += [f"{'kept out':<12}{plain(line)}" for line in out]
    return "\n".join(lines + _last_lines(status.last_lines))


def status_facts(status: RunStatus) -> dict[str, str]:
    """In words, by name; not yet fit for a terminal, for runs may hold anything."""
    return {
        "run": status.name,
        "state": _state(status),
        "workers": _workers(status),
        "step": _step(status),
        "loss": UNSAID if status.loss is None else f"{status.loss:.4f}",
        "checkpoint": _checkpoint(status),
        "saves": _saves(status),
        **_snapshots(status),
        **_archive(status),
        "restarts": _restarts(status),
        "goodput": share_text(status.goodput),
        "storage": status.storage,
        "page": _page(status),
        "Ray": status.dashboard_url or UNSAID,
        "last word": f"{age(status.last_word_age_s)} ago",
    }


def events_text(events: Sequence[LedgerEvent]) -> str:
    """One event a line, times in UTC; below the end of a rank, what it wrote last."""
    if not events:
        return "no such events"
    rows = [
        [
            moment(event.time_s),
            event.kind,
            _or_dash(event.generation),
            _or_dash(event.step),
            _or_dash(event.world_rank),
            "; ".join(filter(None, [_brief(event.reason), _pairs(event.data)])),
        ]
        for event in events
    ]
    header = ["TIME (UTC)", "EVENT", "GENERATION", "STEP", "RANK", "DETAIL"]
    first, *lines = table(header, rows, right="GENERATION STEP RANK")
    blocks = [
        [line, *quoted(last_lines_told(event))] for line, event in zip(lines, events, strict=True)
    ]
    return "\n".join([first, *chain.from_iterable(blocks)])


def checkpoints_text(
    checkpoints: Sequence[Checkpoint],
    pinned: Collection[int] = (),
    archived: Mapping[int, str] = MappingProxyType({}),
    suspects: Mapping[int, str] = MappingProxyType({}),
) -> str:
    """One checkpoint a line; one that does not count says why. `pinned` are steps, `archived` steps
    with their place in the archive, `suspects` steps with the reason."""
    if not checkpoints:
        return "no checkpoints"
    rows = [
        [
            str(one.step),
            _is_complete(one, pinned, archived, suspects),
            size(one.bytes),
            _or_dash(one.world_size),
            _or_dash(one.generation),
            one.path,
            one.reason or (suspects.get(one.step, "") if one.complete else ""),
        ]
        for one in checkpoints
    ]
    header = ["STEP", "COMPLETE", "SIZE", "WORKERS", "GENERATION", "PATH", "WHY NOT"]
    return "\n".join(table(header, rows, right="STEP SIZE WORKERS GENERATION"))


def _is_complete(
    one: Checkpoint,
    pinned: Collection[int],
    archived: Mapping[int, str],
    suspects: Collection[int],
) -> str:
    if not one.complete:
        return "archived" if archived.get(one.step) == one.path else "no"
    marks = (("pinned", pinned), ("archived", archived), ("suspect", suspects))
    return ", ".join(["yes", *(mark for mark, steps in marks if one.step in steps)])


def _state(status: RunStatus) -> str:
    phase = f" ({status.phase})" if status.phase else ""
    return status.state + phase + (f": {status.reason}" if status.reason else "")


def _page(status: RunStatus) -> str:
    if status.page_url is not None:
        return f"{status.page_url} on {status.page_host}"
    return f"elastic dashboard --storage {status.storage.rpartition('/')[0]}"


def _workers(status: RunStatus) -> str:
    if status.world_size is None or status.generation is None:
        return UNSAID
    if status.state in TERMINAL:  # their pids are other processes' by now
        return f"{status.world_size} at the end (generation {status.generation})"
    pids = [str(rank["pid"]) for rank in status.ranks if "pid" in rank]
    shown = " ".join(pids[:MOST_PIDS]) + (" ..." if len(pids) > MOST_PIDS else "")
    return f"{status.world_size} (generation {status.generation}" + (
        f", pids {shown})" if pids else ")"
    )


def _step(status: RunStatus) -> str:
    if status.step is None:
        return UNSAID
    goal = "" if status.until is None else f" of {status.until}"
    speed = "" if status.tokens_per_s is None else f", {status.tokens_per_s:,.0f} tokens/s"
    return f"{status.step}{goal}{speed}"


def _checkpoint(status: RunStatus) -> str:
    if status.checkpoint_step is None:
        return status.checkpoint_note or "none complete yet"
    when = status.checkpoint_age_s
    told = f"step {status.checkpoint_step}" + ("" if when is None else f", {age(when)} ago")
    return "; ".join(filter(None, [told, status.checkpoint_note]))


def _saves(status: RunStatus) -> str:
    told = UNSAID if status.save_interval is None else str(status.save_interval["why"])
    due = status.saves_due
    if not due["skipped"]:
        return told
    lately = f"{due['skipped_lately']} of the last {due['last']} due"
    return f"{told}; skipped: {lately}, {due['skipped']} of {due['due']} in all"


def _snapshots(status: RunStatus) -> dict[str, str]:
    """No fact of a run that takes none."""
    found = status.snapshots
    if found is None:
        return {}
    is_over = status.state in TERMINAL
    if found["step"] is None:
        newest = "none was kept" if is_over else "none kept yet"
    elif is_over:
        newest = f"the last was of step {found['step']}, and is gone with the run"
    else:
        when = "" if status.snapshot_age_s is None else f", {age(status.snapshot_age_s)} ago"
        newest = f"the newest is of step {found['step']}{when}"
    every = "every step" if found["every"] == 1 else f"every {found['every']} steps"
    skipped = f", {found['skipped']} skipped" if found["skipped"] else ""
    problem = f"; the last failed: {found['problem']}" if found["problem"] else ""
    return {"snapshots": f"{every}: {newest}{skipped}{problem}"}


def _archive(status: RunStatus) -> dict[str, str]:
    if status.archive is None:
        return {}
    return {"archive": archive_text(status.archive, status.archive_failing_for_s)}


def _restarts(status: RunStatus) -> str:
    causes = ", ".join(f"{cause} {count}" for cause, count in status.restarts_by_cause.items())
    again = status.submissions - 1
    parts = [
        f"{status.restarts}" + (f" ({causes})" if causes else ""),
        f"{count(status.lost_steps, 'step')} lost" if status.restarts else "",
        f"submitted again {again}x" if again > 0 else "",
    ]
    return ", ".join(filter(None, parts))


def _last_lines(found: LastLines | None) -> list[str]:
    if found is None:
        return []
    whose = f"rank {found.world_rank} of generation {found.generation}"
    return [f"last lines of {whose}:", *quoted(found.lines)]


def moment(time_s: float) -> str:
    """A time of day in UTC, to the millisecond."""
    try:
        return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
    except (ValueError, OverflowError, OSError):
        # A damaged event may name a moment that no calendar has.
        return f"{time_s:g} s"


def _or_dash(number: int | None) -> str:
    return UNSAID if number is None or number < 0 else str(number)


def _brief(text: str) -> str:
    """Not all of a long one: tracebacks are for --json and `elastic logs`."""
    return text if len(text) <= _MOST_DETAIL else f"{text[:_MOST_DETAIL]} ..."


def _pairs(data: Mapping[str, object]) -> str:
    """The scalar facts of an event; nested ones are for --json."""
    return " ".join(
        f"{name}={value:.6g}" if isinstance(value, float) else f"{name}={_brief(str(value))}"
        for name, value in data.items()
        if isinstance(value, str | int | float)
    )
