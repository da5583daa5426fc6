"""Our service under the benchmark: the same loop, through its public interface.

Its `main` is a driver script whose argument is a `Plan`.
"""

from __future__ import annotations

import time

import ray
import ray.train
import torch

import elastic
from jobs.bench import workload
from jobs.bench.engine_process import connect
from jobs.bench.engines import Plan
from jobs.bench.events import Recorder


def train(run: elastic.Run) -> None:
    torch.set_num_threads(1)
    plan = Plan(**run.config)
    recorder = Recorder(
        plan.log,
        group=f"generation-{run.generation}",
        rank=run.world_rank,
        world_size=run.world_size,
        node_id=ray.get_runtime_context().get_node_id(),
    )
    recorder.write("enter")
    model = workload.build_model(run.mesh, state_bytes=plan.state_bytes)
    optimizer = workload.build_optimizer(model)
    recorder.write("build")
    run.track(model=model, optimizer=optimizer)
    recorder.write("load")
    # As the rivals: a rank's share of the global batch is one micro-batch at every world size.
    loader = run.loader(
        workload.Samples(),
        global_batch=workload.GLOBAL_BATCH,
        micro_batch=workload.GLOBAL_BATCH,
    )
    for step in run.steps(loader, until=plan.num_steps):
        for batch in step:
            workload.backward(model, workload.loss_sum(model, batch) / step.num_valid_tokens)
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(plan.device_time_s)
        recorder.write("step", step=step.number)


def main(argument: str) -> None:
    from elastic import ElasticConfig, HangLimits  # here, for no worker needs the trainer

    plan = Plan.from_json(argument)
    hangs = HangLimits() if plan.hang_limit_s is None else HangLimits(step_s=plan.hang_limit_s)
    connect(plan.address)
    elastic.ElasticTrainer(
        train,
        train_loop_config=vars(plan),
        scaling_config=ray.train.ScalingConfig(
            num_workers=(1, plan.num_workers),
            elastic_resize_monitor_interval_s=plan.grow_interval_s,
        ),
        run_config=ray.train.RunConfig(name="bench", storage_path=plan.directory),
        elastic_config=ElasticConfig(
            save_every=plan.save_every_steps,
            recovery=plan.recovery,
            snapshot_every=plan.snapshot_every,
            hangs=hangs,
            node_strikes=0,  # no rival keeps a node out for being struck
        ),
    ).fit()
