"""Completeness: whether a step's directory is a checkpoint, decided in one place for every reader.

It needs nothing but the directory itself, and changes nothing. Must not import ray or torch, and
never interprets the files of a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

from elastic.storage.chunk_digests import ChunkCheck
from elastic.storage.filesystem import Filesystem
from elastic.storage.format import UnsupportedFormat, check_format
from elastic.storage.manifest import (
    FORMAT_VERSION,
    MANIFEST,
    MARKER,
    WHOLE,
    FileDigest,
    Manifest,
    parse,
)

DIR = "checkpoints"
_PIECE_BYTES = 1 << 20
_NUMBER = "(0|[1-9][0-9]*)"
STEP_NAME = re.compile(f"step-{_NUMBER}")
ATTEMPT_NAME = re.compile(f"step-{_NUMBER}\\.tmp-{_NUMBER}-{_NUMBER}")
QUARANTINED_NAME = re.compile(f"step-{_NUMBER}-{_NUMBER}")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What is known of one directory; `reason` says why it is not complete, "" if it is.

    `path` is relative to the run's root. `world_size` and `generation` are those of the save, None
    where that cannot be told.
    """

    step: int
    complete: bool
    bytes: int
    world_size: int | None
    generation: int | None
    path: str
    reason: str


@dataclass(kw_only=True)
class Look:
    """What one look at `step-<step>` found; `flaw` is why it is not complete, "" if it is.

    `path` is where its files lie. `too_new` is set if a newer program saved it for this run.
    """

    step: int
    path: str
    flaw: str = ""
    bytes: int = 0
    has_marker: bool = False
    manifest: Manifest | None = None
    too_new: UnsupportedFormat | None = None

    @property
    def complete(self) -> bool:
        return self.flaw == ""

    def is_of(self, generation: int, attempt: int) -> bool:
        """Whether that attempt is what was saved here."""
        found = self.manifest
        return found is not None and (found.generation, found.attempt) == (generation, attempt)

    def checkpoint(self) -> Checkpoint:
        """The same for those who only want to know."""
        return Checkpoint(
            step=self.step,
            complete=self.complete,
            bytes=self.bytes,
            world_size=self.manifest.world_size if self.manifest else None,
            generation=self.manifest.generation if self.manifest else None,
            path=self.path,
            reason=self.flaw,
        )


def look_at(fs: Filesystem, run_id: str, step: int, path: str = "") -> Look:
    """What is at `step-<step>` of the run `run_id` with root `fs`, or at `path` if given.

    Trouble in reading raises, except that something is missing: it says nothing about the bytes.
    """
    look = Look(step=step, path=path or home(step))
    look.flaw = _flaw(fs, run_id, look)
    if not look.complete:
        look.bytes = sum(file_sizes(fs, look.path).values())
    return look


def _flaw(fs: Filesystem, run_id: str, look: Look) -> str:
    """THE definition of complete: why this step is not, "" if it is. Fills `look` on the way.

    Marker there, manifest readable, of this run, of this step, as the marker knows it, and every
    file it names there with its size. Digests of the files are for those who read them.
    """
    marker = read_if_there(fs, f"{look.path}/{MARKER}")
    if marker is None:
        return f"no {MARKER} marker: never committed, or being removed"
    look.has_marker = True
    try:
        pointer = Pointer.from_json(marker, look.step)
    except UnsupportedFormat as error:
        look.too_new = error
        return str(error)
    if pointer is None:
        return f"its {MARKER} marker is unreadable"
    if pointer.path != home(look.step):
        look.path = pointer.path
    text = read_if_there(fs, f"{look.path}/{MANIFEST}")
    if text is None:
        return f"{MANIFEST} is missing"
    flaw = _manifest_flaw(text, run_id, look)
    if flaw or look.manifest is None:
        return flaw
    if sha256(text) != pointer.manifest_digest:
        return f"{MANIFEST}: expected {pointer.manifest_digest}, found {sha256(text)}"
    sizes = file_sizes(fs, look.path)
    look.bytes = sum(sizes.values())
    return "; ".join(size_problems(look.manifest, sizes))


def _manifest_flaw(text: bytes, run_id: str, look: Look) -> str:
    try:
        tree = parse(text)
        # Whose it is comes first: nothing else in another run's directory is of interest.
        if tree.get("run_id") != run_id:
            return f"it belongs to run {tree.get('run_id')!r}, not to this run {run_id!r}"
        manifest = Manifest.from_tree(tree)
    except UnsupportedFormat as error:
        look.too_new = error
        return str(error)
    except ValueError as error:
        return f"{MANIFEST} is unreadable: {error}"
    look.manifest = manifest
    if manifest.step != look.step:
        return f"its {MANIFEST} is of step {manifest.step}: the directory was renamed or copied"
    return ""


