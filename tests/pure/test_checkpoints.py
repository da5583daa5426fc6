"""The catalog: a checkpoint is complete or it does not exist, whatever happens to a save."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic.storage import local_store
from elastic.storage.checkpoints import (
    AlreadyComplete,
    Catalog,
    FileDigest,
    Manifest,
    NotComplete,
    SaveIncomplete,
    StaleGeneration,
    TensorInfo,
)
from elastic.storage.completeness import sha256
from elastic.storage.filesystem import Filesystem
from elastic.storage.format import UnsupportedFormat
from tests.relative_cost import relative_cost

RUN = "0123456789abcdef"
CONTENT = {
    ".metadata": b"meta",
    "__0_0.distcp": b"a" * 100,
    "__1_0.distcp": b"b" * 60,
    "rank-0.json": b"{}",
    "rank-1.json": b"{}",
    "state.json": b'{"samples": 80}',
}


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """That data is synced, and in which order, is what test_filesystem.py is about."""
    monkeypatch.setattr(local_store.os, "fsync", lambda descriptor: None)


@pytest.fixture(params=["local", "object"])
def fs(request: pytest.FixtureRequest, tmp_path: Path) -> Filesystem:
    return new_fs(request.param, tmp_path)


@pytest.fixture
def catalog(fs: Filesystem) -> Catalog:
    return Catalog(fs, RUN)


def new_fs(kind: str, tmp_path: Path) -> Filesystem:
    name = uuid.uuid4().hex
    return Filesystem.at(str(tmp_path / name) if kind == "local" else f"memory://{name}")


def write_attempt(
    catalog: Catalog, step: int, generation: int = 0, attempt: int = 0
) -> tuple[Manifest, str]:
    path = catalog.begin(step, generation, attempt)
    for name, data in CONTENT.items():
        with catalog.fs.open_output(f"{path}/{name}") as file:
            file.write(data)
    manifest = Manifest(
        run_id=catalog.run_id,
        step=step,
        world_size=2,
        generation=generation,
        attempt=attempt,
        created_s=1.5,
        counters={"step": step, "samples": 8 * step},
        tensors={"model.w": TensorInfo(shape=[7, 5], dtype="float32")},
        files=[
            FileDigest(path=name, bytes=len(data), digest=sha256(data))
            for name, data in CONTENT.items()
        ],
    )
    return manifest, path


def save(catalog: Catalog, step: int, generation: int = 0, attempt: int = 0) -> None:
    checkpoint = catalog.commit(*write_attempt(catalog, step, generation, attempt))
    assert checkpoint.complete


def reasons(catalog: Catalog) -> dict[str, str]:
    return {found.path.removeprefix("checkpoints/"): found.reason for found in catalog.list()}


# --- what is complete ----------------------------------------------------------------------------


def test_a_committed_save_is_a_checkpoint(catalog: Catalog) -> None:
    manifest, path = write_attempt(catalog, 20)
    assert catalog.complete_steps() == []
    made = catalog.commit(manifest, path)
    assert (made.step, made.complete, made.world_size, made.generation) == (20, True, 2, 0)
    assert made.reason == ""
    assert made.bytes > sum(map(len, CONTENT.values()))
    assert [made] == catalog.list() == [catalog.inspect(20)]
    assert catalog.highest() == made
    assert catalog.manifest(20) == manifest
    assert catalog.verify_files(20) == []
    for name, data in CONTENT.items():
        assert catalog.fs.read_bytes(f"{catalog.data_path(20)}/{name}") == data


def test_on_a_disk_the_files_lie_in_step_n(tmp_path: Path) -> None:
    catalog = Catalog(Filesystem.at(str(tmp_path)), RUN)
    save(catalog, 20)
    assert catalog.data_path(20) == "checkpoints/step-20"
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step-20"]
    assert sorted(os.listdir(tmp_path / "checkpoints" / "step-20")) == sorted(
        [*CONTENT, "manifest.json", "_COMPLETE"]
    )


def test_nothing_there(catalog: Catalog) -> None:
    assert catalog.list() == []
    assert catalog.highest() is None
    assert not catalog.inspect(5).complete
    for ask in (catalog.manifest, catalog.data_path):
        with pytest.raises(NotComplete, match="step-5 is not a complete checkpoint"):
            ask(5)
    with pytest.raises(FileNotFoundError):
        catalog.quarantine(5, "bad")
    catalog.remove(5)


def test_steps_are_numbers_and_strange_names_are_ignored(catalog: Catalog) -> None:  # B16
    save(catalog, 900)
    save(catalog, 1000)
    data = catalog.data_path(1000)
    for name in (
        "step-0000950",
        "step-1e3",
        "step_x",
        "step-+7",
        "step-٣",
        "step-1001.tmp",
        "step-",
    ):
        for file in [*CONTENT, "manifest.json"]:
            catalog.fs.write_bytes(
                f"checkpoints/{name}/{file}", catalog.fs.read_bytes(f"{data}/{file}")
            )
        catalog.fs.write_bytes(f"checkpoints/{name}/_COMPLETE", b'{"path": "step-1000"}')
    catalog.fs.write_bytes("checkpoints/step-2000", b"a file")
    catalog.fs.write_bytes("checkpoints/step_3000", b"a file")
    assert catalog.complete_steps() == [900, 1000]
    assert [found.step for found in catalog.list()] == [900, 1000]
    highest, below = catalog.highest(), catalog.highest(below=1000)
    assert highest is not None
    assert below is not None
    assert (highest.step, below.step) == (1000, 900)
    assert catalog.highest(below=900) is None


@pytest.mark.parametrize("text", [b"", b"step-7", b"\xff{", b"999"])
def test_a_pointer_to_the_latest_has_no_say(catalog: Catalog, text: bytes) -> None:  # B17
    save(catalog, 10)
    for name in ("latest", "latest_checkpointed_iteration.txt", "step-latest"):
        catalog.fs.write_bytes(f"checkpoints/{name}", text)
        catalog.fs.write_bytes(name, text)
    assert catalog.complete_steps() == [10]


def test_one_storage_is_the_only_truth(
    catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # B22
    save(catalog, 10)
    node_local = Catalog(Filesystem.at(str(tmp_path / "node")), RUN)
    save(node_local, 5)
    monkeypatch.chdir(tmp_path / "node")
    elsewhere = Catalog(Filesystem.at(catalog.fs.url), RUN)
    assert elsewhere.complete_steps() == [10]
    save(catalog, 12)
    assert elsewhere.complete_steps() == [10, 12]


SHARD = "{data}/__1_0.distcp"
MANIFEST = "{data}/manifest.json"
MARKER = "checkpoints/step-20/_COMPLETE"
# What is done to which file (new content, None to delete it, or a replacement), and the reason.
DAMAGE: dict[str, tuple[str, bytes | tuple[bytes, bytes] | None, str]] = {
    "half": (SHARD, b"b" * 30, "__1_0.distcp: expected 60 bytes, found 30"),
    "empty": (SHARD, b"", "__1_0.distcp: expected 60 bytes, found 0"),
    "deleted": (SHARD, None, "__1_0.distcp is missing"),
    "no metadata": ("{data}/.metadata", None, ".metadata is missing"),
    "no data state": ("{data}/state.json", None, "state.json is missing"),  # B15
    "no rank state": ("{data}/rank-1.json", None, "rank-1.json is missing"),  # B15
    "no manifest": (MANIFEST, None, "manifest.json is missing"),
    "torn manifest": (MANIFEST, b'{"run_id', "manifest.json is unreadable"),
    "changed manifest": (MANIFEST, (b'"samples": 160', b'"samples": 0'), "expected sha256:"),
    "no marker": (MARKER, None, "no _COMPLETE marker"),
    "empty marker": (MARKER, b"", "marker is unreadable"),
    "binary marker": (MARKER, b"\xff\x00", "marker is unreadable"),
    "marker of another step": (MARKER, (b"step-20", b"step-10"), "marker is unreadable"),
    "marker that leaves the root": (MARKER, (b"step-20", b"../../step-20"), "unreadable"),
}


def do_damage(fs: Filesystem, data_path: str, damage: str) -> str:
    """Damages the save of step 20 whose files lie there; returns the reason to be found."""
    template, change, reason = DAMAGE[damage]
    path = template.format(data=data_path)
    content = change
    if isinstance(change, tuple):
        content = fs.read_bytes(path).replace(*change)
        assert content != fs.read_bytes(path)
    fs.remove_tree(path)
    if isinstance(content, bytes):
        fs.write_bytes(path, content)
    return reason


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over_and_says_why(
    catalog: Catalog, damage: str
) -> None:  # B14
    save(catalog, 10)
    save(catalog, 20)
    reason = do_damage(catalog.fs, catalog.data_path(20), damage)
    assert catalog.complete_steps() == [10]
    assert reason in catalog.inspect(20).reason
    assert [found.complete for found in catalog.list() if found.step == 10] == [True]
    with pytest.raises(NotComplete, match="step-20"):
        catalog.data_path(20)
    assert catalog.verify_files(20) == [catalog.inspect(20).reason]


def test_a_flipped_byte_is_found_by_reading(catalog: Catalog) -> None:  # B14
    save(catalog, 20)
    path = f"{catalog.data_path(20)}/__0_0.distcp"
    catalog.fs.write_bytes(path, b"a" * 50 + b"A" + b"a" * 49)
    found = sha256(b"a" * 50 + b"A" + b"a" * 49)
    expected = sha256(b"a" * 100)
    assert catalog.verify_files(20) == [f"__0_0.distcp: expected {expected}, found {found}"]
    others = [file for file in catalog.manifest(20).files if file.path != "__0_0.distcp"]
    assert catalog.verify_files(20, others) == []


def test_a_renamed_checkpoint_is_none(tmp_path: Path) -> None:
    catalog = Catalog(Filesystem.at(str(tmp_path)), RUN)
    save(catalog, 20)
    shutil.copytree(tmp_path / "checkpoints/step-20", tmp_path / "checkpoints/step-99")
    assert "unreadable" in catalog.inspect(99).reason
    marker = tmp_path / "checkpoints/step-99/_COMPLETE"
    marker.write_bytes(marker.read_bytes().replace(b"step-20", b"step-99"))
    assert "of step 20: the directory was renamed" in catalog.inspect(99).reason
    assert catalog.complete_steps() == [20]


def test_a_checkpoint_copied_from_an_object_store_is_read_on_a_disk(tmp_path: Path) -> None:
    objects = Catalog(new_fs("object", tmp_path), RUN)
    save(objects, 20, generation=3)
    disk = Catalog(Filesystem.at(str(tmp_path / "copy")), RUN)
    for directory in ("step-20", "step-20.tmp-3-0"):
        for entry in objects.fs.list(f"checkpoints/{directory}"):
            path = f"checkpoints/{directory}/{entry.name}"
            disk.fs.write_bytes(path, objects.fs.read_bytes(path))
    assert disk.complete_steps() == [20]
    assert disk.verify_files(20) == []
    disk.sweep(9)
    assert disk.verify_files(20) == []


class Canary:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("owner", ["fedcba", None, 7])
def test_another_runs_directory_is_never_opened(
    catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any
) -> None:  # B90
    save(catalog, 10)
    save(catalog, 999)
    data = catalog.data_path(999)
    poison = pickle.dumps(Canary(tmp_path / "canary"))
    tree = json.loads(catalog.fs.read_bytes(f"{data}/manifest.json"))
    tree["run_id"] = owner
    for file in tree["files"]:
        if file["path"] in (".metadata", "__0_0.distcp"):
            catalog.fs.write_bytes(f"{data}/{file['path']}", poison)
            file |= {"bytes": len(poison), "digest": sha256(poison)}
    text = json.dumps(tree).encode()
    marker = json.loads(catalog.fs.read_bytes("checkpoints/step-999/_COMPLETE"))
    marker["manifest"] = sha256(text)
    catalog.fs.write_bytes(f"{data}/manifest.json", text)
    catalog.fs.write_bytes("checkpoints/step-999/_COMPLETE", json.dumps(marker).encode())

    opened: list[str] = []
    real = catalog.fs.store.open_input
    monkeypatch.setattr(
        catalog.fs.store, "open_input", lambda path: (opened.append(path), real(path))[1]
    )
    assert catalog.complete_steps() == [10]
    highest = catalog.highest()
    assert highest is not None
    assert highest.step == 10
    expected = f"it belongs to run {owner!r}, not to this run {RUN!r}"
    assert catalog.inspect(999).reason == expected
    assert catalog.verify_files(999) == [expected]
    assert expected in reasons(catalog).values()
    planted = [path for path in opened if "step-999" in path]
    assert planted
    assert {path.rsplit("/", 1)[1] for path in planted} == {"_COMPLETE", "manifest.json"}
    assert not (tmp_path / "canary").exists()
    if owner == "fedcba":
        assert Catalog(catalog.fs, owner).complete_steps() == [999]


def test_a_newer_format_is_refused_by_name_and_not_passed_by(catalog: Catalog) -> None:
    save(catalog, 10)
    save(catalog, 20)
    path = f"{catalog.data_path(20)}/manifest.json"
    text = catalog.fs.read_bytes(path).replace(b'"format_version": 2', b'"format_version": 3')
    catalog.fs.write_bytes(path, text)
    message = r"manifest has format version 3, this program reads up to 2"
    for ask in (catalog.complete_steps, catalog.highest):
        with pytest.raises(UnsupportedFormat, match=message):
            ask()
    with pytest.raises(UnsupportedFormat, match=message):
        catalog.manifest(20)
    assert "format version 3" in catalog.inspect(20).reason
    below = catalog.highest(below=20)
    assert below is not None
    assert below.step == 10
    with pytest.raises(UnsupportedFormat):
        catalog.commit(*write_attempt(catalog, 20, 1), replace=True)
    assert catalog.fs.read_bytes(path) == text
    # In another run's directory a version is nothing that could stop us.
    assert Catalog(catalog.fs, "other").complete_steps() == []


def test_trouble_in_reading_says_nothing_about_the_bytes(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(catalog, 10)

    def denied(path: str) -> None:
        raise PermissionError(path)

    monkeypatch.setattr(catalog.fs.store, "open_input", denied)
    asks: list[Callable[[], object]] = [
        catalog.complete_steps,
        catalog.highest,
        catalog.list,
        lambda: catalog.inspect(10),
        lambda: catalog.verify_files(10),
    ]
    for ask in asks:
        with pytest.raises(PermissionError):
            ask()


# --- commit --------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["half", "empty", "deleted", "no metadata", "no data state"])
def test_a_file_that_did_not_arrive_stops_the_commit(
    catalog: Catalog, damage: str
) -> None:  # B13, B61
    save(catalog, 10)
    manifest, path = write_attempt(catalog, 20)
    reason = do_damage(catalog.fs, path, damage)
    with pytest.raises(SaveIncomplete, match="step 20 is not published") as caught:
        catalog.commit(manifest, path)
    assert reason in caught.value.problems[0]
    assert catalog.complete_steps() == [10]
    assert not catalog.fs.exists("checkpoints/step-20/_COMPLETE")
    catalog.discard(path)
    assert not catalog.fs.exists(path)
    save(catalog, 20, attempt=1)
    assert catalog.complete_steps() == [10, 20]


def test_an_acknowledged_write_that_was_dropped_is_caught(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:  # B61
    class Nowhere:
        def __enter__(self) -> Nowhere:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def write(self, data: bytes) -> int:
            return len(data)

    real = catalog.fs.store.open_output
    monkeypatch.setattr(
        catalog.fs.store,
        "open_output",
        lambda path: Nowhere() if path.endswith("__1_0.distcp") else real(path),
    )
    manifest, path = write_attempt(catalog, 20)
    with pytest.raises(SaveIncomplete, match=r"__1_0\.distcp is missing"):
        catalog.commit(manifest, path)
    assert catalog.complete_steps() == []


def test_a_leftover_of_the_same_step_is_replaced(catalog: Catalog) -> None:  # B20
    save(catalog, 10)
    for name in ("__0_0.distcp", "junk", "deep/junk"):
        catalog.fs.write_bytes(f"checkpoints/step-20/{name}", b"partial")
    write_attempt(catalog, 20, generation=0)
    save(catalog, 20, generation=1)
    assert catalog.complete_steps() == [10, 20]
    assert catalog.verify_files(20) == []
    if catalog.fs.is_local:
        assert not catalog.fs.exists("checkpoints/step-20/junk")


def test_an_attempt_starts_empty(catalog: Catalog) -> None:  # B20
    path = catalog.begin(20, 0, 0)
    catalog.fs.write_bytes(f"{path}/__9_0.distcp", b"of a larger world")
    other = catalog.begin(20, 0, 1)
    catalog.fs.write_bytes(f"{other}/file", b"x")
    assert catalog.begin(20, 0, 0) == path
    assert catalog.fs.list(path) == []
    assert catalog.fs.exists(f"{other}/file")


def test_a_complete_checkpoint_is_not_replaced_unasked(catalog: Catalog) -> None:
    save(catalog, 20, generation=0)
    manifest, path = write_attempt(catalog, 20, generation=1)
    with pytest.raises(AlreadyComplete, match="saved by generation 0"):
        catalog.commit(manifest, path)
    assert catalog.manifest(20).generation == 0
    made = catalog.commit(manifest, path, replace=True)
    assert made.generation == 1
    assert catalog.verify_files(20) == []
    assert (
        reasons(catalog)["quarantine/step-20-0"]
        == "quarantined: replaced by a save of generation 1"
    )


def test_a_commit_asked_for_twice_is_done_once(catalog: Catalog) -> None:
    manifest, path = write_attempt(catalog, 20)
    assert catalog.commit(manifest, path) == catalog.commit(manifest, path, replace=True)
    assert list(reasons(catalog).values()) == [""]
    for act in (lambda: catalog.begin(20, 0, 0), lambda: catalog.discard(path)):
        with pytest.raises(AlreadyComplete):
            act()
    assert catalog.verify_files(20) == []


@pytest.mark.parametrize("what", ["another run", "missing files"])
def test_what_was_once_published_is_set_aside_and_not_deleted(catalog: Catalog, what: str) -> None:
    stranger = Catalog(catalog.fs, "stranger") if what == "another run" else catalog
    save(stranger, 20, generation=0)
    if what == "missing files":
        catalog.fs.remove_tree(f"{catalog.data_path(20)}/state.json")
    save(catalog, 20, generation=1)
    assert catalog.verify_files(20) == []
    assert "quarantine/step-20-0" in reasons(catalog)
    data = kept_data(catalog.fs, "checkpoints/quarantine/step-20-0")
    assert catalog.fs.read_bytes(f"{data}/__0_0.distcp") == CONTENT["__0_0.distcp"]


def test_a_checkpoint_that_has_lost_its_marker_is_set_aside_and_not_deleted(
    tmp_path: Path,
) -> None:
    catalog = Catalog(new_fs("local", tmp_path), RUN)
    save(catalog, 20, generation=0)
    catalog.fs.remove_tree("checkpoints/step-20/_COMPLETE")
    save(catalog, 20, generation=1)
    assert catalog.verify_files(20) == []
    told = reasons(catalog)["quarantine/step-20-0"]
    assert "no _COMPLETE marker" in told and "replaced by a save of generation 1" in told
    for name, data in CONTENT.items():
        assert catalog.fs.read_bytes(f"checkpoints/quarantine/step-20-0/{name}") == data


def test_what_a_crash_in_a_removal_leaves_is_kept_only_if_it_is_whole(tmp_path: Path) -> None:
    kept = []
    for lives in range(20):
        catalog = Catalog(new_fs("local", tmp_path), RUN)
        save(catalog, 20, generation=0)
        dying = Catalog(Filesystem(CrashingStore(catalog.fs.store, lives), catalog.fs.root), RUN)
        try:
            dying.remove(20)
            break
        except Crash:
            pass
        catalog.commit(*write_attempt(catalog, 20, generation=1), replace=True)
        aside = Path(catalog.fs.root, "checkpoints/quarantine/step-20-0")
        kept.append(aside.exists())
        assert not kept[-1] or {*CONTENT, "manifest.json"} <= set(os.listdir(aside))
    assert kept[-1] is False and len(kept) > 1


def kept_data(fs: Filesystem, quarantine_path: str) -> str:
    """Where the bytes of a quarantined checkpoint are."""
    if fs.is_local:
        return quarantine_path
    name = json.loads(fs.read_bytes(f"{quarantine_path}/_COMPLETE"))["path"]
    return f"checkpoints/{name}"


def test_a_manifest_of_something_else_is_refused(catalog: Catalog) -> None:
    manifest, path = write_attempt(catalog, 20)
    for other, where in (
        (dataclasses.replace(manifest, run_id="other"), path),
        (dataclasses.replace(manifest, generation=1), path),
        (manifest, "checkpoints/step-20"),
        (manifest, catalog.attempt_path(20, 0, 1)),
    ):
        with pytest.raises(ValueError, match="manifest"):
            catalog.commit(other, where)
    for bad in ("checkpoints/step-20", "ledger", "checkpoints/quarantine"):
        with pytest.raises(ValueError, match="no attempt's path"):
            catalog.discard(bad)


def test_an_older_generation_can_not_publish(catalog: Catalog) -> None:  # B75
    save(catalog, 10, generation=0)
    manifest, path = write_attempt(catalog, 20, generation=1)
    other, other_path = write_attempt(catalog, 15, generation=2)
    assert catalog.sweep(2) == [path]
    assert catalog.sweep(2) == []
    catalog.fs.make_dirs(path)
    for name, data in CONTENT.items():
        catalog.fs.write_bytes(f"{path}/{name}", data)
    leftover = Catalog(catalog.fs, RUN)
    acts: list[Callable[[], object]] = [
        lambda: leftover.commit(manifest, path),
        lambda: leftover.begin(30, 1, 0),
        lambda: leftover.sweep(1),
    ]
    for act in acts:
        with pytest.raises(StaleGeneration, match="generation 2 has taken over"):
            act()
    assert catalog.complete_steps() == [10]
    assert not catalog.fs.exists("checkpoints/step-20")
    assert catalog.commit(other, other_path).complete
    assert catalog.verify_files(10) == []


# --- a crash at every operation ------------------------------------------------------------------


class Crash(BaseException):
    """The process is gone."""


class CrashingStore:
    """A store whose process dies at, or in the middle of, the n-th operation that changes it."""

    CHANGES = ("write_bytes", "rename", "remove_tree", "make_dirs", "open_output", "open_append")

    def __init__(self, store: Any, lives: int) -> None:
        self.store = store
        self.left = lives
        self.done: list[str] = []

    def __getattr__(self, name: str) -> Any:
        act = getattr(self.store, name)
        if name not in self.CHANGES:
            return act

        def change(*args: Any) -> Any:
            if self.left == 0:
                self.half(name, *args)
                raise Crash
            self.left -= 1
            self.done.append(name)
            return act(*args)

        return change

    def half(self, name: str, path: str, *args: Any) -> None:
        found = self.store.entry(path)
        if name == "remove_tree" and found is not None and found.is_dir:
            for entry in self.store.list(path)[::2]:
                self.store.remove_tree(f"{path}/{entry.name}")
        if name == "write_bytes" and not self.store.scheme:
            self.store.write_bytes(f"{os.path.dirname(path)}/.litter.tmp", b"half")


def leftover(catalog: Catalog) -> None:
    catalog.fs.write_bytes("checkpoints/step-20/__0_0.distcp", b"partial")
    catalog.fs.write_bytes("checkpoints/step-20/sub/junk", b"partial")


def damaged(catalog: Catalog) -> None:
    save(catalog, 20)
    catalog.fs.remove_tree(f"{catalog.data_path(20)}/state.json")


def strangers(catalog: Catalog) -> None:
    save(Catalog(catalog.fs, "stranger"), 20)


BEFORE: dict[str, Callable[[Catalog], None]] = {
    "nothing": lambda catalog: None,
    "leftover": leftover,
    "damaged": damaged,
    "another run's": strangers,
    "complete": lambda catalog: save(catalog, 20),
}


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("kind", ["local", "object"])
def test_a_crash_in_commit_leaves_the_old_set_or_the_new_one(
    kind: str, before: str, tmp_path: Path
) -> None:  # B10
    outcomes = []
    for lives in range(100):
        catalog = Catalog(new_fs(kind, tmp_path), RUN)
        save(catalog, 10)
        BEFORE[before](catalog)
        manifest, path = write_attempt(catalog, 20, generation=1)
        store = CrashingStore(catalog.fs.store, lives)
        dying = Catalog(Filesystem(store, catalog.fs.root), RUN)
        try:
            dying.commit(manifest, path, replace=before == "complete")
        except Crash:
            outcomes.append(complete_generations(catalog))
            check_recovery(catalog)
            continue
        assert complete_generations(catalog) == {10: 0, 20: 1}
        break
    assert len(store.done) == len(outcomes) >= 2
    old = {10: 0, 20: 0} if before == "complete" else {10: 0}
    allowed = [old, {10: 0, 20: 1}]
    if (kind, before) == ("local", "complete"):
        allowed.insert(1, {10: 0})  # a disk has no step from one directory to another of its name
    for outcome in outcomes:
        assert outcome in allowed
    order = [allowed.index(outcome) for outcome in outcomes]
    assert order == sorted(order)


def complete_generations(catalog: Catalog) -> dict[int, int]:
    steps = catalog.complete_steps()
    assert all(catalog.verify_files(step) == [] for step in steps)
    return {step: catalog.manifest(step).generation for step in steps}


def check_recovery(catalog: Catalog) -> None:
    """The next generation saves the step again, sweeps, and no unpublished attempt is left."""
    catalog.sweep(2)
    catalog.commit(*write_attempt(catalog, 20, generation=2), replace=True)
    assert complete_generations(catalog) == {10: 0, 20: 2}
    assert not [reason for reason in reasons(catalog).values() if "abandoned" in reason]


@pytest.mark.parametrize("act", ["remove", "quarantine", "sweep"])
@pytest.mark.parametrize("kind", ["local", "object"])
def test_a_crash_in_removal_leaves_the_old_set_or_one_less(
    kind: str, act: str, tmp_path: Path
) -> None:
    acts: dict[str, Callable[[Catalog], object]] = {
        "remove": lambda catalog: catalog.remove(20),
        "quarantine": lambda catalog: catalog.quarantine(20, "bad bytes"),
        "sweep": lambda catalog: catalog.sweep(1),
    }
    after = {10: 0, 20: 0, 30: 0} if act == "sweep" else {10: 0, 30: 0}
    for lives in range(100):
        catalog = Catalog(new_fs(kind, tmp_path), RUN)
        for step in (10, 20, 30):
            save(catalog, step)
        write_attempt(catalog, 40)
        store = CrashingStore(catalog.fs.store, lives)
        try:
            acts[act](Catalog(Filesystem(store, catalog.fs.root), RUN))
        except Crash:
            assert complete_generations(catalog) in ({10: 0, 20: 0, 30: 0}, after)
            continue
        assert complete_generations(catalog) == after
        break
    assert 2 <= len(store.done) < 10 or (kind, act) == ("local", "quarantine")


def test_a_crash_at_every_call_of_the_operating_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # B10
    outcomes = []
    for lives in range(200):
        catalog = Catalog(new_fs("local", tmp_path), RUN)
        save(catalog, 10)
        leftover(catalog)
        manifest, path = write_attempt(catalog, 20, generation=1)
        left = [lives]
        for name in ("fsync", "replace", "rename", "mkdir", "unlink"):
            monkeypatch.setattr(local_store.os, name, dying_call(left, getattr(os, name)))
        try:
            catalog.commit(manifest, path)
            break
        except Crash:
            pass
        finally:
            monkeypatch.undo()
        outcomes.append(complete_generations(catalog))
        check_recovery(catalog)
    changes = [outcome != {10: 0} for outcome in outcomes]
    assert len(changes) >= 8
    assert changes == sorted(changes)
    assert all(outcome in ({10: 0}, {10: 0, 20: 1}) for outcome in outcomes)


def dying_call(left: list[int], act: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        if left[0] == 0:
            raise Crash
        left[0] -= 1
        return act(*args, **kwargs)

    return call


# --- quarantine, removal, listing ----------------------------------------------------------------


def test_quarantine_keeps_the_bytes_and_says_why(catalog: Catalog) -> None:  # B14
    save(catalog, 10)
    for generation in (0, 1):
        save(catalog, 20, generation=generation)
        target = catalog.quarantine(20, f"bad shard {generation}")
        assert target == f"checkpoints/quarantine/step-20-{generation}"
        assert catalog.fs.read_bytes(f"{target}/REASON") == f"bad shard {generation}\n".encode()
        data = kept_data(catalog.fs, target)
        assert all(catalog.fs.read_bytes(f"{data}/{name}") == CONTENT[name] for name in CONTENT)
        assert catalog.complete_steps() == [10]
    catalog.sweep(5)
    catalog.remove(20)
    for generation in (0, 1):
        data = kept_data(catalog.fs, f"checkpoints/quarantine/step-20-{generation}")
        assert catalog.fs.read_bytes(f"{data}/state.json") == CONTENT["state.json"]
    assert reasons(catalog) == {
        catalog.data_path(10).removeprefix("checkpoints/"): "",
        "quarantine/step-20-0": "quarantined: bad shard 0",
        "quarantine/step-20-1": "quarantined: bad shard 1",
    }
    assert min(found.bytes for found in catalog.list()) >= sum(map(len, CONTENT.values()))


def test_bytes_in_quarantine_outlive_the_checkpoint_they_were(tmp_path: Path) -> None:
    catalog = Catalog(new_fs("object", tmp_path), RUN)
    save(catalog, 20)
    store = CrashingStore(catalog.fs.store, 2)
    with pytest.raises(Crash):
        Catalog(Filesystem(store, catalog.fs.root), RUN).quarantine(20, "bad")
    assert catalog.complete_steps() == [20]
    catalog.remove(20)
    data = kept_data(catalog.fs, "checkpoints/quarantine/step-20-0")
    assert catalog.fs.read_bytes(f"{data}/state.json") == CONTENT["state.json"]


def test_falling_back_ends_when_all_are_bad(catalog: Catalog) -> None:  # B14
    for step in (10, 20, 30):
        save(catalog, step)
        catalog.fs.write_bytes(f"{catalog.data_path(step)}/__0_0.distcp", b"A" * 100)
    tried = []
    while (found := catalog.highest()) is not None:
        tried.append(found.step)
        (problem,) = catalog.verify_files(found.step)
        catalog.quarantine(found.step, problem)
    assert tried == [30, 20, 10]
    assert len(catalog.list()) == 3


def test_a_full_disk_does_not_keep_a_bad_checkpoint_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # B14
    catalog = Catalog(Filesystem.at(str(tmp_path)), RUN)
    save(catalog, 10)
    save(catalog, 20)

    def full(path: str, data: bytes) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(catalog.fs.store, "write_bytes", full)
    catalog.quarantine(20, "bad")
    assert catalog.complete_steps() == [10]
    assert reasons(catalog)["quarantine/step-20-0"] == "quarantined: no reason recorded"


def test_a_removed_checkpoint_leaves_nothing(catalog: Catalog) -> None:
    save(catalog, 10)
    save(catalog, 20)
    catalog.remove(20)
    assert catalog.complete_steps() == [10]
    assert not catalog.fs.exists("checkpoints/step-20")
    assert not catalog.fs.exists(catalog.attempt_path(20, 0, 0))


def test_the_list_is_in_numeric_order_and_holds_everything(catalog: Catalog) -> None:
    for step in (1000, 900, 20):
        save(catalog, step)
    write_attempt(catalog, 1100, generation=4, attempt=2)
    catalog.fs.write_bytes("checkpoints/step-950/junk", b"xyz")
    catalog.quarantine(20, "bad")
    found = catalog.list()
    assert [each.step for each in found] == [20, 900, 950, 1000, 1100]
    assert [each.complete for each in found] == [False, True, False, True, False]
    assert found[2].bytes == 3
    assert "never committed" in found[2].reason
    assert (found[4].generation, found[4].path) == (4, "checkpoints/step-1100.tmp-4-2")
    assert found[4].reason == "attempt 2 of generation 4, in progress or abandoned"
    assert found[4].bytes == sum(map(len, CONTENT.values()))


def test_checkpoints_are_listed_in_about_the_time_that_their_files_take(tmp_path: Path) -> None:
    catalog = Catalog(Filesystem.at(str(tmp_path)), RUN)
    for step in range(100):
        save(catalog, step)

    def look_at_all() -> list[Path]:
        found = list((tmp_path / "checkpoints").iterdir())
        for file in (file for folder in found for file in folder.iterdir()):
            assert file.stat().st_size
            if file.suffix == ".json":
                json.loads(file.read_text())
        return found

    assert relative_cost(catalog.list, look_at_all, 100) < 6  # 2.0 to 2.7 where it was measured


# --- manifest and errors -------------------------------------------------------------------------


def test_a_manifest_comes_back_equal(catalog: Catalog) -> None:
    manifest, _ = write_attempt(catalog, 20)
    assert Manifest.from_json(manifest.to_json()) == manifest
    assert Manifest.from_json(manifest.to_json().encode()) == manifest


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("step", "x"),
        ("step", None),
        ("step", -1),
        ("world_size", 0),
        ("files", [{"path": "a"}]),
        ("files", {"a": 1}),
        ("files", [{"path": "../a", "bytes": 1, "digest": "sha256:00"}]),
        ("files", [{"path": "/a", "bytes": 1, "digest": "sha256:00"}]),
        ("files", [{"path": "_COMPLETE", "bytes": 1, "digest": "sha256:00"}]),
        ("files", [{"path": "a", "bytes": -1, "digest": "sha256:00"}]),
        ("files", [{"path": "a", "bytes": 1, "digest": "00"}]),
        ("files", [{"path": "a", "bytes": 1, "digest": "sha256:00"}] * 2),
        ("tensors", None),
        ("tensors", {"w": {"shape": [1]}}),
        ("counters", 5),
        ("format_version", None),
        ("format_version", "1"),
        ("format_version", True),
    ],
)
def test_a_garbled_manifest_is_a_value_error(catalog: Catalog, field: str, value: Any) -> None:
    manifest, _ = write_attempt(catalog, 20)
    tree = json.loads(manifest.to_json()) | {field: value}
    for text in (json.dumps(tree), json.dumps({key: tree[key] for key in tree if key != field})):
        with pytest.raises(ValueError):
            Manifest.from_json(text)


@pytest.mark.parametrize(
    "error",
    [
        NotComplete(5, "torn"),
        AlreadyComplete(5, 1),
        SaveIncomplete(5, ["a is missing"]),
        StaleGeneration(1, 2),
        UnsupportedFormat("the manifest", 2, 1),
    ],
)
def test_errors_cross_processes(error: Exception) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert copy.__dict__ == error.__dict__
