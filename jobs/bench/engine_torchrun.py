"""The rival without Ray: the same loop under `torchrun --max-restarts`, checkpoints by DCP.

Its `main` is the launcher, with a `Plan` as its argument; torchrun runs this file as each worker.
Every failure restarts all workers at the same size, on this machine alone. Must not import ray or
elastic.
"""

from __future__ import annotations

import os
import sys
import time
import uuid
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh

from jobs.bench import workload
from jobs.bench.engines import Plan
from jobs.bench.events import Recorder


def train(plan: Plan) -> None:
    torch.set_num_threads(1)
    _join_group()
    name = [uuid.uuid4().hex]
    dist.broadcast_object_list(name)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    recorder = Recorder(plan.log, group=name[0], rank=rank, world_size=world_size, node_id="")
    recorder.write("enter")
    mesh = init_device_mesh("cpu", (world_size,))
    model = workload.build_model(mesh, state_bytes=plan.state_bytes)
    optimizer = workload.build_optimizer(model)
    recorder.write("build")
    state = workload.AppState(model, optimizer)
    _resume(plan, state)
    recorder.write("load")
    samples = workload.Samples()
    while state.step < plan.num_steps:
        state.step += 1
        batch = workload.batch_of(samples, state.step, rank, world_size)
        workload.train_step(model, optimizer, batch)
        time.sleep(plan.device_time_s)
        recorder.write("step", step=state.step)
        if state.step % plan.save_every_steps == 0:
            _save(plan, state)


def _join_group() -> None:
    # torchrun keeps one store over all its restarts. Without a prefix for each, gloo reads the
    # addresses of the dead, and every restart fails with "connection refused".
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        world_size,
        is_master=False,
    )
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(f"attempt-{attempt}", store),
        rank=rank,
        world_size=world_size,
    )


def _checkpoints(plan: Plan) -> Path:
    return Path(plan.directory) / "checkpoints"


def _resume(plan: Plan, state: workload.AppState) -> None:
    complete = [int(marker.parent.name) for marker in _checkpoints(plan).glob("*/_COMPLETE")]
    if complete:
        dcp.load({"app": state}, checkpoint_id=_checkpoints(plan) / str(max(complete)))


def _save(plan: Plan, state: workload.AppState) -> None:
    directory = _checkpoints(plan) / str(state.step)
    dcp.save({"app": state}, checkpoint_id=directory)
    dist.barrier()
    if dist.get_rank() == 0:
        (directory / "_COMPLETE").touch()


def main(argument: str) -> None:
    from torch.distributed.run import main as torchrun

    plan = Plan.from_json(argument)
    torchrun(
        [
            "--standalone",
            f"--nproc-per-node={plan.num_workers}",
            "--max-restarts=10",
            "--module",
            "jobs.bench.engine_torchrun",
            argument,
        ]
    )


if __name__ == "__main__":
    train(Plan.from_json(sys.argv[1]))
