"""One cluster for all tests that leave it as they found it; starting one takes ten seconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from elastic.dashboard.goodput import goodput_if_readable
from elastic.storage.filesystem import Filesystem
from elastic.storage.ledger import LedgerEvent, read_ledger
from elastic.storage.run_file import RUN_FILE
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


@pytest.fixture(autouse=True)
def every_slot_second_is_in_one_bucket(request: pytest.FixtureRequest) -> Iterator[None]:
    """Of each run that a test has left: buckets add up to wall time times slots, within 0.1 %."""
    made_in = request.getfixturevalue("tmp_path") if "tmp_path" in request.fixturenames else None
    yield
    for file in [] if made_in is None else Path(made_in).rglob(RUN_FILE):
        fs = Filesystem.at(str(file.parent))
        events = read_ledger(fs)
        found = goodput_if_readable(fs, events)
        if found is None:
            continue  # the test has damaged its metrics
        whole, buckets = found.whole_slot_seconds, found.slot_seconds.values()
        assert min(buckets) >= -1e-6 * whole, found
        assert abs(sum(buckets) - whole) <= 1e-3 * whole, found
        assert whole <= _most_slot_s(events) * 1.001, found


def _most_slot_s(events: list[LedgerEvent]) -> float:
    """Wall time of all lives, times the most slots that any plan has told of."""
    sizes = [
        value
        for event in events
        for name in ("world_size", "new_world_size")
        if isinstance(value := event.data.get(name), int)
    ]
    return (events[-1].time_s - events[0].time_s) * max(sizes, default=0) if events else 0.0
