"""A phase of a rehearsal: ranks started, watched, and ended or killed, in the parent process.

Must not import ray.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path

from elastic.storage.checkpoints import Catalog
from elastic.storage.filesystem import Filesystem
from elastic.storage.metrics import current_metrics
from elastic.storage.run_file import load_run_file
from elastic.training import process_group
from elastic.training.rehearsal import notes, rank
from elastic.training.rehearsal.notes import Trace
from elastic.training.rehearsal.plan import Plan

# Once one rank has failed the others only wait for it in a collective.
_GRACE_S = 5.0
_LOOK_S = 0.02
_MOST_OUTPUT = 2_000

Values = dict[int, dict[str, float]]


class PhaseFailed(Exception):
    """A rank raised or died, or time ran out; the text is for the user."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """What is done to which run, on how many ranks."""

    name: str
    plan: Plan
    folder: Path
    """Of the run, which is begun or gone on with."""
    world_size: int
    is_killed: bool = False


@dataclass(frozen=True, kw_only=True)
class Observed:
    """What a phase has shown."""

    values: Values
    """All that was logged, by step and name, in the history that counts."""
    traces: list[Trace]
    """By rank."""
    last_step: int


@dataclass
class _Rank:
    number: int
    process: BaseProcess
    pipe: Connection
    part: rank.Part
    step: int = 0
    state: str = "running"
    raised: str = ""
    is_victim: bool = False


def run(phase: Phase, until_s: float, tell: Callable[[int], None]) -> Observed:
    """What this phase shows. `until_s` is on the monotonic clock; `tell` hears of rank 0's steps.

    Raises:
        PhaseFailed: it could not be brought to its end.
    """
    server = process_group.open_store("127.0.0.1")
    with _ranks(phase, server.port) as ranks:
        if phase.is_killed:
            _await(ranks, "held", until_s, tell)
            _await_checkpoint(phase, until_s)
            for each in ranks:
                assert each.process.pid is not None
                os.kill(each.process.pid, signal.SIGKILL)
            for each in ranks:
                each.process.join()
        else:
            _await(ranks, "ended", until_s, tell)
    return Observed(
        values=current_metrics(Filesystem.at(str(phase.folder))),
        traces=[notes.read(each.part.notes) for each in ranks],
        last_step=max(each.step for each in ranks),
    )


@contextlib.contextmanager
def _ranks(phase: Phase, port: int) -> Iterator[list[_Rank]]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["elastic.training.rehearsal.rank"])
    beside = phase.folder.with_name(f"{phase.name} notes")
    beside.mkdir()
    ranks: list[_Rank] = []
    try:
        for number in range(phase.world_size):
            part = rank.Part(
                plan=phase.plan,
                run_url=str(phase.folder),
                world_rank=number,
                world_size=phase.world_size,
                store_port=port,
                notes=beside / f"rank-{number}.jsonl",
                output=beside / f"rank-{number}.log",
                hold_at=phase.plan.half + 1 if phase.is_killed else None,
            )
            ranks.append(_started(context, part))
        yield ranks
    finally:
        for each in ranks:
            each.process.kill()
            each.process.join()
            each.pipe.close()


def _started(context: ForkServerContext, part: rank.Part) -> _Rank:
    ours, theirs = context.Pipe()
    # Not a daemon: those may not have children, and a loader has.
    process = context.Process(target=rank.serve, args=(theirs, part))
    process.start()
    theirs.close()
    return _Rank(part.world_rank, process, ours, part)


def _await(ranks: list[_Rank], state: str, until_s: float, tell: Callable[[int], None]) -> None:
    """Returns when all ranks are in `state`."""
    pending = {each.pipe: each for each in ranks}
    deadline_s = until_s
    while pending and (left_s := deadline_s - time.monotonic()) > 0:
        for pipe in wait(list(pending), left_s):
            each = pending[pipe]  # type: ignore[index]
            _hear(each)
            if each.number == 0 and each.state == "running":
                tell(each.step)
            if each.state != "running":
                del pending[each.pipe]
            if each.state not in ("running", state):
                deadline_s = min(deadline_s, time.monotonic() + _GRACE_S)
    bad = [each for each in ranks if each.state != state]
    if bad:
        raise PhaseFailed(_complaint(ranks, bad, state, until_s))


def _hear(each: _Rank) -> None:
    try:
        kind, data = each.pipe.recv()
    except (EOFError, ConnectionResetError):
        each.state = "died"
        return
    if kind == "step":
        each.step = data
    elif kind == "raised":
        each.state = "raised"
        each.raised, each.is_victim = data
    else:
        each.state, each.step = kind, max(each.step, data - (kind == "held"))


def _complaint(ranks: list[_Rank], bad: list[_Rank], state: str, until_s: float) -> str:
    own = [each for each in bad if each.state == "raised" and not each.is_victim]
    if own:
        return f"rank {own[0].number} raised\n{own[0].raised}"
    for each in bad:
        if each.state == "died":
            each.process.join(1.0)
            tail = each.part.output.read_text(errors="replace")[-_MOST_OUTPUT:]
            return f"rank {each.number} died with exit code {each.process.exitcode}\n{tail}"
    if time.monotonic() >= until_s:
        return (
            f"it was at step {ranks[0].step} when the time for the rehearsal was over: "
            "take fewer --steps, or give it more --limit"
        )
    if state == "held" and any(each.state == "ended" for each in bad):
        return (
            f"the training function ended at step {ranks[0].step}, before the kill: "
            f"take --steps {ranks[0].step} at most"
        )
    return f"rank {bad[0].number} {bad[0].state}\n{bad[0].raised}"


def _await_checkpoint(phase: Phase, until_s: float) -> None:
    filesystem = Filesystem.at(str(phase.folder))
    run_file = load_run_file(filesystem)
    assert run_file is not None
    catalog = Catalog(filesystem, run_file.run_id)
    while not catalog.inspect(phase.plan.half).complete:
        if time.monotonic() > until_s:
            raise PhaseFailed(
                f"the checkpoint of step {phase.plan.half} was not committed in time: "
                f"{catalog.inspect(phase.plan.half).reason}"
            )
        time.sleep(_LOOK_S)
