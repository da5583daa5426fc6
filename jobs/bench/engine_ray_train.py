"""The rival: the elastic loop that a good user writes with stock Ray Train, FSDP2 and DCP.

Its `main` is a driver script whose argument is a `Plan`. Which of Ray Train's defaults hold is up
to the environment it is started with. Must not import elastic.
"""

from __future__ import annotations

import tempfile
import time
import uuid
from typing import Any

import ray
import ray.train
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ray.train.torch import TorchConfig, TorchTrainer
from torch.distributed.device_mesh import init_device_mesh

from jobs.bench import workload
from jobs.bench.engine_process import connect
from jobs.bench.engines import Plan
from jobs.bench.events import Recorder


def train(config: dict[str, Any]) -> None:
    plan = Plan(**config)
    torch.set_num_threads(1)
    recorder = _recorder(plan)
    recorder.write("enter")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = workload.build_model(mesh, state_bytes=plan.state_bytes)
    optimizer = workload.build_optimizer(model)
    recorder.write("build")
    state = workload.AppState(model, optimizer)
    _resume(state)
    recorder.write("load")
    samples = workload.Samples()
    is_saved = False
    while state.step < plan.num_steps:
        state.step += 1
        batch = workload.batch_of(samples, state.step, dist.get_rank(), dist.get_world_size())
        workload.train_step(model, optimizer, batch)
        time.sleep(plan.device_time_s)
        recorder.write("step", step=state.step)
        # As the documentation of get_preemption_info has it: once, and training goes on.
        is_notified = plan.saves_on_preemption and ray.train.get_preemption_info() is not None
        if state.step % plan.save_every_steps == 0 or (is_notified and not is_saved):
            is_saved = is_notified
            _save(state)


def _recorder(plan: Plan) -> Recorder:
    # Ray Train gives a group no name that all its ranks know; one is needed to tell its steps from
    # the group before.
    name = [uuid.uuid4().hex]
    dist.broadcast_object_list(name)
    return Recorder(
        plan.log,
        group=name[0],
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        node_id=ray.get_runtime_context().get_node_id(),
    )


def _resume(state: workload.AppState) -> None:
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as directory:
            dcp.load({"app": state}, checkpoint_id=directory)


def _save(state: workload.AppState) -> None:
    with tempfile.TemporaryDirectory() as directory:
        dcp.save({"app": state}, checkpoint_id=directory)
        checkpoint = ray.train.Checkpoint.from_directory(directory)
        ray.train.report({"step": state.step}, checkpoint=checkpoint)


def main(argument: str) -> None:
    plan = Plan.from_json(argument)
    connect(plan.address)
    TorchTrainer(
        train,
        train_loop_config=vars(plan),
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ray.train.ScalingConfig(
            num_workers=(1, plan.num_workers),
            elastic_resize_monitor_interval_s=plan.grow_interval_s,
        ),
        run_config=ray.train.RunConfig(
            name="bench",
            storage_path=plan.directory,
            failure_config=ray.train.FailureConfig(max_failures=-1),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=3),
        ),
    ).fit()
