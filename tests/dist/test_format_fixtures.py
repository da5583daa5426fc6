"""Checkpoints of every format version there ever was: loaded, value by value, and trained on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from elastic.storage.checkpoints import Catalog
from elastic.storage.filesystem import Filesystem
from elastic.training.checkpoint import load
from elastic.training.state import TrackedState
from tests.dist.processes import RankFailed, run_ranks
from tests.dist.standalone_run import Recipe, catalog, run, sharded_model
from tests.format_fixture import DISK, FIXTURES, expected_of, unpacked

every_fixture = pytest.mark.parametrize("fixture", FIXTURES, ids=lambda path: path.name)


def loaded(rank: int, world_size: int, root: str, run_id: str) -> dict[str, Any]:
    """All that the checkpoint of step 3 holds, as it is in the live objects, tensors whole."""
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("shard",))
    model = sharded_model(torch.float32, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    counter = {"calls": 0}
    state = TrackedState(model=model, optimizer=optimizer, scheduler=scheduler, counter=counter)
    found = Catalog(Filesystem.at(root), run_id)
    manifest, path = found.manifest(3), found.data_path(3)
    restored = load(found.fs, path, manifest, state, dist.group.WORLD)
    return {
        "tensors": {name: told(tensor) for name, tensor in state.capture().tensors.items()},
        "counters": restored.plain["counters"],
        "tracked": {"calls": counter["calls"], "lr": scheduler.get_last_lr()},
        "rng": sorted(restored.rank_plain["rng"]) if restored.rank_plain else None,
    }


def told(tensor: torch.Tensor) -> dict[str, Any]:
    whole = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
    dtype = str(whole.dtype).removeprefix("torch.")
    return {"dtype": dtype, "shape": list(whole.shape), "values": whole.flatten().tolist()}


@every_fixture
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_checkpoint_loads_into_the_model(fixture: Path, world_size: int, tmp_path: Path) -> None:
    root, expected = unpacked(fixture, tmp_path), expected_of(fixture)
    for found in run_ranks(loaded, world_size, str(root), expected[DISK]["run_file"]["run_id"]):
        assert found["tensors"] == expected["tensors"]
        assert found["counters"] == {"step": 3, "samples": 36, "tokens": 36, "epoch": 0}
        assert found["tracked"] == {"calls": 3, "lr": [pytest.approx(1e-2 * 0.99**3)]}
        assert found["rng"] and {"python", "numpy"} <= set(found["rng"])


@every_fixture
def test_a_flipped_byte_is_found_before_anything_is_trained(fixture: Path, tmp_path: Path) -> None:
    root = unpacked(fixture, tmp_path)
    run_file = json.loads((root / "run.json").read_text())
    identity = {key: value for key, value in run_file["identity"].items() if key != "seed"}
    spec = {"identity": identity, "config": run_file["config"]}
    shard = root / "checkpoints/step-3/__1_0.distcp"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    found = r"no checkpoint with sound bytes is left.*__1_0.distcp: expected (sha256|xxh3_128):"
    with pytest.raises(RankFailed, match=found):
        run(2, Recipe(root=str(root), until=5, keep=1, dtype="float32", spec=spec))


@every_fixture
def test_the_run_goes_on(fixture: Path, tmp_path: Path) -> None:
    root = unpacked(fixture, tmp_path)
    run_file = json.loads((root / "run.json").read_text())
    identity = {key: value for key, value in run_file["identity"].items() if key != "seed"}
    spec = {"identity": identity, "config": run_file["config"]}
    ended = run(2, Recipe(root=str(root), until=5, keep=1, dtype="float32", spec=spec))
    for rank in ended:
        assert (rank["resumed"], sorted(rank["steps"])) == (3, [4, 5])
        assert rank["counter"] == {"calls": 5}
    assert catalog(str(root)).complete_steps() == [3, 5]  # that of step 3 is pinned
