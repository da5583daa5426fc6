"""A Ray cluster of which every node has a network of its own, and a link that can be cut.

The head runs on this machine as it is, each other node in a network namespace. A node whose link is
cut sends no reset and gets none: so does a machine vanish. When this process is killed outright its
Ray nodes die with it, and only an empty network is left.

Must not import torch or elastic.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jobs.bench.cluster import FAST_HEALTH_CHECKS
from jobs.bench.network import (
    INTERFACE,
    Namespace,
    NamespacesUnavailable,
    Network,
    opened_network,
    what_is_missing,
)
from jobs.bench.processes import Processes
from jobs.bench.site import environment, sigterm_exits, site

START_DEADLINE_S = 60.0
_OBJECT_STORE_BYTES = 150 * 2**20
# `ray start`, which the kernel ends (PR_SET_PDEATHSIG, SIGKILL) when the process that made it dies.
_RAY = """
import ctypes
ctypes.CDLL(None).prctl(1, 9)
from ray.scripts.scripts import main
main()
"""
# Gloo would take the address that the host's name resolves to, which is this machine's loopback for
# every node, where no peer can reach it.
_NODE_ENVIRONMENT = {"GLOO_SOCKET_IFNAME": INTERFACE, "TP_SOCKET_IFNAME": INTERFACE}


class NamespacedCluster:
    """A head without CPUs on this machine, and nodes in namespaces; `namespaced_cluster` starts and
    stops it.
    """

    def __init__(
        self,
        *,
        directory: Path,
        processes: Processes,
        network: Network,
        cpus_per_node: int,
        fast_health_checks: bool,
    ) -> None:
        self.directory = directory
        self.address = f"{network.address}:{_free_port()}"
        self._processes = processes
        self._network = network
        self._cpus_per_node = cpus_per_node
        self._fast_health_checks = fast_health_checks
        self._namespace_of: dict[str, Namespace] = {}
        self._ray_nodes: list[_RayNode] = []

    def start_head(self) -> None:
        address, port = self.address.split(":")
        checks = json.dumps(dict(FAST_HEALTH_CHECKS))
        head = self._start_ray(
            "head",
            *("--head", f"--node-ip-address={address}", f"--port={port}", "--num-cpus=0"),
            # Another Ray on this machine may have the fixed defaults.
            *("--include-dashboard=true", "--dashboard-port=0", "--dashboard-agent-listen-port=0"),
            f"--ray-client-server-port={_free_port()}",
            *([f"--system-config={checks}"] if self._fast_health_checks else []),
        )
        self._wait_for_node(address, head)

    def add_nodes(self, num_nodes: int) -> list[str]:
        """Start nodes, each in a namespace of its own, and give their ids once all have joined.

        Raises RuntimeError when one of them ends, or misses the deadline.
        """
        started = [self._start_node(self._network.add()) for _ in range(num_nodes)]
        found = []
        for namespace, node in started:
            node_id = self._wait_for_node(namespace.address, node)
            self._namespace_of[node_id] = namespace
            found.append(node_id)
        return found

    @property
    def node_ids(self) -> list[str]:
        """Of the nodes that were added, the cut ones included."""
        return list(self._namespace_of)

    def cut(self, node_id: str) -> None:
        """From here on nothing leaves the node, and nothing reaches it. Its processes live on."""
        self._network.cut(self._namespace(node_id))
        self._processes.note()  # a raylet that ends itself once healed leaves orphans

    def heal(self, node_id: str) -> None:
        """Undo `cut`. A node that Ray took for dead meanwhile ends itself when it hears of that:
        add another in its place.
        """
        self._network.heal(self._namespace(node_id))

    def is_alive(self, node_id: str) -> bool:
        """Whether the head takes the node to be alive."""
        return node_id in _alive_nodes(self.address)

    def reap(self) -> None:
        """Wait for the killed daemons, so that this process keeps no zombies."""
        for node in self._ray_nodes:
            node.process.wait()

    def _namespace(self, node_id: str) -> Namespace:
        if node_id not in self._namespace_of:
            raise ValueError(
                f"no such node: expected one of {sorted(self._namespace_of)}, found {node_id!r}"
            )
        return self._namespace_of[node_id]

    def _start_node(self, namespace: Namespace) -> tuple[Namespace, _RayNode]:
        return namespace, self._start_ray(
            namespace.name,
            f"--address={self.address}",
            f"--node-ip-address={namespace.address}",
            f"--num-cpus={self._cpus_per_node}",
            within=("ip", "netns", "exec", namespace.name),
        )

    def _start_ray(self, name: str, *options: str, within: Sequence[str] = ()) -> _RayNode:
        """`ray start`, which stays and ends its daemons when it ends."""
        output = self.directory / f"{name}.out"
        with output.open("wb") as stream:
            process = subprocess.Popen(
                [
                    *(*within, sys.executable, "-c", _RAY, "start", "--block"),
                    # One for each, as on machines of their own: two nodes that start at once in one
                    # directory take each other's sockets.
                    f"--temp-dir={self.directory / name}",
                    f"--object-store-memory={_OBJECT_STORE_BYTES}",
                    *options,
                ],
                env={**os.environ, **(_NODE_ENVIRONMENT if within else {})},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        node = _RayNode(process=process, output=output)
        self._ray_nodes.append(node)
        return node

    def _wait_for_node(self, address: str, node: _RayNode) -> str:
        until_s = time.monotonic() + START_DEADLINE_S
        while True:
            has_ended = node.process.poll() is not None
            for node_id, found in _alive_nodes(self.address).items():
                if found == address:
                    return node_id
            if has_ended or time.monotonic() > until_s:
                raise RuntimeError(
                    f"the Ray node at {address} "
                    f"{'ended' if has_ended else f'was not up within {START_DEADLINE_S:.0f} s'}; "
                    f"its last output:\n{node.output.read_text(errors='replace')[-3000:]}"
                )
            time.sleep(0.1)


@dataclass(frozen=True, kw_only=True)
class _RayNode:
    process: subprocess.Popen[bytes]
    output: Path


@contextlib.contextmanager
def namespaced_cluster(
    *, num_nodes: int = 3, cpus_per_node: int = 1, fast_health_checks: bool = True
) -> Iterator[NamespacedCluster]:
    """A running cluster and a directory of its own; on the way out all of it is gone, namespaces
    and links included. SIGTERM ends the block too.

    To be entered on the main thread: its processes die with the thread that started them.

    Raises:
        NamespacesUnavailable: before anything is started.
    """
    if problem := what_is_missing():
        raise NamespacesUnavailable(problem)
    import ray  # noqa: F401  (sets its logger's level when imported, so it has to come first)

    logging.getLogger("ray").setLevel(logging.ERROR)
    with (
        sigterm_exits(),
        # `ray start` would ask for a token if the user has one, and `ray.init` would not send it.
        environment({"RAY_AUTH_MODE": "disabled"}),
        opened_network() as network,
        site() as (directory, processes),
        contextlib.ExitStack() as undo,
    ):
        cluster = NamespacedCluster(
            directory=directory,
            processes=processes,
            network=network,
            cpus_per_node=cpus_per_node,
            fast_health_checks=fast_health_checks,
        )
        # In this order, and before the directory goes, of which what runs makes a part again.
        undo.callback(cluster.reap)
        undo.callback(processes.kill)
        cluster.start_head()
        cluster.add_nodes(num_nodes)
        yield cluster


def _alive_nodes(cluster_address: str) -> dict[str, str]:
    """Addresses of the nodes that the head takes to be alive, by their ids; none while it is down.

    Asks without `ray.init`, which would make this process a member, and of one cluster alone.
    """
    import ray
    from ray.core.generated.gcs_pb2 import GcsNodeInfo
    from ray.exceptions import RpcError

    host, port = cluster_address.split(":")
    with (
        contextlib.suppress(OSError, RpcError),
        socket.create_connection((host, int(port)), timeout=1.0),
    ):
        found = ray._raylet.GcsClient(address=cluster_address).get_all_node_info(timeout=5.0)
        return {
            node_id.hex(): node.node_manager_address
            for node_id, node in found.items()
            if node.state == GcsNodeInfo.GcsNodeState.ALIVE
        }
    return {}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
