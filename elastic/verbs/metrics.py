"""The verb metrics: a run, or all below a storage root, as text for Prometheus. Reads only.

Must import neither ray nor torch.
"""

from __future__ import annotations

import os
import time
from importlib import resources

import click

from elastic.dashboard.text import plain
from elastic.verbs.run_argument import BadRun, open_run, reading, storage_at


@click.command(short_help="Runs as text for Prometheus.")
@click.argument("run", metavar="[RUN]", required=False)
@click.option("--storage", metavar="URL", help="All runs directly below this path or URL.")
@click.option(
    "--alert-rules",
    "file",
    flag_value="alerts/elastic.yaml",
    help="Print alert rules for Prometheus instead.",
)
@click.option(
    "--grafana-dashboard",
    "file",
    flag_value="grafana/elastic.json",
    help="Print a dashboard for Grafana instead.",
)
def metrics(run: str | None, storage: str | None, file: str | None) -> None:
    """RUN, or all runs below --storage, in Prometheus' text format: for node-exporter's textfile
    collector, or to look at.

    \b
    Exit codes: 0 told, 2 no such run or storage.
    """
    if [run, storage, file].count(None) != 2:
        raise click.UsageError(
            "give one of RUN, --storage URL, --alert-rules and --grafana-dashboard"
        )
    if file is not None:
        packaged = resources.files("elastic.dashboard").joinpath(file)
        click.echo(packaged.read_text(encoding="utf-8"), nl=False)
        return
    # Not at the top: a quick verb would take as long to import it as for all the rest.
    from elastic.dashboard.prometheus import metrics_text
    from elastic.dashboard.run_picture import Readers

    place = str(run if storage is None else storage)
    with reading(place):
        root = storage_at(place)
        if storage is None:
            open_run(place)
        elif root.local_root is not None and not os.path.isdir(root.local_root):
            raise BadRun(f"no storage at {plain(root.url)}: there is no such directory")
        text = metrics_text(Readers(root), time.time())
    click.echo(text, nl=False)
