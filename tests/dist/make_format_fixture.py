"""Makes the fixture of a new format version, from a real run of two ranks that is resumed once.

`python -m tests.dist.make_format_fixture tests/fixtures/format-N`. What was made is never made
again.
"""

from __future__ import annotations

import dataclasses
import io
import json
import socket
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from elastic.storage import lease, pins, requests
from elastic.storage.checkpoints import Catalog
from elastic.storage.filesystem import Filesystem
from elastic.storage.run_file import load_run_file
from elastic.training.log_target import open_log
from tests.dist import standalone_run
from tests.dist.processes import run_ranks
from tests.dist.standalone_run import Recipe
from tests.format_fixture import DISK, STORE, told
from tests.made_run import BORN_S, add_checkpoint, add_history, make_run

WIDTH = {"width": 7}
SPEC = {
    "config": {**WIDTH, "until": 3},
    "identity": WIDTH,
    "operational": {"until": 3, "num_workers": [1, 2]},
    "versions": {"ray": "2.60.0", "torch": "2.13.0"},
}


def main(folder: Path) -> None:
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        disk = train(Path(scratch, DISK))
        now_s = BORN_S
        expected = {
            "now_s": now_s,
            DISK: told(disk, now_s=now_s),
            STORE: told(store := publish(), now_s=now_s),
            "tensors": tensors_of(Path(scratch, DISK, "checkpoints/step-3")),
        }
        pack(folder / f"{DISK}.tar.xz", disk)
        pack(folder / f"{STORE}.tar.xz", store)
    text = json.dumps(expected, indent=1, sort_keys=True)
    (folder / "expected.json").write_text(text + "\n")


def train(root: Path) -> Filesystem:
    """A run of two lives on a disk, with one of everything that may lie in its directory."""
    recipe = Recipe(root=str(root), until=2, keep=1, dtype="float32", spec=SPEC)
    run_ranks(nameless, 2, recipe)
    run_ranks(nameless, 2, dataclasses.replace(recipe, until=3))
    fs = Filesystem.at(str(root))
    run_file = load_run_file(fs)
    assert run_file is not None
    catalog = Catalog(fs, run_file.run_id)
    pins.pin(catalog, 3, time_s=BORN_S)
    add_checkpoint(catalog, 1, generation=1)
    catalog.quarantine(1, "__0_0.distcp: expected other bytes")
    fs.write_bytes(f"{catalog.begin(4, 1, 5)}/__0_0.distcp", b"half a sa")
    requests.ask(fs, requests.SAVE, who="somebody", time_s=BORN_S, epoch=2)
    for rank in range(2):
        log = open_log(fs, 1, rank)
        Path(f"/proc/self/fd/{log.write_fd}").write_text(f"one line of rank {rank}\nand another")
        log.close()
    return fs


def nameless(rank: int, world_size: int, recipe: Recipe) -> dict[str, Any]:
    """The rank's run, with nothing of the machine that made it."""
    socket.gethostname = lambda: "host"
    lease._machine = lambda: "boot/pid:[1]"
    return standalone_run._rank(rank, world_size, recipe)


def publish() -> Filesystem:
    """A run on an object store, where files are named and placed otherwise."""
    fs = Filesystem.at("memory://format-fixture")
    made = make_run("memory://format-fixture")
    add_history(made, 0)
    for step in (0, 2, 4):
        add_checkpoint(made, step)
    made.quarantine(2, "bad bytes")
    socket.gethostname, lease._machine = lambda: "host", lambda: ""
    lease.acquire(fs, "a driver").release()
    made.sweep(1)
    return fs


def tensors_of(checkpoint: Path) -> dict[str, Any]:
    """Shape, dtype and values of each tensor, as torch itself reads them."""
    with tempfile.NamedTemporaryFile() as whole:
        dcp_to_torch_save(checkpoint, whole.name)
        return flat(torch.load(whole.name, weights_only=True))


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}.")
        else:
            dtype = str(value.dtype).removeprefix("torch.")
            found[f"{prefix}{key}"] = {
                "dtype": dtype,
                "shape": list(value.shape),
                "values": value.flatten().tolist(),
            }
    return found


def pack(path: Path, fs: Filesystem) -> None:
    with tarfile.open(path, "w:xz", preset=9) as archive:
        for name in files_below(fs, ""):
            data = fs.read_bytes(name)
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


def files_below(fs: Filesystem, path: str) -> list[str]:
    found = []
    for entry in fs.list(path):
        name = f"{path}/{entry.name}" if path else entry.name
        found += files_below(fs, name) if entry.is_dir else [name]
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]))
