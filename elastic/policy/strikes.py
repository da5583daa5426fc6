"""Strikes: failures put down to a node, and the nodes that are kept out for having too many.

Folded from what the ledger tells, so that a driver knows what those before it have seen. Times are
wall time, in seconds since 1970, since they outlive a driver. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from elastic.policy.durations import told
from elastic.policy.events import Record

KEPT_OUT, ALLOWED, TOLERATED = "node_kept_out", "node_allowed", "node_tolerated"
"""What the ledger is told: kept out from now on, let back in, over the limit and not kept out."""

# As much as the limit at once: such memory stays bad until somebody has reset or changed it.
_AT_ONCE = frozenset({"ecc_error"})
# They say nothing of why, and may be the node's doing.
_SILENT = frozenset({"worker_killed", "worker_died", "hang"})
_LOUD = frozenset({"cuda_error", "nccl_error"}) | _AT_ONCE
# Whatever one fault of a node takes down, it takes down within this time.
_INCIDENT_S = 5.0
# Workers that die without a word on several nodes within this time have died of something else.
_TOGETHER_S = 2.0
_MOST_STRIKES = 1000


class Word(Protocol):
    """An event of the ledger, or what is about to become one."""

    @property
    def kind(self) -> str: ...

    @property
    def time_s(self) -> float: ...

    @property
    def generation(self) -> int: ...

    @property
    def world_rank(self) -> int: ...

    @property
    def data(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True, kw_only=True)
class StrikeRules:
    """When a node has had too many strikes, and for how long they count."""

    limit: int = 3
    """So many, each within `expire_s` of the last one. 0: no node is ever kept out."""
    expire_s: float = 3600.0
    """A node is kept out for as long, from its last strike on."""

    def __post_init__(self) -> None:
        if self.limit < 0:
            raise ValueError(
                f"node_strikes is a number of failures, or 0 to keep no node out; "
                f"found {self.limit}"
            )
        if not self.expire_s > 0:
            raise ValueError(f"node_strikes_expire_s must be above 0; found {self.expire_s}")


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node: Ray's id of it, new whenever its raylet starts, and its address, for people."""

    node_id: str
    node_ip: str = ""

    def __str__(self) -> str:
        return f"node {self.node_id[:12]}" + (f" ({self.node_ip})" if self.node_ip else "")


@dataclass(frozen=True, kw_only=True)
class Strike:
    """One failure that is put down to a node."""

    node: Node
    cause: str
    time_s: float
    generation: int


@dataclass(frozen=True, kw_only=True)
class KeptOut:
    """A node on which nothing of this run starts before `until_s`, and why."""

    node: Node
    until_s: float
    strikes: tuple[Strike, ...]

    def why(self) -> str:
        """As in `3 strikes in 12 min: worker_killed 2, hang 1`."""
        count = len(self.strikes)
        times = [strike.time_s for strike in self.strikes] or [0.0]
        span = f" in {told(max(times) - min(times))}" if count > 1 else ""
        causes = Counter(strike.cause for strike in self.strikes)
        by_cause = ", ".join(f"{cause} {causes[cause]}" for cause in sorted(causes))
        return f"{count} strike{'' if count == 1 else 's'}{span}: {by_cause}"


@dataclass(frozen=True, kw_only=True)
class Strikes:
    """What is remembered of the nodes of a run. `after` is the only way to the next one."""

    strikes: tuple[Strike, ...] = ()
    """Oldest first, at most one for a node and a failure."""
    kept_out: tuple[KeptOut, ...] = ()
    doubted: frozenset[str] = frozenset()
    """Ids of nodes that are kept out for a strike which turned out to be none."""
    tolerated: Mapping[str, float] = field(default_factory=dict)
    """When a node, by its id, had the strike for which it was not kept out all the same."""
    deaths: tuple[tuple[float, str], ...] = ()
    """When, and on which node, workers have died without a word just now."""
    places: Mapping[tuple[int, int], Node] = field(default_factory=dict)
    """The node of each rank, by (generation, world rank), of the last groups."""

    def after(self, word: Word) -> Strikes:
        """What is known once this has been told too."""
        fold = _FOLDS.get(word.kind)
        return self if fold is None else fold(self, word)

    def nodes(self) -> list[Node]:
        """Those with strikes, or kept out."""
        known = [*(one.node for one in self.kept_out), *(one.node for one in self.strikes)]
        return list({node.node_id: node for node in known}.values())

    def of(self, node_id: str) -> list[Strike]:
        """The strikes of one node."""
        return [strike for strike in self.strikes if strike.node.node_id == node_id]


