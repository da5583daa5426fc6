"""The files of a source: those below a path that have one of its endings, in order of path.

Must import neither torch nor ray.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from elastic.storage.filesystem import Filesystem


def absolute(path: str | os.PathLike[str]) -> str:
    """The path or URL, from which `Filesystem.at` makes a filesystem."""
    text = os.fspath(path)
    return text if "://" in text else os.path.abspath(text)


def data_files(filesystem: Filesystem, endings: Sequence[str], folder: str = "") -> Iterator[str]:
    """Paths below the root, "" for the root that is a file itself, whatever its ending.

    Hidden names and those that begin with _ are left out, with all below them.
    """
    if not folder and filesystem.size("") is not None:
        yield ""
        return
    for entry in filesystem.list(folder):
        path = f"{folder}/{entry.name}" if folder else entry.name
        if entry.name.startswith((".", "_")):
            continue
        if entry.is_dir:
            yield from data_files(filesystem, endings, path)
        elif entry.name.endswith(tuple(endings)):
            yield path
