"""The order of samples: each once per epoch, the same from anywhere, split evenly over ranks."""

from __future__ import annotations

import itertools
import math
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.training.order import (
    EpochOrder,
    SampleStream,
    micro_batches,
    num_micro_batches,
    share,
)

SEEDS = st.integers(-(2**70), 2**70)


def whole(num_samples: int, seed: int = 0, epoch: int = 0) -> list[int]:
    order = EpochOrder(num_samples=num_samples, seed=seed, epoch=epoch)
    return order.slice(0, num_samples).tolist()


@given(num_samples=st.integers(1, 3000), seed=SEEDS, epoch=st.integers(0, 10**6))
@settings(deadline=None)
def test_an_epoch_has_each_sample_once(num_samples: int, seed: int, epoch: int) -> None:
    assert sorted(whole(num_samples, seed, epoch)) == list(range(num_samples))


@given(num_samples=st.integers(1, 2**62), seed=SEEDS, data=st.data())
@settings(deadline=None)
def test_a_slice_holds_what_single_reads_give(
    num_samples: int, seed: int, data: st.DataObject
) -> None:
    order = EpochOrder(num_samples=num_samples, seed=seed, epoch=1)
    start = data.draw(st.integers(0, num_samples - 1))
    stop = min(num_samples, start + 5)
    found = order.slice(start, stop).tolist()
    assert found == [order[position] for position in range(start, stop)]
    assert len(set(found)) == stop - start
    assert all(0 <= index < num_samples for index in found)


@pytest.mark.parametrize("num_samples", [2, 7, 16, 100, 1000])
def test_epochs_and_seeds_have_orders_of_their_own(num_samples: int) -> None:  # B37
    orders = {tuple(whole(num_samples, seed, epoch)) for seed in range(4) for epoch in range(4)}
    assert len(orders) == (2 if num_samples == 2 else 16)
    assert whole(num_samples, 3, 2) == whole(num_samples, 3, 2)


def test_an_order_never_changes_between_versions() -> None:
    """A run that resumes under a newer version of this code must meet the order it began with."""
    assert whole(10, seed=1, epoch=2) == [4, 9, 1, 5, 3, 8, 7, 0, 6, 2]
    billion = EpochOrder(num_samples=10**9, seed=1, epoch=2)
    assert billion.slice(500, 503).tolist() == [602867295, 222766751, 603508254]


@pytest.mark.parametrize("num_samples", [2, 3, 4])
def test_all_orders_of_few_samples_are_equally_likely(num_samples: int) -> None:
    permutations = list(itertools.permutations(range(num_samples)))
    num_epochs = 100 * len(permutations)
    found = Counter(tuple(whole(num_samples, 5, epoch)) for epoch in range(num_epochs))
    chi_square = sum((found[order] - 100) ** 2 / 100 for order in permutations)
    assert is_plausible(chi_square, len(permutations) - 1)


def test_samples_come_at_all_positions_and_after_all_others_equally_often() -> None:
    num_samples, num_epochs = 37, 1500
    places = np.zeros((num_samples, num_samples))
    gaps = np.zeros(num_samples)
    for epoch in range(num_epochs):
        order = np.array(whole(num_samples, 11, epoch))
        places[np.arange(num_samples), order] += 1
        gaps += np.bincount(np.diff(order) % num_samples, minlength=num_samples)
    expected = num_epochs / num_samples
    chi_square = ((places - expected) ** 2 / expected).sum()
    assert is_plausible(chi_square, (num_samples - 1) ** 2)
    chi_square = ((gaps[1:] - num_epochs) ** 2 / num_epochs).sum()
    assert is_plausible(chi_square, num_samples - 2)


def test_neighbours_are_not_related() -> None:
    """Serial correlation would put samples of one document into one batch."""
    order = np.array(whole(100_003, 7), dtype=float)
    for lag in (1, 2, 316, 317):  # 317 is the width of the grid inside
        correlation = np.corrcoef(order[lag:], order[:-lag])[0, 1]
        assert abs(correlation) * math.sqrt(len(order)) < 4.5, lag


def is_plausible(chi_square: float, degrees: int) -> bool:
    return abs(chi_square - degrees) / math.sqrt(2 * degrees) < 4.5


