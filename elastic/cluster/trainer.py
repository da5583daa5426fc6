"""`ElasticTrainer`: a `TorchTrainer` whose runs survive what clusters do.

Checks everything that can be checked before any worker starts, then launches the driver actor and
waits for it. The trainer decides nothing about the run.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import logging
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray import cloudpickle
from ray.train import Checkpoint, FailureConfig, Result, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from elastic import versions
from elastic.cluster import worker
from elastic.cluster.backend import ElasticTorchConfig
from elastic.cluster.driver import TrainingFailed
from elastic.cluster.driver_actor import DriverActor
from elastic.cluster.driver_config import DriverConfig
from elastic.cluster.ray_internals import launch
from elastic.policy.retention import Retention
from elastic.policy.saves import SaveInterval
from elastic.policy.situation import Rules
from elastic.storage.checkpoints import Catalog
from elastic.storage.claim import IdentityMismatch, RunSpec, run_url
from elastic.storage.filesystem import Filesystem
from elastic.storage.format import UnsupportedFormat
from elastic.storage.lease import LeaseHeld
from elastic.storage.metrics import current_metrics
from elastic.storage.rollback import RollbackRefused
from elastic.storage.run_file import load_run_file
from elastic.training.foreign import check_trust
from elastic.training.membership import TrainingConfig

logger = logging.getLogger("elastic")

# Refusals that come before anything was begun: their message says it all.
NOT_BEGUN = (LeaseHeld, IdentityMismatch, UnsupportedFormat, RollbackRefused)


@dataclass(frozen=True, kw_only=True)
class ElasticConfig:
    """What an elastic run has beyond Ray Train's own configuration."""

    seed: int = 0
    save_every: str | int | SaveInterval | None = "60s"
    """`"60s"`, `"100steps"`, `100`, or None for both ends only."""
    save_behind: str = "skip"
    """`skip` (and count) or `wait` when a save is due while one is still being written."""
    keep: int | None = None
    """Complete checkpoints to keep; -1 for all. None takes `CheckpointConfig.num_to_keep`, or 3."""
    keep_every: int | None = None
    """Steps divisible by this are kept for ever."""
    recovery: str = "warm"
    """`warm`: survivors of a death keep their processes. `cold`: every failure starts all anew."""
    mix_accelerators: bool = False
    """One generation may have workers on GPUs, or other accelerators, of several types."""
    max_failures_without_progress: int = 5
    wait_for_capacity_s: float = 300.0
    collective_timeout_s: float = 1800.0
    from_scratch: bool = False
    """Start at step 0 although the run has committed checkpoints that cannot be found."""
    from_step: int | None = None
    """Go back to this complete checkpoint first; newer ones are set aside, and none is deleted."""
    identity: dict[str, Any] | None = None
    """Fields that must match when the name is used again. None takes all of `train_loop_config`
    but what is only operational (`steps`, `until` and alike); the seed always counts."""
    accept_changes: Sequence[str] = ()
    """Identity fields that may differ this once, from then on with their new value."""
    load_from: str | None = None
    """A run, a checkpoint or a DCP directory whose weights the model begins with at step 0."""
    trust_foreign: bool = False
    """Whoever can write to `load_from` is trusted; without this it is refused."""
    env_vars: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_trust(self.load_from, self.trust_foreign)
        if self.from_step is not None and self.from_step < 0:
            raise ValueError(f"from_step is the step of a checkpoint; found {self.from_step}")
        if self.from_step is not None and self.from_scratch:
            raise ValueError("from_step and from_scratch cannot both be asked for")


