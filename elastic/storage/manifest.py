"""A manifest: what one checkpoint holds, file by file and tensor by tensor, and whose it is.

Plain data and its JSON. It never looks at the files it names, that is the catalog's duty. Must not
import ray or torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from elastic.storage.format import check_format

FORMAT_VERSION = 2
MANIFEST = "manifest.json"
MARKER = "_COMPLETE"
REASON = "REASON"
WHOLE, CHUNKED = "sha256:", "xxh3_128:"
CHUNK_DIGEST_HEX = 32


@dataclass(frozen=True, kw_only=True)
class FileDigest:
    """One file of a checkpoint: path relative to the checkpoint, size, and digest.

    A small file, and each one in a manifest of version 1, has `sha256:<hex>` of its bytes. A large
    one has digests by chunk: `chunk_bytes` is the size of all chunks but the last, `chunk_digests`
    has 32 hex digits for each, and `digest` is `xxh3_128:<hex>` of these digests' bytes.
    """

    path: str
    bytes: int
    digest: str
    chunk_bytes: int = 0
    chunk_digests: str = ""

    def __post_init__(self) -> None:
        parts = self.path.split("/")
        if any(part in ("", ".", "..") for part in parts) or self.path in (
            MANIFEST,
            MARKER,
            REASON,
        ):
            raise ValueError(f"a checkpoint cannot hold a file at {self.path!r}")
        kind = CHUNKED if self.chunk_bytes else WHOLE
        if self.bytes < 0 or self.chunk_bytes < 0 or not self.digest.startswith(kind):
            raise ValueError(
                f"file {self.path!r} needs a size and a digest {kind}<hex>, "
                f"found {self.bytes!r} bytes and {self.digest!r}"
            )
        expected = self.num_chunks * CHUNK_DIGEST_HEX
        if len(self.chunk_digests) != expected:
            raise ValueError(
                f"file {self.path!r} of {self.bytes} bytes in chunks of {self.chunk_bytes} needs "
                f"{expected} hex digits of digests, found {len(self.chunk_digests)}"
            )

    @property
    def num_chunks(self) -> int:
        """Of a file that is digested by chunk; 0 for one that is digested whole."""
        return -(-self.bytes // self.chunk_bytes) if self.chunk_bytes else 0

    def chunk_range(self, index: int) -> tuple[int, int]:
        """Offsets of the chunk's first byte and of the one after its last."""
        start = index * self.chunk_bytes
        return start, min(start + self.chunk_bytes, self.bytes)

    def chunk_digest(self, index: int) -> str:
        """The chunk's digest, in hex."""
        return self.chunk_digests[index * CHUNK_DIGEST_HEX :][:CHUNK_DIGEST_HEX]


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """Global shape and dtype name (such as "float32") of one tensor."""

    shape: list[int]
    dtype: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of one checkpoint; `run_id` is the run that owns it, `created_s` wall time.

    Raises `ValueError` for a negative step or generation, no rank, or two files of the same path.
    """

    run_id: str
    step: int
    world_size: int
    generation: int
    attempt: int
    created_s: float
    counters: dict[str, Any]
    tensors: dict[str, TensorInfo]
    files: list[FileDigest]
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        if min(self.step, self.generation, self.attempt, self.world_size - 1) < 0:
            raise ValueError(
                f"no checkpoint has step {self.step}, generation {self.generation}, "
                f"attempt {self.attempt} and world size {self.world_size}"
            )
        paths = [file.path for file in self.files]
        if len(paths) != len(set(paths)):
            twice = sorted({path for path in paths if paths.count(path) > 1})
            raise ValueError(f"two ranks report the same file: {', '.join(twice)}")

    def to_json(self) -> str:
        """Text that `from_json` reads back equal."""
        return json.dumps(asdict(self), indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Manifest:
        """The manifest in `text`.

        Raises `UnsupportedFormat` if a newer program wrote it, `ValueError` if it is no manifest.
        """
        return cls.from_tree(parse(text))

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> Manifest:
        """The manifest in parsed JSON. Raises as `from_json` does."""
        version = check_format("the manifest", tree.get("format_version"), FORMAT_VERSION)
        try:
            return cls(
                format_version=version,
                run_id=str(tree["run_id"]),
                step=int(tree["step"]),
                world_size=int(tree["world_size"]),
                generation=int(tree["generation"]),
                attempt=int(tree["attempt"]),
                created_s=float(tree["created_s"]),
                counters=dict(tree["counters"]),
                tensors={name: TensorInfo(**info) for name, info in tree["tensors"].items()},
                files=[FileDigest(**file) for file in tree["files"]],
            )
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"the manifest lacks or garbles a field: {error!r}") from error


def parse(text: str | bytes) -> dict[str, Any]:
    """The JSON object in `text`. Raises `ValueError` if there is none."""
    try:
        tree = json.loads(text)
    except RecursionError as error:
        raise ValueError("expected a JSON object, found brackets in brackets") from error
    if not isinstance(tree, dict):
        raise ValueError(f"expected a JSON object, found {type(tree).__name__}")
    return tree
