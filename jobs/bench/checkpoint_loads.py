"""The ranks' side of `bench checkpoint`'s loads: what three ranks saved, two ranks load, in place.

Each way reads what was saved in that way. Hot: the files are in the page cache. Cold: the system
was told to drop them, as after a restart of the node.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp

from elastic.storage.checkpoints import Manifest
from elastic.storage.filesystem import Filesystem
from elastic.training.checkpoint import AsyncSaver, describe, load
from elastic.training.process_group import Groups
from elastic.training.state import TrackedState
from jobs.bench import checkpoint_memory
from jobs.bench.checkpoint import NUM_RANKS, OURS, Plan
from jobs.bench.checkpoint_state import Job, join

_DCP = "dcp.load"


def main(plan: Plan, what: str, rank: int, num_ranks: int) -> None:
    directory = Path(plan.directory)
    member, groups, _ = join(directory, what, rank, num_ranks)
    # The same in all, whatever the number of ranks.
    job = Job(groups, plan.bytes_per_rank * NUM_RANKS)
    if what == "write":
        _write(directory, job.state, groups)
        checkpoint_memory.write(directory, job.state)
    else:
        with checkpoint_memory.loader(directory, member, job.state, groups) as from_memory:
            _read(plan, job.state, groups, from_memory)
    dist.barrier()


def _write(directory: Path, state: TrackedState, groups: Groups) -> None:
    captured = state.capture()
    dcp.save(dict(captured.tensors), checkpoint_id=str(directory / _DCP))
    handle = AsyncSaver(groups.saves).save(
        Filesystem.at(str(directory)),
        OURS,
        captured.tensors,
        plain={"tracked": captured.plain},
        rank_plain={},
        rank=dist.get_rank(),
    )
    files: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(files, handle.files())
    manifest = Manifest(
        run_id="bench",
        step=1,
        world_size=len(files),
        generation=1,
        attempt=1,
        created_s=0.0,
        counters={},
        tensors=describe(captured.tensors),
        files=[file for of_rank in files for file in of_rank],
    )
    (directory / "manifest").write_bytes(pickle.dumps(manifest))


def _read(plan: Plan, state: TrackedState, groups: Groups, from_memory: Callable[[], Any]) -> None:
    directory = Path(plan.directory)
    tensors = dict(state.capture().tensors)
    manifest = pickle.loads((directory / "manifest").read_bytes())
    fs = Filesystem.at(str(directory))
    ways: dict[str, Callable[[], Any]] = {
        _DCP: lambda: dcp.load(tensors, checkpoint_id=str(directory / _DCP)),
        OURS: lambda: load(fs, OURS, manifest, state, groups.control),
        checkpoint_memory.MEMORY: from_memory,
    }
    for turn in range(plan.num_loads + 1):
        for way, read in ways.items():
            is_on_disk = way != checkpoint_memory.MEMORY
            for is_cold in (False, True) if is_on_disk else (False,):
                if is_on_disk:
                    _set_cache(directory / way, is_cold)
                took_s = _timed(read, groups.control)
                if turn and dist.get_rank() == 0:  # the first warms up
                    name = f"{way}.cold" if is_cold else way
                    plan.log.write("load", way=name, load_s=took_s)


def _timed(read: Callable[[], Any], group: dist.ProcessGroup) -> float:
    """Until the last rank has all."""
    dist.barrier(group=group)
    begun_s = time.perf_counter()
    read()
    dist.barrier(group=group)
    return time.perf_counter() - begun_s


def _set_cache(folder: Path, is_cold: bool) -> None:
    """Has the files in the page cache, or not; on one rank, for all."""
    if dist.get_rank() == 0:
        room = bytearray(1 << 24)
        for path in folder.iterdir():
            descriptor = os.open(path, os.O_RDONLY)
            if is_cold:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while os.readv(descriptor, [room]):
                    pass
            os.close(descriptor)
    torch.distributed.barrier()
