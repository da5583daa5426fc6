"""Coverage: which snapshot is whole, what a group resumes from, and what it all takes."""

from __future__ import annotations

from elastic.policy.coverage import (
    Piece,
    Resume,
    Snapshot,
    Unneeded,
    buddy,
    choose,
    newest,
    room_bytes,
)


def piece(step: int, rank: int, *, generation: int = 0, world_size: int = 2) -> Piece:
    return Piece(generation=generation, step=step, world_rank=rank, world_size=world_size)


def snapshot(step: int, *nodes: tuple[str, ...], generation: int = 0) -> Snapshot:
    return Snapshot(generation=generation, step=step, nodes=nodes)


def test_the_newest_snapshot_counts_of_which_every_piece_is_somewhere() -> None:
    held = {
        "a": [piece(4, 0), piece(4, 1), piece(6, 0)],
        "b": [piece(4, 1), piece(6, 1), piece(8, 1)],
    }
    assert newest(held) == snapshot(6, ("a",), ("b",))
    del held["a"][2]
    assert newest(held) == snapshot(4, ("a",), ("a", "b"))
    assert newest({"b": held["b"]}) is None
    assert newest({}) is None


def test_pieces_of_two_groups_are_not_put_together() -> None:
    held = {"a": [piece(6, 0), piece(6, 1, generation=1)]}
    assert newest(held) is None
    assert newest({"a": [piece(6, 0, world_size=1), piece(6, 1)]}) == snapshot(6, ("a",))


def test_what_a_newer_generation_made_counts_before_what_an_older_one_made() -> None:
    """It has resumed somewhere, and what was made after that by the older one is not its past."""
    held = {"a": [piece(9, 0, world_size=1), piece(7, 0, world_size=1, generation=1)]}
    assert newest(held) == snapshot(7, ("a",), generation=1)


def test_the_newer_of_checkpoint_and_snapshot_is_resumed_and_memory_at_the_same_step() -> None:
    found = snapshot(6, ("a",))
    assert choose(5, found) == Resume(step=6, snapshot=found)
    assert choose(6, found) == Resume(step=6, snapshot=found)
    assert choose(7, found) == Resume(step=7)
    assert choose(7, None) == Resume(step=7)
    assert choose(None, None) == Resume(step=None)


def test_copies_go_to_the_next_node_of_the_ring() -> None:
    nodes = ["a", "a", "b", "c", "c"]
    assert [buddy(node, nodes) for node in "abc"] == ["b", "c", "a"]
    assert buddy("a", ["a", "a"]) is None
    assert buddy("d", nodes) is None


def test_a_rank_takes_two_pieces_on_its_node_and_two_on_another() -> None:
    assert room_bytes(100, 8, has_buddy=True) == 3200
    assert room_bytes(100, 8, has_buddy=False) == 1600


def test_only_what_is_older_than_a_whole_snapshot_and_what_failed_gives_its_place() -> None:
    unneeded = Unneeded(whole=piece(6, 0, generation=1), failed=piece(8, 0, generation=1))
    assert unneeded.has(piece(4, 1, generation=1))
    assert unneeded.has(piece(9, 1, generation=0))
    assert unneeded.has(piece(8, 0, generation=1))
    assert not unneeded.has(piece(6, 1, generation=1))
    assert not unneeded.has(piece(8, 1, generation=1))
    assert not Unneeded().has(piece(0, 0))
