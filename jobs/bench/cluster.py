"""A fresh Ray cluster on this machine for one measurement, of which nothing stays behind.

Must not import torch or elastic. `ray.cluster_utils.Cluster` needs the main thread: its daemons ask
the kernel to die with the thread that started them, which is also what ends them when this process
is killed outright.
"""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jobs.bench.processes import Processes
from jobs.bench.site import sigterm_exits, site

# Ray is told to hear a death within about half a second instead of its default of 14 s.
FAST_HEALTH_CHECKS: Mapping[str, int] = MappingProxyType(
    {
        "health_check_initial_delay_ms": 0,
        "health_check_period_ms": 250,
        "health_check_timeout_ms": 500,
        "health_check_failure_threshold": 2,
    }
)


class LocalCluster:
    """A head without CPUs and `num_nodes` nodes; `local_cluster` starts and stops it."""

    def __init__(
        self,
        *,
        directory: Path,
        processes: Processes,
        num_nodes: int,
        cpus_per_node: int,
        fast_health_checks: bool,
        same_priority: bool,
    ) -> None:
        from ray.cluster_utils import Cluster

        # Without its dashboard a local cluster was seen to burn both cores after a node had been
        # removed.
        head: dict[str, Any] = {
            "num_cpus": 0,
            "include_dashboard": True,
            "dashboard_port": 0,  # any free one: another Ray may be running here
            "temp_dir": str(directory / "ray"),
        }
        # A copy, for Ray writes into it where this cluster spills: the next would go there too.
        settings = dict(FAST_HEALTH_CHECKS) if fast_health_checks else {}
        if same_priority:
            settings["worker_niceness"] = 0
        if settings:
            head["_system_config"] = settings
        self.directory = directory
        self._processes = processes
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        for _ in range(num_nodes):
            self.add_node(cpus_per_node)
        self._cluster.wait_for_nodes()

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add_node(self, num_cpus: int = 1) -> None:
        """Start one more node. Ray hears of it a moment later."""
        self._cluster.add_node(num_cpus=num_cpus)

    def remove_node(self, node_id: str) -> None:
        """SIGKILL to every daemon of the node; its workers notice by themselves."""
        self._processes.note()
        self._cluster.remove_node(self._node(node_id), allow_graceful=False)

    def drain_node(self, node_id: str, deadline_s: int) -> None:
        """Tell Ray that the node will be taken away in `deadline_s` seconds, as clouds announce it.

        Raises CalledProcessError when Ray refuses.
        """
        command = [
            *(sys.executable, "-m", "ray.scripts.scripts", "drain-node"),
            *("--address", self.address, "--node-id", node_id),
            *("--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot"),
            *("--deadline-remaining-seconds", str(deadline_s)),
        ]
        subprocess.run(command, check=True, capture_output=True)

    def kill_raylet(self, node_id: str) -> None:
        """SIGKILL to the node's raylet alone."""
        self._processes.note()
        raylet = self._node(node_id).all_processes["raylet"][0].process
        raylet.kill()
        # As init would. While it is a zombie its workers take it to be alive.
        raylet.wait()

    def reap(self) -> None:
        """Wait for the killed daemons, so that this process keeps no zombies."""
        self._cluster.shutdown()

    def _node(self, node_id: str) -> Any:
        by_id = {node.node_id: node for node in self._cluster.worker_nodes}
        if node_id not in by_id:
            raise ValueError(f"no such node: expected one of {sorted(by_id)}, found {node_id!r}")
        return by_id[node_id]


@contextlib.contextmanager
def local_cluster(
    *,
    num_nodes: int = 3,
    cpus_per_node: int = 1,
    fast_health_checks: bool,
    same_priority: bool = False,
) -> Iterator[LocalCluster]:
    """A running cluster and a directory of its own; on the way out all of it is gone.

    With `same_priority` workers do not yield to Ray's own processes, as they do by Ray's default.
    """
    import ray  # noqa: F401  (sets its logger's level when imported, so it has to come first)

    logging.getLogger("ray").setLevel(logging.ERROR)
    with (
        sigterm_exits() as exits_on_sigterm,
        _ray_address_kept(),
        site() as (directory, processes),
        contextlib.ExitStack() as undo,
    ):
        cluster = LocalCluster(
            directory=directory,
            processes=processes,
            num_nodes=num_nodes,
            cpus_per_node=cpus_per_node,
            fast_health_checks=fast_health_checks,
            same_priority=same_priority,
        )
        # In this order, and before the directory goes, of which reaping makes a part again.
        undo.callback(cluster.reap)
        undo.callback(processes.kill)
        exits_on_sigterm()
        yield cluster


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
