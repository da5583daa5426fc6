"""Sources without random access: the same samples at any size, found again by count."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from elastic.training.data import GlobalLoader, MicroBatch
from elastic.training.stream_reader import SourceChanged

# What torchdata says of itself, and of this machine's few cores.
pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]
SEED = 3
Ids = list[tuple[int, int]]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


class Stream:
    """Pass p gives its items in an order of its own, of which each tells pass and index."""

    def __init__(self, num_items: int, by_pass: dict[int, int] | None = None) -> None:
        self.num_items = num_items
        self.by_pass = by_pass or {}
        self.epoch = -1
        self.broken: set[tuple[int, int]] = set()
        self.num_read = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def items(self, epoch: int) -> Ids:
        indices = list(range(self.by_pass.get(epoch, self.num_items)))
        random.Random(epoch).shuffle(indices)
        return [(epoch, index) for index in indices]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for item in self.items(self.epoch):
            if item in self.broken:
                raise OSError(f"item {item} is on a lost disk")
            self.num_read += 1
            drawn = torch.rand(()).item() + np.random.rand() + random.random()
            yield {"pass": item[0], "labels": item[1], "drawn": drawn}


class Skipping(Stream):
    """Can leave items out without reading them."""

    left_out = 0

    def skip(self, count: int) -> Stream:
        rest = Stream(0)
        rest.items = lambda _epoch: self.items(self.epoch)[count:]  # type: ignore[method-assign]
        self.left_out += count
        self.rest = rest
        return rest


class SharesOut(IterableDataset[Any]):
    """Gives each loader process a part, as torch's documentation advises."""

    def __init__(self, source: Stream) -> None:
        self.source = source

    def set_epoch(self, epoch: int) -> None:
        self.source.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        told = get_worker_info()
        for number, item in enumerate(self.source):
            if told is None or number % told.num_workers == told.id:
                yield item


def loader_of(source: Any, **changed: Any) -> GlobalLoader:
    arguments: dict[str, Any] = {
        "global_batch": 3,
        "micro_batch": 2,
        "seed": SEED,
        "world_rank": 0,
        "world_size": 1,
    }
    return GlobalLoader(source, **{**arguments, **changed})


def ids(step: list[MicroBatch]) -> Ids:
    return [
        (epoch, index)
        for micro in step
        if not micro.is_padding
        for epoch, index in zip(
            micro.batch["pass"].tolist(), micro.batch["labels"].tolist(), strict=True
        )
    ]


@dataclass
class History:
    """A run by hand: stretches at any size, each resumed from the state of the one before."""

    source: Any
    steps: list[Ids] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=lambda: {"samples": 0})
    epochs: list[int] = field(default_factory=list)

    def train(self, num_steps: int, *, world_size: int = 1, **changed: Any) -> History:
        resumed = {"samples_done": self.state["samples"], "state": self.state}
        loaders = [
            loader_of(self.source, **resumed, world_rank=rank, world_size=world_size, **changed)
            for rank in range(world_size)
        ]
        for of_ranks in zip(*map(iter, loaders), strict=False):
            assert len({len(step) for step in of_ranks}) == 1
            self.steps.append([item for step in of_ranks for item in ids(step)])
            states = [loader.state for loader in loaders]
            assert all(state == states[0] for state in states), "all ranks know the same"
            self.state = states[0]
            self.epochs.append(loaders[-1].epoch)
            num_steps -= 1
            if num_steps == 0:
                break
        for loader in loaders:
            loader.close()
        return self


def reference(source: Stream, num_passes: int = 40) -> Ids:
    return [item for epoch in range(num_passes) for item in source.items(epoch)]


def flat(steps: list[Ids]) -> Ids:
    return [item for step in steps for item in step]


def check(history: History, source: Stream) -> None:
    found = flat(history.steps)
    assert found == reference(source)[: len(found)]


# --- position ----------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(2, 1, 3), (1, 3, 2)])
def test_world_sizes_change_within_a_pass(sizes: tuple[int, ...]) -> None:  # B28
    source = Stream(31)
    history = History(source)
    for world_size in sizes:
        history.train(2, world_size=world_size, global_batch=4)
    check(history, source)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_resume_at_the_end_of_a_pass(num_workers: int) -> None:
    """B30: the pass that is over is neither left out nor read twice."""
    for num_items in (7, 8):
        for first in (3, 4, 5):  # before, at or after the end of the first pass
            source = Stream(num_items)
            history = History(source).train(first, global_batch=2, num_workers=num_workers)
            check(history.train(9, global_batch=2, num_workers=num_workers), source)


def test_resumes_within_one_pass_add_up() -> None:  # B31
    source = Stream(120)
    history = History(source)
    for num_steps in (10, 5, 2, 13):
        history.train(num_steps)
    assert len(history.steps) == 30
    check(history, source)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_passes_after_a_resume_are_whole(num_workers: int) -> None:
    """B32: only the pass that was broken into is short."""
    source = Stream(20)
    history = History(source).train(7, global_batch=2, num_workers=num_workers)
    history.train(23, global_batch=2, num_workers=num_workers)
    found = flat(history.steps)
    assert [sum(epoch == number for epoch, _ in found) for number in range(3)] == [20, 20, 20]
    check(history, source)


def test_a_position_is_right_at_any_moment_also_with_prefetched_batches() -> None:  # B33
    source = Stream(8)
    history = History(source)
    for _ in range(6):
        history.train(1, num_workers=4)
    check(history, source)


