"""The verb metrics: a run, or all below a storage root, as text for Prometheus. Reads only.

Must import neither ray nor torch.
"""

from __future__ import annotations

import os
import time

import click

from elastic.dashboard.text import plain
from elastic.verbs.run_argument import BadRun, open_run, reading, storage_at


@click.command(short_help="Runs as text for Prometheus.")
@click.argument("run", metavar="[RUN]", required=False)
@click.option("--storage", metavar="URL", help="All runs directly below this path or URL.")
def metrics(run: str | None, storage: str | None) -> None:
    """RUN, or all runs below --storage, in Prometheus' text format: for node-exporter's textfile
    collector, or to look at.

    \b
    Exit codes: 0 told, 2 no such run or storage.
    """
    # Its package takes as long to import as all the rest of a quick verb.
    from elastic.dashboard.prometheus import metrics_text

    if (run is None) == (storage is None):
        raise click.UsageError("give either RUN or --storage URL")
    place = str(run if storage is None else storage)
    with reading(place):
        root = storage_at(place)
        if storage is None:
            open_run(place)
        elif root.local_root is not None and not os.path.isdir(root.local_root):
            raise BadRun(f"no storage at {plain(root.url)}: there is no such directory")
        text = metrics_text(root, time.time())
    click.echo(text, nl=False)
