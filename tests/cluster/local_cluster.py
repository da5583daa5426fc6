"""A real local Ray cluster of several nodes, and real jobs on it, for tests that kill things."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import ray
from ray.cluster_utils import Cluster

from elastic.storage.checkpoints import Catalog
from elastic.storage.filesystem import Filesystem
from elastic.storage.ledger import LedgerEvent, read_ledger
from elastic.storage.requests import STOP, ask
from elastic.storage.run_file import load_run_file
from jobs.bench.cluster import FAST_HEALTH_CHECKS

if TYPE_CHECKING:
    from elastic import ElasticTrainer

ROOT = Path(__file__).resolve().parents[2]
# So that `python` on the cluster is the one that has this project's dependencies.
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
RAY = shutil.which("ray", path=PATH) or "ray"


def wait_for(what: str, condition: Callable[[], Any], timeout_s: float = 90.0) -> Any:
    """The first true answer of `condition`. A timeout fails, naming `what`."""
    until_s = time.monotonic() + timeout_s
    while (began_s := time.monotonic()) < until_s:
        found = condition()
        if found:
            return found
        # Looking takes at most a quarter of a core from what is looked at.
        time.sleep(max(0.05, 3 * (time.monotonic() - began_s)))
    raise AssertionError(f"timed out after {timeout_s:g} s waiting for {what}")


_FIRST_WORDS = ("stall_seen", "failure_decided", "leave_ordered")


class LocalCluster:
    """A head without CPUs and some nodes. Use `started` to make one."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.nodes: list[Any] = []

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    @property
    def dashboard_url(self) -> str:
        return f"http://{self._cluster.head_node.webui_url}"

    def add(self, num_cpus: int = 1, **options: Any) -> Any:
        node = self._cluster.add_node(num_cpus=num_cpus, **options)
        self.nodes.append(node)
        return node

    def remove(self, node_id: str) -> None:
        """Take the node away without a word, as a lost machine goes."""
        node = next(node for node in self.nodes if node.node_id == node_id)
        self.nodes.remove(node)
        self._cluster.remove_node(node, allow_graceful=False)

    def kill_head(self) -> None:
        """Every daemon of the head at once; the other nodes are left without it."""
        daemons = [
            one.process for all in self._cluster.head_node.all_processes.values() for one in all
        ]
        for daemon in daemons:
            daemon.kill()
        for daemon in daemons:
            daemon.wait()

    def raylet(self, node_id: str) -> subprocess.Popen[bytes]:
        """Its process. Once it has ended it has to be polled: workers take a zombie for alive."""
        node = next(node for node in self.nodes if node.node_id == node_id)
        raylet: subprocess.Popen[bytes] = node.all_processes["raylet"][0].process
        return raylet


def is_running(pid: int) -> bool:
    """Whether there is such a process, and it is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] != "Z"
    except OSError:
        return False


@contextlib.contextmanager
def started(
    num_nodes: int, cpus_per_node: int = 1, head_cpus: int = 0, *, takes_jobs: bool = False
) -> Iterator[LocalCluster]:
    """A cluster that is gone when the block ends. With `takes_jobs`, `ray job submit` works on it.

    Nodes on one machine share the directory that a job's files are unpacked to, and a node that
    unpacks them anew takes them away for a moment: several jobs at once need `num_nodes=0`.
    """
    with contextlib.ExitStack() as undo, pytest.MonkeyPatch.context() as starting:
        if takes_jobs:
            # A job is given the address of the cluster that was last started in the directory that
            # Ray has on its supervisor's machine, so this one has a directory of its own. Sockets
            # lie in it, whose paths must be short.
            own = tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True)
            starting.setenv("RAY_TMPDIR", undo.enter_context(own))
        cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": head_cpus,
                "include_dashboard": takes_jobs,
                "dashboard_port": 0,
                # Its fixed default may be another cluster's on this machine, and no job starts.
                "dashboard_agent_listen_port": 0,
                "_system_config": dict(FAST_HEALTH_CHECKS),
            },
        )
        undo.callback(cluster.shutdown)
        local = LocalCluster(cluster)
        for _ in range(num_nodes):
            local.add(cpus_per_node)
        cluster.wait_for_nodes(timeout=60)
        starting.undo()
        try:
            yield local
        finally:
            with contextlib.suppress(Exception):
                ray.shutdown()


class Job:
    """`python -m jobs.pretrain` on a cluster, as a user runs it, and its run directory."""

    def __init__(
        self,
        cluster: LocalCluster,
        storage: Path,
        name: str,
        *flags: str,
        pace: Path | None = None,
        module: str = "jobs.pretrain",
    ) -> None:
        self.url = str(storage / name)
        self._json = storage / f"{name}.json"
        self._log = storage / f"{name}.log"
        storage.mkdir(parents=True, exist_ok=True)
        module = module if pace is None else "tests.cluster.paced_pretrain"
        command = [
            *(sys.executable, "-m", module, "--name", name, "--storage", str(storage)),
            *("--json", str(self._json)),
            *flags,
        ]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "RAY_ADDRESS": cluster.address, "PACE": str(pace or "")},
            )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def events(self, *kinds: str) -> list[LedgerEvent]:
        """What the ledger holds so far, of these kinds."""
        found = read_ledger(Filesystem.at(self.url)) if Path(self.url).is_dir() else []
        return [event for event in found if not kinds or event.kind in kinds]

    def wait_for_event(
        self,
        kind: str,
        that: Callable[[LedgerEvent], bool] = lambda _: True,
        timeout_s: float = 90.0,
    ) -> LedgerEvent:
        """The first event of a kind for which `that` holds."""

        def look() -> LedgerEvent | None:
            found = next((event for event in self.events(kind) if that(event)), None)
            if found is None and self.process.poll() is not None:
                raise AssertionError(f"the job ended before {kind}:\n{self.log()}")
            return found

        event: LedgerEvent = wait_for(f"{kind} of {self.url}\n{self.log()}", look, timeout_s)
        return event

    def wait_for_commit(self, step: int, timeout_s: float = 120.0) -> LedgerEvent:
        return self.wait_for_event("checkpoint_committed", lambda e: e.step >= step, timeout_s)

    def ranks(self) -> list[dict[str, Any]]:
        """The members of the newest generation: pid, node_id and so on, by world rank."""
        found: list[dict[str, Any]] = self.events("generation_started")[-1].data["ranks"]
        return found

    def kill_rank(self, rank: int) -> None:
        os.kill(self.ranks()[rank]["pid"], signal.SIGKILL)

    def wait(self, timeout_s: float = 180.0) -> dict[str, Any]:
        """The job's summary, once it has ended well."""
        status = self.process.wait(timeout=timeout_s)
        assert status == 0, f"exit status {status}:\n{self.log()}"
        found: dict[str, Any] = json.loads(self._json.read_text())
        return found

    def fails(self, timeout_s: float = 180.0) -> str:
        """What the job said, once it has ended badly."""
        status = self.process.wait(timeout=timeout_s)
        assert status not in (0, None), self.log()
        return self.log()

    def log(self) -> str:
        return self._log.read_text(errors="replace")[-6000:]


