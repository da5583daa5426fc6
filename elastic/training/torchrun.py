"""A run under torchrun: this process's place in the group, and a training run in it.

The only module of the room that reads the environment, once, and takes signals. Must not import
ray.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from elastic import versions
from elastic.policy.durations import parse_duration_s
from elastic.policy.mesh import Mesh, checked_mesh
from elastic.policy.retention import Retention
from elastic.policy.saves import AUTO, SaveInterval
from elastic.storage.claim import RunSpec, recorded_tiers, run_url
from elastic.storage.filesystem import Filesystem
from elastic.training.book import Launcher
from elastic.training.foreign import check_trust
from elastic.training.membership import TrainingConfig
from elastic.training.rank_log import RankLog
from elastic.training.run import Run
from elastic.training.standalone import train_standalone

_MEET_S = 600.0
_LOOK_S = 0.02


class GroupNotMet(RuntimeError):
    """Not every rank of the group arrived in time."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where torchrun has put this process."""

    job: str
    """torchrun's own id of this launch (`--rdzv-id`)."""
    restarts: int
    max_restarts: int
    world_rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host: str
    port: int
    has_agents_store: bool
    """Whether torchrun's agent serves the store; it outlives the ranks. Rank 0 serves it if not."""

    @classmethod
    def read(cls, environment: Mapping[str, str] = os.environ) -> Place | None:
        """The place that these variables tell; None where torchrun has not started this process."""
        if not {"TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE"} <= environment.keys():
            return None
        return cls(
            job=environment["TORCHELASTIC_RUN_ID"],
            restarts=int(environment.get("TORCHELASTIC_RESTART_COUNT", "0")),
            max_restarts=int(environment.get("TORCHELASTIC_MAX_RESTARTS", "0")),
            world_rank=int(environment["RANK"]),
            world_size=int(environment["WORLD_SIZE"]),
            local_rank=int(environment.get("LOCAL_RANK", environment["RANK"])),
            local_world_size=int(environment.get("LOCAL_WORLD_SIZE", environment["WORLD_SIZE"])),
            host=environment.get("MASTER_ADDR", "127.0.0.1"),
            port=int(environment.get("MASTER_PORT", "29500")),
            has_agents_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )

    @classmethod
    def here(cls) -> Place:
        """This process's place. Raises `RuntimeError` where torchrun has not started it."""
        place = cls.read()
        if place is None:
            raise RuntimeError(
                "not under torchrun: TORCHELASTIC_RUN_ID, RANK and WORLD_SIZE are not set. Start "
                "it with: torchrun --nproc-per-node 2 --max-restarts 5 FILE"
            )
        return place

    def store(self) -> dist.Store:
        """What all ranks of this launch share; where the agent serves it, all attempts do too."""
        return dist.PrefixStore(
            f"elastic/{self.job}",
            dist.TCPStore(
                host_name=self.host,
                port=self.port,
                is_master=self.world_rank == 0 and not self.has_agents_store,
                wait_for_workers=False,
                multi_tenant=not self.has_agents_store,
                timeout=timedelta(seconds=_MEET_S),
            ),
        )

    def say_once(self, message: str) -> None:
        """Print an error on rank 0, if no attempt of this launch has.

        torchrun starts a group again whatever it failed of; what all attempts find need not be
        read each time.
        """
        if self.world_rank > 0:
            return
        if not (self.has_agents_store and self.store().add(f"said/{message}", 1) > 1):
            sys.stderr.write(f"{message}\n")
            sys.stderr.flush()


def meet(store: dist.Store, place: Place, *, timeout_s: float = _MEET_S) -> dist.Store:
    """The part of `store` that belongs to this attempt alone; all its ranks get the same.

    An attempt before this one may have left any key behind, and in a launch of several nodes their
    restart counts differ. So each rank comes with a word of its own, and rank 0 tells the attempt's
    name to exactly the words of those that are there now. Raises `GroupNotMet`.
    """
    if place.world_rank == 0:
        name = f"attempt-{place.restarts}-{uuid.uuid4().hex}"
        _gather(store, place, name, time.monotonic() + timeout_s)
        return dist.PrefixStore(name, store)
    word = uuid.uuid4().hex
    store.set(f"here/{place.world_rank}", word)
    try:
        store.wait([f"name/{word}"], timedelta(seconds=timeout_s))
    except (dist.DistStoreError, RuntimeError) as error:
        raise GroupNotMet(f"rank 0 did not come within {timeout_s:g} s: {error}") from error
    name = store.get(f"name/{word}").decode()
    store.set(f"{name}/in/{place.world_rank}", word)
    return dist.PrefixStore(name, store)


def _gather(store: dist.Store, place: Place, name: str, until_s: float) -> None:
    missing = set(range(1, place.world_size))
    greeted: dict[int, str] = {}
    while missing:
        for rank in sorted(missing):
            if not store.check([f"here/{rank}"]):
                continue
            word = store.get(f"here/{rank}").decode()
            if greeted.get(rank) != word:
                greeted[rank] = word
                store.set(f"name/{word}", name)
            answer = f"{name}/in/{rank}"
            # A word may be that of a rank of an older attempt: only an answer to it counts.
            if store.check([answer]) and store.get(answer).decode() == word:
                missing.remove(rank)
        if missing and time.monotonic() > until_s:
            raise GroupNotMet(f"ranks {sorted(missing)} of {place.world_size} did not come")
        time.sleep(_LOOK_S)


