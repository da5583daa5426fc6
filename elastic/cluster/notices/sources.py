"""The sources of notices by the names that people ask for them with.

`auto` is what the firmware says this machine is, and nothing where it says neither AWS nor GCP:
then no metadata address is ever asked. `aws-rebalance` is never among them, since a drain cannot
be taken back and the advice is often early by days.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path

from elastic.cluster.notices import vendor
from elastic.cluster.notices.aws import AwsRebalance, AwsSpot
from elastic.cluster.notices.file import NoticeFile
from elastic.cluster.notices.gcp import GcpMaintenance, GcpPreempted
from elastic.cluster.notices.notice import Source

AUTO = "auto"
NONE = "none"
_FILE = "file:"
_CLOUDS: dict[str, tuple[type[Source], ...]] = {
    "aws": (AwsSpot,),
    "aws-rebalance": (AwsRebalance,),
    "gcp": (GcpPreempted, GcpMaintenance),
}


def checked(asked: str | Sequence[str]) -> tuple[str, ...]:
    """The names asked for, one or several. Raises `ValueError` for one that there is not."""
    names = (asked,) if isinstance(asked, str) else tuple(asked)
    for name in names:
        is_file = name.startswith(_FILE) and Path(name.removeprefix(_FILE)).is_absolute()
        if name not in (AUTO, NONE, *_CLOUDS) and not is_file:
            raise ValueError(
                f"notices come from {AUTO}, {NONE}, {', '.join(_CLOUDS)} or {_FILE}PATH with a "
                f"whole path; found {name!r}"
            )
    return names


def sources_of(names: Sequence[str], *, node_id: str = "", dmi: Path = vendor.DMI) -> list[Source]:
    """The sources of these names, each once.

    In the path of a file `{node_id}` and `{hostname}` stand for those of this node.
    """
    found: dict[str, list[Source]] = {}
    for name in names:
        wanted = (vendor.detect(dmi) or NONE) if name == AUTO else name
        if wanted.startswith(_FILE):
            path = wanted.removeprefix(_FILE).replace("{node_id}", node_id)
            found[wanted] = [NoticeFile(path.replace("{hostname}", socket.gethostname()))]
        elif wanted != NONE:
            found[wanted] = [kind() for kind in _CLOUDS[wanted]]
    return [source for several in found.values() for source in several]
