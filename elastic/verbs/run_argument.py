"""The argument RUN: from what an operator typed to an open run, or one sentence and exit code 2.

Reads only. Must import neither ray nor torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import click

from elastic.dashboard.text import plain
from elastic.storage.filesystem import Filesystem
from elastic.storage.format import UnsupportedFormat
from elastic.storage.run_file import RUN_FILE, RunFile, load_run_file

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*://")
_CREDENTIALS = re.compile("//[^/@]*@")

run_argument = click.argument("run", metavar="RUN")
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
storage_option = click.option(
    "--storage",
    default="~/elastic-runs",
    show_default=True,
    metavar="URL",
    help="Path or URL, as given to the runs.",
)


class BadRun(click.ClickException):
    """RUN names nothing that can be read as a run."""

    exit_code = 2


class Problem(click.ClickException):
    """The verb was asked properly and could not, or may not, do it: one sentence, exit code 1."""

    exit_code = 1


@contextmanager
def reading(run: str) -> Iterator[None]:
    """Turns whatever goes wrong while a run is read into one sentence and exit code 2."""
    # What is refused for holding a password must not carry it on into a log.
    shown = plain(_CREDENTIALS.sub("//***@", run))
    try:
        yield
    except click.ClickException:
        raise
    except (ValueError, UnsupportedFormat) as error:
        raise BadRun(f"cannot read {shown}: {plain(str(error))}") from error
    except Exception as error:  # storage clients raise classes of their own
        raise BadRun(
            f"cannot read {shown}: {type(error).__name__}: {plain(str(error))}. Check that "
            "this machine can reach that storage and may read it, and that nobody changed it"
        ) from error


def open_run(run: str) -> tuple[Filesystem, RunFile]:
    """The run's directory and its run file. Raises `BadRun`, and what storage raises."""
    fs = storage_at(run)
    try:
        run_file = load_run_file(fs)
    except NotADirectoryError:
        run_file = None
    if run_file is None:
        raise BadRun(_no_run(fs))
    return fs, run_file


def storage_at(place: str) -> Filesystem:
    """The filesystem at a URL, or at a path of this machine, which may be relative here."""
    return Filesystem.at(place if _URL.match(place) else os.path.abspath(os.path.expanduser(place)))


def _no_run(fs: Filesystem) -> str:
    looked_for = f"no run at {plain(fs.url)}: looked for the file {RUN_FILE} in it"
    if fs.local_root is not None and not os.path.isdir(fs.local_root):
        what = "it is a file" if os.path.exists(fs.local_root) else "there is no such directory"
        return f"{looked_for}, but {what}. Give a run directory: STORAGE/NAME"
    bucket = fs.missing_bucket()
    if bucket is not None:
        return f"{looked_for}, but there is no bucket {plain(bucket)}"
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
