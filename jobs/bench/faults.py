"""The faults: who is struck, and how. One entry of the table per `--fault`.

Must not import torch or elastic, and must not measure: the caller notes the time of the strike.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jobs.bench.cluster import LocalCluster


@dataclass(frozen=True, kw_only=True)
class Victim:
    """A rank that is to be struck: its process and the Ray node it runs on."""

    world_rank: int
    pid: int
    node_id: str


@dataclass(frozen=True, kw_only=True)
class Fault:
    """`world_ranks` of the group are struck, all at once."""

    name: str
    world_ranks: Sequence[int]
    strike: Callable[[LocalCluster | None, Victim], None]
    needs_cluster: bool


def _kill_worker(cluster: LocalCluster | None, victim: Victim) -> None:
    os.kill(victim.pid, signal.SIGKILL)


def _remove_node(cluster: LocalCluster | None, victim: Victim) -> None:
    assert cluster is not None
    cluster.remove_node(victim.node_id)


def _kill_raylet(cluster: LocalCluster | None, victim: Victim) -> None:
    assert cluster is not None
    cluster.kill_raylet(victim.node_id)


FAULTS = {
    fault.name: fault
    for fault in (
        Fault(name="worker", world_ranks=(1,), strike=_kill_worker, needs_cluster=False),
        Fault(name="rank0", world_ranks=(0,), strike=_kill_worker, needs_cluster=False),
        Fault(name="node", world_ranks=(1,), strike=_remove_node, needs_cluster=True),
        Fault(name="raylet", world_ranks=(1,), strike=_kill_raylet, needs_cluster=True),
    )
}
