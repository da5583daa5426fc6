"""`ElasticTrainer`: a `TorchTrainer` whose runs survive what clusters do.

Checks everything that can be checked before any worker starts, then has the run driven to its end.
The trainer decides nothing about the run.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import itertools
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import ray
from ray.train import Checkpoint, Result, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from elastic import versions
from elastic.cluster import checks, own_page, worker
from elastic.cluster.backend import ElasticTorchConfig
from elastic.cluster.driver_actor import DriverActor
from elastic.cluster.driver_config import DriverConfig
from elastic.cluster.elastic_config import ElasticConfig
from elastic.cluster.notices.sources import checked
from elastic.cluster.ray_internals import launch
from elastic.cluster.succession import Succession
from elastic.cluster.training_failed import TrainingFailed
from elastic.policy.saves import SaveInterval
from elastic.storage.access import StorageRefused, check_access
from elastic.storage.archive import ArchiveRefused
from elastic.storage.checkpoints import Catalog
from elastic.storage.claim import IdentityMismatch, RunSpec
from elastic.storage.filesystem import Filesystem
from elastic.storage.format import UnsupportedFormat
from elastic.storage.lease import LeaseHeld
from elastic.storage.metrics import current_metrics
from elastic.storage.rollback import RollbackRefused
from elastic.storage.run_file import load_run_file
from elastic.training.membership import TrainingConfig

logger = logging.getLogger("elastic")

# Refusals that come before anything was begun: their message says it all.
NOT_BEGUN = (
    *(LeaseHeld, IdentityMismatch, UnsupportedFormat, RollbackRefused, ArchiveRefused),
    StorageRefused,
)


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
        checks.check_function(train)
        checks.check_others(others)
        self._rules = checks.rules(scaling, run.failure_config, self.elastic_config)
        self._keep = checks.retention(run, self.elastic_config)
        self._interval = SaveInterval.parse(self.elastic_config.save_every)
        self.run_url = checks.url_of(run)
        """The run directory, as an absolute path or a URL."""
        self.outcome = ""
        """How the last `fit` ended that returned: finished or stopped."""
        self._tiers = checks.tiers(run, self.elastic_config)
        if torch_config is not None and torch_config.backend not in (None, "gloo", "nccl"):
            raise ValueError(
                f"torch_config.backend is gloo or nccl here; found {torch_config.backend!r}"
            )
        self._function = train
        super().__init__(
            train,
            train_loop_config=train_loop_config,
            torch_config=ElasticTorchConfig(backend="nccl" if scaling.use_gpu else "gloo"),
            scaling_config=checks.as_used(scaling, self._rules.mesh),
            run_config=run,
            **others,
        )
        checks.check_pickles(train, train_loop_config, self.elastic_config.loggers)

    def fit(self, on_status: Callable[[dict[str, Any]], None] | None = None) -> Result:
        """Train until the run is over, and return Ray Train's result for it.

        The result's metrics are those of the last step, its checkpoint the highest complete one
        (None on an object store), its path the run directory. `on_status` is called about once a
        second with a dict (state, reason, step, loss, tokens_per_s, generation, world_size,
        checkpoint_step, restarts, warnings: lines, all since the driver began).

        Raises:
            TrainingFailed: the run failed; the message leads with the first cause and its rank.
            LeaseHeld: another driver, of this or another cluster, is at this run; names it.
            IdentityMismatch: the name belongs to a run of another configuration; names the fields.
            RollbackRefused: `from_step` is not the step of a complete checkpoint.
            ArchiveRefused: the archive holds another run of that name, or takes nothing.
            StorageRefused: nothing can be written there, from this process or from the driver's.
        """
        filesystem = Filesystem.at(self.run_url)
        checks.check_past(filesystem, self.elastic_config.from_step)
        check_access(filesystem, "the submitting process")
        training = TrainingConfig(
            run_url=self.run_url,
            config=self.train_loop_config or {},
            seed=self.elastic_config.seed,
            save=self._interval,
            save_behind=self.elastic_config.save_behind,
            snapshot_every=self.elastic_config.snapshot_every,
            collective_timeout_s=self.elastic_config.collective_timeout_s,
            use_cuda=bool(self.scaling_config.use_gpu),
            mesh=self.elastic_config.mesh,
            accept_changes=tuple(self.elastic_config.accept_changes),
            load_from=self.elastic_config.load_from,
            local=self.elastic_config.local,
        )
        serve = functools.partial(worker.serve, self._function, training)

        def launch_driver(config: DriverConfig) -> Any:
            env_vars = self.elastic_config.env_vars
            return launch(self, DriverActor, serve, env_vars, driver_config=config)

        drivers = Succession(filesystem, self._driver_config(), launch_driver)
        grace_s = self.elastic_config.grace_s(os.environ)
        if not ray.is_initialized():
            ray.init()  # which sets signal handlers of its own: ours come after it
        with _stop_on_signals(drivers.stop, grace_s), _not_begun_in_few_words():
            outcome = drivers.outcome(on_status)
        return self._result(filesystem, outcome)

    def _driver_config(self) -> DriverConfig:
        return DriverConfig(
            run_url=self.run_url,
            spec=self._spec(),
            rules=self._rules,
            keep=self._keep,
            save=self._interval,
            mtbf_s=self.elastic_config.mtbf_s,
            snapshots=self.elastic_config.snapshot_every is not None,
            resources_per_worker=self.scaling_config._resources_per_worker_not_none,
            label_selector=checks.one_selector(self.scaling_config),
            mix_accelerators=self.elastic_config.mix_accelerators,
            hangs=self.elastic_config.capped_hangs,
            strikes=self.elastic_config.strikes,
            notices=checked(self.elastic_config.notices),
            loggers=tuple(self.elastic_config.loggers),
            page=own_page.checked(self.elastic_config.page, os.environ),
            page_token=os.environ.get(own_page.TOKEN, ""),
            from_scratch=self.elastic_config.from_scratch,
            from_step=self.elastic_config.from_step,
        )

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
                "mesh": str(self._rules.mesh),
                **self._tiers,
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


# --- waiting --------------------------------------------------------------------------------------


def _failure_text(run_url: str, outcome: dict[str, Any]) -> str:
    """The cause, then what the rank at fault wrote last, then where it raised."""
    parts = [f"{outcome['reason']}\nrun directory: {run_url}"]
    if outcome["last_lines"]:
        lines = "".join(f"\n    {line}" for line in outcome["last_lines"])
        parts.append(f"last lines of rank {outcome['cause_rank']}:{lines}")
    return "\n\n".join([*parts, outcome["traceback"]]).rstrip()


@contextlib.contextmanager
def _not_begun_in_few_words() -> Iterator[None]:
    try:
        yield
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, NOT_BEGUN):
            raise error.cause from None
        raise


@contextlib.contextmanager
def _stop_on_signals(stop: Callable[[str, float | None], None], grace_s: float) -> Iterator[None]:
    """The first SIGINT or SIGTERM asks for a save and a stop; the third ends the process.

    Whoever sends SIGTERM kills this process `grace_s` seconds later.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    count = itertools.count(1)

    def handle(number: int, frame: Any) -> None:
        name = signal.Signals(number).name
        if next(count) >= 3:
            raise KeyboardInterrupt
        within_s = grace_s if number == signal.SIGTERM else None
        told = "" if within_s is None else f" within {within_s:g} s"
        logger.warning("%s: saving and stopping%s; twice more to end at once", name, told)
        stop(f"{name} received by the submitting process", within_s)
        if within_s is not None:
            atexit.register(_exit_soon)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _exit_soon() -> None:
    """At exit Ray waits half a second for log lines, and Python's last collection takes longer."""
    ray.shutdown()
    gc.freeze()
