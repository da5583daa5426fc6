"""What is checked of a run before anything starts: what cannot work is said at once, and why."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from ray import cloudpickle
from ray.train import FailureConfig, RunConfig, ScalingConfig

from elastic.cluster.elastic_config import ElasticConfig
from elastic.policy.mesh import Mesh
from elastic.policy.retention import Retention
from elastic.policy.situation import Rules
from elastic.storage.claim import recorded_tiers, run_url
from elastic.storage.filesystem import Filesystem
from elastic.storage.rollback import RollbackRefused
from elastic.storage.run_file import load_run_file
from elastic.training.loggers.logger import Logger


def check_function(train: Callable[..., None]) -> None:
    """Raises `TypeError` unless it takes one argument, the run."""
    if not callable(train):
        raise TypeError(f"expected a training function train(run); found {type(train).__name__}")
    try:
        parameters = list(inspect.signature(train).parameters.values())
    except (TypeError, ValueError):
        return
    required = [
        parameter
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    names = ", ".join(parameter.name for parameter in parameters)
    is_rays = len(required) == 0 or (
        len(required) == 1 and required[0].name in ("config", "cfg", "train_loop_config")
    )
    if is_rays or len(required) > 1:
        raise TypeError(
            f"the training function must take one argument, the run: def train(run: elastic.Run). "
            f"Found {getattr(train, '__name__', train)!s}({names}), which looks like Ray Train's "
            "train_func(config). Here it is called once per generation: take run, read your "
            "configuration from run.config, name your model and optimizer with "
            "run.track(model=..., optimizer=...), which also restores them, and loop over "
            "run.steps(...); saving and reporting are done for you"
        )


def check_others(others: dict[str, Any]) -> None:
    """Raises `ValueError` for what a `TorchTrainer` takes and this one cannot keep."""
    refused = {
        "datasets": "its shards are made for one world size, and have no position to resume at: "
        "give a dataset to run.loader in the training function",
        "dataset_config": "it configures datasets=, which is not supported",
        "validation_config": "evaluate in the training function, in `with run.evaluation():`",
    }
    for name, instead in refused.items():
        if others.get(name):
            raise ValueError(f"ElasticTrainer({name}=...) is not supported: {instead}")


def check_pickles(
    train: Callable[..., None], config: dict[str, Any] | None, loggers: Sequence[Logger] = ()
) -> None:
    """Raises `TypeError` for what cannot be sent to a worker, or to the driver."""
    named = {"training function": train, "train_loop_config": config, "loggers": loggers}
    for what, value in named.items():
        try:
            cloudpickle.dumps(value)
        except Exception as error:
            raise TypeError(
                f"the {what} cannot be sent to the workers: {type(error).__name__}: {error}. "
                "It, or something it refers to, cannot be pickled: open files, locks, sockets "
                "and process groups must be made inside the training function (run.once keeps "
                "what should outlive a generation)"
            ) from error


def rules(scaling: ScalingConfig, failure: FailureConfig | None, config: ElasticConfig) -> Rules:
    """What the policy goes by. Raises `ValueError` for what is not supported here, by name."""
    failure = failure or FailureConfig()
    if config.recovery not in ("warm", "cold"):
        raise ValueError(f"recovery is 'warm' or 'cold'; found {config.recovery!r}")
    if scaling.use_tpu:
        raise ValueError("ScalingConfig(use_tpu=True) is not supported: FSDP2 runs on CUDA or CPU")
    for name, default in (
        ("controller_failure_limit", -1),
        ("max_preemption_failures", -1),
        ("relax_collectives_on_preemption", False),
        ("preemption_grace_s", 0.0),
    ):
        if getattr(failure, name) != default:
            raise ValueError(
                f"FailureConfig({name}={getattr(failure, name)!r}) is not supported here: leave it "
                f"at its default {default!r}; ElasticConfig(max_failures_without_progress=...) "
                "bounds failures that are not exceptions of the training function"
            )
    return Rules(
        min_workers=scaling.min_workers,
        max_workers=scaling.max_workers,
        max_failures=failure.max_failures,
        max_failures_without_progress=config.max_failures_without_progress,
        max_failures_by_cause=dict(config.max_failures_by_cause),
        wait_for_capacity_s=config.wait_for_capacity_s,
        grow_interval_s=scaling.elastic_resize_monitor_interval_s,
        warm=config.recovery == "warm",
        mesh=config.mesh,
    )


def as_used(scaling: ScalingConfig, mesh: Mesh) -> ScalingConfig:
    """What Ray's autoscaler is to be asked for: no worker more than the mesh can use."""
    if isinstance(scaling.num_workers, int):
        return scaling
    least, most = scaling.num_workers
    return dataclasses.replace(scaling, num_workers=(least, mesh.largest(most)))


def retention(run: RunConfig, config: ElasticConfig) -> Retention:
    """Which checkpoints are kept. Raises `ValueError`."""
    checkpoint = run.checkpoint_config
    if checkpoint is not None and checkpoint.checkpoint_score_attribute is not None:
        raise ValueError(
            "CheckpointConfig(checkpoint_score_attribute=...) is not supported: checkpoints are "
            "kept by step (ElasticConfig(keep=, keep_every=)), not by a score"
        )
    stock = None if checkpoint is None else checkpoint.num_to_keep
    keep = config.keep if config.keep is not None else (stock if stock is not None else 3)
    return Retention(keep=keep, keep_every=config.keep_every)


def tiers(run: RunConfig, config: ElasticConfig) -> dict[str, str]:
    """What the run file records of a local tier and an archive. Raises `ValueError`."""
    return recorded_tiers(
        str(run.storage_path),
        str(run.name),
        local=config.local,
        archive=config.archive,
        keep_every=config.keep_every,
    )


def url_of(run: RunConfig) -> str:
    """Of the run directory."""
    if run.storage_filesystem is not None:
        raise ValueError(
            "RunConfig(storage_filesystem=...) is not supported: give storage_path as a URL"
        )
    return run_url(str(run.storage_path), str(run.name))


def check_past(filesystem: Filesystem, from_step: int | None) -> None:
    """Raises `RollbackRefused` where there is nothing to go back to."""
    if from_step is not None and load_run_file(filesystem) is None:
        raise RollbackRefused(filesystem.url, from_step, "there is no such run yet")


def one_selector(scaling: ScalingConfig) -> dict[str, str] | None:
    """The labels of nodes to run on. Raises `ValueError` for a list of them."""
    selector: dict[str, str] | list[dict[str, str]] | None = scaling.label_selector
    if isinstance(selector, list):
        raise ValueError(
            "ScalingConfig(label_selector=[...]) is not supported: give one selector for all "
            "workers, since a group that changes its size has no fixed list of them"
        )
    return selector
