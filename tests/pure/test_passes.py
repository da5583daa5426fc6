"""Passes over a source that ends where it ends: found again from any position, and foretold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.training.passes import Passes, foretold, is_foretold

LENGTHS = st.lists(st.integers(1, 9), max_size=8)


def of(lengths: list[int]) -> Passes:
    found = Passes()
    for length in lengths:
        found = found.ended(length)
    return found


def sample_at(lengths: list[int], position: int) -> tuple[int, int]:
    for epoch, length in enumerate(lengths):
        if position < length:
            return epoch, position
        position -= length
    return len(lengths), position


@given(lengths=LENGTHS, position=st.integers(0, 90))
def test_the_passes_before_a_position(lengths: list[int], position: int) -> None:
    known = of(lengths)
    assert (known.epoch, known.start) == (len(lengths), sum(lengths))
    ended = [n for n in range(len(lengths)) if sum(lengths[: n + 1]) <= position]
    assert known.before(position) == of(lengths[: len(ended)])
    assert Passes.of([list(run) for run in known.runs]) == known


@given(lengths=LENGTHS, start=st.integers(0, 60), count=st.integers(0, 60))
def test_each_sample_belongs_to_a_pass(lengths: list[int], start: int, count: int) -> None:
    """B39: the number of the pass is part of a position."""
    pieces = of(lengths).pieces(start, count)
    found = [(epoch, index) for epoch, begin, end in pieces for index in range(begin, end)]
    assert found == [sample_at(lengths, position) for position in range(start, start + count)]


@given(lengths=LENGTHS, more=LENGTHS, part=st.integers(1, 9))
def test_what_was_told_is_right_until_something_else_is_told(
    lengths: list[int], more: list[int], part: int
) -> None:
    """Whoever reads along, sample by sample, and tells when what was told no longer holds."""
    every = [*lengths, *more, part]
    told: dict[str, object] = {}
    for position in range(1, sum(every) + 1):
        ended = [n for n in range(len(every)) if sum(every[: n + 1]) < position]
        known = of(every[: len(ended)])
        now = {**known.facts(position), "samples_done": position}
        if not told or not is_foretold(told, now):
            told = now
        pieces = list(foretold(told, position).pieces(position - 1, 1))
        assert [(epoch, begin) for epoch, begin, _ in pieces] == [sample_at(every, position - 1)]


def test_passes_of_one_length_are_told_once() -> None:
    told = {**of([8]).facts(9), "samples_done": 9}
    assert all(
        is_foretold(told, {**of([8] * n).facts(8 * n + 1), "samples_done": 8 * n + 1})
        for n in range(1, 1000)
    )
    assert not is_foretold(told, {**of([8, 8]).facts(26), "samples_done": 26}), "longer already"
    assert not is_foretold(told, {**of([8, 7]).facts(16), "samples_done": 16})


@pytest.mark.parametrize("runs", [[[0, 1]], [[3, 0]], [[3, 1], [-1, 2]]])
def test_what_no_passes_are(runs: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="pairs of a length"):
        Passes.of(runs)
