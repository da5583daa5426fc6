"""A store: the few operations `Filesystem` needs of a medium, with paths that are already checked.

Consumed by `Filesystem`, implemented by `LocalStore` and `ObjectStore`, around which `SteadyStore`
lies; tests wrap one to record or to break operations. Must not import ray or torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO, Protocol


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One name in a directory; `bytes` is 0 for a directory."""

    name: str
    is_dir: bool
    bytes: int


class Store(Protocol):
    """Whole paths in, literal: no pattern, escape or expansion has a meaning here."""

    scheme: str  # "" on a local disk

    def open_input(self, path: str) -> BinaryIO: ...

    def read_files(self, paths: Sequence[str]) -> list[bytes]:
        """The whole content of each, for files that are small and many."""
        ...

    def read_range(self, path: str, start: int, num_bytes: int) -> bytes: ...

    def list(self, path: str) -> list[Entry]: ...

    def entry(self, path: str) -> Entry | None: ...

    def write_bytes(self, path: str, data: bytes) -> None: ...

    def create_new(self, path: str, data: bytes) -> bool: ...

    def open_output(self, path: str) -> BinaryIO: ...

    def open_append(self, path: str) -> BinaryIO: ...

    def rename(self, src: str, dst: str) -> None: ...

    def exchange(self, one: str, other: str) -> bool: ...

    def remove_tree(self, path: str) -> None: ...

    def make_dirs(self, path: str) -> None: ...

    def free_bytes(self, path: str) -> int | None: ...

    def rebuild(self) -> None: ...
