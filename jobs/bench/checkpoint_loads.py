"""The ranks' side of `bench checkpoint`'s loads: what three ranks saved, two ranks load, in place.

Each way reads what was saved in that way. Hot: the files are in the page cache, also those of the
S3 server, which is on this machine. Cold: the system was told to drop them, as after a restart of
the node.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp

from elastic.storage.checkpoints import Manifest
from elastic.storage.filesystem import Filesystem
from elastic.training.checkpoint import AsyncSaver, describe, load
from elastic.training.collector import settle
from elastic.training.process_group import Groups
from elastic.training.state import TrackedState
from jobs.bench import checkpoint_memory
from jobs.bench.checkpoint import MEMORY, NUM_RANKS, OURS, S3, Plan
from jobs.bench.checkpoint_state import Job, join
from jobs.bench.quiet import hush

_DCP = "dcp.load"


def main(plan: Plan, what: str, rank: int, num_ranks: int) -> None:
    hush()
    directory = Path(plan.directory)
    member, groups, _ = join(directory, what, rank, num_ranks)
    # The same in all, whatever the number of ranks.
    job = Job(groups, plan.bytes_per_rank * NUM_RANKS)
    if what == "write":
        _write(plan, job.state, groups)
        checkpoint_memory.write(directory, job.state)
    else:
        with checkpoint_memory.loader(directory, member, job.state, groups) as from_memory:
            _read(plan, job.state, groups, from_memory)
    dist.barrier()


def _places(plan: Plan) -> dict[str, Filesystem]:
    """Where our ways have saved, each below its own name."""
    places = {OURS: Filesystem.at(plan.directory)}
    if plan.has_s3:
        places[S3] = Filesystem.at(f"s3://{plan.bucket.name}")
    return places


def _write(plan: Plan, state: TrackedState, groups: Groups) -> None:
    directory = Path(plan.directory)
    dcp.save(dict(state.capture().tensors), checkpoint_id=str(directory / _DCP))
    saver = AsyncSaver(groups.saves)
    for way, fs in _places(plan).items():
        _manifest(directory, way).write_bytes(pickle.dumps(_save(saver, fs, way, state)))


def _save(saver: AsyncSaver, fs: Filesystem, way: str, state: TrackedState) -> Manifest:
    captured = state.capture()
    handle = saver.save(
        fs,
        way,
        captured.tensors,
        plain={"tracked": captured.plain},
        rank_plain={},
        rank=dist.get_rank(),
    )
    files: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(files, handle.files())
    return Manifest(
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


def _manifest(directory: Path, way: str) -> Path:
    return directory / f"manifest-{way}"


def _read(plan: Plan, state: TrackedState, groups: Groups, from_memory: Callable[[], Any]) -> None:
    directory = Path(plan.directory)
    tensors = dict(state.capture().tensors)
    ways: dict[str, Callable[[], Any]] = {
        _DCP: lambda: dcp.load(tensors, checkpoint_id=str(directory / _DCP)),
        MEMORY: from_memory,
    }
    # S3 comes last: its server is not at rest at once when it has answered.
    for way, fs in _places(plan).items():
        manifest = pickle.loads(_manifest(directory, way).read_bytes())
        ways[way] = partial(load, fs, way, manifest, state, groups.control)
    files_in = {_DCP: directory / _DCP, OURS: directory / OURS, S3: plan.bucket / S3}
    settle()  # as the service does, and for all ways: a collection takes as long as a load
    for turn in range(plan.num_loads + 1):
        for way, read in ways.items():
            for is_cold in (False, True) if way in (_DCP, OURS) else (False,):
                if way in files_in:
                    _set_cache(files_in[way], is_cold)
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
