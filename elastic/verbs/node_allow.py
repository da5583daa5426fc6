"""The verb `node allow`: let a node back in that a run keeps out.

Whoever is at the run is asked; where nobody is, it is written down for the next one. Must import
neither ray nor torch.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import asdict, dataclass

import click

from elastic.dashboard.kept_out import SHOWN, strikes_told
from elastic.dashboard.text import count, plain, to_json
from elastic.policy.strikes import Node, Strikes, allowed
from elastic.storage import lease
from elastic.storage.filesystem import Filesystem
from elastic.storage.lease import LeaseHeld
from elastic.storage.ledger import LedgerWriter, next_life, read_ledger
from elastic.storage.requests import ALLOW
from elastic.verbs.requests import NobodyThere, ask_run, timeout_option, who
from elastic.verbs.run_argument import (
    Problem,
    json_option,
    open_run,
    reading,
    run_argument,
)


@dataclass(frozen=True, kw_only=True)
class Allowed:
    """A node that may be used again."""

    node_id: str
    node_ip: str
    was_kept_out: bool
    num_strikes: int
    """So many are forgotten."""


@click.command(short_help="Let a node back in that a run keeps out.")
@run_argument
@click.argument("node", metavar="NODE")
@timeout_option
@json_option
def allow(run: str, node: str, timeout_s: float, as_json: bool) -> None:
    """Let RUN use NODE again, which it keeps out, and forget all strikes of that node.

    NODE is its address, or its id or the beginning of it, as `elastic status RUN` shows them. It
    works while the run is at work, and before it is submitted again.

    \b
    Exit codes: 0 done, 1 no such node, or not within the timeout, 2 no such run.
    """
    with reading(run):
        fs, _ = open_run(run)
        known = strikes_told(read_ledger(fs))
        found = _find(known, node, fs)
    is_there = _ask(run, found, timeout_s)
    if not is_there:
        with reading(run):
            _write_down(fs, found)
    out = {one.node.node_id for one in known.kept_out}
    done = Allowed(
        **vars(found),
        was_kept_out=found.node_id in out,
        num_strikes=len(known.of(found.node_id)),
    )
    click.echo(to_json(asdict(done)) if as_json else _said(done, is_there))


def add_to(group: click.Group) -> None:
    """Make `allow` a verb of the group `node`."""
    group.add_command(allow)


def _find(known: Strikes, asked: str, fs: Filesystem) -> Node:
    """The node that is meant. Raises `Problem`, with a list of them, if it is not one."""
    nodes = known.nodes()
    found = [
        node
        for node in nodes
        if node.node_ip == asked or (asked and node.node_id.startswith(asked))
    ]
    if len(found) == 1:
        return found[0]
    listed = "; ".join(_listed(known, node) for node in found or nodes)
    where = plain(fs.url)
    if found:
        raise Problem(f"{plain(asked)} is more than one node of {where}: {plain(listed)}")
    raise Problem(
        f"no node {plain(asked)} is kept out of {where}"
        + (f", nor has strikes. Known are: {plain(listed)}" if nodes else ": it keeps none out")
    )


def _listed(known: Strikes, node: Node) -> str:
    is_out = node.node_id in {one.node.node_id for one in known.kept_out}
    num = len(known.of(node.node_id))
    strikes = count(num, "strike")
    return f"{node} ({'kept out' if is_out else strikes})"


def _ask(run: str, node: Node, timeout_s: float) -> bool:
    """Whether somebody was there who did it. Raises `Problem` if he would not, or was too late."""
    try:
        answer = ask_run(run, ALLOW, timeout_s, node=node.node_id)
    except NobodyThere:
        return False
    if answer.outcome == "discarded":
        raise Problem(f"{node} was not let in: {plain(answer.reason)}")
    return answer.outcome == "allowed"


def _write_down(fs: Filesystem, node: Node) -> None:
    """Into the ledger, as its owner for a moment. Raises `Problem` if somebody else became it."""
    try:
        held = lease.acquire(fs, f"elastic node allow, {who()}")
    except LeaseHeld as error:
        raise Problem(f"{plain(str(error))}; ask again") from error
    try:
        ledger = LedgerWriter(fs, next_life(fs), f"allow-{uuid.uuid4().hex[:8]}")
        try:
            record = allowed(node, f"allow asked by {who()}")
            ledger.append(record.kind, time_s=time.time(), reason=record.reason, data=record.data)
        finally:
            ledger.close()
    finally:
        held.release()


def _said(done: Allowed, is_there: bool) -> str:
    name = f"node {done.node_id[:SHOWN]} ({done.node_ip or 'address unknown'})"
    strikes = f"{count(done.num_strikes, 'strike')} forgotten"
    if not done.was_kept_out:
        return f"{name} was not kept out; {strikes}"
    when = "" if is_there else ", when the run is submitted again"
    return f"{name} is let back in{when}; {strikes}"
