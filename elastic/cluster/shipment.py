"""A shipment: the files of a working directory that go to the cluster with a job.

Code goes, and small data. Never version control, environments, caches, or what runs have left:
checkpoints of last month are what makes a submission fail. Pure: the tree is asked through a
function. Must import neither ray nor torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from elastic.storage.manifest import MARKER
from elastic.storage.run_file import RUN_FILE
from elastic.storage.store import Entry

LIMIT_BYTES = 100 << 20
"""Ray's dashboard refuses a larger package."""

ListDirectory = Callable[[str], Sequence[Entry]]

_VERSION_CONTROL = frozenset({".git", ".hg", ".svn", ".jj"})
_CACHES = frozenset(
    {"__pycache__", "node_modules", ".tox", ".nox", ".hypothesis", ".ipynb_checkpoints", ".cache"}
)
_GIT_IGNORED = "ignored by git"
_VERSIONS = "version control"
_CACHE = "a cache"
_COMPILED = "compiled by Python"
EXPECTED = frozenset({_GIT_IGNORED, _VERSIONS, _CACHE, _COMPILED})
"""Reasons that nobody asks about."""
_MOST_NAMED = 5


@dataclass(frozen=True, kw_only=True)
class Shipment:
    """What goes, and what stays and why. Paths are relative, with "/"."""

    files: dict[str, int] = field(default_factory=dict)
    """Bytes by path."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Reason by path, of a directory for all in it."""

    @property
    def bytes(self) -> int:
        """Of all files, before they are packed."""
        return sum(self.files.values())


class TooLarge(ValueError):
    """More than Ray takes; names the biggest entries."""


def plan(list_directory: ListDirectory, ignored: Collection[str] = ()) -> Shipment:
    """The shipment of the directory whose content `list_directory` tells, "" being its root.

    `ignored` are paths that the user's ignore files leave out, a directory with all in it.
    """
    shipment = Shipment()
    waiting = [""]
    while waiting:
        directory = waiting.pop()
        for entry in list_directory(directory):
            path = f"{directory}/{entry.name}" if directory else entry.name
            why = _GIT_IGNORED if path in ignored else _why_not(entry, path, list_directory)
            if why:
                shipment.left_out[path] = why
            elif entry.is_dir:
                waiting.append(path)
            else:
                shipment.files[path] = entry.bytes
    return shipment


def check_size(shipment: Shipment, where: str, limit_bytes: int = LIMIT_BYTES) -> None:
    """Raises `TooLarge`."""
    if shipment.bytes <= limit_bytes:
        return
    named = ", ".join(f"{path} {_mib(num)}" for path, num in biggest(shipment.files))
    raise TooLarge(
        f"{where} is too large to be shipped with a job: {_mib(shipment.bytes)} in "
        f"{len(shipment.files)} files, at most {_mib(limit_bytes)}. The biggest: {named}. Move "
        "them elsewhere and give the job their path, list them in .gitignore, or submit from "
        "another directory with --working-dir"
    )


def biggest(files: Mapping[str, int], most: int = _MOST_NAMED) -> list[tuple[str, int]]:
    """The entries that account for the size, largest first, directories with a slash at the end.

    A directory stands for its content, unless nearly all of that is in one entry of it.
    """
    found = _children(files, "")
    for path in list(found):
        num_bytes = found.pop(path)
        while path.endswith("/"):
            inside = _children(files, path)
            largest = max(inside, key=lambda name: inside[name])
            if inside[largest] < 0.8 * num_bytes:
                break
            path, num_bytes = largest, inside[largest]
        found[path] = num_bytes
    return sorted(found.items(), key=lambda item: (-item[1], item[0]))[:most]


def _children(files: Mapping[str, int], directory: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for path, num_bytes in files.items():
        if path.startswith(directory):
            name, slash, _ = path[len(directory) :].partition("/")
            child = directory + name + slash
            sizes[child] = sizes.get(child, 0) + num_bytes
    return sizes


def _why_not(entry: Entry, path: str, list_directory: ListDirectory) -> str:
    """Why this one stays, "" if it goes."""
    name = entry.name
    if name in _VERSION_CONTROL:
        return _VERSIONS
    if not entry.is_dir:
        return _COMPILED if name.endswith((".pyc", ".pyo")) else ""
    if name in _CACHES or (name.startswith(".") and name.endswith("_cache")):
        return _CACHE
    return next(_signs({inside.name for inside in list_directory(path)}), "")


def _signs(names: Collection[str]) -> Iterator[str]:
    """What a directory is that holds these names, as far as it must stay."""
    if "pyvenv.cfg" in names:
        yield "a virtual environment"
    if "conda-meta" in names:
        yield "a conda environment"
    if RUN_FILE in names and {"checkpoints", "ledger", "lease"} & set(names):
        yield "the output of a run"
    if MARKER in names or any(name.endswith(".distcp") for name in names):
        yield "a checkpoint"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.1f} MiB"
