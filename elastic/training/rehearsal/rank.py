"""One rank of a rehearsal: a process that trains the target without a cluster, on the CPU.

Must not import ray.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from elastic.policy.cause import is_victim
from elastic.policy.retention import Retention
from elastic.policy.saves import SaveInterval
from elastic.storage.claim import RunSpec
from elastic.training.membership import TrainingConfig
from elastic.training.rehearsal.notes import Notebook
from elastic.training.rehearsal.observed_run import Enough, ObservedRun
from elastic.training.rehearsal.plan import Plan
from elastic.training.rehearsal.target import load
from elastic.training.run import Run
from elastic.training.standalone import train_standalone


@dataclass(frozen=True, kw_only=True)
class Part:
    """One rank's part in one phase."""

    plan: Plan
    run_url: str
    world_rank: int
    world_size: int
    store_port: int
    notes: Path
    output: Path
    """What the rank prints."""
    hold_at: int | None
    """The step at whose start it waits to be killed."""


def serve(pipe: Connection, part: Part) -> None:
    """Train, and send (`step`, n), (`held`, n), (`ended`, n) or (`raised`, what) to the parent."""
    threading.Thread(target=_end_with_parent, args=(pipe,), daemon=True).start()
    _set_up(part)
    try:
        pipe.send(("ended", _train(pipe, part)))
    except BaseException as error:  # noqa: BLE001 - the parent shows it
        is_effect = is_victim(type(error).__name__, str(error))
        pipe.send(("raised", (traceback.format_exc(), is_effect)))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a thread that the target has left must not keep the process alive


def _end_with_parent(pipe: Connection) -> None:
    # The parent sends nothing: what can be read is the end.
    pipe.poll(None)
    os._exit(1)


def _set_up(part: Part) -> None:
    output = os.open(part.output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for number in (1, 2):
        os.dup2(output, number)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if Path("/sys/class/net/lo").exists():
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    sys.argv = [part.plan.target.partition(":")[0], *part.plan.arguments]
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // part.world_size))


def _train(pipe: Connection, part: Part) -> int:
    plan = part.plan
    function, config = load(plan.target, plan.arguments)
    reached = 0

    def on_step(step: int) -> None:
        nonlocal reached
        reached = step
        pipe.send(("step", step))

    make_run = functools.partial(
        ObservedRun,
        function=function,
        notebook=Notebook(part.notes),
        last_step=plan.steps,
        look_at=plan.half + 1,
        reached=on_step,
        hold_at=part.hold_at,
        held=lambda: pipe.send(("held", part.hold_at)),
    )
    try:
        ended: Run = train_standalone(
            function,
            _config(part, config),
            RunSpec(name="rehearsal", seed=plan.seed),
            Retention(keep=2),
            world_rank=part.world_rank,
            world_size=part.world_size,
            local_rank=part.world_rank,
            local_world_size=part.world_size,
            store=dist.TCPStore(
                "127.0.0.1", part.store_port, is_master=False, wait_for_workers=False
            ),
            make_run=make_run,
        )
    except Enough:
        return reached
    return ended.step


def _config(part: Part, config: dict[str, Any]) -> TrainingConfig:
    return TrainingConfig(
        run_url=part.run_url,
        config=config,
        seed=part.plan.seed,
        save=SaveInterval(steps=part.plan.save_every),
        save_behind="wait",
        collective_timeout_s=part.plan.limit_s,
        commit_timeout_s=part.plan.limit_s,
    )