@pytest.mark.parametrize("source", [Stream(20), SharesOut(Stream(20))], ids=["plain", "shares"])
def test_the_number_of_loader_processes_may_change(source: Any) -> None:
    """B34; also of a source that would share its samples out among them."""
    history = History(source)
    for num_workers in (2, 0, 1, 3):
        history.train(3, num_workers=num_workers)
    check(history, source if isinstance(source, Stream) else source.source)


def test_stopping_after_any_step() -> None:  # B36
    source = Stream(29)
    whole = History(source).train(12, global_batch=6).steps
    for stop in range(1, 12):
        history = History(source).train(stop, global_batch=6).train(12 - stop, global_batch=6)
        assert history.steps == whole


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("by_pass", [{}, {1: 3, 2: 11}, {0: 1, 1: 1}])
def test_the_pass_is_part_of_the_position(num_workers: int, by_pass: dict[int, int]) -> None:
    """B39 B37: each pass has an order of its own, and batches of 3 cross from one to the next."""
    source = Stream(8, by_pass)
    for stop in range(1, 9):
        history = History(source).train(stop, num_workers=num_workers)
        check(history.train(5, num_workers=num_workers, world_size=3), source)
        ended = [sum(len(source.items(p)) for p in range(n + 1)) for n in range(20)]
        known = [sum(end < 3 * step for end in ended) for step in range(1, stop + 6)]
        assert history.epochs == known


def test_iterating_again_goes_on() -> None:
    source = Stream(8)
    loader = loader_of(source)
    found: Ids = []
    for _ in range(3):
        for step in loader:
            found += ids(step)
            break
    assert found == reference(source)[:9]
    assert source.num_read <= 1 + 9, "one to look at, and none again"


def test_a_state_without_passes_is_found_from_the_beginning() -> None:
    source = Stream(8, {1: 5})
    for samples in (6, 8, 12, 14):
        loader = loader_of(source, samples_done=samples)
        found = flat([ids(step) for step, _ in zip(loader, range(4), strict=False)])
        assert found == reference(source)[samples : samples + 12]


# --- reading -----------------------------------------------------------------------------------


def test_what_a_source_can_leave_out_is_not_read() -> None:
    source = Skipping(1000)
    history = History(source).train(300)
    source.num_read = source.left_out = 0
    check(history.train(3), source)
    assert (source.left_out, source.num_read, source.rest.num_read) == (900, 1, 9)
    history = History(source).train(334)  # two samples into the second pass
    source.num_read = source.left_out = 0
    check(history.train(3), source)
    assert (source.left_out, source.rest.num_read) == (2, 9)


def test_a_resume_at_the_end_of_what_can_be_left_out() -> None:
    source = Skipping(9)
    check(History(source).train(3).train(3), source)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("bad", [6, 7])
def test_a_failed_read_is_no_end_of_a_pass(num_workers: int, bad: int) -> None:
    """B36: a generator that has raised looks as if it were at its end."""
    source = Stream(20)
    expected = reference(source)
    source.broken = {expected[bad]}
    loader = loader_of(source, num_workers=num_workers)
    steps = iter(loader)
    assert ids(next(steps)) == expected[:3]
    assert ids(next(steps)) == expected[3:6]
    with pytest.raises(OSError, match="lost disk"):
        next(steps)
    assert loader.position == 6
    source.broken = set()
    assert [ids(next(iter(loader))) for _ in range(5)] == [
        expected[start : start + 3] for start in range(6, 21, 3)
    ]


def test_a_source_that_has_become_shorter() -> None:
    history = History(Stream(20)).train(5)
    history.source = Stream(10)
    with pytest.raises(SourceChanged, match="ended after 10 samples of pass 0, of which 15 were"):
        history.train(1)


def test_what_a_source_draws_belongs_to_the_sample() -> None:
    """Else a resume, another world size or another number of processes would change the data."""

    def drawn(**changed: Any) -> dict[tuple[int, int], float]:
        found = {}
        world_size = changed.pop("world_size", 1)
        for rank in range(world_size):
            loader = loader_of(Stream(8), world_rank=rank, world_size=world_size, **changed)
            for _, step in zip(range(6), loader, strict=False):
                for micro in step:
                    if not micro.is_padding:
                        keys = ids([micro])
                        found |= dict(zip(keys, micro.batch["drawn"].tolist(), strict=True))
        return found

    expected = drawn()
    assert len(expected) == len({*expected.values()}) == 18
    assert drawn(world_size=3) == drawn(num_workers=2) == drawn(micro_batch=1) == expected
    before = random.getstate(), np.random.get_state()[2], torch.get_rng_state().tolist()
    drawn()
    assert (random.getstate(), np.random.get_state()[2], torch.get_rng_state().tolist()) == before


# --- bad input ---------------------------------------------------------------------------------


def test_sources_that_cannot_be_read_again() -> None:
    with pytest.raises(ValueError, match="a generator can be read once only"):
        loader_of({"labels": index} for index in range(9))
    with pytest.raises(ValueError, match="Stream gave no sample in pass 0"):
        loader_of(Stream(0))
    with pytest.raises(ValueError, match=r"map-style dataset.*or an iterable, found int"):
        loader_of(3)


def test_a_pass_that_is_empty() -> None:
    with pytest.raises(ValueError, match="Stream gave no sample in pass 1"):
        History(Stream(4, {1: 0})).train(3)
