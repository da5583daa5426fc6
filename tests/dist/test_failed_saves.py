"""Saves that fail: how many in a row a run bears, and what a disk without room costs it."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path
from typing import Any

import pytest

from elastic.storage.filesystem import Filesystem
from elastic.storage.ledger import LedgerEvent, read_ledger
from tests.dist import standalone_run
from tests.dist.processes import RankFailed, run_ranks
from tests.dist.standalone_run import Recipe

SMALL_BYTES = 300
"""Less than a shard has."""


def on_failing_storage(
    rank: int, world_size: int, recipe: Recipe, failing: list[int], how: str
) -> Any:
    """A rank's run, in which rank 1 cannot write its shard in the saves of these steps."""
    write = Filesystem.open_output

    def struck(self: Filesystem, path: str) -> Any:
        if rank == 1 and any(f"/step-{step}.tmp" in f"{self.root}/" for step in failing):
            if how == "no room":
                hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
                resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL_BYTES, hard))
            else:
                raise OSError(errno.ENXIO, "the disk has gone")
        return write(self, path)

    Filesystem.open_output = struck  # type: ignore[method-assign]
    standalone_run._note = lambda *_: None  # a file of the test's own, which would not fit either
    return standalone_run._rank(rank, world_size, recipe)


def events(root: str, kind: str) -> list[LedgerEvent]:
    return [event for event in read_ledger(Filesystem.at(root)) if event.kind == kind]


def attempts_left(root: str) -> list[str]:
    return [name for name in os.listdir(f"{root}/checkpoints") if ".tmp-" in name]


def test_two_failed_saves_are_told_and_borne(tmp_path: Path) -> None:  # B07
    recipe = Recipe(root=f"{tmp_path}/run", until=25, save_every=5)
    run_ranks(on_failing_storage, 2, recipe, [5, 10], "gone")
    failed = events(recipe.root, "checkpoint_failed")
    assert [event.step for event in failed] == [5, 10]
    assert all("rank 1" in event.reason and "disk has gone" in event.reason for event in failed)
    assert standalone_run.catalog(recipe.root).complete_steps() == [0, 15, 20, 25]
    assert attempts_left(recipe.root) == []


def test_a_third_in_a_row_ends_the_run_and_a_full_disk_loses_nothing_else(  # B07, B59
    tmp_path: Path,
) -> None:
    recipe = Recipe(root=f"{tmp_path}/run", until=50, save_every=5, keep=2)
    told = r"StorageFull: .* full at .*: 3 saves in a row have failed \(limit 3\).*Free room"
    with pytest.raises(RankFailed, match=told):
        run_ranks(on_failing_storage, 2, recipe, [10, 15, 20, 25, 30], "no room")
    failed = events(recipe.root, "checkpoint_failed")
    assert [event.step for event in failed] == [10, 15, 20]
    assert all("File too large" in event.reason for event in failed)
    # Of the two that are kept the older one would have gone for the third: it has made room.
    removed = [(e.step, e.reason) for e in events(recipe.root, "checkpoint_removed")]
    assert removed == [(0, "storage is full")]
    catalog = standalone_run.catalog(recipe.root)
    assert catalog.complete_steps() == [5]
    assert catalog.verify_files(5) == []
    assert attempts_left(recipe.root) == []
    (ended,) = events(recipe.root, "run_failed")
    assert "StorageFull" in ended.reason
