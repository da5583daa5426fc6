"""Pretrain a small language model elastically: `python -m jobs.pretrain`.

Starts a local Ray by itself, or joins the cluster when it runs as a Ray job; under torchrun it
needs no Ray. Checks everything it can before any worker starts. Same name, same storage: the run
resumes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic import versions
from elastic.importing import collector_paused
from elastic.storage.run_file import free_name
from jobs import ray_cluster
from jobs.report import Progress, report, stopped_line, summary

if TYPE_CHECKING:
    import elastic
    from elastic.training.torchrun import Place

DEFAULT_STORAGE = Path("~/elastic-runs").expanduser()
OPTIMIZERS = ("adamw", "sgd")


def train(run: elastic.Run) -> None:
    """The training function: called once per generation, on every rank."""
    import torch
    from torch.distributed.fsdp import fully_shard
    from torch.nn.utils import clip_grad_norm_

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
        fully_shard(layer, mesh=run.mesh)
    fully_shard(model, mesh=run.mesh)
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
    config, _ = check(_parser().parse_args(argv))
    return train, {**config, "steps": sys.maxsize}


# --- command line --------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m jobs.pretrain", description=__doc__)
    parser.add_argument("--name", help="the run; the same name resumes (default: a new one)")
    parser.add_argument(
        "--storage", default=None, help=f"path or URL for all runs (default {DEFAULT_STORAGE})"
    )
    parser.add_argument("--data", help="text or Parquet (default: Python's library)")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps in all")
    parser.add_argument("--num-workers", default="2", metavar="N|MIN:MAX")
    parser.add_argument("--global-batch", type=int, default=32, help="samples per step")
    parser.add_argument("--micro-batch", type=int, default=8, help="samples per forward")
    parser.add_argument("--sequence-length", type=int, default=128, help="tokens per sample")
    parser.add_argument("--model", default="tiny", help="model preset")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--warmup-steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-every", default="50steps", help="such as 50, 50steps or 60s")
    parser.add_argument("--save-behind", choices=("skip", "wait"), default="skip")
    parser.add_argument("--keep", type=int, default=3, help="newest checkpoints to keep; -1 all")
    parser.add_argument("--keep-every", type=int, help="also keep steps divisible by this")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float64"), default="float32")
    parser.add_argument("--max-failures", type=int, default=0, help="restarts for exceptions")
    parser.add_argument("--grow-interval", type=float, default=60.0, metavar="SECONDS")
    parser.add_argument("--wait-for-capacity", type=float, default=300.0, metavar="SECONDS")
    parser.add_argument(
        "--accept-change",
        action="append",
        default=[],
        metavar="FIELD",
        help="resume although this field differs from what the run was begun with",
    )
    parser.add_argument("--from-step", type=int, metavar="N", help="go back to this checkpoint")
    parser.add_argument("--fresh", action="store_true", help="a new run NAME-2 if there is NAME")
    parser.add_argument("--json", metavar="PATH", help="write the summary here")
    parser.add_argument("--quiet", action="store_true", help="no progress lines")
    return parser


class InvalidInput(ValueError):
    """Arguments that cannot work; the message says what to do."""


def parse_workers(text: str) -> int | tuple[int, int]:
    """`"3"` to 3, `"2:4"` to (2, 4).

    Raises:
        InvalidInput: it is neither, or names no possible group.
    """
    found = re.fullmatch(r"(\d+)(?::(\d+))?", text.strip())
    if found is None:
        raise InvalidInput(f"--num-workers is N or MIN:MAX, such as 2 or 2:4; found {text!r}")
    low, high = int(found[1]), int(found[2] or found[1])
    if low < 1 or high < low:
        raise InvalidInput(
            f"--num-workers needs at least 1 worker and MIN not above MAX; found {text!r}"
        )
    return low if found[2] is None else (low, high)


def check(arguments: argparse.Namespace) -> tuple[dict[str, Any], int | tuple[int, int]]:
    """The training function's configuration and the number of workers, all checked.

    Raises:
        InvalidInput: something cannot work.
    """
    from elastic.policy.saves import SaveInterval
    from jobs.text import prepare

    with collector_paused():
        from jobs.model import PRESETS

    num_workers = parse_workers(arguments.num_workers)
    smallest = num_workers if isinstance(num_workers, int) else num_workers[0]
    for name in ("steps", "global_batch", "micro_batch", "sequence_length", "warmup_steps"):
        if getattr(arguments, name) < 1:
            flag = "--" + name.replace("_", "-")
            raise InvalidInput(f"{flag} must be at least 1; found {getattr(arguments, name)}")
    if arguments.global_batch < smallest:
        raise InvalidInput(
            f"--global-batch {arguments.global_batch} gives less than one sample to each of "
            f"{smallest} workers, the smallest group asked for: raise --global-batch to at least "
            f"{smallest}, or lower --num-workers"
        )
    if arguments.model not in PRESETS:
        raise InvalidInput(f"--model is one of {', '.join(PRESETS)}; found {arguments.model!r}")
    try:
        SaveInterval.parse(arguments.save_every)
        text = prepare(
            arguments.data,
            sequence_length=arguments.sequence_length,
            min_samples=arguments.global_batch,
        )
    except ValueError as error:
        raise InvalidInput(str(error)) from error
    model = {**vars(PRESETS[arguments.model]), "dropout": arguments.dropout}
    model["vocab_size"] = text.vocab_size
    config = {
        "data": text.data,
        "data_identity": text.identity,
        "model": model,
        **{
            name: getattr(arguments, name)
            for name in (
                "steps",
                "global_batch",
                "micro_batch",
                "sequence_length",
                "optimizer",
                "lr",
                "warmup_steps",
                "dtype",
            )
        },
    }
    return config, num_workers


def identity_of(config: dict[str, Any]) -> dict[str, Any]:
    """What makes this the same run again; where the data lies and how long to train do not."""
    operational = ("steps", "micro_batch", "data")
    return {key: value for key, value in config.items() if key not in operational}


def storage_of(arguments: argparse.Namespace) -> str:
    """Where runs go: an absolute path or URL, never a folder that a job would ship.

    Raises:
        InvalidInput: relative, or inside the working directory.
    """
    storage = str(arguments.storage or DEFAULT_STORAGE)
    if "://" in storage and not storage.startswith("file://"):
        return storage
    path = Path(storage.removeprefix("file://"))
    if not path.is_absolute():
        raise InvalidInput(
            f"--storage must be an absolute path or a URL; found {storage!r}. A relative path "
            f"means another place on every node: use {path.absolute()} if all nodes share it"
        )
    if Path.cwd() != Path("/") and path.resolve().is_relative_to(Path.cwd().resolve()):
        raise InvalidInput(
            f"--storage {storage} lies inside the working directory {Path.cwd()}, which a job "
            "ships to the cluster: choose a place outside it"
        )
    return str(path)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job; the process's exit status."""
    try:
        versions.check("torch", *(() if "TORCHELASTIC_RUN_ID" in os.environ else ("ray",)))
    except versions.UnsupportedVersion as error:
        _say(f"pretrain: {error}")
        return 2
    place = _place()
    if place is None:
        arguments = _parser().parse_args(argv)
        say = _say
    else:
        # All ranks find the same fault in the same arguments, and find it again in each restart.
        is_told = place.world_rank > 0 or place.restarts > 0
        with contextlib.redirect_stderr(None) if is_told else contextlib.nullcontext():
            arguments = _parser().parse_args(argv)
        arguments.num_workers = str(place.world_size)
        say = place.say_once
    try:
        storage = storage_of(arguments)
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
    from elastic.storage.claim import IdentityMismatch, run_url
    from elastic.storage.format import UnsupportedFormat
    from elastic.storage.lease import LeaseHeld
    from elastic.training.coordinator import NoSoundCheckpoint
    from elastic.training.standalone import NotStarted

    try:
        url = run_url(storage, arguments.name)
    except ValueError as error:
        place.say_once(f"pretrain: {error}")
        return 2
    speaks = place.world_rank == 0
    if speaks:
        print(f"run {arguments.name} in {url}", flush=True)
    try:
        run_standalone(
            train,
            name=arguments.name,
            storage_path=storage,
            train_loop_config=config,
            seed=arguments.seed,
            save_every=arguments.save_every,
            save_behind=arguments.save_behind,
            keep=arguments.keep,
            keep_every=arguments.keep_every,
            identity=identity_of(config),
            accept_changes=arguments.accept_change,
            on_status=None if arguments.quiet else Progress(arguments.steps),
            place=place,
        )
    except NotStarted:
        return 1  # rank 0 has the cause, and tells it
    except (LeaseHeld, IdentityMismatch, UnsupportedFormat, NoSoundCheckpoint) as error:
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


