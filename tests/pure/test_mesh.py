"""Which numbers of workers can be a group, how they are laid out, who waits, and what follows."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from elastic.policy import events as e
from elastic.policy.causes import Cause
from elastic.policy.fitting import Fitting
from elastic.policy.mesh import Mesh, checked_mesh
from elastic.policy.situation import Phase, Rules
from tests.pure.test_failure_histories import Toy
from tests.pure.test_policy import Drive

meshes = some.builds(
    Mesh, shard=some.none() | some.integers(1, 6), tensor=some.integers(min_value=1, max_value=5)
)
PAIRS = Rules(min_workers=1, max_workers=7, grow_interval_s=10.0, warm=True, mesh=Mesh(tensor=2))


@pytest.mark.parametrize(
    ("mesh", "sizes"),
    [
        (Mesh(), [1, 2, 3, 4, 5, 6, 7, 8, 9]),
        (Mesh(tensor=2), [2, 4, 6, 8]),
        (Mesh(shard=2), [1, 2, 4, 6, 8]),  # 1: a smaller replica, better than none
        (Mesh(shard=4), [1, 2, 3, 4, 8]),
        (Mesh(shard=2, tensor=2), [2, 4, 8]),
        (Mesh(shard=1, tensor=3), [3, 6, 9]),
    ],
)
def test_sizes_are_whole_groups_and_whole_replicas(mesh: Mesh, sizes: list[int]) -> None:
    assert [size for size in range(10) if mesh.fits(size)] == sizes


@given(mesh=meshes, most=some.integers(0, 200))
def test_the_largest_size_is_the_largest_that_fits(mesh: Mesh, most: int) -> None:
    fitting = [size for size in range(1, most + 1) if mesh.fits(size)]
    assert mesh.largest(most) == max(fitting, default=0)


@given(mesh=meshes, least=some.integers(1, 200))
def test_the_smallest_size_is_the_smallest_that_fits(mesh: Mesh, least: int) -> None:
    fitting = (size for size in range(least, least + 60) if mesh.fits(size))
    assert mesh.smallest(least) == next(fitting)


@given(mesh=meshes, most=some.integers(1, 60))
def test_a_shape_uses_every_worker_and_groups_share_their_samples(mesh: Mesh, most: int) -> None:
    size = mesh.largest(most)
    if not size:
        return
    shape = mesh.shape(size)
    assert shape["replicate"] * shape["shard"] * shape["tensor"] == size
    assert shape["tensor"] == mesh.tensor
    assert shape.names == mesh.shape(mesh.smallest(1)).names  # the same at every size
    places = [(shape.data_rank(rank), shape.tensor_rank(rank)) for rank in range(size)]
    assert len(set(places)) == size and places == sorted(places)
    assert {data for data, _ in places} == set(range(shape.data_size))
    if mesh.shard and size >= mesh.shard * mesh.tensor:
        assert shape["shard"] == mesh.shard


@pytest.mark.parametrize(
    ("mesh", "size", "told"),
    [
        (Mesh(), 3, "shard 3"),
        (Mesh(shard=2), 6, "replicate 3 x shard 2"),
        (Mesh(shard=2), 1, "replicate 1 x shard 1"),
        (Mesh(tensor=2), 6, "shard 3 x tensor 2"),
        (Mesh(shard=2, tensor=2), 8, "replicate 2 x shard 2 x tensor 2"),
    ],
)
def test_shapes_as_they_are_told(mesh: Mesh, size: int, told: str) -> None:
    assert str(mesh.shape(size)) == told


@pytest.mark.parametrize(
    ("mesh", "size", "told"),
    [
        (Mesh(tensor=2), 5, "5 workers cannot .*groups of 2: the number before is 4, .* next .* 6"),
        (Mesh(tensor=2), 1, "1 worker cannot be laid out as .*groups of 2: the next number is 2"),
        (Mesh(shard=8), 12, "before is 8, and the next number is 16"),
        (Mesh(shard=8), 0, "0 workers .*: the next number is 1"),
    ],
)
def test_a_size_that_cannot_be_is_refused_with_its_neighbours(
    mesh: Mesh, size: int, told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        mesh.shape(size)


@pytest.mark.parametrize("other", [{"tensor": 2}, (2, 2), None, Mesh, "shard"])
def test_what_is_no_mesh_is_refused_by_its_type(other: Any) -> None:
    assert checked_mesh(Mesh(shard=2)) == Mesh(shard=2)
    with pytest.raises(TypeError, match=f"be an elastic.Mesh, .* type {type(other).__name__}"):
        checked_mesh(other)


@pytest.mark.parametrize("bad", [{"tensor": 0}, {"shard": -1}, {"tensor": True}, {"shard": 1.5}])
def test_a_mesh_of_no_workers_is_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="a number of workers, from 1"):
        Mesh(**bad)


@pytest.mark.parametrize(
    ("mesh", "nodes", "stays"),
    [
        (Mesh(tensor=2), "aaabbbb", "aabbbb"),  # no group reaches over two nodes
        (Mesh(tensor=2), "aabbb", "aabb"),
        (Mesh(tensor=2), "aaabbb", "aaabbb"),  # one does: better than two who wait
        (Mesh(tensor=4), "aaaabbbbbbb", "aaaabbbb"),
        (Mesh(shard=2), "aabbc", "aabb"),
        (Mesh(shard=4), "aabbb", "abbb"),
        (Mesh(), "abc", "abc"),
    ],
)
def test_those_wait_who_would_split_a_group(mesh: Mesh, nodes: str, stays: str) -> None:
    waiting = mesh.left_out(list(nodes))
    assert "".join(one for index, one in enumerate(nodes) if index not in waiting) == stays


@given(mesh=meshes, nodes=some.lists(some.sampled_from("abcd"), max_size=40))
def test_no_more_wait_than_have_to(mesh: Mesh, nodes: list[str]) -> None:
    waiting = mesh.left_out(nodes)
    assert len(nodes) - len(waiting) == mesh.largest(len(nodes))
    assert waiting <= set(range(len(nodes)))


# --- what the driver makes of it ----------------------------------------------------------------


def died(drive: Drive, rank: int = 0) -> list[e.Command]:
    generation = drive.now.generation
    return drive(
        e.WorkerDied(generation=generation, world_rank=rank, node_lost=False, detail="killed")
    )


def planned(drive: Drive) -> str:
    return [
        one.reason
        for one in drive.commands
        if isinstance(one, e.Record) and one.kind == "generation_planned"
    ][-1]


def test_a_group_starts_at_the_largest_size_that_can_be() -> None:
    drive = Drive(PAIRS)
    assert drive(e.CapacitySeen(num_workers=5))[-1] == e.StartGroup(generation=0, world_size=4)


def test_it_waits_where_no_size_can_be_and_says_why() -> None:
    drive = Drive(PAIRS)
    drive(e.CapacitySeen(num_workers=1))
    assert drive.now.phase is Phase.WAITING
    assert "1 of at least 2 workers" in drive.now.reason
    assert "tensor-parallel groups of 2" in drive.now.reason


def test_survivors_re_form_at_the_next_smaller_size_and_one_waits() -> None:
    drive = Drive(PAIRS).running(4)
    assert died(drive)[-1] == e.Reform(generation=1, world_size=2)
    assert "1 of 3 wait: the workers are laid out as tensor-parallel groups of 2" in planned(drive)
    drive(e.GroupStarted(generation=1, world_size=2))
    # The place of the one that waits is there, that of the dead is not yet: no growth by one.
    assert drive(e.CapacitySeen(num_workers=3), after_s=60.0) == []
    assert drive(e.CapacitySeen(num_workers=5), after_s=60.0)[-1] == e.StartJoiners(num=2)


def test_survivors_that_make_no_group_are_held_for_one_more() -> None:
    drive = Drive(PAIRS).running(2)
    died(drive)
    assert drive.now.phase is Phase.HOLDING and "1 of at least 2" in drive.now.reason
    assert drive(e.CapacitySeen(num_workers=5))[-1] == e.StartJoiners(num=3)
    assert drive(e.JoinersReady(num=3))[-1] == e.Reform(generation=1, world_size=4)


def test_a_joiner_too_few_waits_for_another_and_nobody_stops_for_it() -> None:
    drive = Drive(PAIRS).running(4)
    assert drive(e.CapacitySeen(num_workers=7), after_s=60.0)[-1] == e.StartJoiners(num=2)
    assert drive(e.JoinersReady(num=1)) == []
    assert drive.now.phase is Phase.RUNNING
    assert drive(e.CapacitySeen(num_workers=7), after_s=60.0)[-1] == e.StartJoiners(num=1)
    assert isinstance(drive(e.JoinersReady(num=1))[-1], e.OrderLeave)
    assert "from 4 to 6 workers" in drive.now.reason
    left = [e.RankLeft(generation=0, world_rank=rank, step=9) for rank in range(4)]
    assert drive(*left)[-1] == e.Reform(generation=1, world_size=6)


def test_a_joiner_that_waits_takes_the_place_of_the_dead() -> None:
    drive = Drive(PAIRS).running(4)
    drive(e.CapacitySeen(num_workers=7), after_s=60.0)
    drive(e.JoinersReady(num=1))
    assert died(drive)[-1] == e.Reform(generation=1, world_size=4)


def test_a_joiner_left_over_after_a_re_form_stops_nobody() -> None:
    """Two of three joiners' peers die while it re-forms: the word that it stands ends nothing."""
    drive = Drive(dataclasses.replace(PAIRS, max_workers=4)).running(2)
    drive(e.CapacitySeen(num_workers=4), after_s=60.0)
    drive(e.WorkerDied(generation=0, world_rank=0, node_lost=False, detail="killed"))
    assert drive.now.phase is Phase.HOLDING
    drive(e.JoinersReady(num=1))
    assert drive.now.phase is Phase.REFORMING and drive.now.world_size == 2
    drive(e.JoinersReady(num=1))
    drive(e.GroupStarted(generation=1, world_size=2))
    assert drive.now.phase is Phase.RUNNING


