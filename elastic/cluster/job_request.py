"""A job request: what is to be run on a cluster, and the shell command that runs it there.

Ray's part in it is `elastic.cluster.submission`. Must import neither ray nor torch.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass

from elastic.cluster.shipment import Shipment

_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


class CannotSubmit(ValueError):
    """The request cannot be carried out; says what was found and what to do."""


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """What is to be submitted, where to, and how it is told."""

    target: str
    """A Python file below the working directory, or a module."""
    arguments: Sequence[str]
    address: str
    """Of the cluster's dashboard."""
    working_dir: str
    python: str
    """The interpreter on the cluster."""
    stop_wait_s: int
    """How long Ray leaves the job to save when it is told to stop it."""
    wait: bool
    as_json: bool

    def to_json(self) -> str:
        """Text for a command line, from which `from_json` makes it again."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> JobRequest:
        """The request again."""
        return cls(**json.loads(text))


def entrypoint(
    target: str, arguments: Sequence[str], python: str, root: str, shipment: Shipment
) -> str:
    """The shell command that runs the target on the cluster. Raises `CannotSubmit`.

    A file inside a package is run as the module it is, so that its own imports work.
    """
    path = os.path.relpath(os.path.join(root, target), root).replace(os.sep, "/")
    if path in shipment.files and path.endswith(".py"):
        return shlex.join([python, *_as_module(path, shipment.files), *arguments])
    if os.path.exists(os.path.join(root, target)):
        raise CannotSubmit(_not_shipped(target, path, root, shipment.left_out))
    if _MODULE.fullmatch(target) and _has_module(target, shipment.files):
        return shlex.join([python, "-m", target, *arguments])
    raise CannotSubmit(
        f"no such file or module: {target!r} in {root}. Give a Python file, such as train.py, or "
        "a module, such as jobs.pretrain"
    )


def _as_module(path: str, files: Collection[str]) -> list[str]:
    folder = os.path.dirname(path)
    if folder and f"{folder}/__init__.py" in files:
        return ["-m", path.removesuffix(".py").replace("/", ".")]
    # A path that begins with a dash would be an option of Python's.
    return [f"./{path}" if path.startswith("-") else path]


def _has_module(name: str, files: Collection[str]) -> bool:
    path = name.replace(".", "/")
    if f"{path}.py" in files or f"{path}/__main__.py" in files:
        return True
    with contextlib.suppress(ImportError, ValueError):
        return importlib.util.find_spec(name.partition(".")[0]) is not None
    return False


def _not_shipped(target: str, path: str, root: str, left_out: Mapping[str, str]) -> str:
    if path.startswith(".."):
        return f"{target} lies outside the working directory {root}: give --working-dir"
    parts = path.split("/")
    for depth in range(len(parts)):
        parent = "/".join(parts[: depth + 1])
        if parent in left_out:
            return f"{target} is not shipped, since {parent} is {left_out[parent]}"
    return f"{target} is not a Python file"
