"""Modules built on the meta device: first values that no size decides, and nothing without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import elastic
from elastic.training import jsonable, rng
from elastic.training.meta_device import materialize
from elastic.training.state import TrackedState
from tests.dist.odd_run import Odd, sharded_odd, table
from tests.dist.processes import run_ranks
from tests.dist.small_run import whole


def first_values(rank: int, world_size: int) -> dict[str, Any]:
    torch.manual_seed(rank)
    before = jsonable.dumps(rng.capture())
    model = sharded_odd(seed=5)
    assert jsonable.dumps(rng.capture()) == before
    assert model.head.weight is model.embedding.weight
    assert len(list(model.parameters())) == len({id(p) for p in model.parameters()})
    assert torch.equal(model.table, table())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()  # of the parameters that forward uses, and not of others
    assert model.embedding.weight.grad is not None
    fresh = sharded_odd(seed=5)
    tensors = (*fresh.named_parameters(remove_duplicate=False), *fresh.named_buffers())
    return {name: whole(tensor) for name, tensor in tensors}


def test_first_values_are_the_same_at_any_size_and_ties_are_kept() -> None:  # B42 B54
    one, three = run_ranks(first_values, 1), run_ranks(first_values, 3)
    assert one[0] == three[0] == three[2]


def on_a_mesh(rank: int, world_size: int, layout: str) -> dict[str, Any]:
    model = on_meta(lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)))
    if layout != "one":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        if layout == "tensor parallel":
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(model, mesh["inner"], plan)
            mesh = mesh["outer"]
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    materialize(model, "cpu", seed=5)
    return {name: whole(tensor) for name, tensor in model.named_parameters()}


@pytest.mark.parametrize("layout", ["hybrid", "tensor parallel"])
def test_first_values_are_the_same_on_any_mesh(layout: str) -> None:
    assert run_ranks(on_a_mesh, 4, layout) == run_ranks(on_a_mesh, 1, "one") * 4


def on_meta(make: Any) -> Any:
    with torch.device("meta"):
        return make()


class Forgetful(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 3)
        self.gain = nn.Parameter(torch.empty(3))
        self.register_buffer("angles", torch.empty(4), persistent=False)
        self.register_buffer("places", torch.empty(4, dtype=torch.int64))


def test_what_nobody_gives_a_value_is_named() -> None:  # B54
    model = on_meta(lambda: nn.Sequential(nn.Linear(2, 2), Forgetful()))
    with pytest.raises(ValueError, match=r"no value was set for 1\.angles, 1\.gain, 1\.places of"):
        elastic.materialize(model, "cpu", seed=0)

    def init(module: nn.Module) -> None:
        if isinstance(module, Forgetful):
            module.gain.fill_(1)
            module.angles.fill_(2)
            module.places.copy_(torch.arange(4))

    model = on_meta(lambda: nn.Sequential(nn.Linear(2, 2), Forgetful()))
    elastic.materialize(model, "cpu", seed=0, init=init)
    assert model[1].angles.tolist() == [2.0] * 4
    assert not model[0].weight.isnan().any()


def test_each_submodule_and_each_seed_has_values_of_its_own() -> None:
    def values(seed: int) -> list[list[float]]:
        model = on_meta(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
        materialize(model, "cpu", seed=seed)
        return [layer.weight.flatten().tolist() for layer in model]

    assert values(1) == values(1)
    assert len({tuple(row) for row in values(1) + values(2)}) == 4


def test_what_has_values_keeps_them() -> None:
    kept = nn.Linear(2, 2)
    before = [p.clone() for p in kept.parameters()]
    outer = nn.Sequential(kept, on_meta(lambda: nn.Linear(2, 2)))
    materialize(outer, "cpu", seed=0)
    assert all(map(torch.equal, kept.parameters(), before))


def test_a_buffer_that_no_checkpoint_holds_is_not_left_without_memory() -> None:  # B54
    model = nn.BatchNorm1d(3)
    model.register_buffer("table", torch.empty(3, device="meta"), persistent=False)
    with pytest.raises(ValueError, match=r"table of BatchNorm1d are on the meta device"):
        TrackedState(model=model)


def test_an_odd_model_on_one_process() -> None:
    model = on_meta(Odd)
    materialize(model, "cpu", seed=5)
    assert model.head.weight is model.embedding.weight
    assert torch.equal(model.table, table())