class Torchrun(Launcher):
    """torchrun, as its ranks see it. SIGTERM or SIGINT asks for a save and a stop, the third of
    them ends the process."""

    what = "torchrun"

    def __init__(
        self,
        place: Place,
        store: dist.Store,
        on_status: Callable[[Mapping[str, Any]], None] | None = None,
        log: RankLog | None = None,
    ) -> None:
        self._log = log
        self.restarts = place.restarts
        self.may_restart = place.restarts < place.max_restarts
        self._store = store
        self._on_status = on_status
        self._stop = threading.Event()
        self._num_signals = 0
        if place.restarts and store.check(["reached"]):
            self.reached_step = int(store.get("reached"))

    @contextmanager
    def training(self, generation: int, world_rank: int) -> Iterator[None]:
        """Output goes to this rank's log, and on to where torchrun has led it; an error too."""
        if self._log is None:
            yield
            return
        self._log.switch(generation, world_rank)
        try:
            yield
        except BaseException as error:
            self._log.end("".join(traceback.format_exception(error)))
            raise
        self._log.end("")

    def is_stop_asked(self) -> bool:
        """Whether a signal has asked for it, here or, by the ranks' agreement, at any rank."""
        return self._stop.is_set()

    def reached(self, step: int) -> None:
        """Kept in torchrun's own store, so that a restart can tell how many steps were lost."""
        self._store.set("reached", str(step))

    def tell(self, status: Mapping[str, Any]) -> None:
        """Hand the status on."""
        if self._on_status is not None:
            self._on_status(status)

    def listen(self) -> None:
        """Take the signals. In another thread than the main one, where none arrive, do nothing."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: Any) -> None:
        self._num_signals += 1
        # One wish may come twice: to every process of a job, and again through torchrun.
        if self._num_signals > 2:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self._stop.set()


def run_standalone(
    train: Callable[[Run], None],
    *,
    name: str,
    storage_path: str,
    train_loop_config: dict[str, Any] | None = None,
    seed: int = 0,
    save_every: str | int | SaveInterval | None = AUTO,
    mtbf: str | float | None = None,
    save_behind: str = "skip",
    keep: int = 3,
    keep_every: int | None = None,
    archive: str | None = None,
    local: str | None = None,
    mesh: Mesh | None = None,
    identity: dict[str, Any] | None = None,
    accept_changes: Sequence[str] = (),
    collective_timeout_s: float = 1800.0,
    load_from: str | None = None,
    trust_foreign: bool = False,
    on_status: Callable[[Mapping[str, Any]], None] | None = None,
    place: Place | None = None,
) -> Run:
    """Train in the group that torchrun has started; every rank calls it. The run as it then stands.

    The arguments mean what they mean to `ElasticTrainer` and `ElasticConfig`, and the run is the
    same: it may go on under Ray, and come back, at any size. `on_status` is called on rank 0.
    CUDA is used where each rank of a node has a device. `place` None is read from the environment.

    Raises:
        RuntimeError: torchrun has not started this process; `UnsupportedVersion` for another torch.
        ValueError, TypeError: something cannot work; says what. `StorageRefused` is one of them.
        LeaseHeld, IdentityMismatch, UnsupportedFormat: on rank 0, `NotStarted` on the others.
    """
    versions.check("torch")
    place = place or Place.here()
    check_trust(load_from, trust_foreign)
    config = TrainingConfig(
        run_url=run_url(storage_path, name),
        config=train_loop_config or {},
        seed=seed,
        save=SaveInterval.parse(save_every),
        mtbf_s=None if mtbf is None else parse_duration_s(str(mtbf), bare_unit="s"),
        save_behind=save_behind,
        collective_timeout_s=collective_timeout_s,
        use_cuda=torch.cuda.device_count() >= place.local_world_size,
        mesh=Mesh() if mesh is None else checked_mesh(mesh),
        load_from=load_from,
        local=local,
    )
    retention = Retention(keep=keep, keep_every=keep_every)
    spec = RunSpec.of(
        name=name,
        seed=seed,
        config=config.config,
        identity=identity,
        operational=_operational(place, config, retention, storage_path, name, archive),
        accepted=accept_changes,
    )
    return _train_at(place, train, config, spec, retention, on_status)


def _operational(
    place: Place,
    config: TrainingConfig,
    retention: Retention,
    storage_path: str,
    name: str,
    archive: str | None,
) -> dict[str, Any]:
    tiers = recorded_tiers(
        storage_path,
        name,
        local=config.local,
        archive=archive,
        keep_every=retention.keep_every,
    )
    return {
        **tiers,
        "num_workers": [place.world_size, place.world_size],
        "save": str(config.save),
        "keep": retention.keep,
        "keep_every": retention.keep_every,
        "mesh": str(config.mesh),
    }


def _train_at(
    place: Place,
    train: Callable[[Run], None],
    config: TrainingConfig,
    spec: RunSpec,
    keep: Retention,
    on_status: Callable[[Mapping[str, Any]], None] | None,
) -> Run:
    config.mesh.shape(place.world_size)  # or it says here what is wrong
    store = place.store()
    launcher = Torchrun(place, store, on_status, RankLog(Filesystem.at(config.run_url)))
    launcher.listen()
    return train_standalone(
        train,
        config,
        spec,
        keep,
        world_rank=place.world_rank,
        world_size=place.world_size,
        local_rank=place.local_rank,
        local_world_size=place.local_world_size,
        store=meet(store, place),
        launcher=launcher,
    )
