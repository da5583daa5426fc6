"""The verb dashboard: serves the web page of all runs below a storage root. Reads only.

Must import neither ray nor torch.
"""

from __future__ import annotations

import json
import os
import secrets
import time

import click

from elastic.dashboard.text import plain
from elastic.policy.addresses import is_loopback
from elastic.storage.run_file import RUN_FILE
from elastic.verbs.run_argument import (
    BadRun,
    Problem,
    json_option,
    reading,
    storage_at,
    storage_option,
)

_TOKEN_BYTES = 24


@click.command(short_help="A web page of all runs below a storage root.")
@storage_option
@click.option(
    "--port",
    type=click.IntRange(min=0, max=65535),
    default=8266,
    show_default=True,
    help="0 takes a free one.",
)
@click.option(
    "--host", default="127.0.0.1", show_default=True, metavar="ADDR", help="Address to listen on."
)
@click.option(
    "--token",
    metavar="TOKEN",
    help="What viewers must know; other addresses than loopback get one if none is given.",
)
@click.option(
    "--name",
    "names",
    multiple=True,
    metavar="NAME",
    help="A host name under which browsers may ask, beside this machine's; repeatable.",
)
@json_option
def dashboard(
    storage: str, port: int, host: str, token: str | None, names: tuple[str, ...], as_json: bool
) -> None:
    """Serve a page that shows every run below a storage root as it goes on, and long after.

    It only reads, and needs no cluster. Its address is printed; Ctrl-C ends it. Reach it on another
    machine through `ssh -L`, or let it listen with --host: then viewers need the token.

    \b
    Exit codes: 0 ended, 1 the address cannot be had, 2 no such storage.
    """
    from elastic.dashboard.page.server import PageServer  # aiohttp is for this verb alone
    from elastic.dashboard.prometheus import metrics_text
    from elastic.dashboard.run_picture import Readers

    with reading(storage):
        root = storage_at(storage)
        if root.local_root is not None and not os.path.isdir(root.local_root):
            raise BadRun(f"no storage at {plain(root.url)}: there is no such directory")
        if root.exists(RUN_FILE):
            raise BadRun(f"{plain(root.url)} is a run itself: give the storage that holds it")
    if not token:
        token = "" if is_loopback(host) else secrets.token_urlsafe(_TOKEN_BYTES)
    runs = Readers(root)
    texts = {"/metrics": lambda: metrics_text(runs, time.time()).decode()}
    server = PageServer(
        root, host=host, port=port, token=token, names=frozenset(names), texts=texts
    )
    try:
        server.start()
    except OSError as error:
        raise Problem(
            f"cannot listen on {plain(host)} port {port}: {plain(str(error))}. "
            "Give another one: --port 0 takes a free one"
        ) from error
    told = {"url": server.url, "port": server.port, "storage": root.url}
    click.echo(json.dumps(told) if as_json else f"{plain(root.url)} at {server.url}")
    try:
        server.wait()
    except KeyboardInterrupt:
        server.stop()
