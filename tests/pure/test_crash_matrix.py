"""The crash matrix: cut off after every operation, the catalogue knows the old set or the new one.

On a disk every call of the operating system is cut off at, with what a power cut may take along; on
an object store, every request. Whatever is left, the next save and its commit succeed over it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic.policy.retention import Retention
from elastic.storage import local_store, retention
from elastic.storage.checkpoints import Catalog
from elastic.storage.filesystem import Filesystem
from elastic.storage.local_store import LocalStore
from tests.crash_model import DictStore, Tree, crash_states, recorded
from tests.made_run import add_checkpoint

RUN = "run"
Sets = list[dict[int, int]]
"""Complete checkpoints by step, each with the generation that saved it."""


def begin(catalog: Catalog) -> None:
    for step in (10, 20):
        add_checkpoint(catalog, step)


def save(catalog: Catalog) -> None:
    catalog.sweep(1)
    add_checkpoint(catalog, 30, generation=1)


def save_and_retain(catalog: Catalog) -> None:
    save(catalog)
    retention.apply(catalog, Retention(keep=1), {30})


def save_again(catalog: Catalog) -> None:
    add_checkpoint(catalog, 20, generation=1, replace=True)


def quarantine(catalog: Catalog) -> None:
    catalog.quarantine(20, "bad bytes")


def quarantine_and_save_again(catalog: Catalog) -> None:
    quarantine(catalog)
    add_checkpoint(catalog, 20, generation=1)


def make_room(catalog: Catalog) -> None:
    retention.make_room(catalog, Retention(keep=2), 30, ())


OLD = {10: 0, 20: 0}
SCENES: dict[str, tuple[Callable[[Catalog], None], Sets]] = {
    "save": (save, [OLD, {**OLD, 30: 1}]),
    "retention": (save_and_retain, [OLD, {**OLD, 30: 1}, {20: 0, 30: 1}, {30: 1}]),
    "same step again": (save_again, [OLD, {10: 0, 20: 1}]),
    "quarantine": (quarantine, [OLD, {10: 0}]),
    "quarantine and save again": (quarantine_and_save_again, [OLD, {10: 0}, {10: 0, 20: 1}]),
    "make room": (make_room, [OLD, {20: 0}]),
}


def complete(catalog: Catalog) -> dict[int, int]:
    steps = catalog.complete_steps()
    assert [step for step in steps if catalog.verify_files(step)] == []
    return {step: catalog.manifest(step).generation for step in steps}


def check(store: Any, root: str, allowed: Sets) -> int:
    """The place in `allowed` of what is complete there."""
    catalog = Catalog(Filesystem(store, root), RUN)
    found = complete(catalog)
    assert found in allowed
    catalog.list()
    # The driver that comes next finds its way over whatever is left.
    catalog.sweep(5)
    for step in (20, 40):
        add_checkpoint(catalog, step, generation=5, replace=True)
    assert complete(catalog) == {**found, 20: 5, 40: 5}
    assert not [each.path for each in catalog.list() if "abandoned" in each.reason]
    return allowed.index(found)


def tree_of(root: Path) -> Tree:
    found: Tree = {str(root): None}
    for path in root.rglob("*"):
        found[str(path)] = path.read_bytes() if path.is_file() else None
    return found


@pytest.mark.parametrize("scene", SCENES)
def test_on_a_disk(scene: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    act, allowed = SCENES[scene]
    root = tmp_path / "run"
    root.mkdir()
    catalog = Catalog(Filesystem(LocalStore(), str(root)), RUN)
    with monkeypatch.context() as quick:
        quick.setattr(local_store.os, "fsync", lambda descriptor: None)
        begin(catalog)
    before = tree_of(root)
    with recorded(monkeypatch, str(root)) as calls:
        act(catalog)
    assert tree_of(root) in [state for _, state in crash_states(before, calls, random.Random(0))]
    found = set()
    for done, state in crash_states(before, calls, random.Random(7)):
        try:
            found.add(place := check(DictStore(state), str(root), allowed))
            assert done < len(calls) or place == len(allowed) - 1  # what was told is durable
        except BaseException as error:
            error.add_note(f"cut off after {done} of {len(calls)} calls: {calls[:done][-1:]}")
            raise
    assert found == set(range(len(allowed)))


class Cut(BaseException):
    """The process is gone."""


class CutStore:
    """An object store whose process ends before its n-th request that changes something."""

    def __init__(self, store: Any, left: int) -> None:
        self.store, self.left = store, left

    def __getattr__(self, name: str) -> Any:
        act = getattr(self.store, name)
        if name not in ("write_bytes", "remove_tree", "create_new", "open_output"):
            return act

        def request(path: str, *args: Any) -> Any:
            if name == "remove_tree" and path in self.store.tree:
                self._count()
            elif name == "remove_tree":
                return self._remove_one_by_one(path)
            else:
                self._count()
            return act(path, *args)

        return request

    def _count(self) -> None:
        if self.left == 0:
            raise Cut
        self.left -= 1

    def _remove_one_by_one(self, path: str) -> None:
        """A prefix is no object: those below it go one after the other, in no order."""
        below = [p for p in self.store.tree if p.startswith(f"{path}/")]
        random.Random(len(below)).shuffle(below)
        for gone in below:
            self._count()
            del self.store.tree[gone]


@pytest.mark.parametrize("scene", SCENES)
def test_on_an_object_store(scene: str) -> None:
    act, allowed = SCENES[scene]
    first = DictStore({}, "s3")  # quick to fill, and has what an object store has
    begin(Catalog(Filesystem(first, "bucket/run"), RUN))
    found = []
    for cut in range(200):
        store = DictStore(first.tree, "s3")
        try:
            act(Catalog(Filesystem(CutStore(store, cut), "bucket/run"), RUN))
            is_whole = True
        except Cut:
            is_whole = False
        found.append(check(store, "bucket/run", allowed))
        if is_whole:
            break
    assert found == sorted(found)
    assert set(found) == set(range(len(allowed)))
