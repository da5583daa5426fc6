"""How many workers can run now: Ray's node table, checked against the nodes themselves.

Ray's table can name a dead node for seconds. A node whose raylet refuses a connection is gone,
whatever the table says, so that no start waits for resources that are not there.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from elastic.cluster.ray_internals import read_nodes
from elastic.policy.plan import NodeCapacity, count_workers, describe, of_one_accelerator

logger = logging.getLogger("elastic")

_PROBE_TIMEOUT_S = 1.0
_READ_TRIES = 5
_READ_AGAIN_S = 0.4
# The label that Ray gives to nodes with accelerators, and whose value a user may set.
_ACCELERATOR = "ray.io/accelerator-type"


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """What could run now, the workers that run already included."""

    num_workers: int
    note: str
    selector: Mapping[str, str]
    """Labels of the nodes they fit on."""


def look(
    per_worker: Mapping[str, float],
    held: Mapping[str, int],
    selector: Mapping[str, str] | None = None,
    read: Callable[[], list[dict[str, Any]]] = read_nodes,
    *,
    mix_accelerators: bool = False,
) -> Capacity:
    """Count the workers that fit on the nodes which answer now.

    `held` gives this run's own workers by node id; what they use counts as free. `selector` keeps
    nodes whose labels equal it. Only nodes of one accelerator type count, unless they may be mixed.
    Blocks for up to a second if a node does not answer.
    """
    nodes = [node for node in read() if _matches(node["labels"], selector)]
    alive = _answering(nodes)
    found = [
        NodeCapacity(
            node_id=node["node_id"],
            available=node["available"],
            total=node["total"],
            num_held=held.get(node["node_id"], 0),
            accelerator=node["labels"].get(_ACCELERATOR, ""),
        )
        for node in alive
    ]
    wanted = dict(selector or {})
    alike = found if mix_accelerators else of_one_accelerator(found, per_worker)
    note = describe(alike, per_worker)
    if len(alike) < len(found):
        kind = alike[0].accelerator
        others = sorted({node.accelerator or "none" for node in found} - {kind or "none"})
        note += f"; left out, of another accelerator than {kind or 'none'}: {', '.join(others)}"
        wanted[_ACCELERATOR] = kind or f"!in({','.join(others)})"
    return Capacity(num_workers=count_workers(alike, per_worker), note=note, selector=wanted)


def answers(address: str, port: int, timeout_s: float = _PROBE_TIMEOUT_S) -> bool:
    """Whether something listens at the address."""
    try:
        with socket.create_connection((address, port), timeout=timeout_s):
            return True
    except OSError:
        return False


def answering_nodes(read: Callable[[], list[dict[str, Any]]] = read_nodes) -> set[str]:
    """The ids of the nodes whose raylets take connections."""
    return {node["node_id"] for node in _answering(read())}


def node_answers(node_id: str, read: Callable[[], list[dict[str, Any]]] = read_nodes) -> bool:
    """Whether the node is in Ray's table and its raylet takes connections.

    A table that cannot be read is asked for again; after some tries nothing is known against the
    node. Blocks for up to two seconds more then.
    """
    for _ in range(_READ_TRIES):
        try:
            nodes = read()
        except Exception as error:  # noqa: BLE001 - unknown is not dead
            logger.warning("could not read Ray's node table: %s", error)
            time.sleep(_READ_AGAIN_S)
        else:
            return any(
                node["node_id"] == node_id and answers(node["address"], node["port"])
                for node in nodes
            )
    return True


def _answering(nodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if not nodes:
        return []
    with ThreadPoolExecutor(max_workers=min(32, len(nodes))) as pool:
        up = pool.map(lambda node: answers(node["address"], node["port"]), nodes)
        return [node for node, is_up in zip(nodes, up, strict=True) if is_up]


def _matches(labels: Mapping[str, str], selector: Mapping[str, str] | None) -> bool:
    return all(_label_fits(labels.get(key), rule) for key, rule in (selector or {}).items())


def _label_fits(value: str | None, rule: str) -> bool:
    """Ray's label selectors: `a`, `!a`, `in(a,b)`, `!in(a,b)`."""
    negated = rule.startswith("!")
    text = rule.removeprefix("!")
    if text.startswith("in(") and text.endswith(")"):
        wanted = {part.strip() for part in text[3:-1].split(",")}
    else:
        wanted = {text}
    return (value in wanted) != negated
