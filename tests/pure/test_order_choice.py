"""Which order a loader takes, and that no run goes on in another one than it began with."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.training.block_order import DEFAULT_WINDOW_BLOCKS, Blocks
from elastic.training.order import stream_of
from elastic.training.order_choice import (
    BEFORE_BLOCKS,
    GlobalBatchDiffers,
    OrderDiffers,
    changed_batch,
    check_reading,
    choose,
    facts,
)
from elastic.training.sources.data_files import file_facts


class InBlocks:
    """A dataset that tells of its blocks, and is told how many to keep."""

    def __init__(self, num_blocks: int, of_block: int = 3) -> None:
        self.block_starts = np.arange(num_blocks + 1) * of_block
        self.kept = 0

    def __len__(self) -> int:
        return int(self.block_starts[-1])

    def keep_blocks(self, num_blocks: int) -> None:
        self.kept = num_blocks


def test_a_dataset_that_tells_its_blocks_is_shuffled_through_a_window() -> None:
    dataset = InBlocks(200)
    stream = choose(dataset, seed=1)
    assert stream.window is not None and stream.window.window_blocks == DEFAULT_WINDOW_BLOCKS == 64
    assert dataset.kept == 76
    assert choose(dataset, seed=1, window=8).window != stream.window
    assert dataset.kept == 11
    assert choose(dataset, seed=1, window=200).window is None
    assert dataset.kept == 200, "shuffled as a whole, all of it is in use at once"
    assert choose(dataset, seed=1, shuffle=False).window is None
    assert dataset.kept == 1
    with pytest.raises(ValueError, match="window must be 1 block or more, found 0"):
        choose(dataset, seed=1, window=0)


def test_any_other_dataset_is_shuffled_as_a_whole() -> None:
    assert choose([1] * 1000, seed=1).window is None


def test_a_window_that_would_mean_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="window=5 counts blocks, and a list has none"):
        choose([1] * 1000, seed=1, window=5)
    with pytest.raises(ValueError, match=r"window=5 .* shuffle=False that they are not"):
        choose(InBlocks(200), seed=1, window=5, shuffle=False)


@pytest.mark.parametrize("window", [None, 7])
def test_a_run_goes_on_in_the_order_it_began_with(window: int | None) -> None:
    began = json.loads(json.dumps(facts(choose(InBlocks(200), seed=1, window=window))))
    now = choose(InBlocks(200), seed=1, began=began)
    assert now.window is not None and now.window.window_blocks == (window or 64)
    assert now.indices(0, 20) == choose(InBlocks(200), seed=1, window=window).indices(0, 20)


def test_a_run_from_before_there_were_blocks_keeps_its_order() -> None:
    plain = choose([0] * 600, seed=1).indices(0, 50)
    dataset = InBlocks(200)
    assert choose(dataset, seed=1, began=BEFORE_BLOCKS).indices(0, 50) == plain
    assert dataset.kept == 0, "not all of a corpus, which may not fit in memory"
    with pytest.raises(OrderDiffers, match="none when it began, 64 now"):
        choose(InBlocks(200), seed=1, began=BEFORE_BLOCKS, window=64)


@pytest.mark.parametrize(
    ("changed", "dataset", "expected"),
    [
        ({}, InBlocks(201), "samples in the dataset: 600 when it began, 603 now; digest of the b"),
        ({}, InBlocks(100, 6), r"\(digest of the blocks .*: \w+ when it began, \w+ now\)"),
        ({}, [0] * 600, "blocks in a window of the order: 64 when it began, none now"),
        ({"window": 32}, InBlocks(200), r"\(blocks in a window of the order: 64 .* 32 now\)"),
        ({"shuffle": False}, InBlocks(200), "shuffle: True when it began, False now"),
    ],
)
def test_another_order_is_refused(changed: Any, dataset: Any, expected: str) -> None:
    began = facts(choose(InBlocks(200), seed=1))
    with pytest.raises(OrderDiffers, match=expected) as refused:
        choose(dataset, seed=1, began=began, name="mine", **changed)
    for told in ("loader 'mine'", "shuffle=, window=", "(name=)", "load_from="):
        assert told in str(refused.value)


class OfFiles(InBlocks):
    """As files would be read: those at `paths` below `url`, holding so much."""

    def __init__(self, paths: list[str], sizes: list[int], url: str = "/data") -> None:
        super().__init__(10)
        self.file_facts = file_facts(url, paths, sizes)


BEGAN_WITH = OfFiles(["a/x.jsonl", "b.jsonl"], [7, 8])


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (OfFiles(["a/x.jsonl", "b.jsonl", "c.jsonl"], [7, 8, 0]), r"\(files: 2 when .*, 3 now; "),
        (OfFiles(["a/x.jsonl", "c.jsonl"], [7, 8]), r"\(digest of the names of the files .*\w"),
        (OfFiles(["b.jsonl", "a/x.jsonl"], [7, 8]), r"\(digest of the names of the files .*\w"),
        (OfFiles(["a/x.jsonl", "b.jsonl"], [8, 7]), r"\(digest of how much each file holds.*\w"),
    ],
)
def test_other_files_with_as_many_samples_are_refused(now: OfFiles, expected: str) -> None:
    began = json.loads(json.dumps(facts(choose(BEGAN_WITH, seed=1), BEGAN_WITH)))
    with pytest.raises(OrderDiffers, match=expected):
        choose(now, seed=1, began=began)


def test_files_that_have_moved_or_that_nobody_told_of_are_the_same() -> None:
    began = facts(choose(BEGAN_WITH, seed=1), BEGAN_WITH)
    moved = OfFiles(["a/x.jsonl", "b.jsonl"], [7, 8], url="s3://bucket/elsewhere")
    choose(moved, seed=1, began=began)
    choose(InBlocks(10), seed=1, began=began)
    choose(BEGAN_WITH, seed=1, began=facts(choose(InBlocks(10), seed=1)))
    # A file is the same one by its own path and as the only one of its folder.
    assert file_facts("/data/x.jsonl", [""], [7]) == file_facts("/data", ["x.jsonl"], [7])


def test_a_position_by_index_is_none_by_count() -> None:
    by_index = {"samples": 6, "order": facts(choose([0] * 9, seed=1))}
    by_count: dict[str, Any] = {"samples": 6, "passes": []}
    check_reading("mine", by_index, by_count=False)
    check_reading("mine", by_count, by_count=True)
    for by in (True, False):
        check_reading("mine", {"samples": 6}, by_count=by)  # of a version that told neither
    with pytest.raises(OrderDiffers, match=r"loader 'mine' began with a dataset .* an iterable"):
        check_reading("mine", by_index, by_count=True)
    with pytest.raises(OrderDiffers, match=r"loader 'mine' began with an iterable .* a dataset"):
        check_reading("mine", by_count, by_count=False)


def test_another_global_batch_is_refused_unless_it_is_accepted() -> None:
    state = {"samples": 64, "global_batch": 32}
    assert changed_batch("mine", state, 32, ()) == ""
    assert changed_batch("mine", {"samples": 64}, 64, ()) == "", "of a version that told none"
    changed = "global_batch of loader 'mine': was 32, now 64"
    with pytest.raises(GlobalBatchDiffers, match=f"{changed}.*accept_changes=.*--accept-change"):
        changed_batch("mine", state, 64, ("lr", "global_batch.x"))
    for accepted in ("global_batch", "data.global_batch"):
        assert changed_batch("mine", state, 64, ("lr", accepted)) == changed


def test_other_blocks_do_not_matter_where_the_epoch_is_shuffled_as_a_whole() -> None:
    began = facts(choose(InBlocks(10, 60), seed=1))
    assert choose(InBlocks(20, 30), seed=1, began=began).window is None
    with pytest.raises(OrderDiffers):
        choose(InBlocks(200, 3), seed=1, began=began, window=64)


@pytest.mark.parametrize("dataset", [InBlocks(200), InBlocks(10), [0] * 77], ids=len)
@pytest.mark.parametrize("shuffle", [True, False])
def test_the_facts_of_a_stream_make_an_equal_one(dataset: Any, shuffle: bool) -> None:
    stream = choose(dataset, seed=5, shuffle=shuffle)
    told = json.loads(json.dumps(stream.facts()))
    assert stream_of(told).indices(70, 700) == stream.indices(70, 700)
    assert stream_of(told).facts() == told


@given(
    sizes=st.lists(st.integers(0, 2**40), min_size=1, max_size=30).filter(any),
    window=st.integers(1, 99),
)
def test_blocks_come_back_from_their_text(sizes: list[int], window: int) -> None:
    blocks = Blocks(starts=np.cumsum([0, *sizes]), window_blocks=window)
    again = Blocks.of_text(blocks.text, window)
    assert again.starts.tolist() == blocks.starts.tolist()
    assert (again.digest, again.window_blocks) == (blocks.digest, window)


def test_a_text_of_no_blocks() -> None:
    for text in ("nothing", "eJw=", "AAAA"):
        with pytest.raises(ValueError, match="cannot read the sizes of blocks"):
            Blocks.of_text(text, 1)
    alike = Blocks(starts=np.arange(10**6 + 1) * 512)
    assert len(alike.text) < 20_000
