"""The files of a source: those below a path that have one of its endings, in order of path.

And what tells them from others.

Must import neither torch nor ray.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

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


def file_facts(url: str, paths: Sequence[str], sizes: Sequence[int]) -> dict[str, Any]:
    """What tells these files, in this order, from others, without reading them: short plain values.

    paths: as `data_files` gives them below `url`, so that the folder may lie anywhere
    sizes: how much each holds, in any unit
    """
    names = (path or url.rpartition("/")[2] for path in paths)
    return {"num_files": len(paths), "file_names": _digest(names), "file_sizes": _digest(sizes)}


def nothing_there(
    filesystem: Filesystem, path: str | os.PathLike[str], endings: Sequence[str]
) -> ValueError:
    """The error where `data_files` found none at the root, which is the absolute form of `path`."""
    text, url = os.fspath(path), filesystem.url
    if filesystem.exists(""):
        wanted = " or ".join(endings)
        return ValueError(
            f"{url} is a folder that holds no {wanted} file: expected a file, or a folder of them"
        )
    if "://" in text or os.path.isabs(text):
        return ValueError(f"there is no such file or folder: {url}")
    return ValueError(
        f"there is no such file or folder: {url}. {text!r} is looked for below the working "
        f"directory of the process that reads it, here {os.getcwd()}, which is another one on each "
        "node of a cluster: give an absolute path or a URL"
    )


def _digest(values: Iterable[Any]) -> str:
    found = hashlib.blake2b(digest_size=8)
    for value in values:
        found.update(f"{value}\0".encode(errors="surrogateescape"))
    return found.hexdigest()
