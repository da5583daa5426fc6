"""Checkpoints cross between any two layouts, and the norm to clip by is the same on each."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from elastic.policy.mesh import Mesh
from elastic.storage.checkpoints import Manifest
from elastic.training.clipping import clip_grad_norm_
from elastic.training.meshes import check_sharding
from elastic.training.process_group import Groups
from elastic.training.state import TrackedState
from tests.dist.mesh_run import (
    LAYOUTS,
    Layout,
    Model,
    backward,
    built,
    generation,
)
from tests.dist.processes import run_ranks
from tests.dist.small_run import content, restore, save

MOST = max(layout.size for layout in LAYOUTS)


class Tracked:
    """Model, optimizer and average on the mesh of a generation."""

    def __init__(self, groups: Groups, rank: int, seed: int) -> None:
        self.shape, self.rank = groups.shape, rank
        self.model, self.ema = built(groups, seed), built(groups, seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.state = TrackedState(model=self.model, optimizer=self.optimizer, ema=self.ema)

    def train(self, steps: range) -> None:
        for step in steps:
            backward(self.model, step, self.shape, self.rank)
            self.optimizer.step()
            self.optimizer.zero_grad()
            with torch.no_grad():
                pairs = zip(self.ema.parameters(), self.model.parameters(), strict=True)
                for average, parameter in pairs:
                    average.lerp_(parameter, 0.1)


def save_and_load_all(rank: int, world_size: int, folder: Path) -> list[str]:
    """Save in each layout; then load all of these checkpoints in each. Gives what was compared."""
    for number, layout in enumerate(LAYOUTS):
        if rank < layout.size:
            with generation(number, rank, layout, str(folder)) as groups:
                tracked = Tracked(groups, rank, seed=number)
                tracked.train(range(3 * number, 3 * number + 3))
                manifest = save(folder, str(number), tracked.state)
                whole = content(tracked.state)
                if rank == 0:
                    Path(folder, f"{number}.pickle").write_bytes(pickle.dumps((manifest, whole)))
    compared = []
    for number, layout in enumerate(LAYOUTS, len(LAYOUTS)):
        if rank < layout.size:
            with generation(number, rank, layout, str(folder)) as groups:
                tracked = Tracked(groups, rank, seed=number)
                for source, written in enumerate(LAYOUTS):
                    found = Path(folder, f"{source}.pickle").read_bytes()
                    manifest, whole = pickle.loads(found)
                    restore(folder, str(source), manifest, tracked.state)
                    assert content(tracked.state) == whole, f"{written} to {layout}"
                    compared.append(f"{written} to {layout}")
                tracked.train(range(2))  # what was restored takes a step
    return compared


@pytest.mark.timeout(300)
def test_any_layout_reads_what_any_other_wrote(tmp_path: Path) -> None:  # B40, B51
    compared = run_ranks(save_and_load_all, MOST, tmp_path, timeout_s=200)[0]
    assert len(set(compared)) == len(LAYOUTS) ** 2 == 64
    (whole,) = {frozenset(pickle.loads(path.read_bytes())[1]) for path in tmp_path.glob("*.pickle")}
    for name in ("model.up.weight", "optimizer.down.weight.exp_avg_sq", "ema.scale"):
        assert name in whole
    assert len({path.read_bytes() for path in tmp_path.glob("*.pickle")}) == len(LAYOUTS)


# --- clipping -----------------------------------------------------------------------------------

NORM_TYPES = (2.0, 1.0, 3.0, math.inf)


def reference(norm_type: float) -> tuple[float, dict[str, torch.Tensor]]:
    """The norm and the clipped gradients of one machine, as torch has them."""
    torch.manual_seed(0)
    model = Model().to(torch.float64)
    backward(model, 0, Mesh().shape(1), 0)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type)
    return norm.item(), gradients(model)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        gradient = parameter.grad
        found[name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return found


def clipped(rank: int, world_size: int, folder: Path) -> dict[str, list[float]]:
    """The norms by layout; asserts that the gradients become those of one machine."""
    expected = {norm_type: reference(norm_type) for norm_type in NORM_TYPES}
    norms: dict[str, list[float]] = {}
    for number, layout in enumerate(LAYOUTS):
        if rank >= layout.size:
            continue
        with generation(number, rank, layout, str(folder)) as groups:
            model = built(groups, 0, torch.float64)
            meshes = {p.device_mesh for p in model.parameters() if isinstance(p, DTensor)}
            assert len(meshes) == (2 if layout.mesh.tensor > 1 else 1)
            for norm_type in NORM_TYPES:
                model.zero_grad()
                backward(model, 0, groups.shape, rank)
                norm, whole = expected[norm_type]
                before = gradients(model)
                same = clip_grad_norm_(model.parameters(), 2 * norm, norm_type)
                for name, gradient in gradients(model).items():
                    assert torch.equal(gradient, before[name]), f"{layout}: {name}"
                found = clip_grad_norm_(model.parameters(), 0.01, norm_type)
                assert not isinstance(found, DTensor) and torch.equal(found, same)
                for name, gradient in gradients(model).items():
                    torch.testing.assert_close(gradient, whole[name], rtol=1e-12, atol=1e-15)
                norms.setdefault(str(layout), []).append(found.item() / norm - 1.0)
    return norms


def test_the_norm_is_that_of_one_machine_on_every_mesh(tmp_path: Path) -> None:
    by_rank = run_ranks(clipped, MOST, tmp_path, timeout_s=120)
    assert len(by_rank[0]) == len(LAYOUTS)
    for found in by_rank:
        for layout, off in found.items():
            assert len(off) == len(NORM_TYPES)
            assert max(map(abs, off)) <= 1e-12, f"{layout}: {off}"
            assert off == by_rank[0][layout], "every rank must scale by the same"


def not_finite(rank: int, world_size: int, folder: Path) -> None:
    with generation(0, rank, Layout(2, Mesh()), str(folder)) as groups:
        model = built(groups, 0)
        backward(model, 0, groups.shape, rank)
        gradient = model.up.weight.grad
        assert isinstance(gradient, DTensor)
        if rank == 1:
            gradient.to_local().fill_(math.nan)
        for norm_type in (2.0, math.inf):
            with pytest.raises(RuntimeError, match="some gradient is not finite"):
                clip_grad_norm_(model.parameters(), 1.0, norm_type, error_if_nonfinite=True)
        assert model.head.weight.grad is not None
        assert gradients(model)["head.weight"].isfinite().all()  # nothing was scaled by it
        assert not clip_grad_norm_(model.parameters(), 1.0).isfinite()
        model.zero_grad()
        assert clip_grad_norm_(model.parameters(), 1.0) == 0


def test_a_gradient_that_is_not_finite_on_one_rank_is_told_on_all(tmp_path: Path) -> None:
    run_ranks(not_finite, 2, tmp_path)


def still_to_be_summed(rank: int, world_size: int, folder: Path) -> float:
    """A replicated parameter that has seen split inputs: its gradient is a sum not yet made."""
    with generation(0, rank, Layout(2, Mesh()), str(folder)) as groups:
        weight = nn.Parameter(distribute_tensor(torch.ones(3, 4), groups.mesh, [Replicate()]))
        inputs = distribute_tensor(torch.ones(6, 4), groups.mesh, [Shard(0)])
        (inputs @ weight.T).sum().to_local().backward()
        assert isinstance(weight.grad, DTensor) and weight.grad.placements[0].is_partial()
        norm = clip_grad_norm_([weight], 1.0).item()
        assert torch.linalg.vector_norm(weight.grad.full_tensor()).item() == pytest.approx(1.0)
        return norm


def test_a_gradient_that_is_still_to_be_summed_counts_as_the_sum(tmp_path: Path) -> None:
    found = run_ranks(still_to_be_summed, 2, tmp_path)
    assert found == [pytest.approx(6 * math.sqrt(12))] * 2


def of_two_widths(rank: int, world_size: int) -> float:
    """bfloat16 beside float32, with parameters that hold nothing on some ranks."""
    parameters = [torch.ones(3, dtype=dtype) for dtype in (torch.bfloat16, torch.float32)]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 2.0)
    found = clip_grad_norm_(parameters, 1.0)
    assert found.dtype == torch.float32
    assert [p.grad.dtype for p in parameters if p.grad is not None] == [
        torch.bfloat16,
        torch.float32,
    ]
    return found.item()


def test_gradients_of_two_widths_are_clipped_together() -> None:
    assert run_ranks(of_two_widths, 1)[0] == pytest.approx(math.sqrt(24))


# --- meshes that do not sum what they should ----------------------------------------------------


def sharded_wrongly(rank: int, world_size: int, folder: Path) -> None:
    for number, (mesh, wrong) in enumerate(
        [(Mesh(shard=2), ("shard",)), (Mesh(shard=2), ("replicate",)), (Mesh(tensor=2), None)]
    ):
        layout = Layout(4, mesh)
        with generation(number, rank, layout, str(folder)) as groups:
            model = nn.Sequential(nn.Linear(4, 4))
            over: Any = groups.mesh if wrong is None else groups.mesh[wrong]
            fully_shard(model, mesh=over)
            right = ", ".join(map(repr, layout.shape.data_names))
            with pytest.raises(ValueError, match=rf"0.weight lies as .*run.mesh\[{right}\]"):
                check_sharding(model, groups.mesh, groups.shape)


def test_a_model_sharded_over_the_wrong_dimensions_is_refused(tmp_path: Path) -> None:
    run_ranks(sharded_wrongly, 4, tmp_path)


# --- a (1, 17) weight ---------------------------------------------------------------------------


def one_row(rank: int, world_size: int, folder: Path, size: int) -> None:
    """Full to sharded and back, at one world size."""
    layout = Layout(size, Mesh())
    torch.manual_seed(size)
    plain = nn.Linear(17, 1)
    before = content(TrackedState(model=plain))
    full: Manifest | None = None
    if rank == 0:
        dist.destroy_process_group()
        full = save(folder, "full", TrackedState(model=plain))
        Path(folder, "full.pickle").write_bytes(pickle.dumps(full))
    with generation(0, rank, layout, str(folder)) as groups:
        dist.barrier()
        full = pickle.loads(Path(folder, "full.pickle").read_bytes())
        torch.manual_seed(99)
        model = nn.Linear(17, 1)
        fully_shard(model, mesh=groups.mesh)
        tracked = TrackedState(model=model)
        restore(folder, "full", full, tracked)
        assert content(tracked) == before
        assert tuple(model.weight.shape) == (1, 17)
        sharded = save(folder, "sharded", tracked)
    back = nn.Linear(17, 1)
    restore(folder, "sharded", sharded, TrackedState(model=back))
    assert torch.equal(back.weight, plain.weight) and torch.equal(back.bias, plain.bias)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_single_row_goes_from_full_to_sharded_and_back(tmp_path: Path, size: int) -> None:
    """B41: the same result at every size, 1 included."""
    run_ranks(one_row, size, tmp_path, size)
