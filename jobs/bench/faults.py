"""The faults: who is struck, and how. One entry of the table per `--fault`.

Must not import torch or elastic, and must not measure: the caller notes the time of the strike.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jobs.bench.cluster import LocalCluster
from jobs.bench.namespaces import NamespacedCluster

Cluster = LocalCluster | NamespacedCluster | None


@dataclass(frozen=True, kw_only=True)
class Victim:
    """A rank that is to be struck: its process and the Ray node it runs on."""

    world_rank: int
    pid: int
    node_id: str


@dataclass(frozen=True, kw_only=True)
class Fault:
    """`world_ranks` of the group are struck, all at once.

    An engine that did no new step by `recover_deadline_s` after the strike has failed. Our service
    hears of a rank that stands still after `hang_limit_s` at the earliest; None leaves its default.
    """

    name: str
    world_ranks: Sequence[int]
    strike: Callable[[Cluster, Victim], None]
    needs_cluster: bool
    needs_namespaces: bool = False
    recover_deadline_s: float = 300.0
    hang_limit_s: float | None = None


def _kill_worker(cluster: Cluster, victim: Victim) -> None:
    os.kill(victim.pid, signal.SIGKILL)


def _stop_worker(cluster: Cluster, victim: Victim) -> None:
    os.kill(victim.pid, signal.SIGSTOP)  # ended with the measurement: SIGKILL reaches it too


def _remove_node(cluster: Cluster, victim: Victim) -> None:
    assert isinstance(cluster, LocalCluster)
    cluster.remove_node(victim.node_id)


def _kill_raylet(cluster: Cluster, victim: Victim) -> None:
    assert isinstance(cluster, LocalCluster)
    cluster.kill_raylet(victim.node_id)


def _cut_link(cluster: Cluster, victim: Victim) -> None:
    assert isinstance(cluster, NamespacedCluster)
    cluster.cut(victim.node_id)


FAULTS = {
    fault.name: fault
    for fault in (
        Fault(name="worker", world_ranks=(1,), strike=_kill_worker, needs_cluster=False),
        Fault(name="rank0", world_ranks=(0,), strike=_kill_worker, needs_cluster=False),
        Fault(name="two", world_ranks=(1, 2), strike=_kill_worker, needs_cluster=False),
        # Rivals wait for half an hour and more, by their defaults.
        Fault(
            name="hang",
            world_ranks=(1,),
            strike=_stop_worker,
            needs_cluster=False,
            recover_deadline_s=120.0,
            hang_limit_s=2.0,
        ),
        Fault(name="node", world_ranks=(1,), strike=_remove_node, needs_cluster=True),
        Fault(name="raylet", world_ranks=(1,), strike=_kill_raylet, needs_cluster=True),
        Fault(
            name="partition",
            world_ranks=(1,),
            strike=_cut_link,
            needs_cluster=True,
            needs_namespaces=True,
        ),
    )
}