# --- what is told, folded in ----------------------------------------------------------------------


def _after_start(now: Strikes, word: Word) -> Strikes:
    ranks = word.data.get("ranks")
    found = [rank for rank in ranks if isinstance(rank, dict)] if isinstance(ranks, list) else []
    places = {
        (word.generation, int(rank["world_rank"])): node
        for rank in found
        if isinstance(rank.get("world_rank"), int) and (node := _node(rank)) is not None
    }
    kept = {key: node for key, node in now.places.items() if key[0] >= word.generation - 1}
    return replace(now, places={**kept, **places})


def _after_death(now: Strikes, word: Word) -> Strikes:
    node = _node(word.data) or now.places.get((word.generation, word.world_rank))
    if node is None:
        return now
    place = (word.generation, word.world_rank)
    now = replace(now, places={**now.places, place: node})
    cause = str(word.data.get("cause") or ("hang" if word.data.get("hang") else ""))
    if cause in _LOUD:
        return _strike(now, word, node, cause)
    if cause and cause not in _SILENT:
        return now
    recent = [one for one in now.deaths if word.time_s - one[0] <= _TOGETHER_S]
    now = replace(now, deaths=(*recent, (word.time_s, node.node_id)))
    if len({node_id for _, node_id in now.deaths}) > 1:
        return _none_to_blame(now, word)
    return _strike(now, word, node, cause) if cause == "hang" else now


def _after_decision(now: Strikes, word: Word) -> Strikes:
    node = _node(word.data) or now.places.get((word.generation, word.world_rank))
    cause = str(word.data.get("cause", ""))
    # A hang is told with the death of who was at fault; who only waited too long was not.
    if node is None or cause == "hang" or cause not in _SILENT | _LOUD:
        return now
    around = {one for time_s, one in now.deaths if word.time_s - time_s <= _TOGETHER_S}
    if cause in _SILENT and around - {node.node_id}:
        return now
    return _strike(now, word, node, cause)


def _strike(now: Strikes, word: Word, node: Node, cause: str) -> Strikes:
    """One more, unless it is told of an incident that has one; the graver cause is kept."""
    own = now.of(node.node_id)
    last = own[-1] if own else None
    if last is not None and (
        last.generation == word.generation or word.time_s - last.time_s <= _INCIDENT_S
    ):
        graver = max(last.cause, cause, key=_gravity)
        same = replace(last, cause=graver, generation=word.generation)
        return replace(now, strikes=tuple(same if one is last else one for one in now.strikes))
    new = Strike(node=node, cause=cause, time_s=word.time_s, generation=word.generation)
    return replace(now, strikes=(*now.strikes, new)[-_MOST_STRIKES:])


def _gravity(cause: str) -> int:
    return (cause in _LOUD) + (cause in _AT_ONCE)


def _none_to_blame(now: Strikes, word: Word) -> Strikes:
    """Workers on several nodes died in the same moment: no strike of that moment stays."""
    wrong = [
        strike
        for strike in now.strikes
        if strike.cause in _SILENT and word.time_s - strike.time_s <= _TOGETHER_S
    ]
    out = {one.node.node_id for one in now.kept_out}
    doubted = out & {strike.node.node_id for strike in wrong}
    return replace(
        now,
        strikes=tuple(strike for strike in now.strikes if strike not in wrong),
        doubted=now.doubted | doubted,
    )


def _after_kept_out(now: Strikes, word: Word) -> Strikes:
    node, until_s = _node(word.data), word.data.get("until_s")
    if node is None or not isinstance(until_s, int | float):
        return now
    others = tuple(one for one in now.kept_out if one.node.node_id != node.node_id)
    new = KeptOut(node=node, until_s=float(until_s), strikes=_strikes_told(node, word))
    return replace(now, kept_out=(*others, new), doubted=now.doubted - {node.node_id})


def _strikes_told(node: Node, word: Word) -> tuple[Strike, ...]:
    listed = word.data.get("strikes")
    return tuple(
        Strike(
            node=node,
            cause=str(one.get("cause", "")),
            time_s=float(one["time_s"]),
            generation=word.generation,
        )
        for one in (listed if isinstance(listed, list) else [])
        if isinstance(one, dict) and isinstance(one.get("time_s"), int | float)
    )


