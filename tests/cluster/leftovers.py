"""What a run has left on a cluster, as Ray's own tables tell it to a process connected to it."""

from __future__ import annotations

from typing import Any

import ray
from ray.util.placement_group import placement_group_table

from tests.cluster.local_cluster import wait_for

GONE_S = 60.0


def living_actors() -> list[dict[str, Any]]:
    """Those that belong to a job. Ray's own coordinator, which is detached, is everybody's."""
    actors = ray._private.state.actors().values()
    return [one for one in actors if one["State"] != "DEAD" and not one["IsDetached"]]


def held_groups() -> list[dict[str, Any]]:
    """Placement groups that hold resources, or wait for some."""
    return [one for one in placement_group_table().values() if one["state"] != "REMOVED"]


def wait_until_nothing_is_left() -> None:
    """No actor, no placement group, and every CPU free, within a minute."""
    wait_for("the last actor to go", lambda: not living_actors(), GONE_S)
    wait_for("the last placement group to go", lambda: not held_groups(), GONE_S)
    total = ray.cluster_resources()["CPU"]
    wait_for("all CPUs", lambda: ray.available_resources().get("CPU", 0.0) == total, GONE_S)
