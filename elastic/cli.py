"""The command `elastic`: an operator's questions about a run, answered from its directory.

Reads only, so it is safe beside a live run and works when the cluster is gone. Must import neither
ray nor torch. Every way in which RUN can be wrong ends in one sentence and exit code 2.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict

import click

from elastic import __version__
from elastic.dashboard.report import checkpoints_text, events_text, status_text
from elastic.dashboard.status import read_status
from elastic.dashboard.text import plain, to_json
from elastic.storage.checkpoints import Catalog
from elastic.storage.filesystem import Filesystem
from elastic.storage.format import UnsupportedFormat
from elastic.storage.ledger import read_ledger
from elastic.storage.run_file import RUN_FILE, RunFile, load_run_file

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*://")
_CREDENTIALS = re.compile("//[^/@]*@")
QUIET_KINDS = frozenset({"driver_heartbeat", "progress"})

_run_argument = click.argument("run", metavar="RUN")
_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")


@click.group(
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="RUN is the path or URL of a run directory: STORAGE/NAME, as in ~/runs/demo or "
    "s3://bucket/runs/demo.",
)
@click.version_option(__version__, package_name="elastic-ray", prog_name="elastic")
def main() -> None:
    """Look at elastic training runs. Nothing here changes a run.

    \b
    Exit codes: 0 answered, 2 wrong usage or no such run.
    """


@main.command(short_help="How a run stands, and what its restarts have cost.")
@_run_argument
@_json_option
def status(run: str, as_json: bool) -> None:
    """How RUN stands: state and why, step, loss, last checkpoint, restarts."""
    with _reading(run):
        found = read_status(*_open_run(run), now_s=time.time())
    click.echo(to_json(asdict(found)) if as_json else status_text(found))


@main.command(short_help="What happened, oldest first, with its cause.")
@_run_argument
@_json_option
@click.option("--kind", "kinds", multiple=True, metavar="KIND", help="Only this kind; repeatable.")
@click.option("--last", type=click.IntRange(min=1), metavar="N", help="Only the last N of them.")
@click.option("--all", "show_all", is_flag=True, help="Show heartbeats and progress too.")
def events(
    run: str, as_json: bool, kinds: tuple[str, ...], last: int | None, show_all: bool
) -> None:
    """What happened in RUN, oldest first: every start, death, restart, checkpoint, with its cause.

    Heartbeats and progress are left out unless asked for; --json leaves nothing out.
    """
    with _reading(run):
        fs, _ = _open_run(run)
        found = read_ledger(fs)
    if kinds:
        found = [event for event in found if event.kind in kinds]
    elif not (as_json or show_all):
        found = [event for event in found if event.kind not in QUIET_KINDS]
    found = found[-last:] if last else found
    click.echo(to_json([asdict(event) for event in found]) if as_json else events_text(found))


@main.group()
def checkpoints() -> None:
    """The checkpoints of a run."""


@checkpoints.command("list", short_help="All of them, and why some do not count.")
@_run_argument
@_json_option
def list_checkpoints(run: str, as_json: bool) -> None:
    """Every checkpoint of RUN, lowest step first, and why an incomplete one does not count."""
    with _reading(run):
        fs, run_file = _open_run(run)
        found = Catalog(fs, run_file.run_id).list()
    click.echo(to_json([asdict(one) for one in found]) if as_json else checkpoints_text(found))


# --- finding the run -----------------------------------------------------------------------------


class BadRun(click.ClickException):
    """RUN names nothing that can be read as a run."""

    exit_code = 2


@contextmanager
def _reading(run: str) -> Iterator[None]:
    """Turns whatever goes wrong while a run is read into one sentence and exit code 2."""
    # What is refused for holding a password must not carry it on into a log.
    shown = plain(_CREDENTIALS.sub("//***@", run))
    try:
        yield
    except click.ClickException:
        raise
    except (ValueError, UnsupportedFormat) as error:
        extra = (
            ". Install the extra for it: elastic-ray[s3] or elastic-ray[gcs]"
            if isinstance(error.__cause__, ImportError)
            else ""
        )
        raise BadRun(f"cannot read {shown}: {plain(str(error))}{extra}") from error
    except Exception as error:  # storage clients raise classes of their own
        raise BadRun(
            f"cannot read {shown}: {type(error).__name__}: {plain(str(error))}. Check that "
            "this machine can reach that storage and may read it"
        ) from error


def _open_run(run: str) -> tuple[Filesystem, RunFile]:
    location = run if _URL.match(run) else os.path.abspath(os.path.expanduser(run))
    fs = Filesystem.at(location)
    try:
        run_file = load_run_file(fs)
    except NotADirectoryError:
        run_file = None
    if run_file is None:
        raise BadRun(_no_run(fs))
    return fs, run_file


def _no_run(fs: Filesystem) -> str:
    looked_for = f"no run at {plain(fs.url)}: looked for the file {RUN_FILE} in it"
    if fs.local_root is not None and not os.path.isdir(fs.local_root):
        what = "it is a file" if os.path.exists(fs.local_root) else "there is no such directory"
        return f"{looked_for}, but {what}. Give a run directory: STORAGE/NAME"
    entries = fs.list()
    runs = [
        entry.name for entry in entries if entry.is_dir and fs.exists(f"{entry.name}/{RUN_FILE}")
    ]
    if runs:
        example = f"{plain(fs.url)}/{plain(runs[0])}"
        return f"{looked_for}; it holds the runs {_some(runs)}. Give one of them: {example}"
    names = _some(entry.name for entry in entries) if entries else "nothing"
    return f"{looked_for}, found {names}. Give a run directory: STORAGE/NAME"


def _some(names: Iterable[str], most: int = 5) -> str:
    ordered = sorted(plain(name) for name in names)
    rest = len(ordered) - most
    return ", ".join(ordered[:most]) + (f" and {rest} more" if rest > 0 else "")
