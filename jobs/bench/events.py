"""The event log of one measurement: a JSON line for everything a rank does that the benchmark
times.

Written by every rank, read by the benchmark while they run. Must not import ray, torch or elastic:
all engines, and the loop under torchrun, write the same log.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any


class EventLog:
    """An append-only file of JSON lines, shared by processes of one machine, so that their times
    compare.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)

    def write(self, event: str, **fields: Any) -> None:
        line = (
            json.dumps({"event": event, "time_s": time.time(), "pid": os.getpid(), **fields}) + "\n"
        )
        # One write to a file opened for append: lines of ranks that write at the same moment do not
        # mix.
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)

    def read(self) -> list[dict[str, Any]]:
        """All events so far, in the order written; a last line that a killed rank left torn is not
        among them.
        """
        try:
            lines = self._path.read_text().splitlines(keepends=True)
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines if line.endswith("\n")]


class Recorder:
    """One rank's pen: writes to the log with who it is already filled in."""

    def __init__(
        self, log: EventLog, *, group: str, rank: int, world_size: int, node_id: str
    ) -> None:
        self._log = log
        self._who = {"group": group, "rank": rank, "world_size": world_size, "node_id": node_id}

    def write(self, event: str, **fields: Any) -> None:
        self._log.write(event, **self._who, **fields)
