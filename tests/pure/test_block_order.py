"""The block order: each sample once, few blocks at a time, from anywhere, for little memory."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.training.block_order import BlockOrder, Blocks
from elastic.training.order import EpochOrder, SampleStream, micro_batches, share

SIZES = st.lists(st.integers(0, 70), min_size=1, max_size=60).filter(lambda sizes: sum(sizes) > 0)
WINDOWS = st.integers(1, 50)
SEEDS = st.integers(-(2**70), 2**70)


def blocks_of(sizes: Sequence[int], window_blocks: int) -> Blocks:
    return Blocks(starts=np.cumsum([0, *sizes]), window_blocks=window_blocks)


@st.composite
def sliding(draw: st.DrawFn) -> Blocks:
    """Blocks that do not fit in one window."""
    sizes = draw(SIZES.filter(lambda sizes: len(sizes) > 1))
    return blocks_of(sizes, draw(st.integers(1, len(sizes) - 1)))


def whole(blocks: Blocks, seed: int = 0, epoch: int = 0) -> list[int]:
    order = BlockOrder(blocks=blocks, seed=seed, epoch=epoch)
    return order.slice(0, len(order)).tolist()


def blocks_read(blocks: Blocks, samples: Sequence[int]) -> list[int]:
    found: list[int] = (np.searchsorted(blocks.starts, samples, side="right") - 1).tolist()
    return found


def stands_of(order: BlockOrder) -> list[list[int]]:
    """The samples of each stand of the window."""
    bounds = [0, *order._ends.tolist()]
    return [order.slice(*bound).tolist() for bound in pairwise(bounds)]


@given(blocks=sliding(), seed=SEEDS, epoch=st.integers(0, 10**6))
@settings(deadline=None)
def test_an_epoch_has_each_sample_once(blocks: Blocks, seed: int, epoch: int) -> None:
    assert sorted(whole(blocks, seed, epoch)) == list(range(blocks.num_samples))


@given(blocks=sliding(), seed=SEEDS)
@settings(deadline=None, max_examples=30)
def test_a_window_holds_so_many_blocks_and_takes_in_a_few_at_a_time(
    blocks: Blocks, seed: int
) -> None:
    stands = stands_of(BlockOrder(blocks=blocks, seed=seed, epoch=0))
    held = [{*blocks_read(blocks, stand)} for stand in stands]
    assert max(map(len, held)) <= blocks.window_blocks
    num_new = max(len(now - before) for before, now in pairwise(held))
    num_samples = np.diff(blocks.starts)
    if num_samples.min() >= 16:  # smaller ones may be missing from a stand they take part in
        assert num_new <= max(1, blocks.window_blocks // 16)
    for block, size in enumerate(num_samples.tolist()):
        taken = [blocks_read(blocks, stand).count(block) for stand in stands]
        assert max(taken) <= -(-size // min(16, blocks.window_blocks))


@pytest.mark.parametrize("window", [1, 2, 8, 16, 31, 32, 64])
def test_who_holds_a_window_decodes_each_block_about_once(window: int) -> None:
    """Least recently used goes first; only the ring's end is read again, at the beginning."""
    num_blocks = 300
    blocks = blocks_of([40 + number % 50 for number in range(num_blocks)], window)
    held: dict[int, None] = {}
    num_reads: Counter[int] = Counter()
    for block in blocks_read(blocks, whole(blocks, seed=5)):
        num_reads[block] += held.pop(block, 1) or 0
        held[block] = None
        while len(held) > blocks.held_blocks:
            del held[next(iter(held))]
    assert len(num_reads) == num_blocks
    assert sum(num_reads.values()) <= num_blocks + window