def _train(
    arguments: argparse.Namespace,
    storage: str,
    name: str,
    config: dict[str, Any],
    num_workers: int | tuple[int, int],
) -> int:
    from ray.train import FailureConfig, RunConfig, ScalingConfig

    from elastic import ElasticConfig, ElasticTrainer, TrainingFailed
    from elastic.cluster.trainer import NOT_BEGUN

    largest = num_workers if isinstance(num_workers, int) else num_workers[1]
    try:
        ray_cluster.connect(largest)
        trainer = ElasticTrainer(
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
                seed=arguments.seed,
                save_every=arguments.save_every,
                save_behind=arguments.save_behind,
                keep=arguments.keep,
                keep_every=arguments.keep_every,
                wait_for_capacity_s=arguments.wait_for_capacity,
                identity=identity_of(config),
                accept_changes=arguments.accept_change,
                from_step=arguments.from_step,
            ),
        )
    except (ValueError, TypeError) as error:
        print(f"pretrain: {error}", file=sys.stderr)
        return 2
    url = trainer.run_url
    print(f"run {name} in {url}", flush=True)
    try:
        trainer.fit(None if arguments.quiet else Progress(arguments.steps))
    except (TrainingFailed, *NOT_BEGUN) as error:
        print(f"pretrain: {error}", file=sys.stderr)
        return 1
    report(summary(url), arguments.json, url)
    if trainer.outcome == "stopped":
        is_same = arguments.name == name and arguments.from_step is None
        print(stopped_line(url, name, is_same=is_same))
    return 0


if __name__ == "__main__":
    sys.exit(main())