class Fit:
    """`trainer.fit()` in a thread, while a test does things to its run."""

    def __init__(self, trainer: ElasticTrainer) -> None:
        self._url = trainer.run_url
        self._fit = trainer.fit
        self._failures: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._fit()
        except BaseException as error:  # noqa: BLE001 - the test tells it
            self._failures.append(error)

    def events(self, kind: str) -> list[LedgerEvent]:
        """What the ledger holds so far of this kind; fails once the run has failed."""
        assert self._failures == []
        is_there = "://" in self._url or Path(self._url).is_dir()
        found = read_ledger(Filesystem.at(self._url)) if is_there else []
        return [event for event in found if event.kind == kind]

    def stop(self) -> None:
        """Have it save and stop."""
        ask(Filesystem.at(self._url), STOP, who="a test", time_s=time.time(), epoch=1)

    def failure(self, timeout_s: float = 60.0) -> BaseException:
        """What it raised, once it has."""
        self._thread.join(timeout=timeout_s)
        assert not self._thread.is_alive() and len(self._failures) == 1
        return self._failures[0]

    def join(self, timeout_s: float = 120.0) -> None:
        """Wait for its end, which has to be a good one."""
        self._thread.join(timeout=timeout_s)
        assert not self._thread.is_alive() and self._failures == []


def unaccounted_s(events: Sequence[LedgerEvent]) -> float:
    """How far the phases of any recovery are from its whole, from the first word of it on."""
    worst_s = 0.0
    begun_s: float | None = None
    for event in events:
        if event.kind in _FIRST_WORDS and begun_s is None:
            begun_s = event.time_s
        if event.kind == "stall_passed":
            begun_s = None
        if event.kind == "recovered":
            assert begun_s is not None
            found_s = sum(event.data["phases_s"].values())
            worst_s = max(worst_s, abs(found_s - (event.time_s - begun_s)))
            begun_s = None
    return worst_s


def digest(url: str, step: int) -> str:
    """Of every tensor's name, dtype, shape and bytes in a checkpoint, whoever saved it."""
    import hashlib

    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

    filesystem = Filesystem.at(url)
    run_file = load_run_file(filesystem)
    assert run_file is not None
    path = Path(url) / Catalog(filesystem, run_file.run_id).data_path(step)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # one process is what is meant here
        state = _load_state_dict_from_keys(storage_reader=dcp.FileSystemReader(str(path)))
    found = hashlib.sha256()

    def feed(name: str, value: Any) -> None:
        if isinstance(value, dict):
            for key in sorted(value):
                feed(f"{name}.{key}", value[key])
        else:
            assert isinstance(value, torch.Tensor), name
            found.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            found.update(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())

    feed("", state)
    return found.hexdigest()


def losses(summary: dict[str, Any], key: str = "losses") -> list[float]:
    """By step from 1 on; every step is there once."""
    by_step = {int(step): value for step, value in summary[key].items()}
    assert sorted(by_step) == list(range(1, summary["step"] + 1))
    return [by_step[step] for step in sorted(by_step)]


def worst_difference(left: Sequence[float], right: Sequence[float]) -> float:
    """The largest relative difference between two equally long lists."""
    assert len(left) == len(right)
    return max(abs(a - b) / max(abs(a), abs(b), 1e-300) for a, b in zip(left, right, strict=True))
