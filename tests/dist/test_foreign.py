"""Weights that this run did not write: refused unless trusted, and then only the weights."""

from __future__ import annotations

import dataclasses
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from elastic.storage.filesystem import Filesystem
from elastic.storage.ledger import read_ledger
from elastic.training.foreign import Source, check_trust, load_weights
from elastic.training.held_checkpoint import hold
from elastic.training.state import TrackedState
from elastic.training.torchrun import run_standalone
from tests.dist.processes import run_ranks
from tests.dist.standalone_run import Recipe, catalog, run, sharded_model
from tests.dist.test_torchrun import PLACE
from tests.made_run import add_checkpoint, fingerprint, make_run


class Canary:
    """Makes a directory when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def held(root: str, step: int) -> dict[str, list[float]]:
    """The tensors of a run's checkpoint, flat, by name."""
    with hold(catalog(root), step) as checkpoint:
        stored = checkpoint.tensors.values()
        return {one.name: checkpoint.read(one).flatten().tolist() for one in stored}


def test_a_run_begins_with_the_weights_of_another(tmp_path: Path) -> None:
    other = Recipe(root=f"{tmp_path}/other", until=10)
    run(2, other)
    before, expected = fingerprint(Path(other.root)), held(other.root, 10)
    recipe = Recipe(root=f"{tmp_path}/run", until=1, load_from=other.root, dtype="float32")
    ended = run(1, recipe)
    assert [(rank["resumed"], rank["samples"], rank["counter"]) for rank in ended] == [
        (0, 12, {"calls": 1})
    ]
    assert fingerprint(Path(other.root)) == before
    found = held(recipe.root, 0)
    assert found.keys() == {name for name in expected if name.startswith("model.")}
    for name, values in found.items():
        assert values == torch.tensor(expected[name], dtype=torch.float32).tolist(), name
    (event,) = (e for e in read_ledger(Filesystem.at(recipe.root)) if e.kind == "weights_loaded")
    other_id = catalog(other.root).run_id
    assert event.reason == f"from step 10 of the run small ({other_id}) at {other.root}"

    shutil.rmtree(other.root)  # once there is a save, it is never looked at again
    assert run(2, dataclasses.replace(recipe, until=2))[0]["resumed"] == 1


# --- one group, many sources ---------------------------------------------------------------------


def plain_model() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5, bias=False))


def begun_with(rank: int, world_size: int, sources: dict[str, str]) -> dict[str, Any]:
    """By source what became of a model of float64: an error, or its values."""
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("shard",))
    outcomes: dict[str, Any] = {}
    for name, url in sources.items():
        torch.manual_seed(0)
        model = sharded_model(torch.float64, mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        state = TrackedState(model=model, optimizer=optimizer)
        before = values(model)
        try:
            load_weights(url, state, dist.group.WORLD)
            outcomes[name] = values(model)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            outcomes[name] = f"{type(error).__name__}: {error}"
            outcomes[f"{name}, changed"] = values(model) != before
    return outcomes


def values(model: nn.Module) -> dict[str, list[float]]:
    tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    whole = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in tensors.items()}
    return {name: tensor.flatten().tolist() for name, tensor in whole.items()}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_is_no_such_model_changes_nothing_and_runs_nothing(tmp_path: Path) -> None:
    canary, weights = tmp_path / "canary", plain_model().state_dict()
    saves: dict[str, dict[str, Any]] = {
        "nested": {"app": {"model": weights}, "note": Canary(canary)},
        "bare": weights,
        "beside an average": {"model": weights, "ema": plain_model().double().state_dict()},
        "several": {"a": weights, "b": weights},
        "smaller": {"model": nn.Sequential(nn.Linear(6, 3)).state_dict()},
        "another type": {"model": {name: t.int() for name, t in weights.items()}},
    }
    for name, saved in saves.items():
        dcp.save(saved, checkpoint_id=tmp_path / name, no_dist=True)
    poisoned = tmp_path / "poisoned"
    shutil.copytree(tmp_path / "bare", poisoned)
    (poisoned / ".metadata").write_bytes(pickle.dumps(Canary(canary)))
    (tmp_path / "empty").mkdir()
    (shard,) = shutil.copytree(tmp_path / "bare", tmp_path / "short").glob("*.distcp")
    shard.write_bytes(shard.read_bytes()[:-600])

    names = [*saves, "poisoned", "empty", "short"]
    found = run_ranks(begun_with, 2, {name: f"{tmp_path}/{name}" for name in names})
    expected = {name: tensor.double().flatten().tolist() for name, tensor in weights.items()}
    for rank, outcomes in enumerate(found):
        for name in ("nested", "bare", "beside an average"):
            assert outcomes[name] == expected, (rank, name)
        assert "holds such a model several times, as a., b." in outcomes["several"]
        assert outcomes["smaller"].startswith("StateMismatch: ")
        assert (
            "model.0.weight: expected float64 of shape (7, 6), found torch.float32 of (3, 6)"
            in (outcomes["smaller"])
        )
        assert (
            "model.2.weight: expected float64 of shape (5, 7), found nothing"
            in (outcomes["smaller"])
        )
        assert outcomes["another type"].startswith("StateMismatch: ")
        assert "no part of a checkpoint's metadata" in outcomes["poisoned"]
        assert f"no checkpoint to load from at {tmp_path}/empty" in outcomes["empty"]
        assert isinstance(outcomes["short"], str), outcomes
        changed = {name for name, value in outcomes.items() if value is True}
        assert changed <= {"short, changed"}
    assert not canary.exists()


def test_bad_bytes_of_another_run_are_told_and_left_as_they_lie(tmp_path: Path) -> None:
    other = Recipe(root=f"{tmp_path}/other", until=1)
    run(1, other)
    shard = Path(other.root, "checkpoints/step-1/__0_0.distcp")
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    before = fingerprint(Path(other.root))
    sources = {"newest": other.root, "older": f"{other.root}/checkpoints/step-0"}
    for outcomes in run_ranks(begun_with, 2, sources):
        assert "__0_0.distcp: expected xxh3_128:" in outcomes["newest"]
        assert outcomes["older"].keys() == {"0.weight", "0.bias", "2.weight"}
    assert fingerprint(Path(other.root)) == before


# --- refusals ------------------------------------------------------------------------------------


def test_a_foreign_checkpoint_needs_to_be_trusted(tmp_path: Path) -> None:  # B90
    check_trust(None, False)
    check_trust("/runs/other", True)
    with pytest.raises(ValueError, match=r"this run did not write.*trust_foreign=True"):
        check_trust("/runs/other", False)
    with pytest.raises(ValueError, match="absolute path or a URL"):
        check_trust("runs/other", True)
    with pytest.raises(ValueError, match="trust_foreign=True"):
        run_standalone(
            lambda run: None,
            name="run",
            storage_path=str(tmp_path / "runs"),
            load_from="/other",
            place=PLACE,
        )
    assert not (tmp_path / "runs").exists()


def test_a_run_without_checkpoints_is_no_source(tmp_path: Path) -> None:
    made = make_run(tmp_path / "run")
    with pytest.raises(ValueError, match="has no complete checkpoint to load from"):
        Source.find(f"{tmp_path}/run")
    add_checkpoint(made, 0)
    add_checkpoint(made, 7)
    assert Source.find(f"{tmp_path}/run/").path == "checkpoints/step-7"
    older = Source.find(f"{tmp_path}/run/checkpoints/step-0")
    assert (older.root, older.path) == (f"{tmp_path}/run", "checkpoints/step-0")
