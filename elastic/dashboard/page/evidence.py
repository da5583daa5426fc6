"""Logs and stacks of a run for its page: what there is, and the end of one of them as lines.

What lies outside of the run, behind a link, is not read. Must import neither ray nor torch.
"""

from __future__ import annotations

import os
import re
from typing import Any

from elastic.storage.filesystem import Filesystem
from elastic.storage.log_lines import readable
from elastic.storage.rank_logs import WrittenLog, log_path, logged_generations, logged_ranks
from elastic.storage.stacks import STACKS

MOST_LINES = 400
MOST_BYTES = 256 * 1024
_MOST_GENERATIONS = 300
_DUMP = re.compile(r"g\d+-\d+")
_RANK = re.compile(r"rank\d+\.txt")


def is_contained(root: Filesystem, path: str) -> bool:
    """Whether `path` below `root` is below it still when all links are followed."""
    if root.local_root is None:
        return True
    base = os.path.realpath(root.local_root)
    target = os.path.realpath(os.path.join(root.local_root, path))
    return os.path.commonpath([base, target]) == base


def listing(fs: Filesystem) -> dict[str, Any]:
    """The newest generations with logs, and their ranks; and the dumps of stacks."""
    generations = logged_generations(fs)[-_MOST_GENERATIONS:]
    return {
        "logs": [{"generation": one, "ranks": logged_ranks(fs, one)} for one in generations],
        "stacks": [
            {
                "dump": entry.name,
                "files": [
                    it.name for it in fs.list(f"{STACKS}/{entry.name}") if _is_stack(it.name)
                ],
            }
            for entry in fs.list(STACKS)
            if entry.is_dir and _DUMP.fullmatch(entry.name)
        ],
    }


def log_end(fs: Filesystem, generation: int, world_rank: int) -> list[str] | None:
    """The last lines of one rank, readable; None if there is no such log."""
    if not is_contained(fs, log_path(generation, world_rank)):
        return None
    log = WrittenLog(fs, generation, world_rank)
    end = log.size()
    if end == 0:
        return None
    start = max(0, end - MOST_BYTES, log.start_of_last(MOST_LINES))
    return _lines(_bytes_of(log, start, end))


def stack(fs: Filesystem, dump: str, file: str) -> list[str] | None:
    """The stacks of one rank, readable; None if there are none."""
    path = f"{STACKS}/{dump}/{file}"
    if not (_DUMP.fullmatch(dump) and _is_stack(file) and is_contained(fs, path)):
        return None
    try:
        with fs.open_input(path) as opened:
            return _lines(opened.read(MOST_BYTES))
    except FileNotFoundError:
        return None


def _is_stack(name: str) -> bool:
    return _RANK.fullmatch(name) is not None


def _bytes_of(log: WrittenLog, start: int, end: int) -> bytes:
    data = b""
    while start + len(data) < end:
        more = log.read(start + len(data), end - start - len(data))
        if not more:
            break
        data += more
    return data


def _lines(data: bytes) -> list[str]:
    return [readable(line) for line in data.removesuffix(b"\n").split(b"\n")]
