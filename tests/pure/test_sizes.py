"""Checkpoint sizes: every component, by hand-made sums."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.policy.sizes import DTYPE_BYTES, OPTIMIZER_STATE, CheckpointSize, checkpoint_size

GB = 10**9
PARAMS = st.integers(1, 10**13)


def components(size: CheckpointSize) -> dict[str, tuple[str, int]]:
    return {one.name: (one.dtype, one.num_bytes) for one in size.components}


def test_70_billion_parameters_in_bf16_with_adamw() -> None:
    size = checkpoint_size(70 * GB, dtype="bf16", optimizer="adamw")
    assert components(size) == {
        "parameters": ("bf16", 140 * GB),
        "master weights": ("fp32", 280 * GB),
        "exp_avg": ("fp32", 280 * GB),
        "exp_avg_sq": ("fp32", 280 * GB),
    }
    assert size.num_bytes("parameters") == 140 * GB
    assert size.num_bytes("optimizer") == 840 * GB
    assert size.num_bytes() == 980 * GB
    assert size.per_rank_bytes(256) == 3_828_125_000


@pytest.mark.parametrize(
    ("options", "bytes_per_param"),
    [
        ({"dtype": "fp32", "optimizer": "adamw"}, 4 + 8),
        ({"dtype": "fp32", "optimizer": "sgd"}, 4),
        ({"dtype": "fp32", "optimizer": "sgd-momentum"}, 4 + 4),
        ({"dtype": "fp32", "optimizer": "adagrad"}, 4 + 4),
        ({"dtype": "fp32", "optimizer": "adamw-amsgrad"}, 4 + 12),
        ({"dtype": "fp64", "optimizer": "adam"}, 8 + 16),
        ({"dtype": "bf16", "optimizer": "sgd"}, 2 + 4),
        ({"dtype": "fp16", "optimizer": "sgd-momentum"}, 2 + 4 + 4),
        ({"dtype": "fp8", "optimizer": "adamw"}, 1 + 4 + 8),
        # torch.optim makes its state like the parameters when nobody keeps a wider copy
        ({"dtype": "bf16", "optimizer": "adamw", "master": False}, 2 + 4),
        ({"dtype": "bf16", "optimizer": "adamw", "ema": True}, 2 + 4 + 8 + 4),
        ({"dtype": "fp32", "optimizer": "adamw", "ema": True}, 4 + 8 + 4),
        ({"dtype": "fp64", "optimizer": "sgd", "ema": True}, 8 + 8),
        ({"dtype": "bf16", "optimizer": "sgd", "master": False, "ema": True}, 2 + 4),
    ],
)
def test_bytes_per_parameter(options: dict[str, object], bytes_per_param: int) -> None:
    assert checkpoint_size(1000, **options).num_bytes() == 1000 * bytes_per_param  # type: ignore[arg-type]


@given(PARAMS, st.integers(1, 100_000), st.sampled_from(sorted(OPTIMIZER_STATE)))
def test_the_ranks_shares_hold_all_of_it_and_little_more(
    num_params: int, num_ranks: int, optimizer: str
) -> None:
    size = checkpoint_size(num_params, optimizer=optimizer, ema=True)
    share = size.per_rank_bytes(num_ranks)
    assert size.num_bytes() <= share * num_ranks < size.num_bytes() + num_ranks
    assert sum(one.num_bytes for one in size.components) == size.num_bytes()
    assert sum(map(size.num_bytes, ("parameters", "optimizer", "ema"))) == size.num_bytes()


@given(PARAMS, st.sampled_from(sorted(DTYPE_BYTES)), st.sampled_from(sorted(OPTIMIZER_STATE)))
def test_sizes_grow_with_the_parameters_only_in_proportion(
    num_params: int, dtype: str, optimizer: str
) -> None:
    one = checkpoint_size(1, dtype=dtype, optimizer=optimizer)
    many = checkpoint_size(num_params, dtype=dtype, optimizer=optimizer)
    assert many.num_bytes() == num_params * one.num_bytes()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_params": 0}, "at least 1 parameter; found 0"),
        ({"num_params": 1, "dtype": "int4"}, "unknown dtype 'int4'; known: bf16"),
        ({"num_params": 1, "optimizer": "adm"}, "unknown optimizer 'adm'; known: .*adamw"),
        ({"num_params": 1, "dtype": "fp32", "master": True}, "these are fp32 already"),
    ],
)
def test_what_cannot_be_sized_is_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        checkpoint_size(**options)  # type: ignore[arg-type]


def test_there_is_no_share_of_no_ranks() -> None:
    with pytest.raises(ValueError, match="at least 1 rank; found 0"):
        checkpoint_size(1).per_rank_bytes(0)
