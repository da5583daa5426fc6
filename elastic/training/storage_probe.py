"""The storage probe: whether every rank sees the run directory of the run, and can write there.

One path can be another disk on each node. The ranks there would write their shards where nobody
looks for them, and wait for checkpoints that never appear. Must not import ray.
"""

from __future__ import annotations

import time
import uuid
from typing import Any

import torch.distributed as dist

from elastic.storage.access import BUCKET_ADVICE, surroundings
from elastic.storage.filesystem import Filesystem
from elastic.storage.run_file import RUN_FILE, load_run_file
from elastic.training.membership import Membership
from elastic.training.node_name import node_name

VISIBLE_S = 10.0
"""How late a network file system may show the run file to a node."""
_LOOK_AGAIN_S = 0.2
_SEEN = "elastic.storage_seen"
_ADVICE = {
    True: "a shared file system that is mounted on all of them, or a bucket such as "
    "s3://bucket/runs",
    False: BUCKET_ADVICE,
}


class StorageNotShared(RuntimeError):
    """Not every rank sees the run's storage; the same words on all ranks."""


def probe(
    fs: Filesystem, member: Membership, control: dist.ProcessGroup, kept: dict[str, Any]
) -> None:
    """Nothing, if all ranks of the group see the run `member.run_id` at `fs`, and can write there.

    Every rank calls it. What a process has seen once is kept in `kept`, over generations.

    Raises:
        StorageNotShared: on every rank; names each node and what it sees.
    """
    flaw = "" if kept.get(_SEEN) else _look(fs, member.run_id, VISIBLE_S)
    everyone: list[Any] = [None] * member.world_size
    dist.all_gather_object(everyone, (node_name(member.store_host), flaw), group=control)
    if any(flaw for _, flaw in everyone):
        raise StorageNotShared(
            f"the ranks do not all see the run {member.run_id} at {fs.url}: {_by_node(everyone)}. "
            f"The path must lead to the same storage on every node: {_ADVICE[fs.is_local]}"
        )
    kept[_SEEN] = True


def _look(fs: Filesystem, run_id: str, visible_s: float) -> str:
    """Why the run is not to be seen or written here, "" if it is."""
    until_s = time.monotonic() + visible_s
    while True:
        try:
            found = load_run_file(fs)
        except Exception as error:  # noqa: BLE001 - whatever it is, this node's name goes with it
            return f"cannot read {RUN_FILE} there ({_words(fs, error)})"
        if found is not None:
            is_ours = found.run_id == run_id
            return _unwritable(fs) if is_ours else f"finds another run there, {found.run_id}"
        if time.monotonic() > until_s:
            return f"finds no {RUN_FILE} there"
        time.sleep(_LOOK_AGAIN_S)


def _unwritable(fs: Filesystem) -> str:
    """Why this node can write nothing there, "" if it can: a mount may be read-only on one."""
    path = f".probe-{uuid.uuid4().hex}"
    try:
        fs.write_bytes(path, b"")
        fs.remove_tree(path)
    except Exception as error:  # noqa: BLE001 - whatever it is, this node's name goes with it
        return f"cannot write there ({_words(fs, error)})"
    return ""


def _words(fs: Filesystem, error: Exception) -> str:
    """The error, and what this node's environment has told the client of an object store."""
    found = surroundings(fs)
    return f"{type(error).__name__}: {error}{f'; {found}' if found else ''}"


def _by_node(everyone: list[tuple[str, str]]) -> str:
    ranks: dict[tuple[str, str], list[int]] = {}
    for rank, told in enumerate(everyone):
        ranks.setdefault(told, []).append(rank)
    # Those with a problem first.
    ordered = sorted(ranks.items(), key=lambda item: item[0][1] == "")
    return "; ".join(
        f"node {node} (rank {', '.join(map(str, numbers))}) {flaw or 'sees it'}"
        for (node, flaw), numbers in ordered
    )
