"""Retention: complete checkpoints only, newest kept, and never the last one."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.policy.retention import Retention
from elastic.storage.checkpoints import Catalog, FileDigest, Manifest
from elastic.storage.completeness import sha256
from elastic.storage.filesystem import Filesystem
from elastic.storage.pins import pin, unpin
from elastic.storage.retention import apply, make_room

STEPS = st.lists(st.integers(0, 10_000), max_size=20)


@pytest.fixture(params=["local", "object"])
def catalog(request: pytest.FixtureRequest, tmp_path: Path) -> Catalog:
    url = str(tmp_path) if request.param == "local" else f"memory://{uuid.uuid4().hex}"
    return Catalog(Filesystem.at(url), "me")


def write_attempt(catalog: Catalog, step: int) -> tuple[Manifest, str]:
    path = catalog.begin(step, 0, 0)
    catalog.fs.write_bytes(f"{path}/shard", b"x")
    manifest = Manifest(
        run_id="me",
        step=step,
        world_size=1,
        generation=0,
        attempt=0,
        created_s=0.0,
        counters={},
        tensors={},
        files=[FileDigest(path="shard", bytes=1, digest=sha256(b"x"))],
    )
    return manifest, path


def save(catalog: Catalog, *steps: int) -> None:
    for step in steps:
        catalog.commit(*write_attempt(catalog, step))


@pytest.mark.parametrize(
    ("policy", "steps", "protected", "removed"),
    [
        (Retention(), [10, 20, 30, 40], [], [10]),
        (Retention(keep=1), [10, 20, 30], [], [10, 20]),
        (Retention(keep=2), [9, 1000, 90, 100], [], [9, 90]),
        (Retention(keep=5), [10, 20], [], []),
        (Retention(keep=1), [], [], []),
        (Retention(keep=-1), [10, 20, 30], [], []),
        (Retention(keep=1), [10, 20, 30], [10], [20]),
        (Retention(keep=1), [10, 20, 30], [15], [10, 20]),
        (Retention(keep=1, keep_every=20), [10, 20, 30, 40, 50], [], [10, 30]),
        (Retention(keep=-1, keep_every=20), [10, 20], [], []),
    ],
)
def test_what_goes(
    policy: Retention, steps: list[int], protected: list[int], removed: list[int]
) -> None:
    assert policy.to_remove(steps, protected) == removed


@pytest.mark.parametrize("keep", [0, -2])
def test_keeping_none_cannot_be_asked_for(keep: int) -> None:  # B16
    with pytest.raises(ValueError, match=f"at least 1, or -1 to keep all.* found {keep}"):
        Retention(keep=keep)


@pytest.mark.parametrize("keep_every", [0, -5])
def test_an_archive_of_every_zeroth_is_refused(keep_every: int) -> None:
    with pytest.raises(ValueError, match=f"keep_every must be at least 1 step.* {keep_every}"):
        Retention(keep_every=keep_every)


@given(STEPS, st.sets(st.integers(0, 10_000)), st.integers(-1, 5), st.none() | st.integers(1, 50))
def test_what_may_never_go(
    steps: list[int], protected: set[int], keep: int, keep_every: int | None
) -> None:  # B16, B21
    policy = Retention(keep=keep or 1, keep_every=keep_every)
    removed = policy.to_remove(steps, protected)
    assert removed == sorted(set(removed))
    assert set(removed) <= set(steps) - protected
    left = set(steps) - set(removed)
    assert not steps or max(steps) in left
    assert len(left) >= min(len(set(steps)), abs(policy.keep))
    assert all(step in left for step in steps if keep_every and step % keep_every == 0)


def test_a_save_in_flight_does_not_count(catalog: Catalog) -> None:  # B21
    policy = Retention(keep=1)
    save(catalog, 10)
    manifest, path = write_attempt(catalog, 20)
    assert apply(catalog, policy, set()) == []
    assert catalog.complete_steps() == [10]
    catalog.commit(manifest, path)
    # A reader still loads 10.
    assert apply(catalog, policy, {10}) == []
    assert catalog.fs.read_bytes(f"{catalog.data_path(10)}/shard") == b"x"
    assert apply(catalog, policy, set()) == [10]
    assert catalog.complete_steps() == [20]


def test_only_complete_checkpoints_count_and_go(catalog: Catalog) -> None:  # B21
    save(catalog, 10, 20, 30, 40)
    catalog.fs.remove_tree(f"{catalog.data_path(40)}/shard")
    catalog.fs.write_bytes("checkpoints/step-50/shard", b"leftover")
    catalog.quarantine(30, "bad")
    assert apply(catalog, Retention(keep=1), set()) == [10]
    assert catalog.complete_steps() == [20]
    assert [found.step for found in catalog.list()] == [20, 30, 40, 50]


def test_order_is_that_of_numbers(catalog: Catalog) -> None:  # B16
    save(catalog, 9000, 10_000, 11_000)
    assert apply(catalog, Retention(keep=2), set()) == [9000]
    assert catalog.complete_steps() == [10_000, 11_000]


def test_room_is_made_of_what_would_go_and_never_of_the_newest(catalog: Catalog) -> None:  # B59
    for step in (10, 20, 30):
        save(catalog, step)
    assert make_room(catalog, Retention(keep=-1), 40, ()) == []
    assert make_room(catalog, Retention(keep=4), 40, ()) == []
    assert make_room(catalog, Retention(keep=3), 40, {10}) == []
    assert make_room(catalog, Retention(keep=3), 40, ()) == [10]
    pin(catalog, 20, time_s=0.0)
    assert make_room(catalog, Retention(keep=1), 40, ()) == []
    unpin(catalog.fs, 20)
    assert make_room(catalog, Retention(keep=1), 40, ()) == [20]
    assert catalog.complete_steps() == [30]


def test_a_removal_that_fails_is_left_to_the_next_commit(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(catalog, 10, 20, 30)
    remove = Catalog.remove

    def refuse(self: Catalog, step: int) -> None:
        if step == 20:
            raise PermissionError("no")
        remove(self, step)

    with monkeypatch.context() as refusing:
        refusing.setattr(Catalog, "remove", refuse)
        assert apply(catalog, Retention(keep=1), set()) == [10]
    assert apply(catalog, Retention(keep=1), set()) == [20]