@dataclass(frozen=True, kw_only=True)
class Pointer:
    """A marker's content: the directory that holds the files, and the manifest's digest."""

    path: str
    manifest_digest: str

    def to_json(self) -> bytes:
        name = self.path.removeprefix(f"{DIR}/")
        tree = {"format_version": FORMAT_VERSION, "path": name, "manifest": self.manifest_digest}
        return json.dumps(tree).encode()

    @classmethod
    def from_json(cls, text: bytes, step: int) -> Pointer | None:
        """None unless it names the step's own directory or one of its attempts'.

        One without a format version is of version 1. Raises `UnsupportedFormat`.
        """
        try:
            tree = parse(text)
            what = f"the {MARKER} marker of step {step}"
            check_format(what, tree.get("format_version", 1), FORMAT_VERSION)
        except ValueError:
            return None
        name, digest = tree.get("path"), tree.get("manifest")
        if not isinstance(name, str) or not isinstance(digest, str):
            return None
        matched = STEP_NAME.fullmatch(name) or ATTEMPT_NAME.fullmatch(name)
        if not matched or int(matched[1]) != step:
            return None
        return cls(path=f"{DIR}/{name}", manifest_digest=digest)


def size_problems(manifest: Manifest, sizes: dict[str, int]) -> list[str]:
    """The manifest's files that are missing or of another size, given the sizes found by path."""
    found = ((file, sizes.get(file.path)) for file in manifest.files)
    return [size_problem(file, size) for file, size in found if size != file.bytes]


def digest_problem(
    fs: Filesystem, path: str, file: FileDigest, tell_bytes: Callable[[int], None] | None = None
) -> str:
    """What is wrong with the bytes of `file` in the directory `path`, "" if nothing.

    Reads the file to its end, or to the end of the first bad chunk, and tells the size of each
    piece; what that raises ends the reading. Trouble in reading raises, except that the file is
    missing.
    """
    size = fs.size(f"{path}/{file.path}")
    if size != file.bytes:
        return size_problem(file, size)
    try:
        with fs.open_input(f"{path}/{file.path}") as stream:
            pieces = _pieces(stream, tell_bytes or (lambda num_bytes: None))
            return _chunk_problem(file, pieces) if file.chunk_bytes else _whole(file, pieces)
    except FileNotFoundError:
        return size_problem(file, None)


def _pieces(stream: BinaryIO, tell_bytes: Callable[[int], None]) -> Iterator[bytes]:
    while piece := stream.read(_PIECE_BYTES):
        yield piece
        tell_bytes(len(piece))


def _whole(file: FileDigest, pieces: Iterator[bytes]) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    found = f"{WHOLE}{digest.hexdigest()}"
    return "" if found == file.digest else f"{file.path}: expected {file.digest}, found {found}"


def _chunk_problem(file: FileDigest, pieces: Iterator[bytes]) -> str:
    check = ChunkCheck(file)
    problems = (check.update(piece) for piece in pieces)
    return next((problem for problem in problems if problem), "") or check.end()


def size_problem(file: FileDigest, size: int | None) -> str:
    """What to say of a file of that size, None if there is none; it is not the manifest's."""
    if size is None:
        return f"{file.path} is missing"
    return f"{file.path}: expected {file.bytes} bytes, found {size}"


def file_sizes(fs: Filesystem, path: str) -> dict[str, int]:
    """Bytes of every file below `path`, by its path relative to it."""
    sizes: dict[str, int] = {}
    for entry in fs.list(path):
        if entry.is_dir:
            below = file_sizes(fs, f"{path}/{entry.name}")
            sizes |= {f"{entry.name}/{name}": size for name, size in below.items()}
        else:
            sizes[entry.name] = entry.bytes
    return sizes


def read_if_there(fs: Filesystem, path: str) -> bytes | None:
    """The file's content, None if there is no such file."""
    try:
        return fs.read_bytes(path)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None


def home(step: int) -> str:
    """The directory that makes `step` a checkpoint when its marker is in it."""
    return f"{DIR}/step-{step}"


def sha256(data: bytes) -> str:
    """`sha256:<hex>` of the bytes."""
    return f"{WHOLE}{hashlib.sha256(data).hexdigest()}"
