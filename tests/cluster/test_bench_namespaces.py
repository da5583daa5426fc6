"""A cluster of nodes with a network of their own: a link that is cut and healed, and no traces."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs.bench.namespaces import namespaced_cluster
from jobs.bench.network import why_unavailable
from tests.cluster.local_cluster import wait_for

CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    if problem := why_unavailable():
        pytest.skip(problem)
    before = traces()
    yield
    assert traces() <= before


def traces() -> set[str]:
    """Network devices, namespaces and directories of measurements."""
    found = [*Path("/sys/class/net").glob("bench*"), *Path("/run/netns").glob("bench*")]
    return {str(path) for path in [*found, *Path("/tmp").glob("bench-*")]}


@pytest.mark.thorough
def test_a_node_whose_link_is_cut_is_lost_and_another_takes_its_place() -> None:
    with namespaced_cluster(num_nodes=2) as cluster:
        lost, kept = cluster.node_ids

        cluster.cut(lost)
        wait_for("the head to miss the node", lambda: not cluster.is_alive(lost), timeout_s=20)
        assert cluster.is_alive(kept)
        cluster.heal(lost)
        (new,) = cluster.add_nodes(1)

        assert cluster.is_alive(new)
        assert cluster.is_alive(kept)


@pytest.mark.thorough
def test_ranks_in_two_namespaces_reach_each_other(tmp_path: Path) -> None:
    script = tmp_path / "all_reduce.py"
    script.write_text(ALL_REDUCE)
    with namespaced_cluster(num_nodes=2) as cluster:
        command = [sys.executable, str(script), cluster.address]
        found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert found.stdout.split() == ["2.0", "2.0"], found.stderr


ALL_REDUCE = """
import sys
from datetime import timedelta

import ray
import torch
import torch.distributed as dist

ray.init(address=sys.argv[1], log_to_driver=False)


@ray.remote(num_cpus=1)
class Rank:
    def open_store(self):
        host = ray.util.get_node_ip_address()
        self.store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return host, self.store.port

    def all_reduce(self, rank, host, port):
        seconds = timedelta(seconds=30)
        store = dist.TCPStore(host, port, is_master=False, timeout=seconds)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=seconds)
        ones = torch.ones(1)
        dist.all_reduce(ones)
        return ones.item()


ranks = [Rank.remote() for _ in range(2)]
where = ray.get(ranks[0].open_store.remote())
print(*ray.get([one.all_reduce.remote(rank, *where) for rank, one in enumerate(ranks)]))
"""


def test_sigterm_takes_namespaces_links_and_processes_down() -> None:
    script = (
        "import time; from jobs.bench.namespaces import namespaced_cluster as started\n"
        "with started(num_nodes=1) as cluster: print(cluster.address, flush=True); time.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], cwd=CHECKOUT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    address = process.stdout.readline().strip()
    assert len(naming(address)) > 5  # daemons of two nodes

    process.send_signal(signal.SIGTERM)

    assert process.wait(timeout=30) == 128 + signal.SIGTERM
    assert naming(address) == []


def naming(address: str) -> list[str]:
    """Command lines of the processes that were told the head's address or port."""
    host, port = address.split(":")
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = path.read_text().replace("\0", " ")
            if address in line or (host in line and port in line):
                found.append(line)
    return found
