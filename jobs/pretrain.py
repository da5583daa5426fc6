"""Pretrain a small language model elastically: `python -m jobs.pretrain`.

Starts a local Ray by itself, or joins the cluster when it runs as a Ray job; under torchrun it
needs no Ray. Checks everything it can before any worker starts. Same name, same storage: the run
resumes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from elastic import versions
from elastic.importing import collector_paused
from elastic.storage.run_file import free_name
from jobs import ray_cluster
from jobs.pretrain_arguments import (
    InvalidInput,
    check,
    check_places,
    hang_limits,
    identity_of,
    mesh,
    mtbf_s,
    parser,
    storage_of,
)
from jobs.report import Progress, report, stopped_line, summary

if TYPE_CHECKING:
    import elastic
    from elastic.training.torchrun import Place


def train(run: elastic.Run) -> None:
    """The training function: called once per generation, on every rank."""
    import torch
    from torch.distributed.fsdp import fully_shard

    from elastic import clip_grad_norm_
    from elastic.training.parquet import ParquetTokens
    from jobs.model import ModelConfig, build, loss_sum
    from jobs.text import ensure_tokens

    config = run.config
    if run.device.type == "cpu":
        torch.set_num_threads(1)
    text = run.once("text", lambda: ensure_tokens(config["data"], config["data_identity"]))
    dataset = run.once(
        "dataset", lambda: ParquetTokens(text.path, length=config["sequence_length"])
    )
    dtype = getattr(torch, config["dtype"])
    model = build(ModelConfig(**config["model"]), seed=run.seed, device=run.device, dtype=dtype)
    for layer in model.layers:
        fully_shard(layer, mesh=run.data_mesh)
    fully_shard(model, mesh=run.data_mesh)
    if config["optimizer"] == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(
            model.parameters(), lr=config["lr"], momentum=0.9
        )
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    warmup_steps = config["warmup_steps"]
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / warmup_steps)
    )
    run.track(model=model, optimizer=optimizer, scheduler=scheduler)
    loader = run.loader(
        dataset, global_batch=config["global_batch"], micro_batch=config["micro_batch"]
    )
    for step in run.steps(loader, until=config["steps"]):
        for batch in step:
            loss = loss_sum(model, batch) / step.num_valid_tokens
            loss.backward()
            step.log(loss=loss)
        step.grad_norm = clip_grad_norm_(model.parameters(), 1.0)
        step.record(lr=scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def rehearsal(argv: Sequence[str]) -> tuple[Callable[[elastic.Run], None], dict[str, Any]]:
    """What `elastic rehearse jobs/pretrain.py -- ARGS` runs; the rehearsal counts the steps."""
    config, _ = check(parser(__doc__).parse_args(argv))
    return train, {**config, "steps": sys.maxsize}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job; the process's exit status."""
    try:
        versions.check("torch", *(() if "TORCHELASTIC_RUN_ID" in os.environ else ("ray",)))
    except versions.UnsupportedVersion as error:
        _say(f"pretrain: {error}")
        return 2
    place = _place()
    if place is None:
        arguments = parser(__doc__).parse_args(argv)
        say = _say
    else:
        # All ranks find the same fault in the same arguments, and find it again in each restart.
        is_told = place.world_rank > 0 or place.restarts > 0
        with contextlib.redirect_stderr(None) if is_told else contextlib.nullcontext():
            arguments = parser(__doc__).parse_args(argv)
        arguments.num_workers = str(place.world_size)
        say = place.say_once
    try:
        storage = storage_of(arguments)
        check_places(arguments, storage)
        config, num_workers = check(arguments)
        if place is not None and not arguments.name:
            raise InvalidInput("give --name: under torchrun a restart needs it to find its run")
        if place is not None and (arguments.fresh or arguments.from_step is not None):
            raise InvalidInput("--fresh and --from-step would count anew in each of its restarts")
    except InvalidInput as error:
        say(f"pretrain: {error}")
        return 2
    if place is not None:
        return _train_under_torchrun(place, arguments, storage, config)
    name = arguments.name or f"pretrain-{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}"
    if arguments.fresh:
        name = free_name(storage, name)
    return _train(arguments, storage, name, config, num_workers)


