"""The command `elastic`: an operator's questions about a run, answered from its directory.

What only asks is safe beside a live run and works when the cluster is gone. Must import neither ray
nor torch. Every way in which RUN can be wrong ends in one sentence and exit code 2.
"""

from __future__ import annotations

import time
from dataclasses import asdict

import click

from elastic import __version__
from elastic.dashboard.report import events_text, status_text
from elastic.dashboard.status import read_status
from elastic.dashboard.text import to_json
from elastic.storage.ledger import read_ledger
from elastic.verbs import node_allow
from elastic.verbs.checkpoints import checkpoints
from elastic.verbs.dashboard import dashboard
from elastic.verbs.data import data
from elastic.verbs.explain import explain
from elastic.verbs.export import export
from elastic.verbs.goodput import goodput
from elastic.verbs.logs import logs
from elastic.verbs.metrics import metrics
from elastic.verbs.node import node
from elastic.verbs.plan import plan
from elastic.verbs.rehearse import rehearse
from elastic.verbs.requests import save, stop
from elastic.verbs.rollback import rollback
from elastic.verbs.run_argument import json_option, open_run, reading, run_argument
from elastic.verbs.runs import runs
from elastic.verbs.submit import submit
from elastic.verbs.watch import watch

QUIET_KINDS = frozenset({"driver_heartbeat", "progress"})


@click.group(
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="RUN is the path or URL of a run directory: STORAGE/NAME, as in ~/runs/demo or "
    "s3://bucket/runs/demo.",
)
@click.version_option(__version__, package_name="elastic-ray", prog_name="elastic")
def main() -> None:
    """Submit elastic training runs, look at them, and look after them and their checkpoints.

    \b
    Exit codes: 0 done, 1 a problem was found, 2 wrong usage or no such run.
    """


@main.command(short_help="How a run stands, and what its restarts have cost.")
@run_argument
@json_option
def status(run: str, as_json: bool) -> None:
    """How RUN stands: state and why, step, loss, last checkpoint, restarts."""
    with reading(run):
        found = read_status(*open_run(run), now_s=time.time())
        text = to_json(asdict(found)) if as_json else status_text(found)
    click.echo(text)


@main.command(short_help="What happened, oldest first, with its cause.")
@run_argument
@json_option
@click.option("--kind", "kinds", multiple=True, metavar="KIND", help="Only this kind; repeatable.")
@click.option("--last", type=click.IntRange(min=1), metavar="N", help="Only the last N of them.")
@click.option("--all", "show_all", is_flag=True, help="Show heartbeats and progress too.")
def events(
    run: str, as_json: bool, kinds: tuple[str, ...], last: int | None, show_all: bool
) -> None:
    """What happened in RUN, oldest first: every start, death, restart, checkpoint, with its cause.

    Heartbeats and progress are left out unless asked for; --json leaves nothing out.
    """
    with reading(run):
        fs, _ = open_run(run)
        found = read_ledger(fs)
        if kinds:
            found = [event for event in found if event.kind in kinds]
        elif not (as_json or show_all):
            found = [event for event in found if event.kind not in QUIET_KINDS]
        found = found[-last:] if last else found
        text = to_json([asdict(event) for event in found]) if as_json else events_text(found)
    click.echo(text)


node_allow.add_to(node)
main.add_command(checkpoints)
main.add_command(dashboard)
main.add_command(data)
main.add_command(explain)
main.add_command(export)
main.add_command(goodput)
main.add_command(logs)
main.add_command(metrics)
main.add_command(node)
main.add_command(plan)
main.add_command(rehearse)
main.add_command(rollback)
main.add_command(runs)
main.add_command(save)
main.add_command(stop)
main.add_command(submit)
main.add_command(watch)
