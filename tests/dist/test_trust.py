"""Nothing is unpickled that this run did not write, and nothing but tensors made of the rest."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from elastic.storage.completeness import Pointer, sha256
from elastic.storage.filesystem import Filesystem
from elastic.storage.ledger import read_ledger
from elastic.storage.local_store import LocalStore
from elastic.storage.manifest import FileDigest, Manifest
from elastic.training.checkpoint import load
from elastic.training.shard_reader import ShardReader
from elastic.training.state import TrackedState
from tests.dist import standalone_run
from tests.dist.processes import run_ranks
from tests.dist.standalone_run import Recipe, catalog, run


class Canary:
    """Makes a directory when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    path = tmp_path / "canary"
    pickle.loads(pickle.dumps(Canary(path)))
    path.rmdir()  # it sings
    return path


def plant(root: str, step: int, files: dict[str, bytes], **fields: Any) -> Path:
    """A copy of step 10 as `step`, with these files in it and these fields in its manifest."""
    checkpoints = Path(root, "checkpoints")
    path = checkpoints / f"step-{step}"
    shutil.copytree(checkpoints / "step-10", path)
    for name, data in files.items():
        (path / name).write_bytes(data)
    tree = json.loads((path / "manifest.json").read_text()) | {"step": step} | fields
    for file in tree["files"]:
        file["bytes"] = (path / file["path"]).stat().st_size
    mark(path, tree)
    return path


def mark(path: Path, tree: dict[str, Any]) -> None:
    text = json.dumps(tree).encode()
    (path / "manifest.json").write_bytes(text)
    pointer = Pointer(path=f"checkpoints/{path.name}", manifest_digest=sha256(text))
    (path / "_COMPLETE").write_bytes(pointer.to_json())


def with_byte_entry(metadata: bytes) -> bytes:
    """The `.metadata` of a checkpoint, and in it a pickled object that fills `__0_0.distcp`."""
    found: Metadata = pickle.loads(metadata)
    found.state_dict_metadata["extra"] = BytesStorageMetadata()
    info = _StorageInfo("__0_0.distcp", 0, 1 << 20)
    return pickle.dumps(
        dataclasses.replace(
            found, storage_data={**found.storage_data, MetadataIndex("extra"): info}
        )
    )


def watched(rank: int, world_size: int, recipe: Recipe) -> tuple[int, list[str]]:
    """Where this rank's run has resumed, and every file of a checkpoint that it has opened."""
    opened: list[str] = []
    real = LocalStore.open_input

    def open_input(self: LocalStore, path: str) -> Any:
        opened.append(path.rpartition("checkpoints/")[2])
        return real(self, path)

    LocalStore.open_input = open_input  # type: ignore[method-assign]
    return standalone_run._rank(rank, world_size, recipe)["resumed"], opened


def test_planted_checkpoints_are_never_unpickled(tmp_path: Path, canary: Path) -> None:  # B90
    recipe = Recipe(root=f"{tmp_path}/run", until=10)
    run(2, recipe)
    poison = pickle.dumps(Canary(canary))
    poisoned = {".metadata": poison, "__0_0.distcp": poison}
    sound = Path(recipe.root, "checkpoints/step-10/.metadata").read_bytes()
    byte_entry = {".metadata": with_byte_entry(sound), "__0_0.distcp": poison}
    # Not ours by their looks: another run's, nobody's, and one with a byte entry.
    plant(recipe.root, 999, poisoned, run_id="another")
    (plant(recipe.root, 998, poisoned) / "manifest.json").unlink()
    plant(recipe.root, 997, byte_entry, run_id=None)
    # Ours by its manifest, but for the digests.
    plant(recipe.root, 20, poisoned)
    plant(recipe.root, 19, byte_entry)

    for resumed, opened in run_ranks(watched, 2, dataclasses.replace(recipe, until=12)):
        assert resumed == 10
        foreign = {name for name in opened if name.startswith("step-99")}
        assert {name.partition("/")[2] for name in foreign} <= {"_COMPLETE", "manifest.json"}
    assert not canary.exists()
    events = read_ledger(Filesystem.at(recipe.root))
    aside = [event for event in events if event.kind == "checkpoint_quarantined"]
    assert [event.step for event in aside] == [20, 19]
    assert all(re.search(r"\.metadata: expected .*sha256:", event.reason) for event in aside)
    assert catalog(recipe.root).complete_steps() == [0, 10, 12]


# --- vouched for, by whoever could write there ---------------------------------------------------


def blessed(folder: Path, metadata: bytes, shard: bytes = b"") -> Manifest:
    """A manifest of this run, true to the last digest, for these two files."""
    (folder / "step-2").mkdir()
    contents = {".metadata": metadata, "__0_0.distcp": shard, "state.json": b"{}"}
    for name, data in contents.items():
        (folder / "step-2" / name).write_bytes(data)
    return Manifest(
        run_id="ours",
        step=2,
        world_size=1,
        generation=0,
        attempt=0,
        created_s=0.0,
        counters={},
        tensors={},
        files=[
            FileDigest(path=name, bytes=len(data), digest=sha256(data))
            for name, data in contents.items()
        ],
    )


def test_a_byte_entry_is_refused_even_so(tmp_path: Path, canary: Path) -> None:  # B90
    metadata = with_byte_entry(pickle.dumps(Metadata(state_dict_metadata={}, storage_data={})))
    manifest = blessed(tmp_path, metadata, pickle.dumps(Canary(canary)))
    state = TrackedState(model=nn.Linear(2, 2), extra={"a": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"'extra' in step-2 is pickled and not a tensor"):
        load(Filesystem.at(str(tmp_path)), "step-2", manifest, state)
    assert not canary.exists()


class Calls:
    """Pickles as the call of a function, or as the look-up of any name."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def named(module: str, name: str) -> bytes:
    """A pickle, of protocol 4, of whatever goes by that name."""
    parts = (f"\x8c{chr(len(text))}{text}" for text in (module, name))
    return b"\x80\x04" + "".join(parts).encode("latin-1") + b"\x93."


METADATA = "torch.distributed.checkpoint.metadata"
ATTACKS = {
    "a call of the system": lambda canary: pickle.dumps(Canary(canary)),
    "eval": lambda canary: pickle.dumps(Calls(eval, f"__import__('os').mkdir({str(canary)!r})")),
    "an import": lambda canary: pickle.dumps(Calls(__import__, "abc")),
    "torch.load": lambda canary: pickle.dumps(Calls(torch.load, str(canary))),
    "inside of metadata": lambda canary: pickle.dumps(
        Metadata(state_dict_metadata={}, planner_data=Canary(canary))
    ),
    "a dotted name": lambda canary: named(METADATA, "Metadata.__init__.__globals__"),
    "what the module imports": lambda canary: named(METADATA, "os"),
    "a dtype that is none": lambda canary: named("torch", "hub"),
    "a builtin": lambda canary: named("builtins", "getattr"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_metadata_makes_nothing_but_metadata(tmp_path: Path, canary: Path, attack: str) -> None:
    manifest = blessed(tmp_path, ATTACKS[attack](canary))
    reader = ShardReader(Filesystem.at(str(tmp_path)), "step-2", manifest.files)
    with pytest.raises(pickle.UnpicklingError, match="which is no part of a checkpoint's metadata"):
        reader.read_metadata()
    assert not canary.exists()