def test_nodes_about_to_go_leave_a_group_that_can_be() -> None:
    drive = Drive(PAIRS).running(6)
    drive(e.NodesDraining(generation=0, world_ranks=frozenset({5}), detail="node b"))
    left = [e.RankLeft(generation=0, world_rank=rank, step=9) for rank in range(6)]
    assert drive(*left)[-1] == e.Reform(generation=1, world_size=4, without=frozenset({5}))


def test_who_take_the_places_of_those_who_go_make_whole_groups() -> None:
    drive = Drive(PAIRS).running(4)
    drive(
        e.Progressed(generation=0, step=7, step_s=1.0),
        e.NodesDraining(
            generation=0, world_ranks=frozenset({3}), detail="node b", remaining_s=300.0
        ),
    )
    assert drive(e.CapacitySeen(num_workers=5))[-1] == e.StartJoiners(num=1)


def test_nobody_is_told_to_be_a_group_of_none() -> None:
    drive = Drive(PAIRS).running(2)
    drive.now = dataclasses.replace(drive.now, fitting=Fitting(ran_out=frozenset({2, 4, 6})))
    assert died(drive)[-1] == e.StopGroup(generation=0)


def test_a_cold_start_without_room_is_tried_at_the_next_size_that_can_be() -> None:
    drive = Drive(dataclasses.replace(PAIRS, warm=False))
    drive(e.CapacitySeen(num_workers=6))
    drive(e.GroupStartFailed(generation=0, reason="no room", is_capacity=True))
    assert drive(e.CapacitySeen(num_workers=6))[-1] == e.StartGroup(generation=1, world_size=4)


