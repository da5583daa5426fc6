"""How many workers can run now: Ray's node table, checked against the nodes themselves.

Ray's table can name a dead node for seconds. A node whose raylet refuses a connection is gone,
whatever the table says, so that no start waits for resources that are not there.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from elastic.cluster.ray_internals import read_nodes
from elastic.policy.plan import (
    NodeCapacity,
    could_ever_fit,
    count_workers,
    describe,
    of_one_accelerator,
)

logger = logging.getLogger("elastic")

_PROBE_TIMEOUT_S = 1.0
_READ_TRIES = 5
_READ_AGAIN_S = 0.4
# The label that Ray gives to nodes with accelerators, and whose value a user may set.
_ACCELERATOR = "ray.io/accelerator-type"
# The label that Ray gives to every node.
NODE_ID = "ray.io/node-id"


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """What could run now, the workers that run already included."""

    num_workers: int
    note: str
    selector: Mapping[str, str]
    """Labels of the nodes they fit on."""
    nodes: frozenset[str] = frozenset()
    """Ids of all nodes that could run a worker, those kept out among them."""


def look(
    per_worker: Mapping[str, float],
    held: Mapping[str, int],
    selector: Mapping[str, str] | None = None,
    read: Callable[[], list[dict[str, Any]]] = read_nodes,
    *,
    mix_accelerators: bool = False,
    kept_out: Mapping[str, str] | None = None,
) -> Capacity:
    """Count the workers that fit on the nodes which answer now.

    `held` gives this run's own workers by node id; what they use counts as free. `selector` keeps
    nodes whose labels equal it. Only nodes of one accelerator type count, unless they may be mixed.
    `kept_out` are nodes that count for nothing, with the reasons, by node id. Blocks for up to a
    second if a node does not answer.
    """
    nodes = [node for node in read() if _matches(node["labels"], selector)]
    alive = _answering(nodes)
    every = [
        NodeCapacity(
            node_id=node["node_id"],
            available=node["available"],
            total=node["total"],
            num_held=held.get(node["node_id"], 0),
            accelerator=node["labels"].get(_ACCELERATOR, ""),
        )
        for node in alive
    ]
    out = kept_out or {}
    found = [node for node in every if node.node_id not in out]
    wanted = dict(selector or {})
    if out:
        wanted[NODE_ID] = without(wanted.get(NODE_ID), out)
    alike = found if mix_accelerators else of_one_accelerator(found, per_worker)
    note = describe(alike, per_worker)
    if len(alike) < len(found):
        kind = alike[0].accelerator
        others = sorted({node.accelerator or "none" for node in found} - {kind or "none"})
        note += f"; left out, of another accelerator than {kind or 'none'}: {', '.join(others)}"
        wanted[_ACCELERATOR] = kind or f"!in({','.join(others)})"
    if named := [out[node.node_id] for node in every if node.node_id in out]:
        note += f"; kept out: {'; '.join(named)}"
    return Capacity(
        num_workers=count_workers(alike, per_worker),
        note=note,
        selector=wanted,
        nodes=frozenset(node.node_id for node in every if could_ever_fit(node, per_worker)),
    )


def without(rule: str | None, node_ids: Iterable[str]) -> str:
    """The rule for the label `NODE_ID` that keeps these nodes out, and all that `rule` does."""
    out = set(node_ids)
    if rule is None:
        return f"!in({','.join(sorted(out))})"
    is_negated, named = _parse(rule)
    if is_negated:
        return f"!in({','.join(sorted(out | named))})"
    # Of nodes that were named and are all out none fits, and so nothing will start on them.
    return f"in({','.join(sorted(named - out or named))})"


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
    is_negated, wanted = _parse(rule)
    return (value in wanted) != is_negated


def _parse(rule: str) -> tuple[bool, set[str]]:
    """Whether it names the values that do not fit, and the values that it names."""
    text = rule.removeprefix("!")
    if text.startswith("in(") and text.endswith(")"):
        return rule != text, {part.strip() for part in text[3:-1].split(",")}
    return rule != text, {text}
