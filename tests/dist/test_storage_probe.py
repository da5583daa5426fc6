"""Nodes behind whose path lies another disk are named before a step is made."""

from __future__ import annotations

import errno
import functools
import re
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from elastic.storage.filesystem import Filesystem
from elastic.storage.local_store import LocalStore
from elastic.training import storage_probe
from tests.dist import standalone_run
from tests.dist.processes import RankFailed, run_ranks
from tests.dist.standalone_run import Recipe
from tests.made_run import make_run

OPERATIONS = ("open_input", "list", "entry", "write_bytes", "create_new", "open_output")
OPERATIONS += ("open_append", "rename", "remove_tree", "make_dirs")


def on_two_nodes(rank: int, world_size: int, recipe: Recipe, elsewhere: str, late_s: float) -> Any:
    """A rank's run, with `elsewhere` behind the path on the node of rank 1, for ever or `late_s`
    seconds long."""
    socket.gethostname = lambda: f"node-{'ab'[rank]}"
    storage_probe.VISIBLE_S = 0.5 if late_s == 0 else 20.0
    if rank == 1:
        until_s = time.monotonic() + late_s if late_s else float("inf")

        def led_away(real: Any, self: LocalStore, *arguments: Any) -> Any:
            if time.monotonic() < until_s:
                arguments = tuple(
                    path.replace(recipe.root, elsewhere) if isinstance(path, str) else path
                    for path in arguments
                )
            return real(self, *arguments)

        for name in OPERATIONS:
            real = getattr(LocalStore, name)
            setattr(LocalStore, name, functools.partialmethod(functools.partial(led_away, real)))
    return standalone_run._rank(rank, world_size, recipe)


@pytest.mark.parametrize("what", ["nothing", "another run"])
def test_a_node_with_another_disk_behind_the_path_is_named(  # B63
    tmp_path: Path, what: str
) -> None:
    recipe, elsewhere = Recipe(root=f"{tmp_path}/run", until=20), tmp_path / "elsewhere"
    found = "finds no run.json there"
    if what == "another run":
        found = f"finds another run there, {make_run(elsewhere).run_id}"
    with pytest.raises(RankFailed) as caught:
        run_ranks(on_two_nodes, 2, recipe, str(elsewhere), 0.0)
    errors = re.findall(r"StorageNotShared: (.*)", str(caught.value))
    assert len(errors) == 2 and errors[0] == errors[1], caught.value
    node = r"\[[\d.]+\]"
    expected = rf"node node-b {node} \(rank 1\) {found}; node node-a {node} \(rank 0\) sees it\. "
    assert re.search(expected, errors[0]), errors[0]
    assert f"at {recipe.root}: " in errors[0]
    assert not list(Path(recipe.root, "checkpoints").glob("step-*"))
    assert not list(elsewhere.rglob("step-*"))


def test_a_node_that_sees_the_run_late_is_waited_for(tmp_path: Path) -> None:
    recipe = Recipe(root=f"{tmp_path}/run", until=1)
    ended = run_ranks(on_two_nodes, 2, recipe, f"{tmp_path}/elsewhere", 4.0)
    assert [rank["step"] for rank in ended] == [1, 1]


def read_only_on_one_node(rank: int, world_size: int, recipe: Recipe) -> Any:
    if rank == 1:

        def refuse(self: LocalStore, path: str, data: bytes) -> None:
            raise OSError(errno.EROFS, "Read-only file system", path)

        LocalStore.write_bytes = refuse  # type: ignore[method-assign]
    return standalone_run._rank(rank, world_size, recipe)


def test_a_node_that_cannot_write_is_named_before_a_step_is_made(tmp_path: Path) -> None:  # B59
    recipe = Recipe(root=f"{tmp_path}/run", until=20)
    with pytest.raises(RankFailed, match=r"\(rank 1\) cannot write there .*Read-only file system"):
        run_ranks(read_only_on_one_node, 2, recipe)
    assert not list(Path(recipe.root, "checkpoints").glob("step-*"))


def test_a_node_that_is_not_led_to_the_bucket_says_what_it_was_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Astray(LocalStore):
        scheme = "s3"

        def open_input(self, path: str) -> Any:
            raise PermissionError("not yours")

    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://store:9000")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    assert storage_probe._look(Filesystem(Astray(), "bucket/run"), "a run", 0.0) == (
        "cannot read run.json there (PermissionError: not yours; AWS_ENDPOINT_URL is "
        "http://store:9000, AWS_ACCESS_KEY_ID is not set (a profile, or a role))"
    )
