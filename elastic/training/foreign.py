"""Foreign weights: what another run, or another program with DCP, has saved, put into the model.

Of a run's checkpoint every digest is checked first. Of a plain one nothing can be: but only tensors
are read, and its metadata by the unpickler that makes nothing else. Must not import ray.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from elastic.storage.checkpoints import Catalog, Manifest
from elastic.storage.completeness import DIR, STEP_NAME
from elastic.storage.filesystem import Filesystem
from elastic.storage.manifest import WHOLE, FileDigest
from elastic.storage.run_file import RUN_FILE, RunFile, load_run_file
from elastic.storage.suspects import highest_trusted
from elastic.storage.verified_file import VerifiedFile
from elastic.training.loading import agree, read_tensors, verify_share
from elastic.training.part import NOTHING, Mismatch, StateMismatch, shape_and_dtype
from elastic.training.shard_reader import CheckpointCorrupt, ShardReader
from elastic.training.shard_writer import METADATA
from elastic.training.state import TrackedState

__all__ = ["check_trust", "load_weights"]

MODEL = "model"


def check_trust(load_from: str | None, trust_foreign: bool) -> None:
    """Nothing, if weights may be loaded from there. Raises `ValueError`."""
    if load_from is None:
        return
    Filesystem.at(load_from)
    if not trust_foreign:
        raise ValueError(
            f"load_from={load_from!r} is a checkpoint that this run did not write: whoever can "
            "write there decides what the model begins with. If you trust that place, say so with "
            "trust_foreign=True; to go on with a run of your own, give its name and storage instead"
        )


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where weights come from: the directory `path` below the URL `root`.

    `manifest` is the JSON of its manifest, "" where there is none; `what` names it in words.
    """

    root: str
    path: str
    manifest: str
    what: str

    @classmethod
    def find(cls, url: str) -> Source:
        """What is at `url`: a run, whose newest checkpoint counts, one of its checkpoints, or a
        directory of DCP's.

        Raises `ValueError` if it is none of these, `NotComplete`, `UnsupportedFormat`.
        """
        fs = Filesystem.at(url)
        run_file = load_run_file(fs)
        if run_file is not None:
            highest = highest_trusted(Catalog(fs, run_file.run_id))
            if highest is None:
                raise ValueError(f"the run at {url} has no complete checkpoint to load from")
            return cls._of_run(fs, run_file, highest.step)
        *above, folder, name = ["", "", *fs.root.split("/")]
        step = STEP_NAME.fullmatch(name)
        if step and folder == DIR:
            run = Filesystem(fs.store, "/".join(above[2:]) or "/")
            run_file = load_run_file(run)
            if run_file is not None:
                return cls._of_run(run, run_file, int(step[1]))
        if not fs.exists(METADATA):
            raise ValueError(
                f"no checkpoint to load from at {url}: looked for a run ({RUN_FILE}), for one of "
                f"its checkpoints, and for the {METADATA} of a DCP checkpoint"
            )
        parent = Filesystem(fs.store, fs.root.rpartition("/")[0] or "/")
        return cls(root=parent.url, path=name, manifest="", what=f"the DCP checkpoint {url}")

    @classmethod
    def _of_run(cls, fs: Filesystem, run_file: RunFile, step: int) -> Source:
        catalog = Catalog(fs, run_file.run_id)
        return cls(
            root=fs.url,
            path=catalog.data_path(step),
            manifest=catalog.manifest(step).to_json(),
            what=f"step {step} of the run {run_file.name} ({run_file.run_id}) at {fs.url}",
        )


def load_weights(url: str, state: TrackedState, group: dist.ProcessGroup) -> str:
    """Fills the tensors of the module tracked as `model`; what they were loaded from, in words.

    Every rank calls it; the same outcome on all. A tensor may be stored in another floating-point
    type, and under another prefix than `model.`. Nothing else that is tracked changes.

    Raises `StateMismatch` if the weights do not fit, before any has changed; `CheckpointCorrupt`;
    on one rank what it met otherwise, such as `ValueError`, and `LoadFailed` on the others.
    """
    problem: Exception | None = None
    told: list[Any] = [None]
    try:
        if dist.get_rank(group) == 0:
            told = [Source.find(url)]
    except Exception as error:  # noqa: BLE001 - the other ranks have to hear of it
        problem = error
    agree(problem, url, group)
    dist.broadcast_object_list(told, group_src=0, group=group)
    source: Source = told[0]
    try:
        _load(source, state, dist.get_rank(group), dist.get_world_size(group))
    except Exception as error:  # noqa: BLE001 - as above
        problem = error
    agree(problem, url, group)
    return source.what


