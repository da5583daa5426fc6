"""This process's own node in a Ray cluster: which one it is, its drain, and what is left on it.

Works in an actor, and in a process that is no part of the cluster.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Mapping
from threading import Event
from typing import NamedTuple

from elastic.cluster.notices.notice import Notice
from elastic.cluster.ray_internals import ClusterView, find_cluster

logger = logging.getLogger("elastic")

_CALL_S = 2.0
_AGAIN_S = 1.0
_LOOK_S = 0.25


class NodeUnknown(LookupError):
    """Which node this is cannot be told, or it is not there; says what was found."""


class Drained(NamedTuple):
    """What came of a notice."""

    node_id: str
    deadline_ms: int
    """Since 1970; 0 when it is not told."""
    is_news: bool
    """Not so where Ray was told already of an end as early as this."""


class OwnNode:
    """Safe to use from several threads.

    `address` is `host:port` of the cluster's control store, or None to look for one. Without
    `node_id` it is the node of this machine.
    """

    def __init__(self, address: str | None, node_id: str = "") -> None:
        self._address = address
        self._node_id = node_id

    def find(self) -> str:
        """Its id. Raises `NodeUnknown`, and `OSError` while no cluster answers."""
        return self._find(*self._look())

    def drain(self, notice: Notice) -> Drained:
        """Have Ray drain it by the notice's deadline, unless it drains by then already.

        Raises `NodeUnknown`, `OSError` while no cluster answers, `RuntimeError` when Ray refuses.
        """
        view, own_ip = self._look()
        node_id = self._find(view, own_ip)
        deadline_ms = 0 if notice.deadline_s is None else round(notice.deadline_s * 1000)
        earlier_ms = view.draining_nodes().get(node_id)
        if earlier_ms is not None and _is_as_early(earlier_ms, deadline_ms):
            return Drained(node_id, earlier_ms, is_news=False)
        message = f"{notice.kind}: {notice.text}"
        why = view.drain(node_id, message, deadline_ms, timeout_s=_CALL_S)
        if why is not None:
            raise RuntimeError(f"Ray refuses to drain node {node_id[:12]}: {why}")
        return Drained(node_id, deadline_ms, is_news=True)

    def drain_at_last(
        self,
        notice: Notice,
        ended: Event,
        on_trouble: Callable[[str], None] = logger.warning,
    ) -> Drained | None:
        """As `drain`, asked again until it is done; each trouble is told once. None once ended."""
        trouble = ""
        while True:
            try:
                return self.drain(notice)
            except Exception as error:  # noqa: BLE001 - Ray has many errors: ask again
                if trouble != (trouble := f"{type(error).__name__}: {error}"):
                    on_trouble(f"not drained yet, for {notice.text}: {trouble}")
            if ended.wait(_AGAIN_S):
                return None

    def wait_until_free(self, node_id: str, until_s: float) -> list[str]:
        """Until nothing on it holds resources, or it is gone; what still does at `until_s`.

        `until_s` is wall time. A cluster that does not answer leaves it unknown, which is told so.
        """
        while True:
            try:
                view, _ = self._look()
                left = view.holders(node_id) if node_id in view.living_nodes() else []
            except Exception as error:  # noqa: BLE001 - unknown is not free: ask again
                left = [f"unknown: {type(error).__name__}: {error}"]
            if not left or time.time() >= until_s:
                return left
            time.sleep(_LOOK_S)

    def _look(self) -> tuple[ClusterView, str]:
        """The cluster, where it answers now, and this machine's address on the way to it."""
        address = find_cluster(self._address)
        host, _, port = address.rpartition(":")
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_CALL_S) as way:
            own_ip: str = way.getsockname()[0]
        return ClusterView(address), own_ip

    def _find(self, view: ClusterView, own_ip: str) -> str:
        nodes = view.living_nodes()
        if self._node_id in nodes:
            return self._node_id
        if self._node_id:
            raise NodeUnknown(f"no node {self._node_id} lives in the cluster")
        return node_of(own_ip, socket.gethostname(), nodes)


def node_of(own_ip: str, own_name: str, nodes: Mapping[str, tuple[str, str]]) -> str:
    """The one node of the machine with this address, or else this host name.

    `nodes` are address and host name by node id. Raises `NodeUnknown`, which names those found.
    """
    by_ip = [node_id for node_id, (ip, _) in nodes.items() if ip == own_ip]
    by_name = [node_id for node_id, (_, name) in nodes.items() if name == own_name]
    for found in (by_ip, by_name):
        if len(found) == 1:
            return found[0]
    several = sorted({*by_ip, *by_name})
    what = f"{len(several)} nodes ({', '.join(several)})" if several else "no node"
    raise NodeUnknown(
        f"{what} of this machine ({own_name}, {own_ip}) in the cluster; expected one: say which "
        "with --node-id"
    )


def _is_as_early(earlier_ms: int, deadline_ms: int) -> bool:
    """Whether a drain by the first deadline is one by the second too; 0 is a time not told."""
    return deadline_ms == 0 or 0 < earlier_ms <= deadline_ms
