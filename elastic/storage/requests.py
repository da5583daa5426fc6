"""Requests: what people ask of a live run, a small file each until its driver has taken it.

A request names the lease epoch of the driver that it was meant for, so that one left behind never
reaches the driver of a later submission, whatever the clocks say. Must not import ray or torch.
"""

from __future__ import annotations

import json
import re
import uuid
from dataclasses import asdict, dataclass
from typing import Any

from elastic.storage.filesystem import Filesystem
from elastic.storage.format import UnsupportedFormat, check_format

FORMAT_VERSION = 1
STOP = "stop"
SAVE = "save"
ALLOW = "allow"
FAULT = "fault"
"""Somebody is about to break something on purpose: see `elastic.cluster.injections`."""

_KINDS = (STOP, SAVE, ALLOW, FAULT)
_DIR = "requests"
_NAME = re.compile(r"([0-9a-f]{32})\.json")


@dataclass(frozen=True, kw_only=True)
class Request:
    """One wish. `flaw` says why it cannot be granted, "" if it can."""

    id: str
    kind: str
    who: str
    """Who asks, in words."""
    time_s: float
    """Wall time of the asker."""
    epoch: int
    """The lease of the driver that is asked; -1 where the file does not tell."""
    node: str = ""
    """The id of the node that is to be let back in."""
    flaw: str = ""


def ask(
    fs: Filesystem, kind: str, *, who: str, time_s: float, epoch: int, node: str = ""
) -> Request:
    """The request as it now lies in the run at the root `fs`, for its driver to find."""
    assert kind in _KINDS and (kind == ALLOW) == bool(node), kind
    request = Request(
        id=uuid.uuid4().hex, kind=kind, who=who, time_s=time_s, epoch=epoch, node=node
    )
    tree = asdict(request) | {"format_version": FORMAT_VERSION}
    del tree["id"], tree["flaw"]
    fs.write_bytes(_path(request.id), (json.dumps(tree) + "\n").encode())
    return request


def pending(fs: Filesystem) -> list[Request]:
    """The requests that wait to be taken, oldest first; a damaged one has a `flaw`."""
    names = (_NAME.fullmatch(entry.name) for entry in fs.list(_DIR) if not entry.is_dir)
    found = [request for name in names if name if (request := _read(fs, name[1])) is not None]
    return sorted(found, key=lambda request: (request.time_s, request.id))


def withdraw(fs: Filesystem, request_id: str) -> None:
    """Takes the request away: it was granted, or nobody waits for it; no matter if it is gone."""
    fs.remove_tree(_path(request_id))


def _read(fs: Filesystem, request_id: str) -> Request | None:
    """None if it was withdrawn since it was listed."""
    try:
        return _parse(request_id, fs.read_bytes(_path(request_id)))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        flaw = f"it cannot be read: {error!r}"
    except UnsupportedFormat as error:
        flaw = str(error)
    return Request(id=request_id, kind="", who="somebody", time_s=0.0, epoch=-1, flaw=flaw)


def _parse(request_id: str, text: bytes) -> Request:
    tree: dict[str, Any] = json.loads(text)
    check_format(f"the request {request_id}", tree["format_version"], FORMAT_VERSION)
    kind = tree["kind"]
    return Request(
        id=request_id,
        kind=kind,
        who=str(tree["who"]),
        time_s=float(tree["time_s"]),
        epoch=int(tree["epoch"]),
        node=str(tree.get("node", "")),
        flaw="" if kind in _KINDS else f"expected stop, save, allow or fault, found {kind!r}",
    )


def _path(request_id: str) -> str:
    return f"{_DIR}/{request_id}.json"