def _place() -> Place | None:
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None  # without paying for torch
    with collector_paused():
        from elastic.training.torchrun import Place

    return Place.read()


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _train_under_torchrun(
    place: Place, arguments: argparse.Namespace, storage: str, config: dict[str, Any]
) -> int:
    from elastic import run_standalone
    from elastic.policy.cause import is_victim
    from elastic.storage.access import StorageRefused
    from elastic.storage.archive import ArchiveRefused
    from elastic.storage.claim import IdentityMismatch, run_url
    from elastic.storage.format import UnsupportedFormat
    from elastic.storage.lease import LeaseHeld
    from elastic.training.coordinator import NoSoundCheckpoint
    from elastic.training.standalone import NotStarted

    url = run_url(storage, arguments.name)
    speaks = place.world_rank == 0
    if speaks:
        print(f"run {arguments.name} in {url}", flush=True)
    try:
        run_standalone(
            train,
            name=arguments.name,
            storage_path=storage,
            train_loop_config=config,
            **_asked(arguments, config),
            on_status=None if arguments.quiet else Progress(arguments.steps),
            place=place,
        )
    except NotStarted:
        return 1  # rank 0 has the cause, and tells it
    except StorageRefused as error:
        place.say_once(f"pretrain: {error}")
        return 2
    except (
        LeaseHeld,
        IdentityMismatch,
        UnsupportedFormat,
        NoSoundCheckpoint,
        ArchiveRefused,
    ) as error:
        place.say_once(f"pretrain: {error}")
        return 1
    except RuntimeError as error:
        if not is_victim(type(error).__name__, str(error)):
            raise
        _say(f"pretrain: rank {place.world_rank} lost a peer: {str(error).splitlines()[0]}")
        return 1
    if speaks:
        report(summary(url), arguments.json, url)
    return 0


def _asked(arguments: argparse.Namespace, config: dict[str, Any]) -> dict[str, Any]:
    """What is asked for by the same names with Ray and without."""
    return {
        "seed": arguments.seed,
        "save_every": arguments.save_every,
        "mtbf": mtbf_s(arguments),
        "save_behind": arguments.save_behind,
        "keep": arguments.keep,
        "keep_every": arguments.keep_every,
        "archive": arguments.archive,
        "local": arguments.local,
        "identity": identity_of(config),
        "accept_changes": arguments.accept_change,
        "load_from": arguments.load_from,
        "trust_foreign": arguments.trust_foreign,
        "mesh": mesh(arguments),
    }


def _train(
    arguments: argparse.Namespace,
    storage: str,
    name: str,
    config: dict[str, Any],
    num_workers: int | tuple[int, int],
) -> int:
    from elastic import TrainingFailed
    from elastic.cluster.trainer import NOT_BEGUN
    from elastic.storage.access import StorageRefused

    try:
        ray_cluster.connect(num_workers if isinstance(num_workers, int) else num_workers[1])
        trainer = _trainer(arguments, storage, name, config, num_workers)
    except (ValueError, TypeError) as error:
        print(f"pretrain: {error}", file=sys.stderr)
        return 2
    url = trainer.run_url
    print(f"run {name} in {url}", flush=True)
    try:
        trainer.fit(None if arguments.quiet else Progress(arguments.steps))
    except (TrainingFailed, *NOT_BEGUN) as error:
        print(f"pretrain: {error}", file=sys.stderr)
        return 2 if isinstance(error, StorageRefused) else 1
    report(summary(url), arguments.json, url)
    if trainer.outcome == "stopped":
        is_same = arguments.name == name and arguments.from_step is None
        print(stopped_line(url, name, is_same=is_same))
    return 0


def _trainer(
    arguments: argparse.Namespace,
    storage: str,
    name: str,
    config: dict[str, Any],
    num_workers: int | tuple[int, int],
) -> elastic.ElasticTrainer:
    from ray.train import FailureConfig, RunConfig, ScalingConfig

    from elastic import ElasticConfig, ElasticTrainer

    return ElasticTrainer(
        train,
        train_loop_config=config,
        scaling_config=ScalingConfig(
            num_workers=num_workers,
            use_gpu=ray_cluster.has_gpus(),
            elastic_resize_monitor_interval_s=arguments.grow_interval,
        ),
        run_config=RunConfig(
            name=name,
            storage_path=storage,
            failure_config=FailureConfig(max_failures=arguments.max_failures),
        ),
        elastic_config=ElasticConfig(
            **_asked(arguments, config),
            snapshot_every=arguments.snapshot_every,
            wait_for_capacity_s=arguments.wait_for_capacity,
            from_step=arguments.from_step,
            hangs=hang_limits(arguments),
            node_strikes=arguments.node_strikes,
            notices=arguments.notices or "auto",
            page=arguments.page,
        ),
    )


if __name__ == "__main__":
    sys.exit(main())
