"""The model that the benchmark trains: as much state as it is asked for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from jobs.bench import workload


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("state_bytes", [30_000_000, 60_000_000, 200_000_000])
def test_state_is_as_large_as_asked_for_and_moves(mesh: DeviceMesh, state_bytes: int) -> None:
    model = workload.build_model(mesh, state_bytes=state_bytes)
    optimizer = workload.build_optimizer(model)
    bulk = model.bulks()[-1]
    batch = workload.batch_of(workload.Samples(), 1, 0, 1)

    for _ in range(2):
        workload.train_step(model, optimizer, batch)

    moments = [t for of in optimizer.state.values() for t in of.values() if t.dim() > 0]
    found = sum(t.numel() * t.element_size() for t in [*model.parameters(), *moments])
    assert found == pytest.approx(state_bytes, abs=12 * workload.BULK_WIDTH)
    assert isinstance(bulk.weight, DTensor)
    assert not torch.equal(bulk.weight.to_local(), torch.full_like(bulk.weight.to_local(), 0.01))
    assert bulk.weight.grad is None


def test_without_a_size_it_is_the_small_model(mesh: DeviceMesh) -> None:
    assert workload.build_model(mesh).bulks() == []
