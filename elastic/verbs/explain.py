"""The verb explain: why a run was formed anew, each time, and what that cost. Reads only.

Must import neither ray nor torch.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click

from elastic.dashboard.explanation import next_steps, places, restart_text, restarts_text
from elastic.dashboard.restarts import Restart, restarts_of, totals
from elastic.dashboard.text import plain, to_json
from elastic.dashboard.tries_left import TriesLeft, tries_left
from elastic.storage.ledger import read_ledger
from elastic.verbs.run_argument import BadRun, json_option, open_run, reading, run_argument


@click.command(short_help="Its restarts: why, what they cost, what is left.")
@run_argument
@click.option(
    "--restart",
    "number",
    type=click.IntRange(min=1),
    metavar="N",
    help="Only this one, as a story with evidence.",
)
@json_option
def explain(run: str, number: int | None, as_json: bool) -> None:
    """The restarts of RUN, oldest first: when, why, at which step, what each has cost; and how many
    failures of which kind the run still forgives. The failure that ended the run is the last one.

    With --restart N one of them: what was seen, what was decided and why, where the time went, and
    what to do next. The newest submission's tries are those of now, or of its end.

    \b
    Exit codes: 0 told, 2 no such run or restart.
    """
    now_s = time.time()
    with reading(run):
        fs, _ = open_run(run)
        events = read_ledger(fs)
        restarts, tries = restarts_of(events), tries_left(events)
        if number is None:
            text = (
                to_json(_all_json(restarts, tries))
                if as_json
                else restarts_text(restarts, totals(restarts), tries, run=fs.url, now_s=now_s)
            )
        else:
            one = _numbered(restarts, number, fs.url)
            text = (
                to_json(_one_json(one, tries, fs.url))
                if as_json
                else restart_text(one, len(restarts), tries, run=fs.url, now_s=now_s)
            )
    click.echo(text)


def _numbered(restarts: Sequence[Restart], number: int, url: str) -> Restart:
    if number > len(restarts):
        there_are = f"there are 1 to {len(restarts)}" if restarts else "there is none"
        raise BadRun(f"no restart {number} of {plain(url)}: {there_are}")
    return restarts[number - 1]


def _all_json(restarts: Sequence[Restart], tries: Sequence[TriesLeft] | None) -> dict[str, Any]:
    rows = [asdict(one) for one in restarts]
    for row in rows:
        del row["events"]
    return {
        "restarts": rows,
        "totals": asdict(totals(restarts)),
        "tries_left": _tries_json(tries),
    }


def _one_json(one: Restart, tries: Sequence[TriesLeft] | None, url: str) -> dict[str, Any]:
    return {
        **asdict(one),
        "places": places(one, url),
        "next": next_steps(one, url),
        "tries_left": _tries_json(tries),
    }


def _tries_json(tries: Sequence[TriesLeft] | None) -> list[dict[str, Any]] | None:
    return None if tries is None else [asdict(one) for one in tries]
