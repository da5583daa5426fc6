"""`bench page`: what a step costs more while somebody looks at the run's page.

Blocks of steps with a viewer and without alternate within one run. The viewer reads the stream that
a browser reads, on this machine; drawing it is the browser's work, on another machine as a rule,
and is not in the figure. Must not import torch: the loop is in `page_loop`, which the workers run.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from elastic.storage.filesystem import Filesystem
from elastic.storage.ledger import read_ledger
from jobs.bench.cluster import local_cluster
from jobs.bench.engine_process import EngineProcess, engine_process, wait_for
from jobs.bench.events import EventLog
from jobs.bench.statistics import bootstrap_interval, paired_ratios

NUM_WORKERS, DEADLINE_S = 2, 300.0
RUN = "page"


@dataclass(frozen=True, kw_only=True)
class Bench:
    """`num_blocks` blocks of steps with the page open, each between two with it closed."""

    num_blocks: int
    # A driver tells of progress each five seconds, and that is when a page is made anew: with
    # shorter blocks some would have no part in its cost.
    block_s: float = 5.5

    def run(self, say: Callable[[str], None]) -> dict[str, Any]:
        """The report, ready for JSON.

        Raises MeasurementFailed when the run ends without its result.
        """
        say(f"{self.num_blocks} blocks of {self.block_s:g} s with the page open ...")
        # The first block of each side warms caches and allocators up, and is thrown away.
        with local_cluster(
            num_nodes=1, cpus_per_node=NUM_WORKERS, fast_health_checks=True
        ) as cluster:
            plan = {
                "directory": str(cluster.directory),
                "address": cluster.address,
                "name": RUN,
                "num_blocks": 2 * self.num_blocks + 3,
                "block_s": self.block_s,
                "num_workers": NUM_WORKERS,
            }
            with engine_process(
                "jobs.bench.page_loop", json.dumps(plan), directory=cluster.directory
            ) as process:
                blocks = self._measure(process, cluster.directory, plan["num_blocks"], say)
        return report(blocks[2:])

    def _measure(
        self,
        process: EngineProcess,
        directory: Path,
        num_blocks: int,
        say: Callable[[str], None],
    ) -> list[dict[str, Any]]:
        log, answers = EventLog(directory / "events.jsonl"), EventLog(directory / "viewer.jsonl")
        viewer: Viewer | None = None
        for block in range(num_blocks):
            asked = functools.partial(_find, log, "ready", block)
            wait_for(asked, process, DEADLINE_S, f"begin block {block + 1} of {num_blocks}")
            if block % 2 == 1:
                viewer = Viewer(page_url(directory))
                wait_for(functools.partial(viewer.has_seen), process, DEADLINE_S, "show its page")
            elif viewer is not None:
                viewer.close()
            answers.write("go", block=block, is_open=block % 2 == 1)
            if block and block % 10 == 0:
                say(f"    {block} of {num_blocks} blocks")
        done = functools.partial(_find, log, "block", num_blocks - 1)
        wait_for(done, process, DEADLINE_S, "finish the last block")
        return [event for event in log.read() if event["event"] == "block"]


def page_url(directory: Path) -> str:
    """Where the run says that its page is."""
    events = read_ledger(Filesystem.at(str(directory / RUN)))
    return str(next(event.data["page_url"] for event in events if event.kind == "run_started"))


def _find(log: EventLog, event: str, block: int) -> bool:
    return any(one["event"] == event and one["block"] == block for one in log.read())


class Viewer:
    """Reads the changes of one run's page until it is closed."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._connection = http.client.HTTPConnection(str(parts.netloc), timeout=60)
        self._connection.request("GET", f"/api{parts.path}/changes")
        self._num_bytes = 0
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def has_seen(self) -> bool:
        """Whether the first picture has come."""
        return self._num_bytes > 0

    def close(self) -> None:
        """Leave."""
        if self._connection.sock is not None:
            with contextlib.suppress(OSError):
                self._connection.sock.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)

    def _read(self) -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            answer = self._connection.getresponse()
            while told := answer.read1(1 << 16):
                self._num_bytes += len(told)


def report(blocks: list[dict[str, Any]]) -> dict[str, Any]:
    """The JSON of `bench page`, from the blocks in their order, a closed one first and last."""
    open_s = [block["step_s"] for block in blocks if block["is_open"]]
    closed_s = [block["step_s"] for block in blocks if not block["is_open"]]
    ratios = paired_ratios(open_s, closed_s)
    low, high = bootstrap_interval(ratios)
    return {
        "ratio_median": median(ratios),
        "ci95": [low, high],
        "open_step_s": median(open_s),
        "closed_step_s": median(closed_s),
        "ratios": ratios,
        "blocks": [
            {key: block[key] for key in ("is_open", "step_s", "num_steps")} for block in blocks
        ],
    }


def table(result: dict[str, Any]) -> str:
    """The report for a reader."""
    low, high = result["ci95"]
    return (
        f"step with the page closed {result['closed_step_s'] * 1e3:.1f} ms, "
        f"open {result['open_step_s'] * 1e3:.1f} ms (medians of blocks)\n"
        f"ratio {result['ratio_median']:.4f}, 95 % interval {low:.4f} to {high:.4f} "
        f"over {len(result['ratios'])} blocks"
    )
