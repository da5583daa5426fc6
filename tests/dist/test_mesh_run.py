"""A run whose meshes change: the same samples, losses and norms as on one rank, and its streams."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic.dashboard.data_history import DataHistory
from elastic.policy.mesh import Mesh
from elastic.policy.retention import Retention
from elastic.policy.saves import SaveInterval
from elastic.storage.claim import RunSpec
from elastic.storage.filesystem import Filesystem
from elastic.storage.ledger import read_ledger
from elastic.storage.metrics import current_metrics
from elastic.training.membership import TrainingConfig
from elastic.training.run import Run
from elastic.training.standalone import train_standalone
from tests.dist.mesh_run import Layout, train_points
from tests.dist.processes import run_ranks
from tests.dist.standalone_run import own_store


@dataclass(frozen=True, kw_only=True)
class Recipe:
    root: str
    layout: Layout
    until: int
    load_from: str | None = None


def run(recipe: Recipe) -> list[dict[str, Any]]:
    """By rank: its indices and the numbers it drew, by step."""
    return run_ranks(_rank, recipe.layout.size, recipe)


def _rank(rank: int, world_size: int, recipe: Recipe) -> dict[str, Any]:
    seen: dict[str, Any] = {"indices": {}, "draws": {}}
    config = TrainingConfig(
        run_url=recipe.root,
        config={"recipe": recipe},
        save=SaveInterval(steps=100),
        collective_timeout_s=30.0,
        mesh=recipe.layout.mesh,
        load_from=recipe.load_from,
    )
    ended = train_standalone(
        lambda run: _train(run, recipe, seen),
        config,
        RunSpec(name="meshes", seed=0),
        Retention(keep=-1),
        world_rank=rank,
        world_size=world_size,
        local_rank=rank,
        local_world_size=world_size,
        store=own_store(rank),
    )
    return {**seen, "step": ended.step, "samples": ended.samples, "tokens": ended.tokens}


def _train(run: Run, recipe: Recipe, seen: dict[str, Any]) -> None:
    seen["tensor_rank"] = recipe.layout.shape.tensor_rank(run.world_rank)
    seen["data_rank"] = run.data_rank
    for step, indices in train_points(run, recipe.layout.mesh, recipe.until):
        seen["indices"][step], seen["draws"][step] = indices, torch.rand(()).item()


def curve(root: str, name: str) -> list[float]:
    steps = current_metrics(Filesystem.at(root))
    return [steps[step][name] for step in sorted(steps)]


def samples(ranks: list[dict[str, Any]]) -> dict[int, set[int]]:
    """The indices of each step, over all ranks."""
    return {
        step: {index for rank in ranks for index in rank["indices"][step]}
        for step in ranks[0]["indices"]
    }


HISTORY = [
    Layout(2, Mesh(tensor=2)),
    Layout(4, Mesh(tensor=2)),
    Layout(4, Mesh(shard=2)),
    Layout(3, Mesh()),
    Layout(4, Mesh(shard=1, tensor=2)),
]


@pytest.mark.timeout(240)
def test_a_run_goes_from_mesh_to_mesh_and_trains_as_on_one_rank(tmp_path: Path) -> None:
    one = Recipe(root=f"{tmp_path}/one", layout=Layout(1, Mesh()), until=15)
    reference = run(one)
    ended: list[list[dict[str, Any]]] = []
    for number, layout in enumerate(HISTORY, 1):
        until = 3 * number
        ended.append(run(Recipe(root=f"{tmp_path}/many", layout=layout, until=until)))
    for name in ("loss", "grad_norm", "valid", "tokens"):
        expected, found = curve(one.root, name), curve(f"{tmp_path}/many", name)
        assert len(found) == 15
        assert found == pytest.approx(expected, rel=1e-9), name
    assert max(curve(one.root, "grad_norm")) > 0.5  # there was something to clip
    whole = samples(reference)
    for ranks in ended:
        for step, indices in samples(ranks).items():
            assert indices == whole[step]
        for rank in ranks:  # a tensor-parallel group has the same samples and the same numbers
            (peer,) = [
                one
                for one in ranks
                if one["data_rank"] == rank["data_rank"] and one["tensor_rank"] == 0
            ]
            assert rank["indices"] == peer["indices"] and rank["draws"] == peer["draws"]
        for step in ranks[0]["draws"]:  # and no others have
            drawn = {rank["draws"][step] for rank in ranks}
            assert len(drawn) == len({rank["data_rank"] for rank in ranks})
    for counter in ("step", "samples", "tokens"):
        assert {rank[counter] for rank in ended[-1]} == {reference[0][counter]}


def test_the_same_mesh_again_changes_no_bit(tmp_path: Path) -> None:
    layout = Layout(2, Mesh(tensor=2))
    whole = Recipe(root=f"{tmp_path}/whole", layout=layout, until=6)
    parts = dataclasses.replace(whole, root=f"{tmp_path}/parts")
    reference = run(whole)
    run(dataclasses.replace(parts, until=3))
    ended = run(parts)
    stretch = DataHistory(read_ledger(Filesystem.at(parts.root))).use(6).stretch
    assert (stretch.world_size, stretch.tensor) == (2, 2)
    assert [[i for batch in part for _, i in batch] for part in stretch.split(6)] == [
        rank["indices"][6] for rank in ended
    ]
    assert curve(parts.root, "loss") == curve(whole.root, "loss")
    for rank, before in zip(ended, reference, strict=True):
        assert rank["draws"] == {step: before["draws"][step] for step in (4, 5, 6)}


def test_weights_of_one_mesh_begin_a_run_on_another(tmp_path: Path) -> None:
    pairs = Recipe(root=f"{tmp_path}/pairs", layout=Layout(2, Mesh(tensor=2)), until=3)
    run(pairs)
    begun = {}
    for layout in (Layout(1, Mesh()), Layout(4, Mesh(shard=1, tensor=2))):
        root = f"{tmp_path}/on-{layout.size}"
        run(Recipe(root=root, layout=layout, until=2, load_from=pairs.root))
        begun[layout.size] = curve(root, "loss")
    assert begun[4] == pytest.approx(begun[1], rel=1e-9)
    assert begun[1][0] != pytest.approx(curve(pairs.root, "loss")[0])  # not from the beginning


def test_a_loop_of_ones_own_counts_a_tensor_parallel_group_once(tmp_path: Path) -> None:
    layout = Layout(2, Mesh(tensor=2))
    ended = run_ranks(_own_loop, layout.size, f"{tmp_path}/run", layout)
    assert ended == [(2, 20, 60)] * 2


def _own_loop(rank: int, world_size: int, root: str, layout: Layout) -> tuple[int, int, int]:
    def train(run: Run) -> None:
        run.track(counter={"value": 0})
        for _ in range(2):
            run.end_step(samples=10, tokens=30)

    ended = train_standalone(
        train,
        TrainingConfig(run_url=root, save=SaveInterval(steps=100), mesh=layout.mesh),
        RunSpec(name="own", seed=0),
        Retention(keep=-1),
        world_rank=rank,
        world_size=world_size,
        local_rank=rank,
        local_world_size=world_size,
        store=own_store(rank),
    )
    return ended.step, ended.samples, ended.tokens
