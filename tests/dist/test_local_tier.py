"""Two tiers of disk: saves go to a node's own disk first, restores take the nearest copy."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from elastic.cli import main
from elastic.storage.archive import archive_of
from elastic.storage.filesystem import Filesystem
from elastic.storage.ledger import read_ledger
from elastic.storage.run_file import load_run_file
from elastic.storage.verification import verify
from tests.dist.processes import RankFailed, run_ranks
from tests.dist.standalone_run import Recipe, catalog, curve, files_of, run
from tests.dist.test_s3 import on_s3
from tests.s3_server import S3Server, s3_server

__all__ = ["s3_server"]


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return _recipe(tmp_path)


def _recipe(tmp_path: Path, **changes: object) -> Recipe:
    values: dict[str, object] = {
        "root": str(tmp_path / "storage" / "run"),
        "local": str(tmp_path / "nvme"),
        "until": 20,
        "save_every": 5,
    }
    return Recipe(**{**values, **changes})  # type: ignore[arg-type]


def kinds(recipe: Recipe) -> list[str]:
    return [event.kind for event in read_ledger(Filesystem.at(recipe.root))]


def killed(tmp_path: Path) -> int:
    """Two ranks, dead at step 16: the newest checkpoint is of step 10 or 15, whose save may have
    been in flight."""
    run(2, _recipe(tmp_path, die_at=16), may_die=(0, 1))
    newest = catalog(_recipe(tmp_path).root).highest()
    assert newest is not None and newest.step in (10, 15)
    return newest.step


def read_told(recipe: Recipe) -> list[str]:
    events = read_ledger(Filesystem.at(recipe.root))
    return [event.reason for event in events if event.kind == "local_disk_read"]


def local_files(recipe: Recipe, step: int) -> list[Path]:
    assert recipe.local is not None
    return sorted(path for path in Path(recipe.local).rglob(f"step-{step}.tmp-*/*"))


def poison(paths: list[Path]) -> None:
    """The same sizes, other bytes."""
    for path in paths:
        path.write_bytes(bytes(path.stat().st_size))


def test_what_lies_on_the_nodes_disk_is_not_read_in_storage(tmp_path: Path, recipe: Recipe) -> None:
    step = killed(tmp_path)
    assert {path.name for path in local_files(recipe, step)} == {
        path.name for path in files_of(recipe.root, step)
    }
    poison(files_of(recipe.root, step))
    ended = run(2, recipe)
    assert [rank["resumed"] for rank in ended] == [step, step]
    assert "checkpoint_quarantined" not in kinds(recipe)
    (told,) = read_told(recipe)
    assert f"of step {step}," in told and told.endswith(
        " lay on the nodes' own disks and 0 in storage"
    )
    assert " 0 lay" not in told
    whole = _recipe(tmp_path / "undisturbed", local=None)
    run(2, whole)
    assert curve(recipe.root) == curve(whole.root)
    assert os.listdir(str(recipe.local)) == [], "the end of the run leaves nothing there"
    good = [one.step for one in verify(catalog(recipe.root)) if one.result == "good"]
    assert good == [other for other in range(0, 21, 5) if other != step]


def test_a_damaged_local_copy_costs_one_read_of_storage_at_any_size(
    tmp_path: Path, recipe: Recipe
) -> None:
    """B64, B14: the checkpoint itself is sound, and is neither blamed nor put aside."""
    step = killed(tmp_path)
    here = {path.name: path for path in local_files(recipe, step)}
    data = bytearray(here["__1_0.distcp"].read_bytes())
    data[len(data) // 2] ^= 1
    here["__1_0.distcp"].write_bytes(data)
    here["__0_0.distcp"].write_bytes(b"torn")
    here["rank-1.json"].unlink()
    poison([path for path in files_of(recipe.root, step) if path.name == "state.json"])
    (ended,) = run(1, recipe)
    assert ended["resumed"] == step
    told = kinds(recipe)
    assert told.count("local_copy_damaged") == 2, "the torn one is seen first, then the flipped one"
    assert "checkpoint_quarantined" not in told


def test_a_checkpoint_that_is_bad_everywhere_is_still_put_aside(
    tmp_path: Path, recipe: Recipe
) -> None:
    step = killed(tmp_path)
    poison(local_files(recipe, step))
    poison(files_of(recipe.root, step))
    (ended,) = run(1, recipe)
    assert ended["resumed"] == step - 5
    assert "checkpoint_quarantined" in kinds(recipe)


def test_a_place_that_no_node_has_is_told_at_the_start(tmp_path: Path, recipe: Recipe) -> None:
    """B63: and a run that has begun goes on without it."""
    nowhere = _recipe(tmp_path, local=str(tmp_path / "not" / "mounted"))
    with pytest.raises(RankFailed, match=r"LocalUnusable: .*not mounted"):
        run(1, nowhere)
    run(1, _recipe(tmp_path, until=5))
    (ended,) = run(1, nowhere)
    assert (ended["resumed"], ended["step"]) == (5, 20)
    assert read_told(recipe) == [], "nobody has a disk"
    assert kinds(recipe).count("local_disk_failed") == 1


def test_slow_uploads_leave_at_most_two_checkpoints_on_the_disk(tmp_path: Path) -> None:
    """B64, B04: 30 saves, some of which come too soon and are skipped and counted."""
    recipe = _recipe(tmp_path, until=30, save_every=1, behind="skip", slow_write_s=0.02)
    with _most_checkpoints(str(recipe.local)) as most:
        run(1, recipe)
    assert most[0] in (1, 2)
    told = kinds(recipe)
    assert told.count("checkpoint_committed") + told.count("checkpoint_skipped") >= 31
    assert catalog(recipe.root).complete_steps()[-1] == 30
    assert os.listdir(str(recipe.local)) == []


def test_a_disk_that_takes_nothing_costs_no_save(tmp_path: Path) -> None:
    """The directory of the saves is a file: ENOTDIR, as no permission stops root."""
    recipe = _recipe(tmp_path, until=5, die_at=3)
    run(1, recipe, may_die=(0,))
    (place,) = Path(str(recipe.local)).iterdir()
    for path in sorted(place.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    (place / "checkpoints").write_text("")
    (ended,) = run(1, _recipe(tmp_path))
    assert ended["step"] == 20
    told = kinds(recipe)
    assert "checkpoint_failed" not in told
    assert told.count("local_disk_failed") == 1
    assert [one.result for one in verify(catalog(recipe.root))] == ["good"] * 5


def archived_run(tmp_path: Path) -> Recipe:
    url = str(tmp_path / "archive" / "run")
    recipe = _recipe(
        tmp_path, until=30, keep=1, keep_every=10, spec={"operational": {"archive": url}}
    )
    run(1, recipe)
    return recipe


def test_the_sparse_archive_is_complete_when_the_run_ends(tmp_path: Path) -> None:
    recipe = archived_run(tmp_path)
    assert "archive_failed" not in kinds(recipe)
    run_file = load_run_file(Filesystem.at(recipe.root))
    assert run_file is not None
    archive = archive_of(run_file)
    assert archive is not None
    assert archive.catalog.complete_steps() == [0, 10, 20, 30]
    assert kinds(recipe).count("checkpoint_archived") == 4
    assert catalog(recipe.root).complete_steps()[-1] == 30
    assert set(catalog(recipe.root).complete_steps()) <= {20, 30}, "the others need not stay"


@pytest.mark.thorough
def test_an_archived_checkpoint_is_exported_from_there(tmp_path: Path) -> None:
    recipe = archived_run(tmp_path)
    assert 10 not in catalog(recipe.root).complete_steps()
    out = tmp_path / "model.pt"
    result = CliRunner().invoke(main, ["export", recipe.root, "--step", "10", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert torch.load(out, weights_only=True)


@pytest.mark.thorough
def test_on_an_object_store_the_nearest_copy_is_read_and_the_archive_filled(
    s3_server: S3Server, tmp_path: Path
) -> None:
    archive = "s3://bucket/archive/run"
    changes = {"root": "s3://bucket/run", "keep_every": 10, "keep": 2}
    spec = {"operational": {"archive": archive}}
    recipe = _recipe(tmp_path, **changes, spec=spec)
    told = (dict(s3_server.environment), str(tmp_path))
    first = _recipe(tmp_path, **changes, spec=spec, die_at=16)
    run_ranks(on_s3, 1, first, *told, may_die=(0,))
    newest = catalog(recipe.root).highest()
    assert newest is not None
    poison(list(s3_server.folder.glob(f"run/{newest.path}/__*.distcp")))
    (ended,) = run_ranks(on_s3, 1, recipe, *told)
    assert (ended["resumed"], ended["step"]) == (newest.step, 20)
    assert "checkpoint_quarantined" not in kinds(recipe)
    assert kinds(recipe).count("checkpoint_archived") >= 1
    run_file = load_run_file(Filesystem.at(recipe.root))
    assert run_file is not None
    found = archive_of(run_file)
    assert found is not None
    assert {one.result for one in verify(found.catalog)} == {"good"}


@contextmanager
def _most_checkpoints(root: str) -> Iterator[list[int]]:
    """How many attempts of saves lay below `root` at once, at most."""
    most, is_over = [0], threading.Event()

    def watch() -> None:
        while not is_over.wait(0.002):
            most[0] = max(most[0], len(list(Path(root).glob("*/checkpoints/*"))))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield most
    finally:
        is_over.set()
        thread.join()
