"""The screen of `elastic watch`: a run's picture as one frame for a terminal, by `rich`.

Figures and words are those of the other reports. What a run recorded reaches the terminal only
through `plain`, and never as rich's markup. Pure: a frame from values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from elastic.dashboard.explanation import RESTART_HEADER, RESTART_RIGHT, restart_row
from elastic.dashboard.kept_out import kept_out_text
from elastic.dashboard.report import UNSAID, status_facts
from elastic.dashboard.restarts import number, words
from elastic.dashboard.run_picture import RunPicture
from elastic.dashboard.text import age, plain, size
from elastic.dashboard.tries_left import TriesLeft, left_text
from elastic.storage.ledger import LedgerEvent

_COLOURS = {
    "RUNNING": "bold green",
    "FINISHED": "bold green",
    "STOPPED": "bold",
    "WAITING": "bold yellow",
    "STARTING": "bold yellow",
    "FAILED": "bold red",
    "UNKNOWN": "bold red",
}
_FACTS = ("workers", "step", "loss", "checkpoint", "saves", "snapshots", "restarts", "goodput")
_LABEL = 12
_WIDE = 120
_FEWEST_ROWS = 2
_SAVED = {
    "checkpoint_committed": "committed",
    "checkpoint_failed": "FAILED",
    "checkpoint_quarantined": "QUARANTINED",
    "checkpoint_passed_by": "PASSED BY",
    "checkpoint_suspect": "SUSPECT",
}


def frame(
    picture: RunPicture, *, now_s: float, width: int, height: int | None, note: str = ""
) -> RenderableType:
    """The run on `width` columns and at most `height` lines; None is as many as it takes.

    `now_s` is wall time, `note` the last line.
    """
    top = list(_top(picture, width))
    left = 10**6 if height is None else max(0, height - len(top) - 2)
    restarts = _restarts(picture, now_s, wide=width >= _WIDE)
    below = _ranks(picture), _saves(picture, now_s)
    low = 3 + max(len(rows) for _, rows in below)
    for_restarts = max(_FEWEST_ROWS + 3, left - low) if len(restarts) else 3
    tables: list[RenderableType] = [
        _table("restarts", restarts[0], restarts[1], for_restarts, right=RESTART_RIGHT),
    ]
    used = 3 + min(len(restarts[1]), max(0, for_restarts - 3))
    room = left - used
    if room > 3:
        side = Table.grid(expand=True, padding=(0, 2, 0, 0))
        side.add_column(ratio=3)
        side.add_column(ratio=5)
        side.add_row(
            _table("ranks", *below[0], room, right="RANK PID"),
            _table("checkpoints", *below[1], room, right="STEP AGO SIZE TOOK STALL"),
        )
        tables.append(side)
    last = Text(plain(note), style="dim", no_wrap=True, overflow="ellipsis")
    return Group(*top, *tables, last)


def _top(picture: RunPicture, width: int) -> Iterator[Text]:
    """One fact a line, the state with as much of its reason as fits on two."""
    status = picture.status
    facts = status_facts(status)
    yield _line("run", f"{status.name}, {status.storage}")
    yield from _state(status.state, facts["state"], width)
    for name in _FACTS:
        if name in facts:
            yield _line(name, facts[name])
    yield _line("tries left", tries_text(picture.tries))
    for told in kept_out_text(status.kept_out, status.storage):
        yield _line("kept out", told, style="yellow")
    yield _line("last word", facts["last word"])


def _state(state: str, told: str, width: int) -> Iterator[Text]:
    text = plain(told)
    room = max(20, width - _LABEL)
    line = _line("state", text[:room])
    line.stylize(_COLOURS.get(state, ""), _LABEL, _LABEL + len(state))
    yield line
    if len(text) > room:
        yield _line("", text[room:])


def _line(name: str, fact: str, *, style: str = "") -> Text:
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(f"{name:<{_LABEL}}", style="dim")
    return line.append(plain(fact), style=style)


def tries_text(tries: Sequence[TriesLeft] | None) -> str:
    """On one line: of each budget how many failures are left of how many."""
    if tries is None:
        return UNSAID
    limited = [f"{one.budget} {left_text(one)}" for one in tries if one.left is not None]
    return ", ".join(limited) or "no limit"


Rows = tuple[Sequence[str], list[list[str]]]


def _restarts(picture: RunPicture, now_s: float, *, wide: bool) -> Rows:
    """The newest first; a narrow terminal has no room for the time of day."""
    rows = [restart_row(one, now_s) for one in reversed(picture.restarts)]
    if wide:
        return RESTART_HEADER, rows
    cut = RESTART_HEADER.index("WHEN (UTC)")
    header = [name for place, name in enumerate(RESTART_HEADER) if place != cut]
    return header, [[*row[:cut], *row[cut + 1 :]] for row in rows]


def _ranks(picture: RunPicture) -> Rows:
    told = picture.status.ranks
    rows = [[_cell(one, key) for key in ("world_rank", "node_ip", "pid")] for one in told]
    return ("RANK", "NODE", "PID"), rows


def _saves(picture: RunPicture, now_s: float) -> Rows:
    """The newest first, failed and bad ones too."""
    told = [event for event in reversed(picture.events) if event.kind in _SAVED]
    rows = [_save(one, now_s, is_there=one.step in picture.complete) for one in told]
    return ("STEP", "AGO", "SIZE", "TOOK", "STALL", "WHAT"), rows


def _save(event: LedgerEvent, now_s: float, *, is_there: bool) -> list[str]:
    num_bytes = event.data.get("bytes")
    what = _SAVED[event.kind]
    if event.kind == "checkpoint_committed" and not is_there:
        what = "removed"
    return [
        str(event.step),
        age(max(0.0, now_s - event.time_s)),
        size(num_bytes) if isinstance(num_bytes, int) else UNSAID,
        _seconds(event.data.get("duration_s")),
        _seconds(event.data.get("stall_s")),
        f"{what}: {event.reason}" if event.reason else what,
    ]


def _table(
    title: str, header: Sequence[str], rows: Iterable[Sequence[str]], height: int, *, right: str
) -> RenderableType:
    """At most `height` lines: a title, the header, rows, and how many are left out."""
    all_rows = list(rows)
    if not all_rows:
        return Text(f"\n{title}: none", style="bold")
    most = max(0, height - 3)
    rest = len(all_rows) - most
    named = title if rest <= 0 else f"{title}, {rest} more not shown"
    found = Table(
        title=Text(f"\n{named}", style="bold"),
        title_justify="left",
        box=None,
        padding=(0, 2, 0, 0),
        show_edge=False,
        expand=True,
    )
    flush = right.split()
    for place, name in enumerate(header):
        is_last = place == len(header) - 1
        found.add_column(
            Text(name, style="dim"),
            justify="right" if name in flush else "left",
            no_wrap=True,
            overflow="ellipsis",
            ratio=1 if is_last else None,
        )
    for row in all_rows[:most]:
        found.add_row(*(Text(plain(cell), overflow="ellipsis", no_wrap=True) for cell in row))
    return found


def _cell(told: Mapping[str, object], key: str) -> str:
    value = told.get(key)
    return str(value) if isinstance(value, int) else words(value) or UNSAID


def _seconds(told: object) -> str:
    value = number(told)
    return UNSAID if value is None else f"{value:.2f} s"
