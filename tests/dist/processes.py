"""Ranks for tests: real processes in a real gloo group, their results or their tracebacks."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

__all__ = ["RankFailed", "run_ranks"]

_PRELOAD = ["tests.dist.preloaded", __name__]
# Once one rank has failed the others only wait for it in a collective.
_GRACE_S = 5.0


class RankFailed(AssertionError):
    """A rank raised, died or outlived its time; the text holds every rank's traceback."""


@dataclass
class _Rank:
    number: int
    process: BaseProcess
    pipe: Connection
    stacks: Path
    outcome: tuple[str, Any] | None = None


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 60,
    may_die: Collection[int] = (),
) -> list[Any]:
    """What `fn(rank, world_size, *args)` returned on each rank, by rank.

    `fn` is a module-level function; it runs with the default gloo group made, one torch thread, on
    the loopback device. A rank in `may_die` may be killed and then gives None. Raises `RankFailed`
    when a rank raises, dies otherwise, or has not returned after `timeout_s`.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        ranks = []
        for number in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_child,
                args=(theirs, number, world_size, folder, timeout_s, pickle.dumps((fn, args))),
                daemon=True,
            )
            process.start()
            theirs.close()
            ranks.append(_Rank(number, process, ours, Path(folder, f"stacks-{number}")))
        try:
            _collect(ranks, time.monotonic() + timeout_s, may_die)
            _judge(ranks, timeout_s, may_die)
            return [rank.outcome[1] if rank.outcome else None for rank in ranks]
        finally:
            _end(ranks)


def _collect(ranks: list[_Rank], deadline: float, may_die: Collection[int]) -> None:
    pending = {rank.pipe: rank for rank in ranks}
    while pending and (left_s := deadline - time.monotonic()) > 0:
        for pipe in wait(list(pending), left_s):
            rank = pending.pop(pipe)
            with contextlib.suppress(EOFError, ConnectionResetError):
                rank.outcome = pickle.loads(rank.pipe.recv_bytes())
            if not (_succeeded(rank) or rank.number in may_die):
                deadline = min(deadline, time.monotonic() + _GRACE_S)


def _judge(ranks: list[_Rank], timeout_s: float, may_die: Collection[int]) -> None:
    failed = [rank for rank in ranks if not _succeeded(rank)]
    if all(rank.outcome is None and rank.number in may_die for rank in failed):
        return
    raise RankFailed("\n".join(_report(rank, timeout_s) for rank in failed))


def _succeeded(rank: _Rank) -> bool:
    return rank.outcome is not None and rank.outcome[0] == "returned"


def _report(rank: _Rank, timeout_s: float) -> str:
    if rank.outcome is not None:
        return f"rank {rank.number} raised\n{rank.outcome[1]}"
    rank.process.join(0.2)
    if rank.process.exitcode is not None:
        return f"rank {rank.number} died with exit code {rank.process.exitcode}"
    if rank.process.pid is not None:
        os.kill(rank.process.pid, signal.SIGUSR1)
        time.sleep(0.3)
    stacks = rank.stacks.read_text() if rank.stacks.exists() else "(no stack)"
    return f"rank {rank.number} was still running (limit {timeout_s} s) at\n{stacks}"


def _end(ranks: list[_Rank]) -> None:
    for rank in ranks:
        if rank.process.is_alive():
            rank.process.kill()
        rank.process.join(5)
        rank.pipe.close()


def _child(
    pipe: Connection, rank: int, world_size: int, folder: str, timeout_s: float, call: bytes
) -> None:
    stacks = open(Path(folder, f"stacks-{rank}"), "w")  # noqa: SIM115 - open until the process ends
    faulthandler.register(signal.SIGUSR1, file=stacks)
    try:
        fn, args = pickle.loads(call)  # imports the test's module, which may fail
        with _group(rank, world_size, folder, timeout_s):
            outcome = ("returned", fn(rank, world_size, *args))
    except BaseException:  # noqa: BLE001 - the parent shows it
        outcome = ("raised", traceback.format_exc())
    try:
        message = pickle.dumps(outcome)
    except Exception:  # noqa: BLE001 - the parent shows it
        message = pickle.dumps(("raised", f"result: {traceback.format_exc()}"))
    pipe.send_bytes(message)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a background thread of a failed test must not keep the process alive


@contextlib.contextmanager
def _group(rank: int, world_size: int, folder: str, timeout_s: float) -> Iterator[None]:
    torch = importlib.import_module("torch")
    dist = importlib.import_module("torch.distributed")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{folder}/store", world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    yield
    if dist.is_initialized():  # a test may have ended it to make its own
        dist.destroy_process_group()
