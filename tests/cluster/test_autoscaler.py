"""Ray's autoscaler is told what a run lacks, and what it brings is taken."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray

from jobs.bench.processes import Processes
from jobs.bench.site import environment
from tests.cluster.local_cluster import RAY, Job, wait_for

# Ray's own provider for tests: it starts raylets of this machine as its nodes.
CONFIG: dict[str, Any] = {
    "cluster_name": "test",
    "max_workers": 3,
    "upscaling_speed": 1.0,
    "idle_timeout_minutes": 60,
    "provider": {
        "type": "fake_multinode",
        "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
    },
    "auth": {},
    "head_node_type": "ray.head.default",
    "available_node_types": {
        "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
        "spot": {"resources": {"CPU": 1}, "node_config": {}, "min_workers": 0, "max_workers": 2},
    },
    "head_node": {},
    "worker_nodes": {},
    "file_mounts": {},
    "cluster_synced_files": [],
    "file_mounts_sync_continuously": False,
    "rsync_exclude": [],
    "rsync_filter": [],
    "initialization_commands": [],
    "setup_commands": [],
    "head_setup_commands": [],
    "worker_setup_commands": [],
    "head_start_ray_commands": [],
    "worker_start_ray_commands": [],
}
FLAGS = (
    *("--steps", "1000000", "--global-batch", "12", "--micro-batch", "2", "--model", "nano"),
    *("--sequence-length", "64", "--save-every", "10", "--grow-interval", "1", "--quiet"),
)


@dataclass(frozen=True)
class Autoscaled:
    """A cluster that has no node for workers until somebody asks for one."""

    address: str


@contextlib.contextmanager
def autoscaled(folder: Path) -> Iterator[Autoscaled]:
    processes = Processes()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    address = f"{ray.util.get_node_ip_address()}:{port}"
    config = folder / "autoscaler.json"
    provider = {**CONFIG["provider"], "gcs_address": address, "launch_multiple": True}
    config.write_text(json.dumps({**CONFIG, "provider": provider}))
    command = [
        *(RAY, "start", "--head", "--block", "--num-cpus=0", f"--port={port}"),
        f"--autoscaling-config={config}",
        *("--dashboard-port=0", "--dashboard-agent-listen-port=0"),
    ]
    variables = {
        **processes.environment,
        "RAY_AUTH_MODE": "disabled",  # whatever this machine's own Ray is set to
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "RAY_FAKE_CLUSTER": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    log = folder / "ray.log"
    with environment(variables), contextlib.ExitStack() as undo:
        with log.open("wb") as output:
            head = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        undo.callback(head.wait)
        undo.callback(processes.kill)
        wait_for("the head", lambda: "Ray runtime started" in log.read_text())
        yield Autoscaled(address)


@pytest.mark.timeout(300)
def test_a_run_that_lacks_nodes_gets_them(tmp_path: Path):
    with (
        autoscaled(tmp_path) as cluster,
        Job(cluster, tmp_path, "run", *FLAGS, "--num-workers", "1:2") as job,
    ):
        waited = job.wait_for_event("waiting")  # there is no node for workers at all
        assert "0 of at least 1" in waited.reason
        job.wait_for_event(
            "generation_started", lambda event: event.data["world_size"] == 2, timeout_s=150.0
        )
        job.wait_for_commit(10)