@torch.no_grad()
def _load(source: Source, state: TrackedState, rank: int, world_size: int) -> None:
    fs = Filesystem.at(source.root)
    reader: ShardReader = _Unvouched(fs, source.path, [])
    if source.manifest:
        files = Manifest.from_json(source.manifest).files
        whole = [file for file in files if not file.chunk_bytes and file.path != METADATA]
        problems = verify_share(fs, source.path, whole, rank, world_size)
        if problems:
            raise CheckpointCorrupt(source.path, "; ".join(problems))
        reader = ShardReader(fs, source.path, files)
    read_tensors(reader, _targets(state, reader))


class _Unvouched(ShardReader):
    """Reads a directory for whose files there are no digests."""

    def read_checked(self, name: str) -> bytes:
        return self._fs.read_bytes(f"{self._path}/{name}")

    @contextmanager
    def _open(self, name: str) -> Iterator[VerifiedFile]:
        size = self._fs.size(f"{self._path}/{name}")
        if size is None:
            raise FileNotFoundError(f"{self._path}/{name} in {self._fs.url} is missing")
        with VerifiedFile(
            self._fs, self._path, FileDigest(path=name, bytes=size, digest=WHOLE)
        ) as file:
            yield file


# --- names ---------------------------------------------------------------------------------------


def _targets(state: TrackedState, reader: ShardReader) -> dict[str, torch.Tensor]:
    """The live tensors to fill, by their names in the checkpoint. Raises `StateMismatch`."""
    saved = {
        name: entry
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    names, live = _live(state)
    prefix = _prefix(names, saved)
    targets, mismatches = {}, []
    for name, tensor in live.items():
        stored = _stored(prefix, names[name], saved)
        entry = saved.get(stored)
        found = NOTHING if entry is None else f"{entry.properties.dtype} of {tuple(entry.size)}"
        if entry is not None and _fits(entry, tensor):
            targets[stored] = tensor
        else:
            expected = shape_and_dtype(tensor)
            mismatches.append(Mismatch(name=f"{MODEL}.{name}", expected=expected, found=found))
    if mismatches:
        raise StateMismatch(mismatches)
    return targets


def _live(state: TrackedState) -> tuple[dict[str, list[str]], dict[str, torch.Tensor]]:
    """Of each tensor of the model all its names, and the tensor itself, by the first of them."""
    captured = state.capture()
    plain = captured.plain.get(MODEL)
    if not isinstance(plain, dict) or "aliases" not in plain:
        raise ValueError(f"load_from fills the module that is tracked as {MODEL!r}: there is none")
    extra = {slot["name"] for one in plain["extra"].values() for slot in one["slots"]}
    parts = ((*whole.partition("."), tensor) for whole, tensor in captured.tensors.items())
    live = {rest: t for owner, _, rest, t in parts if owner == MODEL and rest not in extra}
    names = {name: [name] for name in live}
    for alias, first in plain["aliases"].items():
        names[first].append(alias)
    return names, live


def _prefix(names: Mapping[str, list[str]], saved: Mapping[str, Any]) -> str:
    """What stands before the model's own names in the checkpoint: `model.` if that will do.

    Raises `ValueError` when there are several, and none of them is to be preferred.
    """
    if not names:
        return ""
    ends = next(iter(names.values()))
    prefixes = {
        name[: -len(end)] for name in saved for end in ends if f".{name}".endswith(f".{end}")
    }
    fit = [p for p in prefixes if all(_stored(p, own, saved) for own in names.values())]
    for preferred in (f"{MODEL}.", ""):
        if preferred in fit:
            return preferred
    if len(fit) > 1:
        raise ValueError(
            f"the checkpoint holds such a model several times, as {', '.join(sorted(fit))}: save "
            f"the one to begin with under {MODEL!r}"
        )
    return fit[0] if fit else f"{MODEL}."


def _stored(prefix: str, names: list[str], saved: Mapping[str, Any]) -> str:
    return next((prefix + name for name in names if prefix + name in saved), "")


def _fits(entry: TensorStorageMetadata, live: torch.Tensor) -> bool:
    dtype = entry.properties.dtype
    both_float = dtype.is_floating_point and live.dtype.is_floating_point
    return tuple(entry.size) == tuple(live.shape) and (both_float or dtype == live.dtype)
