"""The transformer of our jobs: its losses, its initial values at any sharding, and its presets."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from jobs.model import PRESETS, Attention, ModelConfig, Transformer, build, initialise, loss_sum
from tests.dist.processes import run_ranks

SMALL = ModelConfig(vocab_size=23, dim=12, num_layers=2, num_heads=3, mlp_dim=20)
TIED = ModelConfig(
    vocab_size=23, dim=12, num_layers=2, num_heads=3, mlp_dim=20, tie_embeddings=True
)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def batch_of(config: ModelConfig, shape: tuple[int, int] = (3, 8)) -> dict[str, torch.Tensor]:
    tokens = torch.randint(
        0,
        config.vocab_size,
        (shape[0], shape[1] + 1),
        generator=torch.Generator().manual_seed(1),
    )
    return {"input_ids": tokens[:, :-1].clone(), "labels": tokens[:, 1:].clone()}


@pytest.mark.parametrize("config", [SMALL, TIED], ids=["plain", "tied"])
def test_an_untrained_model_knows_nothing_and_learns(config: ModelConfig) -> None:
    model, batch = build(config, seed=5), batch_of(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(60):
        loss = loss_sum(model, batch) / batch["labels"].numel()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(config.vocab_size), rel=0.02)
    assert losses[-1] < 0.3


def test_no_token_sees_a_later_one() -> None:
    model = build(SMALL).double()
    ids = batch_of(SMALL)["input_ids"]
    changed = ids.clone()
    changed[:, 5] = (changed[:, 5] + 1) % SMALL.vocab_size
    before, after = model(ids), model(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5], rtol=0, atol=0)
    assert (before[:, 5:] != after[:, 5:]).any(-1).all(), "and all later ones do see it"


def test_where_a_token_stands_matters() -> None:
    model = build(SMALL).double()
    forth = model(torch.tensor([[1, 2, 3]]))[0, -1]
    back = model(torch.tensor([[2, 1, 3]]))[0, -1]
    assert not torch.allclose(forth, back)


def test_only_the_distance_between_tokens_matters() -> None:
    """Zeros have neither value nor score: they move their neighbours and change no direction."""
    attention = Attention(ModelConfig(dim=8, num_heads=1)).double()
    early, late = torch.zeros(2, 1, 9, 8, dtype=torch.float64)
    early[0, [0, 2]] = late[0, [5, 7]] = torch.randn(2, 8, dtype=torch.float64)
    directions = attention(early)[0, 2], attention(late)[0, 7]
    assert F.cosine_similarity(*directions, dim=0).item() == pytest.approx(1, abs=1e-12)
    late[0, 6] = late[0, 5]
    assert F.cosine_similarity(directions[0], attention(late)[0, 7], dim=0).item() < 0.9999


def test_the_loss_is_a_sum_over_the_labels_that_count() -> None:
    model, batch = build(SMALL).double(), batch_of(SMALL)
    logs = model(batch["input_ids"]).log_softmax(-1)
    each = -logs.gather(-1, batch["labels"].unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(loss_sum(model, batch), each.sum())
    batch["labels"][0] = -100
    torch.testing.assert_close(loss_sum(model, batch), each[1:].sum())
    batch["labels"][:] = -100
    loss = loss_sum(model, batch)
    loss.backward()
    assert loss == 0
    assert all(parameter.grad.eq(0).all() for parameter in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_same_seed_gives_the_same_model(dtype: torch.dtype) -> None:
    before = torch.get_rng_state()
    one = build(SMALL, seed=3, dtype=dtype)
    torch.manual_seed(99)
    torch.set_rng_state(before)
    two, other = build(SMALL, seed=3, dtype=dtype), build(SMALL, seed=4, dtype=dtype)
    assert torch.get_rng_state().equal(before), "the process's random stream is left alone"
    single = build(SMALL, seed=3)
    pairs = zip(one.named_parameters(), two.parameters(), single.parameters(), strict=True)
    for (name, first), second, in_float32 in pairs:
        assert first.dtype == dtype, name
        assert first.equal(second), name
        assert first.equal(in_float32.to(dtype)), name
    assert not one.head.weight.equal(other.head.weight)
    loss = loss_sum(one, batch_of(SMALL))
    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    assert loss.isfinite()


def test_parameters_are_drawn_apart_and_scaled_with_depth() -> None:
    model = build(ModelConfig(dim=128, mlp_dim=256, num_layers=8))
    assert not model.layers[0].attention.qkv.weight.equal(model.layers[1].attention.qkv.weight)
    assert model.layers[3].mlp.gate_up.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.layers[3].mlp.down.weight.std().item() == pytest.approx(0.005, rel=0.05)
    assert model.layers[3].attention.out.weight.std().item() == pytest.approx(0.005, rel=0.05)
    assert model.norm.weight.eq(1).all()


def test_dropout_is_for_training_only() -> None:
    config = ModelConfig(vocab_size=23, dim=12, num_layers=1, num_heads=1, mlp_dim=8, dropout=0.5)
    model, ids = build(config), batch_of(config)["input_ids"]
    assert not model(ids).equal(model(ids))
    model.eval()
    assert model(ids).equal(model(ids))


def _sharded(model: Transformer, world_size: int) -> Transformer:
    mesh = init_device_mesh("cpu", (world_size,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _initial_values(_rank: int, world_size: int, config: ModelConfig) -> Any:
    before = torch.get_rng_state()
    model = _sharded(build(config, device="meta"), world_size)
    model.to_empty(device="cpu")
    initialise(model, seed=3)
    assert torch.get_rng_state().equal(before)
    values = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), name
        values[name] = parameter.full_tensor().detach().numpy()
    sharded_late = _sharded(build(config, seed=3), world_size)
    for name, parameter in sharded_late.named_parameters():
        assert (parameter.full_tensor().detach().numpy() == values[name]).all(), name
    return values, loss_sum(model, batch_of(config)).item()


@pytest.mark.parametrize("config", [SMALL, TIED], ids=["plain", "tied"])
def test_initial_values_do_not_depend_on_the_sharding(config: ModelConfig) -> None:
    expected = {name: p.detach().numpy() for name, p in build(config, seed=3).named_parameters()}
    expected_loss = loss_sum(build(config, seed=3), batch_of(config)).item()
    for values, loss in run_ranks(_initial_values, 3, config):
        assert values.keys() == expected.keys()
        assert all((values[name] == expected[name]).all() for name in expected)
        assert loss == pytest.approx(expected_loss, rel=1e-6)


def test_presets_have_the_sizes_they_are_known_for() -> None:
    sizes = {
        name: sum(p.numel() for p in build(config, device="meta").parameters()) / 1e6
        for name, config in PRESETS.items()
    }
    expected = {"nano": 0.043, "tiny": 1.3, "small": 26, "base": 85, "large": 304, "xl": 1215}
    assert sizes == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"dim": 20, "num_heads": 4}, "multiple of 2 \\* num_heads = 8, found 20"),
        ({"num_layers": 0}, "1 or more"),
        ({"dropout": 1.0}, "dropout must be in 0 .. 1"),
    ],
)
def test_sizes_that_make_no_model(changed: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        ModelConfig(**changed)
