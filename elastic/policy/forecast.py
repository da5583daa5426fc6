"""Forecast: what saving will cost a run of a given size, before there is one. Pure arithmetic.

Bandwidths alone: planning a save, barriers and slow ranks come on top.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic.policy.intervals import (
    Interval,
    SaveCosts,
    best_interval,
    daly_interval_s,
    doubts,
    young_interval_s,
)
from elastic.policy.sizes import CheckpointSize

BLOCKING = "blocking"
ASYNCHRONOUS = "asynchronous"


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What the run will run on, as far as saving goes. Bandwidths are in bytes per second."""

    gpus_per_node: int
    storage_bytes_per_s: float
    """Writing and reading, all nodes together."""
    host_bytes_per_s: float
    """From one GPU to host memory, while its neighbours copy too."""
    restart_s: float
    """From the notice of a failure to a group that may load."""
    detection_s: float


@dataclass(frozen=True, kw_only=True)
class SavePlan:
    """How often to save in one way, and what that costs."""

    saves: str
    costs: SaveCosts
    interval: Interval
    young_s: float
    daly_s: float
    overhead: float
    """Seconds lost per second, first order: `SaveCosts.overhead`."""
    lost_share: float
    lost_work_s: float
    """Work lost with one failure, on average."""
    doubts: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """One cluster size: the sizes per rank and node, and both ways to save."""

    num_gpus: int
    num_nodes: int
    mtbf_s: float
    per_rank_bytes: int
    host_bytes_per_node: int
    """Host memory of a node that one staged copy takes."""
    blocking: SavePlan
    asynchronous: SavePlan

    def plans(self) -> tuple[SavePlan, SavePlan]:
        return self.blocking, self.asynchronous


def forecast(size: CheckpointSize, *, num_gpus: int, mtbf_s: float, machine: Machine) -> Forecast:
    """What saving a checkpoint of that size costs on `num_gpus` GPUs that fail each `mtbf_s`.

    One rank per GPU, every tensor split evenly over all of them. A blocking save stalls for the
    whole write, an asynchronous one for the largest rank's copy to host memory. After a failure
    the checkpoint is read at the bandwidth it is written with.
    """
    per_rank_bytes = size.per_rank_bytes(num_gpus)
    transfer_s = size.num_bytes() / machine.storage_bytes_per_s
    recovery_s = machine.restart_s + transfer_s
    common = {
        "mtbf_s": mtbf_s,
        "recovery_s": recovery_s,
        "detection_s": machine.detection_s,
    }
    copy_s = per_rank_bytes / machine.host_bytes_per_s
    return Forecast(
        num_gpus=num_gpus,
        num_nodes=-(-num_gpus // machine.gpus_per_node),
        mtbf_s=mtbf_s,
        per_rank_bytes=per_rank_bytes,
        host_bytes_per_node=per_rank_bytes * min(num_gpus, machine.gpus_per_node),
        blocking=_plan(BLOCKING, SaveCosts(stall_s=transfer_s, **common)),
        asynchronous=_plan(ASYNCHRONOUS, SaveCosts(stall_s=copy_s, write_s=transfer_s, **common)),
    )


def _plan(saves: str, costs: SaveCosts) -> SavePlan:
    interval = best_interval(costs)
    return SavePlan(
        saves=saves,
        costs=costs,
        interval=interval,
        young_s=young_interval_s(costs.mtbf_s, costs.stall_s),
        daly_s=daly_interval_s(costs.mtbf_s, costs.stall_s),
        overhead=costs.overhead(interval.seconds),
        lost_share=costs.lost_share(interval.seconds),
        lost_work_s=costs.lost_work_s(interval.seconds),
        doubts=tuple(doubts(costs, interval.seconds)),
    )