class ElasticTrainer(TorchTrainer):
    """Trains `train(run)` on a group that shrinks, grows and resumes as the cluster changes.

    `train` takes an `elastic.Run` and is called once per generation. `scaling_config.num_workers`
    is a number or `(min, max)`. The run lives in `run_config.storage_path/name`; the same name
    resumes. `FailureConfig.max_failures` counts exceptions of `train`; deaths of workers and nodes
    have a budget of their own (`ElasticConfig.max_failures_without_progress`).

    Raises:
        ValueError, TypeError: something cannot work; says what, what was found, and what to do.
        UnsupportedVersion: Ray or torch is installed in a version that this was not made for.
    """

    def __init__(
        self,
        train: Callable[..., None],
        *,
        train_loop_config: dict[str, Any] | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        elastic_config: ElasticConfig | None = None,
        torch_config: TorchConfig | None = None,
        **others: Any,
    ) -> None:
        versions.check("ray", "torch")
        self.elastic_config = elastic_config or ElasticConfig()
        scaling = scaling_config or ScalingConfig()
        run = run_config or RunConfig()
        _check_function(train)
        self._rules = _rules(scaling, run.failure_config, self.elastic_config)
        self._keep = _retention(run, self.elastic_config)
        self._interval = SaveInterval.parse(self.elastic_config.save_every)
        self.run_url = _run_url(run)
        """The run directory, as an absolute path or a URL."""
        self.outcome = ""
        """How the last `fit` ended that returned: finished or stopped."""
        if torch_config is not None and torch_config.backend not in (None, "gloo", "nccl"):
            raise ValueError(
                f"torch_config.backend is gloo or nccl here; found {torch_config.backend!r}"
            )
        self._function = train
        super().__init__(
            train,
            train_loop_config=train_loop_config,
            torch_config=ElasticTorchConfig(backend="nccl" if scaling.use_gpu else "gloo"),
            scaling_config=scaling,
            run_config=run,
            **others,
        )
        _check_pickles(train, train_loop_config)

    def fit(self, on_status: Callable[[dict[str, Any]], None] | None = None) -> Result:
        """Train until the run is over, and return Ray Train's result for it.

        The result's metrics are those of the last step, its checkpoint the highest complete one,
        its path the run directory. `on_status` is called about once a second with a dict (state,
        reason, step, loss, tokens_per_s, generation, world_size, checkpoint_step, restarts).

        Raises:
            TrainingFailed: the run failed; the message leads with the first cause and its rank.
            LeaseHeld: another driver, of this or another cluster, is at this run; names it.
            IdentityMismatch: the name belongs to a run of another configuration; names the fields.
            RollbackRefused: `from_step` is not the step of a complete checkpoint.
        """
        filesystem = Filesystem.at(self.run_url)
        _check_past(filesystem, self.elastic_config.from_step)
        _probe(filesystem)
        training = TrainingConfig(
            run_url=self.run_url,
            config=self.train_loop_config or {},
            seed=self.elastic_config.seed,
            save=self._interval,
            save_behind=self.elastic_config.save_behind,
            collective_timeout_s=self.elastic_config.collective_timeout_s,
            use_cuda=bool(self.scaling_config.use_gpu),
            load_from=self.elastic_config.load_from,
        )
        driver = launch(
            self,
            DriverActor,
            functools.partial(worker.serve, self._function, training),
            self.elastic_config.env_vars,
            driver_config=DriverConfig(
                run_url=self.run_url,
                spec=self._spec(),
                rules=self._rules,
                keep=self._keep,
                resources_per_worker=self.scaling_config._resources_per_worker_not_none,
                label_selector=_one_selector(self.scaling_config),
                mix_accelerators=self.elastic_config.mix_accelerators,
                from_scratch=self.elastic_config.from_scratch,
                from_step=self.elastic_config.from_step,
            ),
        )
        with _stop_on_signals(driver):
            outcome = _wait(driver, on_status)
        return self._result(filesystem, outcome)

    def _spec(self) -> RunSpec:
        """The run as it is asked for, for its run file."""
        return RunSpec.of(
            name=str(self.run_config.name),
            seed=self.elastic_config.seed,
            config=self.train_loop_config or {},
            identity=self.elastic_config.identity,
            operational={
                "num_workers": [self._rules.min_workers, self._rules.max_workers],
                "save": str(self._interval),
                "keep": self._keep.keep,
                "keep_every": self._keep.keep_every,
            },
            accepted=self.elastic_config.accept_changes,
        )

    def _result(self, filesystem: Filesystem, outcome: dict[str, Any]) -> Result:
        if outcome["outcome"] == "failed":
            raise TrainingFailed(_failure_text(self.run_url, outcome))
        self.outcome = outcome["outcome"]
        run_file = load_run_file(filesystem)
        assert run_file is not None
        catalog = Catalog(filesystem, run_file.run_id)
        highest = catalog.highest()
        steps = current_metrics(filesystem)
        last = max(steps, default=None)
        checkpoint = None
        if highest is not None and filesystem.local_root is not None:
            checkpoint = Checkpoint(f"{filesystem.local_root}/{catalog.data_path(highest.step)}")
        return Result(
            metrics={"step": last, **steps[last]} if last is not None else {},
            checkpoint=checkpoint,
            error=None,
            path=self.run_url,
            metrics_dataframe=None,
        )


