"""Export: a module of a checkpoint as a file that others read, without a cluster or a group.

Works beside the run that trains, whose files it only reads. Started as a process of its own,
`python -m elastic.training.export REQUEST`, since the command line must not wait for torch to load.
Must not import ray.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import shutil
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from elastic.storage.checkpoints import Catalog, NotComplete
from elastic.storage.completeness import home
from elastic.storage.filesystem import Filesystem
from elastic.storage.format import UnsupportedFormat
from elastic.storage.suspects import highest_trusted
from elastic.training.export_content import Content, content_of, plain_enough
from elastic.training.held_checkpoint import (
    CheckpointCorrupt,
    CheckpointGone,
    HeldCheckpoint,
    Unreadable,
    hold,
)
from elastic.training.part import torch_dtype
from elastic.training.tensor_file import (
    Stored,
    check_torch,
    stored_in,
    total_bytes,
    write_safetensors,
    write_torch,
)

__all__ = ["Exported", "Request", "export"]

FORMATS = ("torch", "safetensors")
_TRIES = 3
_TELL_EVERY_S = 0.1

Tell = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to export of the run at `url`: the newest checkpoint when `step` is None.

    `out` is an absolute path; `dtype`, such as "bfloat16", is for the module's floating-point
    tensors, None leaves them as they are; `tracked` is the name the run tracks the module by.
    """

    url: str
    run_id: str
    out: str
    format: str
    step: int | None = None
    dtype: str | None = None
    tracked: str = "model"
    with_optimizer: bool = False


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written. `dtypes` counts tensors by dtype; `warnings` are for people."""

    out: str
    format: str
    step: int
    bytes: int
    num_tensors: int
    dtypes: dict[str, int]
    with_optimizer: bool
    duration_s: float
    warnings: list[str]


class NoSuchStep(Exception):
    """The run has no checkpoint at the step that was asked for."""


class NothingYet(Exception):
    """The run has no complete checkpoint at all."""


def export(request: Request, tell: Tell = lambda what, done, all: None) -> Exported:
    """The file `request.out`, written whole or not at all: one that was there stays on any failure.

    Needs memory for two copies of the largest tensor. Raises `NoSuchStep`, `NothingYet`,
    `NotComplete`, `CheckpointCorrupt`, `CheckpointGone`, `Unreadable`, `UnsupportedFormat`,
    `OSError`, and `ValueError` for what cannot be exported as asked.
    """
    begun_s = time.monotonic()
    catalog = Catalog(Filesystem.at(request.url), request.run_id)
    for last in [False] * (_TRIES - 1) + [True]:
        step = _step(catalog, request.step)
        try:
            return _export(catalog, step, request, tell, begun_s)
        except (CheckpointGone, NotComplete):
            # It was being removed just then; a newer one took its place, which is what was asked.
            if last or request.step is not None:
                raise
    raise AssertionError("the last try returns or raises")


def _step(catalog: Catalog, step: int | None) -> int:
    if step is None:
        newest = highest_trusted(catalog)
        if newest is None:
            raise NothingYet(
                "this run has no complete checkpoint: `elastic checkpoints list` tells why"
            )
        return newest.step
    if not catalog.fs.exists(home(step)):
        raise NoSuchStep(f"no checkpoint of step {step}; complete ones: {catalog.complete_steps()}")
    return step


def _export(catalog: Catalog, step: int, request: Request, tell: Tell, begun_s: float) -> Exported:
    dtype = None if request.dtype is None else torch_dtype(request.dtype)
    with hold(catalog, step) as held:
        content = content_of(
            held.plain["tracked"],
            held.tensors,
            request.tracked,
            dtype,
            with_optimizer=request.with_optimizer,
        )
        writer = _Writer(held, content, request, tell)
        held.verify({stored.name for stored in writer.tensors}, _labelled(tell, "verified"))
        with _replacing(Path(request.out), total_bytes(writer.tensors)) as file:
            writer.write(file, step)
            num_bytes = file.tell()
    dtypes = [str(stored.dtype).removeprefix("torch.") for stored in writer.tensors]
    return Exported(
        out=request.out,
        format=request.format,
        step=step,
        bytes=num_bytes,
        num_tensors=len(dtypes),
        dtypes={name: dtypes.count(name) for name in sorted(set(dtypes))},
        with_optimizer=request.with_optimizer,
        duration_s=time.monotonic() - begun_s,
        warnings=writer.warnings,
    )


class _Writer:
    """One content into one file, and what there is to say about it.

    Raises `ValueError` for what the format cannot hold.
    """

    def __init__(self, held: HeldCheckpoint, content: Content, request: Request, tell: Tell):
        self.warnings: list[str] = []
        self._tree: dict[str, Any] | None = None
        self._flat: dict[str, Stored] = {}
        self._held = held
        self._tell = _labelled(tell, "written")
        self._done_bytes = 0
        if request.format == "torch":
            self._tree = self._torch_tree(content, request.tracked)
            self.tensors = set(stored_in(self._tree))
        else:
            self._flat = content.flat()
            self.tensors = set(self._flat.values())
            self._leave_out(content.extra, "safetensors holds tensors only")
        self._aliases = content.aliases
        self._all_bytes = total_bytes(self.tensors)

    def write(self, file: BinaryIO, step: int) -> None:
        if self._tree is not None:
            write_torch(file, self._tree, self._read)
            check_torch(file)
            return
        # As safetensors.torch.save_model has it: a tied name is in the metadata, and no tensor.
        metadata = {"format": "pt", "step": str(step), **self._aliases}
        write_safetensors(file, self._flat, metadata, self._read)

    def _torch_tree(self, content: Content, name: str) -> dict[str, Any]:
        loadable = {key: value for key, value in content.extra.items() if plain_enough(value)}
        self._leave_out(
            content.extra.keys() - loadable.keys(), "torch.load(weights_only=True) refuses it"
        )
        model = content.model | loadable
        return {name: model, **content.optimizers} if content.optimizers else model

    def _leave_out(self, names: Iterable[str], why: str) -> None:
        self.warnings += [f"left out {name}: {why}" for name in sorted(names)]

    def _read(self, stored: Stored) -> torch.Tensor:
        tensor = self._held.read(stored)
        if _narrows(self._held.tensors[stored.name].dtype, stored.dtype) and _has_infinity(tensor):
            self.warnings.append(f"{stored.name} has infinities as {stored.dtype}")
        self._done_bytes += stored.bytes
        self._tell(self._done_bytes, self._all_bytes)
        return tensor


def _narrows(old: torch.dtype, new: torch.dtype) -> bool:
    """Whether a value may be too large for the new dtype."""
    return old != new and torch.finfo(new).max < torch.finfo(old).max


def _has_infinity(tensor: torch.Tensor) -> bool:
    # In pieces, since the answer for each value needs as much memory again.
    return any(bool(piece.isinf().any()) for piece in tensor.reshape(-1).split(1 << 20))


@contextlib.contextmanager
def _replacing(out: Path, num_bytes: int) -> Iterator[BinaryIO]:
    """A new file that takes the place of `out` once it is whole and on the disk."""
    if out.is_dir() or (out.exists() and not out.is_file()):
        raise ValueError(f"{out} is no file: give a file name for --out")
    if not out.parent.is_dir():
        raise ValueError(f"there is no directory {out.parent}: make it, or choose another --out")
    free_bytes = shutil.disk_usage(out.parent).free
    if free_bytes < num_bytes:
        reason = f"the export needs {num_bytes} bytes, {free_bytes} are free"
        raise OSError(errno.ENOSPC, reason, str(out.parent))
    temporary = out.with_name(f".{out.name[:100]}.{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, out)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    directory = os.open(out.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _labelled(tell: Tell, what: str) -> Callable[[int, int], None]:
    return lambda done, all: tell(what, done, all)


# --- as a process --------------------------------------------------------------------------------


def answer(request: Request, tell: Tell) -> dict[str, Any]:
    """What a program that started this one is told at the end: how it went, and the exit code."""
    try:
        return {"kind": "exported", **asdict(export(request, tell))}
    except (NoSuchStep, UnsupportedFormat, ValueError) as error:
        return {"kind": "failed", "exit_code": 2, "reason": str(error)}
    except (NothingYet, NotComplete, CheckpointGone, Unreadable) as error:
        return {"kind": "failed", "exit_code": 1, "reason": str(error)}
    except CheckpointCorrupt as error:
        advice = "`elastic checkpoints verify` tells which ones are good, --step takes one of them"
        return {"kind": "failed", "exit_code": 1, "reason": f"{error}. {advice}"}
    except Exception as error:  # noqa: BLE001 - storage clients raise classes of their own
        reason = f"{type(error).__name__}: {error}"
        return {"kind": "failed", "exit_code": 1, "reason": reason}


def main(argument: str) -> None:
    """Answers one request, in JSON; prints one JSON object a line, the last is the answer."""
    fields = json.loads(argument)
    told_s = 0.0

    def say(message: dict[str, Any]) -> None:
        print(json.dumps(message), flush=True)  # noqa: T201 - the pipe to whoever started this

    def tell(what: str, done: int, all: int) -> None:
        nonlocal told_s
        if time.monotonic() - told_s >= _TELL_EVERY_S:
            told_s = time.monotonic()
            say({"kind": "progress", "what": what, "done": done, "all": all})

    # What is half written is taken away also when this process is told to end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    # Every file of the checkpoint is held open, of which there are as many as ranks.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    torch.set_num_threads(1)
    with contextlib.suppress(KeyboardInterrupt):
        say(answer(Request(**fields), tell))


if __name__ == "__main__":
    main(sys.argv[1])
