"""Random streams: continued bit-equal, or fresh, distinct and reproducible."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from elastic.training import jsonable, rng
from elastic.training.checkpoint import StateMismatch
from elastic.training.state import TrackedState
from tests.dist.small_run import restore, save, small, train

SEED = 1234


@pytest.fixture(autouse=True)
def _streams_of_the_test_run() -> Iterator[None]:
    before = rng.capture()
    yield
    rng.restore(before)


def draw(count: int = 20) -> list[tuple[float, ...]]:
    return [
        (
            random.random(),
            float(np.random.rand()),
            float(np.random.randn()),
            float(torch.rand(())),
            float(torch.nn.functional.dropout(torch.ones(8)).sum()),
        )
        for _ in range(count)
    ]


def test_streams_continue_bit_equal_through_json() -> None:  # B24
    rng.derive(SEED, 0, 3)
    draw(3)
    np.random.randn()  # leaves a cached second value behind
    saved = jsonable.dumps(rng.capture())
    expected = draw()
    rng.derive(SEED, 0, 3)
    assert rng.restore(jsonable.loads(saved)) == []
    assert draw() == expected


def test_capture_draws_nothing() -> None:
    rng.derive(SEED, 0, 0)
    expected = draw()
    rng.derive(SEED, 0, 0)
    rng.capture()
    assert draw() == expected


def broken(streams: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    streams = copy.deepcopy(streams)
    if value is None:
        del streams[name]
    else:
        streams[name] = value
    return streams


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("torch_cpu", None),
        ("torch_cpu", b""),
        ("torch_cpu", b"short"),
        ("numpy", None),
        ("numpy", ("MT19937", [1, 2, 3], 0, 0, 0.0)),
        ("python", (3, (1, 2), None)),
        ("python", "text"),
    ],
)
def test_broken_streams_are_refused_and_change_nothing(name: str, value: Any) -> None:  # B24
    rng.derive(SEED, 5, 0)
    saved = rng.capture()
    draw(2)
    expected_state = jsonable.dumps(rng.capture())
    with pytest.raises(rng.InvalidStreams, match="cannot be continued"):
        rng.restore(broken(saved, name, value))
    assert jsonable.dumps(rng.capture()) == expected_state


def resumed(saved: list[dict[str, Any]], step: int, world_size: int) -> list[list[Any]]:
    """The draws of every rank after a resume, as run.track makes them."""
    draws = []
    for rank in range(world_size):
        if rank < len(saved):
            rng.restore(saved[rank])
        else:
            rng.derive(SEED, step, rank)
        draws.append(draw(5))
    return draws


def test_new_ranks_get_streams_of_their_own() -> None:  # B26
    saved, expected = [], []
    for rank in range(2):
        rng.derive(SEED, 0, rank)
        draw(7)
        saved.append(rng.capture())
        expected.append(draw(5))
    first, second = resumed(saved, 7, 4), resumed(saved, 7, 4)
    assert first == second
    assert first[:2] == expected
    starts = []
    for rank in range(4):
        rng.derive(SEED, 0, rank)
        starts.append(draw(5))
    # Not one stream of one rank equals any other's, nor one from the start of the run.
    for kind in range(5):
        streams = [tuple(row[kind] for row in rank) for rank in (*first, *starts)]
        assert len(set(streams)) == len(streams), f"stream {kind}"
    assert resumed(saved, 8, 4)[2:] != first[2:]


def test_a_tracked_generator_is_one_more_stream() -> None:
    own: dict[str, Any] = {
        "torch": torch.Generator().manual_seed(1),
        "numpy": np.random.default_rng(1),
        "philox": np.random.Generator(np.random.Philox(1)),
        "older": np.random.RandomState(1),
        "python": random.Random(1),
    }

    def draw_own() -> list[float]:
        numbers = [float(own[name].normal()) for name in ("numpy", "philox", "older")]
        return [*numbers, float(torch.rand((), generator=own["torch"])), own["python"].random()]

    TrackedState(**own)
    rng.derive(SEED, 0, 0)  # the start of a run leaves them as they were made
    saved = jsonable.dumps(rng.capture())
    expected = [draw_own() for _ in range(3)]
    assert expected[0][-1] == random.Random(1).random()
    rng.restore(jsonable.loads(saved))
    assert [draw_own() for _ in range(3)] == expected
    fresh = []
    for rank in (0, 1, 0):
        rng.derive(SEED, 7, rank)
        fresh.append(draw_own())
    assert fresh[0] == fresh[2]
    assert len({*fresh[0], *fresh[1], *expected[0]}) == 15
    rng.follow({})
    assert "generators" not in rng.capture()


def test_a_stream_that_was_not_saved_is_still_each_ranks_own() -> None:  # B26
    """As the stream of a CUDA device is, in a checkpoint of a machine that has none."""
    rng.derive(SEED, 0, 0)
    saved = rng.capture()
    drawn = []
    for rank in (0, 1):
        noise = np.random.default_rng(1)
        TrackedState(noise=noise)
        rng.restore_or_derive(saved, SEED, 7, rank, lambda _: None)
        drawn.append(float(noise.normal()))
    rng.follow({})
    assert len({*drawn, float(np.random.default_rng(1).normal())}) == 3
    rng.restore(saved)
    rest = draw(2)
    rng.restore_or_derive(saved, SEED, 7, 1, lambda _: None)
    assert draw(2) == rest


def test_another_kind_of_generator_is_refused(tmp_path: Path) -> None:
    manifest = save(tmp_path, "a", TrackedState(noise=random.Random(1)))
    with pytest.raises(StateMismatch, match="noise: expected a RandomState, found a Random"):
        restore(tmp_path, "a", manifest, TrackedState(noise=np.random.RandomState(1)))


def test_the_step_after_a_resume_has_its_own_noise(tmp_path: Path) -> None:  # B27
    def noise() -> float:
        return float(torch.randn(()))

    tracked = TrackedState(model=small(sharded=False))
    rng.derive(SEED, 0, 0)
    reference = [noise() for _ in range(7)]
    manifest = save(tmp_path, "step-7", tracked, rank_plain={"rng": rng.capture()})
    reference.append(noise())

    resumed_state = TrackedState(model=small(sharded=False))  # seeds, as start-up code does
    rng.derive(SEED, 0, 0)
    restored = restore(tmp_path, "step-7", manifest, resumed_state)
    assert restored.rank_plain is not None
    rng.restore(restored.rank_plain["rng"])
    eighth = noise()
    assert eighth == reference[7]
    assert eighth not in reference[:7]


def test_saving_and_loading_draw_nothing(tmp_path: Path) -> None:  # B27
    model = small(sharded=False)
    optimizer = torch.optim.AdamW(model.parameters())
    counters = {"mean": torch.ones(2)}
    tracked = TrackedState(model=model, optimizer=optimizer, counters=counters)
    train(model, optimizer, range(1))
    rng.derive(SEED, 0, 0)
    before = jsonable.dumps(rng.capture())
    manifest = save(tmp_path, "a", tracked)
    optimizer.state.clear()
    restore(tmp_path, "a", manifest, tracked)
    assert jsonable.dumps(rng.capture()) == before
