"""A fresh Ray cluster on this machine for one measurement, of which nothing stays behind.

Must not import torch or elastic. `ray.cluster_utils.Cluster` needs the main thread: its daemons ask
the kernel to die with the thread that started them, which is also what ends them when this process
is killed outright.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

# Ray is told to hear a death within about half a second instead of its default of 14 s (see README,
# limits).
FAST_HEALTH_CHECKS = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 250,
    "health_check_timeout_ms": 500,
    "health_check_failure_threshold": 2,
}
_MARK = "ELASTIC_BENCH_CLUSTER"


class LocalCluster:
    """A head without CPUs and `num_nodes` nodes; `local_cluster` starts and stops it."""

    def __init__(
        self, *, directory: Path, num_nodes: int, cpus_per_node: int, fast_health_checks: bool
    ) -> None:
        from ray.cluster_utils import Cluster

        # Without its dashboard a local cluster was seen to burn both cores after a node had been
        # removed.
        head: dict[str, Any] = {
            "num_cpus": 0,
            "include_dashboard": True,
            "temp_dir": str(directory / "ray"),
        }
        if fast_health_checks:
            head["_system_config"] = FAST_HEALTH_CHECKS
        self.directory = directory
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        for _ in range(num_nodes):
            self._cluster.add_node(num_cpus=cpus_per_node)
        self._cluster.wait_for_nodes()

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def remove_node(self, node_id: str) -> None:
        """SIGKILL to every daemon of the node; its workers notice by themselves."""
        self._cluster.remove_node(self._node(node_id), allow_graceful=False)

    def raylet_pid(self, node_id: str) -> int:
        return int(self._node(node_id).all_processes["raylet"][0].process.pid)

    def reap(self) -> None:
        """Wait for the killed daemons, so that this process keeps no zombies."""
        self._cluster.shutdown()

    def _node(self, node_id: str) -> Any:
        by_id = {node.node_id: node for node in self._cluster.worker_nodes}
        if node_id not in by_id:
            raise ValueError(f"no such node: expected one of {sorted(by_id)}, found {node_id!r}")
        return by_id[node_id]


@contextlib.contextmanager
def measurement_directory() -> Iterator[Path]:
    """A directory for one measurement; on the way out all that was started within is killed.

    For engines that need no cluster; `local_cluster` has one of its own.
    """
    with _directory() as directory, _marked_environment() as mark, _sigterm_exits():
        try:
            yield directory
        finally:
            kill_marked(mark)


@contextlib.contextmanager
def local_cluster(
    *, num_nodes: int = 3, cpus_per_node: int = 1, fast_health_checks: bool
) -> Iterator[LocalCluster]:
    """A running cluster and a directory of its own; on the way out all of it is gone."""
    import ray  # noqa: F401  (sets its logger's level when imported, so it has to come first)

    logging.getLogger("ray").setLevel(logging.ERROR)
    with (
        _directory() as directory,
        _marked_environment() as mark,
        _ray_address_kept(),
        _sigterm_exits() as exits_on_sigterm,
    ):
        cluster = None
        try:
            cluster = LocalCluster(
                directory=directory,
                num_nodes=num_nodes,
                cpus_per_node=cpus_per_node,
                fast_health_checks=fast_health_checks,
            )
            exits_on_sigterm()
            yield cluster
        finally:
            kill_marked(mark)
            if cluster is not None:
                cluster.reap()


def kill_marked(mark: str, deadline_s: float = 10.0) -> None:
    """SIGKILL to every process that carries `mark` in its environment, until none is left.

    Ray's own shutdown ends the daemons; a worker whose raylet was killed belongs to nobody and
    trains on for seconds. Where there is no /proc this does nothing.
    """
    begun_s = time.monotonic()
    while True:
        carriers, unknown = _marked_pids(mark)
        for pid in carriers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        waited_s = time.monotonic() - begun_s
        # Some process of the user's own may be without environment for good.
        if not carriers and (not unknown or waited_s > 1.0):
            return
        if waited_s > deadline_s:
            raise RuntimeError(
                f"processes {carriers} outlived SIGKILL for {deadline_s:.0f} s: end them by hand"
            )
        time.sleep(0.05)


def _marked_pids(mark: str) -> tuple[list[int], list[int]]:
    """Processes that carry `mark`, and those of which it cannot be said yet."""
    carriers, unknown = [], []
    line = f"{_MARK}={mark}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            variables = (entry / "environ").read_bytes()
            if line in variables.split(b"\0"):
                carriers.append(int(entry.name))
            elif not variables:
                # Neither a kernel thread nor a zombie, which have no executable: in the middle of
                # its exec, after a fork that escaped the last look.
                (entry / "exe").readlink()
                unknown.append(int(entry.name))
    return carriers, unknown


@contextlib.contextmanager
def _directory() -> Iterator[Path]:
    # Ray puts sockets below it, and a socket's path may have 107 characters: a long TMPDIR would
    # not do.
    directory = Path(
        tempfile.mkdtemp(prefix="bench-", dir="/tmp" if os.path.isdir("/tmp") else None)
    )
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def _marked_environment() -> Iterator[str]:
    mark = uuid.uuid4().hex
    with environment({_MARK: mark, "RAY_USAGE_STATS_ENABLED": "0"}):
        yield mark


@contextlib.contextmanager
def environment(changes: Mapping[str, str]) -> Iterator[None]:
    """This process's environment with `changes`, and afterwards what it was."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _ray_address_kept() -> Iterator[None]:
    """`Cluster` makes itself the machine's current Ray; the user's own is that again afterwards."""
    from ray._common.utils import reset_ray_address
    from ray._private.utils import read_ray_address, write_ray_address

    before = read_ray_address()
    try:
        yield
    finally:
        if before is None:
            reset_ray_address()
        else:
            write_ray_address(before)


@contextlib.contextmanager
def _sigterm_exits() -> Iterator[Callable[[], None]]:
    """SIGTERM becomes an exit that cleans up. Call what it gives after starting Ray nodes.

    Each of them puts a handler of its own in the place of ours, one that drains first.
    """
    before = signal.getsignal(signal.SIGTERM)

    def leave(signum: int, frame: object) -> None:
        raise SystemExit(128 + signum)

    def install() -> None:
        signal.signal(signal.SIGTERM, leave)

    install()
    try:
        yield install
    finally:
        signal.signal(signal.SIGTERM, before)
