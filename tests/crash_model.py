"""Crashes of a machine, modelled: which files a directory may hold after each call of the system.

What a process does to a directory is recorded call by call. After a power cut a name is there for
certain only once its directory was synced, content only once its file was; names that were not
synced survive in the order they were made, up to any one of them, and content in any part.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, BinaryIO

import pytest

from elastic.storage import local_store
from elastic.storage.store import Entry

__all__ = ["Call", "DictStore", "crash_states", "recorded"]

Tree = dict[str, bytes | None]
"""Content by path, None for a directory."""


@dataclass(frozen=True)
class Call:
    """One call; paths are absolute. `file` numbers the files that were made."""

    name: str
    path: str
    target: str = ""
    file: int = -1
    data: bytes = b""

    @property
    def directories(self) -> set[str]:
        """Those whose names it changes."""
        return {os.path.dirname(path) for path in (self.path, self.target) if path}


_NAMING = ("mkdir", "create", "rename", "exchange", "link", "unlink", "rmdir")


@contextlib.contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch, root: str) -> Iterator[list[Call]]:
    """What `LocalStore` does below `root` in this context, in order."""
    calls: list[Call] = []
    numbers: dict[str, int] = {}  # of files, by the path that each was made at

    def record(name: str, path: str, **more: Any) -> None:
        if path.startswith(root):
            calls.append(Call(name, path, **more))

    class RecordedFile(io.FileIO):
        def __init__(self, path: str, mode: str) -> None:
            super().__init__(path, mode)
            self.number = numbers[path] = len(numbers)
            record("create", path, file=self.number)

        def write(self, data: Any, /) -> int:
            written = super().write(data)
            record("write", str(self.name), file=self.number, data=bytes(data)[:written])
            return written

    def fsync(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if os.path.isdir(path):
            record("sync_dir", path)
        else:
            record("sync", path, file=numbers[path])

    def naming(name: str, call: Any) -> Any:
        def act(path: str, *rest: Any, **options: Any) -> None:
            call(path, *rest, **options)
            target = rest[0] if rest and isinstance(rest[0], str) else ""
            record(name, path, target=target)

        return act

    def swap(one: str, other: str) -> bool:
        record("exchange", one, target=other)
        return True

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "_use_fd_functions", False)  # so that paths are whole
        patched.setattr(local_store, "io", SimpleNamespace(FileIO=RecordedFile))
        patched.setattr(os, "fsync", fsync)
        for name in ("mkdir", "rename", "link", "unlink", "rmdir"):
            patched.setattr(os, name, naming(name, getattr(os, name)))
        patched.setattr(os, "replace", naming("rename", os.replace))
        exchange = local_store._exchange
        patched.setattr(local_store, "_exchange", lambda *two: exchange(*two) and swap(*two))
        yield calls


def crash_states(
    before: Tree, calls: list[Call], chance: random.Random, num_random: int = 2
) -> Iterator[tuple[int, Tree]]:
    """What may lie there after a crash, with how many calls were made; each state once."""
    seen = set()
    for length in range(len(calls) + 1):
        done = calls[:length]
        safe = [call for at, call in enumerate(done) if _is_safe(done, at)]
        loose = [call for call in done if call.name in _NAMING and call not in safe]
        states = [
            _state(before, done, done, lambda durable, rest: durable + rest),
            _state(before, done, done, lambda durable, rest: durable),
            _state(before, done, safe, lambda durable, rest: durable),
            _state(before, done, safe, lambda durable, rest: durable + rest),
        ]
        for _ in range(num_random):
            kept = loose[: chance.randint(0, len(loose))]
            names = [call for call in done if call in safe or call in kept]
            states.append(_state(before, done, names, lambda d, rest: d + _torn(rest, chance)))
        for state in states:
            key = tuple(sorted(state.items(), key=lambda item: item[0]))
            if key not in seen:
                seen.add(key)
                yield length, state


def _torn(data: bytes, chance: random.Random) -> bytes:
    part = data[: chance.randint(0, len(data))]
    return chance.choice([part, part + b"\0" * (len(data) - len(part))])


def _is_safe(done: list[Call], at: int) -> bool:
    if done[at].name not in _NAMING:
        return False
    synced = {call.path for call in done[at + 1 :] if call.name == "sync_dir"}
    return bool(done[at].directories & synced)


def _state(before: Tree, done: list[Call], names: list[Call], content: Any) -> Tree:
    """`names` are those calls whose names have survived."""
    tree: dict[str, bytes | int | None] = dict(before)
    for call in names:
        _apply(tree, call)
    return {
        path: content(*_content(done, found)) if isinstance(found, int) else found
        for path, found in tree.items()
    }


def _apply(tree: dict[str, Any], call: Call) -> None:
    if os.path.dirname(call.target or call.path) not in tree:
        return
    if call.name == "mkdir":
        tree.setdefault(call.path, None)
    elif call.name == "create":
        tree[call.path] = call.file
    elif call.name == "link" and call.path in tree:
        tree.setdefault(call.target, tree[call.path])
    elif call.name == "unlink" or (call.name == "rmdir" and not _below(tree, call.path)):
        tree.pop(call.path, None)
    elif call.name == "rename" and call.path in tree:
        _move(tree, call.path, call.target)
    elif call.name == "exchange" and call.path in tree and call.target in tree:
        aside = f"{call.path}\0"
        _move(tree, call.path, aside)
        _move(tree, call.target, call.path)
        _move(tree, aside, call.target)


def _move(tree: dict[str, Any], src: str, dst: str) -> None:
    for path in [src, *_below(tree, src)]:
        tree[dst + path.removeprefix(src)] = tree.pop(path)


def _below(tree: dict[str, Any], path: str) -> list[str]:
    return [other for other in tree if other.startswith(f"{path}/")]


def _content(done: list[Call], file: int) -> tuple[bytes, bytes]:
    """What is on the medium of a file, and what else was written to it."""
    mine = [call for call in done if call.file == file]
    synced = max((at for at, call in enumerate(mine) if call.name == "sync"), default=-1)
    data = [call.data if call.name == "write" else b"" for call in mine]
    return b"".join(data[: synced + 1]), b"".join(data[synced + 1 :])


class DictStore:
    """A store in a dict, quick to fill: a disk, or with a scheme an object store."""

    def __init__(self, tree: Tree, scheme: str = "") -> None:
        self.scheme = scheme
        self.tree = dict(tree)

    def open_input(self, path: str) -> BinaryIO:
        found = self.tree.get(path)
        if found is None:
            raise FileNotFoundError(path)
        return io.BytesIO(found)

    def entry(self, path: str) -> Entry | None:
        found = self.tree.get(path)
        if found is not None:
            return Entry(name=os.path.basename(path), is_dir=False, bytes=len(found))
        is_dir = path in self.tree or bool(_below(self.tree, path))
        return Entry(name=os.path.basename(path), is_dir=True, bytes=0) if is_dir else None

    def list(self, path: str) -> list[Entry]:
        prefix = f"{path}/"
        names = {p.removeprefix(prefix).split("/")[0] for p in self.tree if p.startswith(prefix)}
        found = [self.entry(prefix + name) for name in sorted(names)]
        return [entry for entry in found if entry is not None]

    def write_bytes(self, path: str, data: bytes) -> None:
        self.make_dirs(os.path.dirname(path))
        self.tree[path] = data

    def open_output(self, path: str) -> BinaryIO:
        store = self

        class Output(io.BytesIO):
            def close(self) -> None:
                if not self.closed:
                    store.write_bytes(path, self.getvalue())
                super().close()

        return Output()

    def rename(self, src: str, dst: str) -> None:
        assert not self.scheme
        if src not in self.tree:
            raise FileNotFoundError(src)
        if _below(self.tree, dst):
            raise OSError(f"{dst} is not empty")
        self.make_dirs(os.path.dirname(dst))
        _apply(self.tree, Call("rename", src, dst))

    def exchange(self, one: str, other: str) -> bool:
        if self.scheme:
            return False
        _apply(self.tree, Call("exchange", one, other))
        return True

    def remove_tree(self, path: str) -> None:
        for gone in [path, *_below(self.tree, path)]:
            self.tree.pop(gone, None)

    def make_dirs(self, path: str) -> None:
        while not self.scheme and path not in self.tree and path not in ("", "/"):
            self.tree[path] = None
            path = os.path.dirname(path)