def _after_allowed(now: Strikes, word: Word) -> Strikes:
    node = _node(word.data)
    if node is None:
        return now
    return replace(
        now,
        strikes=tuple(one for one in now.strikes if one.node.node_id != node.node_id),
        kept_out=tuple(one for one in now.kept_out if one.node.node_id != node.node_id),
        doubted=now.doubted - {node.node_id},
    )


def _after_tolerated(now: Strikes, word: Word) -> Strikes:
    node, struck_s = _node(word.data), word.data.get("struck_s")
    if node is None or not isinstance(struck_s, int | float):
        return now
    return replace(now, tolerated={**now.tolerated, node.node_id: float(struck_s)})


def _node(data: Mapping[str, Any]) -> Node | None:
    node_id, address = data.get("node_id"), data.get("node_ip")
    if not isinstance(node_id, str) or not node_id:
        return None
    return Node(node_id=node_id, node_ip=address if isinstance(address, str) else "")


_FOLDS: dict[str, Callable[[Strikes, Word], Strikes]] = {
    "generation_started": _after_start,
    "worker_died": _after_death,
    "failure_decided": _after_decision,
    KEPT_OUT: _after_kept_out,
    ALLOWED: _after_allowed,
    TOLERATED: _after_tolerated,
}


# --- what follows from it -------------------------------------------------------------------------


def judge(now: Strikes, rules: StrikeRules, time_s: float, nodes: Collection[str]) -> Record | None:
    """The next thing that has to be recorded, and folded in, of these nodes; None if nothing.

    `nodes` are the ids of all that could run workers, those kept out among them; none: not known
    yet. At most half of them are kept out at a time, so that what strikes all nodes, as a bad
    driver does, leaves a run somewhere to be: the ones with the newest strikes then.
    """
    for one in now.kept_out:
        if why := _why_allowed(now, one, rules, time_s):
            return allowed(one.node, why)
    if not rules.limit or not nodes:
        return None
    for one in _over_limit(now, rules, time_s):
        others = [
            other
            for other in now.kept_out
            if other.node.node_id in nodes and other.node.node_id != one.node.node_id
        ]
        if len(others) < len(nodes) // 2:
            return _kept_out(one)
        if len(nodes) < 2:
            return _tolerated(one, len(nodes))
        oldest = min(others, key=lambda other: other.until_s)
        why = f"at most half of {len(nodes)} nodes are kept out, and {one.node} was struck since"
        return allowed(oldest.node, why)
    return None


def _why_allowed(now: Strikes, one: KeptOut, rules: StrikeRules, time_s: float) -> str:
    if not rules.limit:
        return "this submission keeps no node out"
    if one.node.node_id in now.doubted:
        return "workers on other nodes died in the same moment"
    return "its strikes have expired" if one.until_s <= time_s else ""


def _over_limit(now: Strikes, rules: StrikeRules, time_s: float) -> list[KeptOut]:
    """Nodes that have to be kept out, or for longer; those with the oldest strikes first."""
    found = []
    out_until_s = {one.node.node_id: one.until_s for one in now.kept_out}
    for node in now.nodes():
        own = now.of(node.node_id)
        if not own:
            continue
        last_s = own[-1].time_s
        counted = tuple(one for one in own if one.time_s > last_s - rules.expire_s)
        is_over = len(counted) >= rules.limit or any(one.cause in _AT_ONCE for one in counted)
        until_s = last_s + rules.expire_s
        is_known = until_s <= out_until_s.get(node.node_id, time_s)
        is_known |= last_s <= now.tolerated.get(node.node_id, last_s - 1.0)
        if is_over and not is_known:
            found.append(KeptOut(node=node, until_s=until_s, strikes=counted))
    return sorted(found, key=lambda one: one.until_s)


def _kept_out(one: KeptOut) -> Record:
    strikes = [{"cause": strike.cause, "time_s": strike.time_s} for strike in one.strikes]
    return Record(
        kind=KEPT_OUT,
        reason=f"{one.node}: {one.why()}",
        data={**vars(one.node), "until_s": one.until_s, "strikes": strikes},
    )


def _tolerated(one: KeptOut, num_nodes: int) -> Record:
    return Record(
        kind=TOLERATED,
        reason=f"{one.node}: {one.why()}; not kept out, since it is one of {num_nodes} nodes, and "
        "at most half of them are",
        data={**vars(one.node), "struck_s": one.strikes[-1].time_s},
    )


def allowed(node: Node, why: str) -> Record:
    """What lets a node back in: none of its strikes counts any more."""
    return Record(kind=ALLOWED, reason=f"{node}: {why}", data=dict(vars(node)))