def test_a_billion_samples_cost_what_is_read() -> None:
    order = EpochOrder(num_samples=10**9, seed=0, epoch=0)
    tracemalloc.start()
    order.slice(10**9 - 512, 10**9)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 1 << 20


def test_without_shuffling_samples_come_in_their_own_order() -> None:
    stream = SampleStream(num_samples=3, seed=0, shuffle=False)
    assert stream.indices(1, 6) == [(0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0)]


@given(
    num_samples=st.integers(1, 40),
    seed=st.integers(0, 99),
    cuts=st.lists(st.integers(0, 30), max_size=8),
)
@settings(deadline=None)
def test_a_stream_goes_on_from_any_position(num_samples: int, seed: int, cuts: list[int]) -> None:
    """B30 B31 B37: also at the very end of an epoch, and after any number of resumes."""
    stream = SampleStream(num_samples=num_samples, seed=seed)
    found, position = [], 0
    for count in cuts:
        found += stream.indices(position, count)
        position += count
    assert found == stream.indices(0, position)
    expected = [
        (epoch, index)
        for epoch in range(position // num_samples + 1)
        for index in whole(num_samples, seed, epoch)
    ]
    assert found == expected[:position]


@given(global_batch=st.integers(1, 64), world_size=st.integers(1, 16), micro=st.integers(1, 9))
def test_ranks_share_a_batch_and_run_the_same_number_of_micro_batches(  # B35
    global_batch: int, world_size: int, micro: int
) -> None:
    taken, spans = [], []
    for rank in range(world_size):
        start, stop = share(global_batch, world_size, rank)
        spans.append(micro_batches(global_batch, micro, world_size, rank))
        taken += range(start, stop)
        mine = [sample for begin, end in spans[-1] for sample in range(begin, end)]
        assert mine == list(range(start, stop))
        assert all(end - begin <= micro for begin, end in spans[-1])
    assert taken == list(range(global_batch))
    counts = {len(of_rank) for of_rank in spans}
    assert counts == {num_micro_batches(global_batch, micro, world_size)}
    largest = -(-global_batch // world_size)
    assert counts == {-(-largest // micro)}, "no more padding than the largest share needs"


def test_twelve_samples_on_five_ranks() -> None:
    sizes = [stop - start for start, stop in (share(12, 5, rank) for rank in range(5))]
    assert sizes == [3, 3, 2, 2, 2]
    assert micro_batches(12, 2, 5, 0) == [(0, 2), (2, 3)]
    assert micro_batches(12, 2, 5, 4) == [(10, 12), (12, 12)]


@given(
    num_samples=st.integers(8, 40),
    global_batch=st.integers(1, 8),
    sizes=st.lists(st.integers(1, 8), min_size=1, max_size=6),
    seed=st.integers(0, 9),
)
@settings(deadline=None)
def test_a_world_that_changes_size_trains_the_same_samples(  # B28 B36
    num_samples: int, global_batch: int, sizes: list[int], seed: int
) -> None:
    stream = SampleStream(num_samples=num_samples, seed=seed)
    found, position = [], 0
    for world_size in sizes:
        for rank in range(world_size):
            start, stop = share(global_batch, world_size, rank)
            found += stream.indices(position + start, stop - start)
        position += global_batch
    assert found == stream.indices(0, position)


@pytest.mark.parametrize("num_samples", [0, -1, 2**62 + 1])
def test_numbers_of_samples_that_cannot_be_ordered(num_samples: int) -> None:
    with pytest.raises(ValueError, match="num_samples"):
        SampleStream(num_samples=num_samples, seed=0)


def test_positions_outside_an_epoch() -> None:
    order = EpochOrder(num_samples=5, seed=0, epoch=0)
    for position in (-1, 5):
        with pytest.raises(IndexError, match="outside"):
            order[position]
    with pytest.raises(IndexError, match="outside"):
        order.slice(3, 6)
    with pytest.raises(ValueError, match="epoch"):
        EpochOrder(num_samples=5, seed=0, epoch=-1)
    with pytest.raises(ValueError, match="start"):
        list(SampleStream(num_samples=5, seed=0).pieces(-1, 1))
