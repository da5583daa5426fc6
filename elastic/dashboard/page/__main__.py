"""The page that a run serves of itself, as a process beside the driver, on the driver's socket.

`python -m elastic.dashboard.page --storage URL --host HOST --fd N`, with the token, if there is
one, in the environment. It gives way to all else on its node, and ends soon after its stdin does,
which the driver's death closes.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time

import click

from elastic.dashboard.page.server import PageServer
from elastic.dashboard.prometheus import metrics_text
from elastic.dashboard.run_picture import Readers
from elastic.storage.filesystem import Filesystem

_NICE = 19
# Viewers are told how the run has ended.
_LAST_S = 3.0


@click.command()
@click.option("--storage", required=True)
@click.option("--host", required=True)
@click.option("--fd", required=True, type=int)
@click.option("--token", default="", envvar="ELASTIC_PAGE_TOKEN")
def main(storage: str, host: str, fd: int, token: str) -> None:
    """Serve the page until stdin ends."""
    os.nice(_NICE)
    root = Filesystem.at(storage)
    runs = Readers(root)
    server = PageServer(
        root,
        host=host,
        token=token,
        texts={"/metrics": lambda: metrics_text(runs, time.time()).decode()},
        listening=socket.socket(fileno=fd),
    ).start()

    def stop_at_the_end() -> None:
        sys.stdin.buffer.read()
        time.sleep(_LAST_S)
        server.stop()

    threading.Thread(target=stop_at_the_end, daemon=True).start()
    server.wait()


if __name__ == "__main__":
    main()