# --- checks ---------------------------------------------------------------------------------------


def _check_function(train: Callable[..., None]) -> None:
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


def _check_pickles(train: Callable[..., None], config: dict[str, Any] | None) -> None:
    for what, value in (("training function", train), ("train_loop_config", config)):
        try:
            cloudpickle.dumps(value)
        except Exception as error:
            raise TypeError(
                f"the {what} cannot be sent to the workers: {type(error).__name__}: {error}. "
                "It, or something it refers to, cannot be pickled: open files, locks, sockets "
                "and process groups must be made inside the training function (run.once keeps "
                "what should outlive a generation)"
            ) from error


def _rules(scaling: ScalingConfig, failure: FailureConfig | None, config: ElasticConfig) -> Rules:
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
        wait_for_capacity_s=config.wait_for_capacity_s,
        grow_interval_s=scaling.elastic_resize_monitor_interval_s,
        warm=config.recovery == "warm",
    )


def _retention(run: RunConfig, config: ElasticConfig) -> Retention:
    checkpoint = run.checkpoint_config
    if checkpoint is not None and checkpoint.checkpoint_score_attribute is not None:
        raise ValueError(
            "CheckpointConfig(checkpoint_score_attribute=...) is not supported: checkpoints are "
            "kept by step (ElasticConfig(keep=, keep_every=)), not by a score"
        )
    stock = None if checkpoint is None else checkpoint.num_to_keep
    keep = config.keep if config.keep is not None else (stock if stock is not None else 3)
    return Retention(keep=keep, keep_every=config.keep_every)


def _run_url(run: RunConfig) -> str:
    if run.storage_filesystem is not None:
        raise ValueError(
            "RunConfig(storage_filesystem=...) is not supported: give storage_path as a URL"
        )
    return run_url(str(run.storage_path), str(run.name))


def _probe(filesystem: Filesystem) -> None:
    """Fail now, not at the first save, if the storage cannot be written."""
    try:
        filesystem.make_dirs()
        filesystem.write_bytes(".probe", b"")
        filesystem.remove_tree(".probe")
    except OSError as error:
        raise ValueError(
            f"cannot write to the run directory {filesystem.url}: {error}; "
            "choose a storage path that this machine and all nodes can write"
        ) from error


def _check_past(filesystem: Filesystem, from_step: int | None) -> None:
    if from_step is not None and load_run_file(filesystem) is None:
        raise RollbackRefused(filesystem.url, from_step, "there is no such run yet")


def _one_selector(scaling: ScalingConfig) -> dict[str, str] | None:
    selector: dict[str, str] | list[dict[str, str]] | None = scaling.label_selector
    if isinstance(selector, list):
        raise ValueError(
            "ScalingConfig(label_selector=[...]) is not supported: give one selector for all "
            "workers, since a group that changes its size has no fixed list of them"
        )
    return selector


def _failure_text(run_url: str, outcome: dict[str, Any]) -> str:
    """The cause, then what the rank at fault wrote last, then where it raised."""
    parts = [f"{outcome['reason']}\nrun directory: {run_url}"]
    if outcome["last_lines"]:
        lines = "".join(f"\n    {line}" for line in outcome["last_lines"])
        parts.append(f"last lines of rank {outcome['cause_rank']}:{lines}")
    return "\n\n".join([*parts, outcome["traceback"]]).rstrip()


# --- waiting --------------------------------------------------------------------------------------


def _wait(driver: Any, on_status: Callable[[dict[str, Any]], None] | None) -> dict[str, Any]:
    done = driver.run.remote()
    while not ray.wait([done], timeout=1.0)[0]:
        if on_status is not None:
            with contextlib.suppress(ray.exceptions.GetTimeoutError):
                on_status(ray.get(driver.status.remote(), timeout=1.0))
    try:
        ray.get(done)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, NOT_BEGUN):
            raise error.cause from None
        raise
    outcome: dict[str, Any] = ray.get(driver.outcome.remote())
    return outcome


@contextlib.contextmanager
def _stop_on_signals(driver: Any) -> Iterator[None]:
    """The first SIGINT or SIGTERM asks for a save and a stop; the third ends the process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    count = itertools.count(1)

    def handle(number: int, frame: Any) -> None:
        name = signal.Signals(number).name
        if next(count) >= 3:
            raise KeyboardInterrupt
        logger.warning("%s: saving and stopping; twice more to end at once", name)
        driver.stop.remote(f"{name} received by the submitting process")

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
