"""The verbs about a node of the cluster: an agent that watches over it, and its drain.

They hand over to the program that knows Ray, `elastic.cluster.node_program`. Imports neither ray
nor torch, so that asking for help stays fast.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import click

from elastic.cluster.node_request import NodeRequest
from elastic.cluster.notices.sources import checked
from elastic.dashboard.text import plain
from elastic.verbs.quantities import duration
from elastic.verbs.run_argument import json_option


@click.group(short_help="A node of the cluster that will be taken: leave it in time.")
def node() -> None:
    """What concerns one node of a Ray cluster, whatever runs train on it."""


def _of_this_node(command: Callable[..., None]) -> Callable[..., None]:
    """The options that say which node is meant, and how long it has."""
    options = (
        click.option(
            "--address",
            envvar="RAY_ADDRESS",
            callback=_checked_address,
            show_default="$RAY_ADDRESS, or the cluster that this machine is in",
            metavar="HOST:PORT",
            help="The cluster, as for `ray start --address`.",
        ),
        click.option(
            "--node-id",
            default="",
            callback=_checked_node_id,
            metavar="ID",
            help="Where this machine has several nodes.",
        ),
        click.option(
            "--grace",
            "grace_s",
            type=duration("s"),
            default="30s",
            show_default=True,
            metavar="DURATION",
            help="How long the node may take to be left.",
        ),
        json_option,
    )
    for option in reversed(options):
        command = option(command)
    return command


def _checked_address(_: Any, __: Any, address: str | None) -> str | None:
    if address and "://" in address:
        raise click.BadParameter(
            f"{plain(repr(address))} is no HOST:PORT: give the address that nodes join with, such "
            "as 10.0.0.1:6379, not that of a dashboard or client"
        )
    return address or None


def _checked_node_id(_: Any, __: Any, node_id: str) -> str:
    if node_id and not re.fullmatch("[0-9a-f]{56}", node_id):
        raise click.BadParameter(
            f"{plain(repr(node_id))} is no id of a Ray node: expected 56 hexadecimal digits, as "
            "`ray list nodes` shows"
        )
    return node_id


def _checked_sources(_: Any, __: Any, names: tuple[str, ...]) -> tuple[str, ...]:
    try:
        return checked(names)
    except ValueError as error:
        raise click.BadParameter(plain(str(error))) from error


@node.command(
    context_settings={"allow_interspersed_args": False},
    short_help="Watch over this node, and have it left when it will be taken.",
)
@_of_this_node
@click.option(
    "--source",
    "sources",
    multiple=True,
    default=("auto",),
    callback=_checked_sources,
    metavar="SOURCE",
    help="auto, none, aws, aws-rebalance, gcp or file:PATH; repeatable.  [default: auto]",
)
@click.argument("command", metavar="[COMMAND]...", nargs=-1, type=click.UNPROCESSED)
def agent(
    address: str | None,
    node_id: str,
    grace_s: float,
    as_json: bool,
    sources: tuple[str, ...],
    command: tuple[str, ...],
) -> None:
    """Drain this node of a Ray cluster when a notice says that it will be taken; runs until it is
    ended. Runs that train on it save and leave it.

    Before COMMAND, which stands after --, it takes the signals:

    \b
        elastic node agent --grace 25s -- ray start --address=HEAD:6379 --block

    On SIGTERM it drains the node, waits until it was left or the grace is over, and only then sends
    SIGTERM to COMMAND. A second SIGTERM does not wait.

    \b
    SOURCE: auto is the cloud that the machine's firmware names, or nothing; aws is the interruption
    of a spot instance; aws-rebalance the recommendation to leave one, which is early or never comes
    true; gcp is preemption and maintenance that stops the machine; file:PATH is a file that
    appears. Metadata addresses are asked only by aws, aws-rebalance and gcp.

    \b
    Exit codes: those of COMMAND; without one 0 the node was left, 1 it was not, 130 Ctrl-C,
    which drains nothing. 2 wrong usage.
    """
    _run(
        NodeRequest(
            address=address,
            node_id=node_id,
            grace_s=grace_s,
            as_json=as_json,
            sources=sources,
            command=command,
        )
    )


@node.command(short_help="Drain this node now, and wait until it was left.")
@_of_this_node
@click.option(
    "--reason", default="asked by elastic node drain", metavar="TEXT", help="Why, for Ray."
)
def drain(address: str | None, node_id: str, grace_s: float, as_json: bool, reason: str) -> None:
    """Have Ray drain this node, and wait until nothing on it holds resources any more.

    For what ends a node and runs a command first, such as a preStop hook of Kubernetes. A drain
    cannot be taken back.

    \b
    Exit codes: 0 the node was left, or is gone, 1 it was not within the grace,
    2 no such node or no cluster.
    """
    _run(
        NodeRequest(
            address=address, node_id=node_id, grace_s=grace_s, as_json=as_json, reason=reason
        )
    )


def _run(request: NodeRequest) -> NoReturn:
    sys.stdout.flush()
    command = [sys.executable, "-m", "elastic.cluster.node_program", request.to_json()]
    os.execv(sys.executable, command)
