"""One cluster for all tests that leave it as they found it; starting one takes ten seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray

from tests.cluster.local_cluster import PATH, LocalCluster, started


@pytest.fixture(scope="session")
def three_nodes() -> Iterator[LocalCluster]:
    """A head without CPUs and three nodes with one each."""
    with started(num_nodes=3) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def one_node() -> Iterator[LocalCluster]:
    """A single node with three CPUs, which takes jobs: nodes on one machine would get in each
    other's way when they unpack a job's files. Its `python` is this one."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PATH", PATH)
        with started(num_nodes=0, head_cpus=3, takes_jobs=True) as cluster:
            yield cluster


@pytest.fixture
def connected(three_nodes: LocalCluster) -> Iterator[LocalCluster]:
    """`three_nodes`, with this process connected to it."""
    ray.init(address=three_nodes.address, log_to_driver=False)
    yield three_nodes
    ray.shutdown()
