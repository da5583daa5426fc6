"""The verb runs: all runs below a storage root. Reads only. Must import neither ray nor torch."""

from __future__ import annotations

import os
import time
from dataclasses import asdict

import click

from elastic.dashboard.goodput import DEFINITION
from elastic.dashboard.run_list import list_runs, runs_text
from elastic.dashboard.text import plain, to_json
from elastic.storage.run_file import RUN_FILE
from elastic.verbs.run_argument import BadRun, json_option, reading, storage_at, storage_option


@click.command(
    short_help="All runs below a storage root.",
    help=f"""The runs directly below a storage root, the one that spoke last first, each with
    state, step, last loss, workers, restarts, goodput so far and age.

    {DEFINITION}

    A damaged run directory is listed with its problem; nothing is changed.

    \b
    Exit codes: 0 listed, 2 no such storage.
    """,
)
@storage_option
@json_option
def runs(storage: str, as_json: bool) -> None:
    """See the decorator: the definition of goodput stands beside its formula."""
    with reading(storage):
        root = storage_at(storage)
        if root.local_root is not None and not os.path.isdir(root.local_root):
            raise BadRun(f"no storage at {plain(root.url)}: there is no such directory")
        if root.exists(RUN_FILE):
            raise BadRun(
                f"{plain(root.url)} is a run itself: look at it with elastic status, or give the "
                "storage that holds it"
            )
        rows = list_runs(root, now_s=time.time())
        bucket = None if rows else root.missing_bucket()
        if bucket is not None:
            raise BadRun(f"no storage at {plain(root.url)}: there is no bucket {plain(bucket)}")
        shown = to_json([asdict(row) for row in rows]) if as_json else runs_text(rows)
    click.echo(shown)