def test_memory_and_mesh_rule_out_sizes_together() -> None:
    fitting = Fitting(mesh=Mesh(tensor=2)).stepped(8).without(4)
    assert [fitting.largest(most) for most in (9, 7, 5, 3)] == [8, 6, 0, 0]
    assert Fitting(mesh=Mesh(tensor=2)).without(4).largest(5) == 2
    assert fitting.bounds(1, 7) == (6, 6)
    assert Fitting(mesh=Mesh(tensor=2)).bounds(3, 7) == (4, 6)
    assert Fitting(mesh=Mesh(tensor=4)).bounds(5, 7) is None


class Meshed(Toy):
    """A toy cluster that knows of meshes, and where not all workers come that are asked for."""

    def perform(self, command: e.Command) -> None:
        if isinstance(command, e.StartGroup | e.Reform):
            assert self.rules.mesh.fits(command.world_size)
            assert self.rules.min_workers <= command.world_size <= self.rules.max_workers
        if isinstance(command, e.StartJoiners):
            assert 1 <= command.num <= self.rules.max_workers
            num = self.rng.randint(0, command.num)
            failed = e.JoinersFailed(reason="no room")
            self.todo.append(e.JoinersReady(num=num) if num else failed)
        else:
            super().perform(command)

    def room(self) -> int:
        return self.rng.randint(0, self.rules.max_workers + 1)


@pytest.mark.parametrize("seed", range(300))
def test_no_history_leads_to_a_group_that_cannot_be(seed: int) -> None:
    rng = random.Random(seed)
    mesh = Mesh(shard=rng.choice([None, 1, 2, 3]), tensor=rng.randint(1, 3))
    rules = Rules(
        min_workers=rng.randint(1, 3),
        max_workers=rng.randint(9, 14),
        max_failures=-1,
        max_failures_without_progress=-1,
        wait_for_capacity_s=1e9,
        grow_interval_s=rng.choice([0.0, 5.0]),
        warm=rng.random() < 0.8,
        mesh=mesh,
    )
    causes = (Cause.NODE_LOST, Cause.PREEMPTION)
    toy = Meshed(rng, rules, causes, num_strikes=8).run()
    assert toy.now.phase is Phase.FINISHED


def test_rules_that_no_number_of_workers_satisfies_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no number of workers from 5 to 7 .*the next is 8"):
        Rules(min_workers=5, max_workers=7, mesh=Mesh(shard=2, tensor=2))