@given(blocks=sliding(), seed=SEEDS, data=st.data())
@settings(deadline=None)
def test_a_slice_holds_what_single_reads_give(
    blocks: Blocks, seed: int, data: st.DataObject
) -> None:
    order = BlockOrder(blocks=blocks, seed=seed, epoch=1)
    start = data.draw(st.integers(0, len(order)))
    stop = data.draw(st.integers(start, min(len(order), start + 40)))
    assert order.slice(start, stop).tolist() == [order[place] for place in range(start, stop)]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:  # B37
    blocks = blocks_of([5] * 8, 3)
    orders = {tuple(whole(blocks, seed, epoch)) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16
    first_blocks = {blocks_read(blocks, order[:1])[0] for order in orders}
    assert len(first_blocks) > 3, "blocks change their places, not only the samples in them"
    assert whole(blocks, 3, 2) == whole(blocks, 3, 2)


def test_an_order_never_changes_between_versions() -> None:
    """A run that resumes under a newer version of this code must meet the order it began with."""
    found = whole(blocks_of([2, 0, 3, 1, 4], 2), seed=1, epoch=2)
    assert found == [5, 7, 9, 1, 0, 2, 4, 3, 6, 8]
    billion = Blocks(starts=np.arange(0, 10**9 + 1, 1000))
    found = BlockOrder(blocks=billion, seed=1, epoch=2).slice(10**9 - 3, 10**9).tolist()
    assert found == [799116665, 893665979, 578622122]


def test_samples_of_a_window_are_mixed() -> None:
    """Read one block after another, a batch would hold the samples of a single document."""
    blocks = blocks_of([160] * 100, 32)
    order = whole(blocks, seed=4)
    found = blocks_read(blocks, order)
    for begin in range(0, len(order) - 320, 320):
        stretch = Counter(found[begin : begin + 320])
        assert 28 <= len(stretch) <= 36, "about a window of blocks, at both ends too"
        assert max(stretch.values()) < 40
    num_changes = sum(a != b for a, b in pairwise(found))
    assert 0.95 < num_changes / len(found) < 0.98, "31 of 32 neighbours are of another block"
    apart = np.abs(np.diff(order))
    assert (apart == 1).mean() < 0.01, "neighbours in the data are apart in the order"


def test_a_single_window_is_the_order_of_a_whole_epoch() -> None:
    """So that a small corpus has the same order whether or not it tells of its blocks."""
    stream = SampleStream(num_samples=18, seed=9, blocks=blocks_of([5, 6, 7], 3))
    plain = EpochOrder(num_samples=18, seed=9, epoch=0).slice(0, 18).tolist()
    assert [index for _, index in stream.indices(0, 18)] == plain
    blocks = blocks_of([5, 6, 7], 2)
    with_window = SampleStream(num_samples=18, seed=9, blocks=blocks)
    assert [index for _, index in with_window.indices(0, 18)] == whole(blocks, 9)
    with pytest.raises(ValueError, match="more blocks than a window of 3 holds, found 3"):
        BlockOrder(blocks=blocks_of([5, 6, 7], 3), seed=9, epoch=0)


def test_without_shuffling_blocks_do_not_matter() -> None:
    stream = SampleStream(num_samples=4, seed=0, shuffle=False, blocks=blocks_of([2, 2], 1))
    assert stream.indices(2, 4) == [(0, 2), (0, 3), (1, 0), (1, 1)]


@given(
    sizes=SIZES,
    window=WINDOWS,
    global_batch=st.integers(1, 20),
    micro=st.integers(1, 7),
    worlds=st.lists(st.integers(1, 6), min_size=1, max_size=12),
    seed=st.integers(0, 9),
)
@settings(deadline=None, max_examples=60)
def test_any_history_of_world_sizes_trains_each_sample_once_an_epoch(
    sizes: list[int], window: int, global_batch: int, micro: int, worlds: list[int], seed: int
) -> None:
    """B28 B30 B35 B36 B37: also over the end of an epoch, in equally many micro-batches."""
    num_samples = sum(sizes)
    blocks = blocks_of(sizes, window)
    found: list[tuple[int, int]] = []
    for world_size in worlds:
        # A stream for each rank of each generation, as in processes that know no others.
        position = len(found)
        counts = set()
        for rank in range(world_size):
            stream = SampleStream(num_samples=num_samples, seed=seed, blocks=blocks)
            start, stop = share(global_batch, world_size, rank)
            spans = micro_batches(global_batch, micro, world_size, rank)
            counts.add(len(spans))
            assert sum(end - begin for begin, end in spans) == stop - start
            for begin, end in spans:
                found += stream.indices(position + begin, end - begin)
        assert len(counts) == 1
    assert len(found) == global_batch * len(worlds)
    for epoch in range(-(-len(found) // num_samples)):
        trained = [index for number, index in found if number == epoch]
        full = found[-1][0] > epoch or len(found) % num_samples == 0
        assert len({*trained}) == len(trained) == (num_samples if full else len(trained))
    assert found == SampleStream(num_samples=num_samples, seed=seed, blocks=blocks).indices(
        0, len(found)
    )


@pytest.mark.parametrize("num_blocks", [1000, 10**6])
def test_a_billion_samples_open_in_little_memory(num_blocks: int) -> None:
    blocks = Blocks(starts=np.linspace(0, 10**9, num_blocks + 1).astype(np.int64))
    tracemalloc.start()
    stream = SampleStream(num_samples=10**9, seed=0, blocks=blocks)
    found = stream.indices(10**9 - 512, 1024)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len({*found}) == 1024 and [epoch for epoch, _ in found] == [0] * 512 + [1] * 512
    assert peak_bytes < 40 << 20


@pytest.mark.parametrize(
    ("starts", "window", "expected"),
    [
        ([0, 5], 0, "window must hold 1 block or more, found 0"),
        ([0, 5, 4], 1, "not descend"),
        ([1, 5], 1, "begin with 0"),
        ([0], 1, "end with the number"),
    ],
)
def test_blocks_that_are_none(starts: list[int], window: int, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        Blocks(starts=np.array(starts), window_blocks=window)


def test_what_lies_outside() -> None:
    blocks = blocks_of([3, 2], 1)
    order = BlockOrder(blocks=blocks, seed=0, epoch=0)
    for position in (-1, 5):
        with pytest.raises(IndexError, match="outside"):
            order[position]
    with pytest.raises(IndexError, match="outside"):
        order.slice(3, 6)
    with pytest.raises(ValueError, match="epoch"):
        BlockOrder(blocks=blocks, seed=0, epoch=-1)
    with pytest.raises(ValueError, match="hold num_samples = 6"):
        SampleStream(num_samples=6, seed=0, blocks=blocks)
    with pytest.raises(ValueError, match="num_samples"):
        SampleStream(num_samples=0, seed=0, blocks=Blocks(starts=np.array([0, 0])))
