"""Packing: the working directory as it lies on this disk, and the part of it that is shipped.

What goes is for `elastic.cluster.shipment` to say. Must import neither ray nor torch.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from elastic.cluster.shipment import ListDirectory, Shipment
from elastic.storage.filesystem import Filesystem
from elastic.storage.store import Entry

MARK = ".elastic-submission"
"""A file in each shipment that makes its package unlike any other."""


def git_ignored(root: str) -> set[str] | None:
    """Paths below `root` that git ignores; None where git cannot tell."""
    command = ["git", "-C", root, "ls-files", "-z", "--others", "--ignored", "--exclude-standard"]
    try:
        found = subprocess.run([*command, "--directory"], capture_output=True, check=False)
    except OSError:
        return None
    if found.returncode != 0:
        return None
    return {name.rstrip("/") for name in os.fsdecode(found.stdout).split("\0") if name}


def lister(root: str) -> ListDirectory:
    """The directories below `root`, links followed, each real one once, so that no loop is."""
    fs = Filesystem.at(root)
    homes: dict[str, str] = {}

    def list_directory(path: str) -> Sequence[Entry]:
        real = os.path.realpath(os.path.join(root, path))
        return fs.list(path) if homes.setdefault(real, path) == path else []

    return list_directory


@contextlib.contextmanager
def staged(root: str, shipment: Shipment) -> Iterator[str]:
    """A directory that holds the shipment and nothing else: its paths need no patterns."""
    with tempfile.TemporaryDirectory(prefix="elastic-submit-") as folder:
        for path in shipment.files:
            copy = Path(folder, path)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(os.path.join(root, path), copy)
        # A package like that of a job which is just ending would not be uploaded, and would then
        # be deleted with it before it is used (ray#46625, ray#36703).
        Path(folder, MARK).write_text(f"{uuid.uuid4()}\n")
        yield folder
