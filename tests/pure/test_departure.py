"""Leaving nodes that are about to go, and stopping, in the time that is left."""

from __future__ import annotations

import dataclasses

import pytest

from elastic.policy import events as e
from elastic.policy.departure import Pace, Way, choose, needed_s
from elastic.policy.situation import Phase
from tests.pure.test_policy import COLD, WARM, Drive


def draining(*ranks: int, left_s: float | None = 30.0) -> e.NodesDraining:
    detail = "node a, which goes in 30 s"
    return e.NodesDraining(
        generation=0, world_ranks=frozenset(ranks), detail=detail, remaining_s=left_s
    )


def paced(size: int, *, step_s: float, save_s: float, save_age_s: float | None = None) -> Drive:
    """A group of which steps and saves have been measured."""
    drive = Drive(WARM).running(size)
    drive(e.Committed(step=30, took_s=save_s))
    drive(e.Progressed(generation=0, step=40, step_s=step_s, save_age_s=save_age_s))
    return drive


def left(drive: Drive, size: int) -> list[e.Command]:
    return drive(*[e.RankLeft(generation=0, world_rank=rank, step=40) for rank in range(size)])


def order(commands: list[e.Command]) -> e.OrderLeave:
    (found,) = [command for command in commands if isinstance(command, e.OrderLeave)]
    return found


def kinds(commands: list[e.Command]) -> list[str]:
    return [command.kind for command in commands if isinstance(command, e.Record)]


# --- the sum ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step_s", "save_s", "remaining_s", "way"),
    [
        (1.0, 1.0, None, Way.STEP),
        (1.0, 1.0, 30.0, Way.STEP),
        (25.0, 4.0, 120.0, Way.STEP),
        (25.0, 4.0, 30.0, Way.MICRO_BATCH),
        (200.0, 4.0, 120.0, Way.MICRO_BATCH),
        (0.2, 8.0, 5.0, Way.LAST_CHECKPOINT),
        (0.2, 110.0, 120.0, Way.LAST_CHECKPOINT),
        (None, None, 1.0, Way.STEP),
    ],
)
def test_the_way_is_chosen_by_predicted_time(step_s, save_s, remaining_s, way):
    pace = Pace(step_s=step_s, saves_s=() if save_s is None else (save_s,))
    assert choose(pace, remaining_s).way is way


def test_the_slowest_of_the_last_three_saves_counts():
    pace = Pace()
    for took_s in (9.0, 1.0, 2.0, 1.5):
        pace = pace.saved(took_s)
    assert pace.save_s == 2.0
    assert needed_s(pace.stepped(1.0)) > 3.0


# --- drains -------------------------------------------------------------------------------------


def test_a_node_that_is_to_go_is_left_after_a_save():
    drive = paced(3, step_s=0.1, save_s=0.5)
    commands = drive(draining(0))
    assert kinds(commands) == ["drain_noticed", "leave_ordered"]
    assert order(commands).has_deadline and not order(commands).drop_step
    assert e.LookForCapacity() in commands, "what takes the place starts at the notice"
    assert drive(draining(0)) == []  # said again and again
    assert left(drive, 3)[-1] == e.Reform(generation=1, world_size=2, without=frozenset({0}))
    assert drive.now.draining == frozenset() and drive.now.leave_by_s is None


def test_without_warm_re_forms_all_start_anew_after_the_save():
    drive = Drive(COLD).running(3)
    assert order(drive(draining(0))).has_deadline
    assert left(drive, 3)[-1] == e.StopGroup(generation=0)
    assert drive(e.GroupStopped(generation=0))[-1] == e.LookForCapacity()


def test_a_long_step_is_dropped_when_its_end_comes_too_late():
    drive = paced(3, step_s=40.0, save_s=2.0)
    assert order(drive(draining(1))).drop_step
    assert not order(paced(3, step_s=40.0, save_s=2.0)(draining(1, left_s=120.0))).drop_step


def test_no_time_for_a_save_is_the_last_checkpoint_at_once():
    """B67: a 5 s deadline, and a save that needs 8 s."""
    drive = paced(3, step_s=0.1, save_s=8.0)
    commands = drive(draining(0, left_s=5.0))
    assert kinds(commands) == ["drain_noticed", "left_unsaved", "generation_planned"]
    assert e.Reform(generation=1, world_size=2, without=frozenset({0})) in commands
    assert "8 s" in drive.now.reason and "too little for a save" in drive.now.reason


@pytest.mark.parametrize(("age_s", "waits"), [(6.0, True), (1.0, False)])
def test_a_save_under_way_that_ends_in_time_is_waited_for(age_s, waits):
    drive = paced(3, step_s=0.1, save_s=8.0, save_age_s=age_s)
    commands = drive(draining(0, left_s=5.0))
    assert any(isinstance(one, e.Reform) for one in commands) is not waits
    if waits:
        assert drive.now.phase is Phase.LEAVING
        commands = drive(e.Committed(step=38, took_s=7.5), after_s=1.5)
        assert commands[-1] == e.Reform(generation=1, world_size=2, without=frozenset({0}))
        assert drive.now.committed_step == 38


def test_and_no_longer_than_the_node_is_there():
    drive = paced(3, step_s=0.1, save_s=8.0, save_age_s=6.0)
    drive(draining(0, left_s=5.0))
    assert drive(e.Tick(), after_s=3.0) == []
    assert isinstance(drive(e.Tick(), after_s=0.6)[-1], e.Reform)


def test_a_save_that_takes_longer_than_it_did_is_not_waited_for():
    """B67: the deadline holds although the sum was wrong; the group goes on without the node."""
    drive = paced(3, step_s=0.1, save_s=0.5)
    drive(draining(0, left_s=5.0))
    assert drive.now.phase is Phase.LEAVING
    assert drive(e.Tick(), after_s=3.4) == []
    commands = drive(e.Tick(), after_s=0.2)
    assert kinds(commands) == ["left_unsaved", "generation_planned"]
    assert commands[-1] == e.Reform(generation=1, world_size=2, without=frozenset({0}))
    assert "not all ranks had saved" in drive.now.reason


def test_notices_while_it_leaves_are_handled_together():
    drive = paced(4, step_s=0.1, save_s=0.5)
    drive(draining(0))
    commands = drive(draining(0, 3, left_s=20.0))
    assert kinds(commands) == ["drain_noticed"] and order(commands).has_deadline
    assert left(drive, 4)[-1] == e.Reform(generation=1, world_size=2, without=frozenset({0, 3}))


def test_notices_add_up_and_the_earliest_end_counts():
    drive = paced(4, step_s=0.1, save_s=0.5)
    drive(draining(0, left_s=None))
    assert drive(draining(0, left_s=None)) == []
    assert kinds(drive(draining(0, left_s=9.0))) == ["drain_noticed"], "now there is a time"
    assert drive(draining(0, left_s=8.9), after_s=0.1) == []
    assert kinds(drive(draining(3, left_s=20.0))) == ["drain_noticed"]
    assert drive.now.draining == {0, 3} and drive.now.gone_by_s == pytest.approx(9.0)
    assert drive.now.leave_by_s == pytest.approx(7.5)
    assert left(drive, 4)[-1] == e.Reform(generation=1, world_size=2, without=frozenset({0, 3}))


def test_a_notice_while_it_leaves_to_grow():
    drive = paced(3, step_s=0.1, save_s=0.5)
    drive(e.JoinersReady(num=1))
    assert drive.now.phase is Phase.LEAVING
    drive(draining(2))
    assert left(drive, 3)[-1] == e.Reform(generation=1, world_size=3, without=frozenset({2}))


def test_too_few_beside_it_train_on_until_others_take_the_places():
    drive = paced(2, step_s=0.1, save_s=0.5)
    commands = drive(draining(1))
    assert kinds(commands) == ["drain_noticed"] and commands[-1] == e.LookForCapacity()
    assert drive.now.phase is Phase.RUNNING
    assert drive(e.CapacitySeen(num_workers=2), after_s=1.0)[-1] == e.StartJoiners(num=1)
    assert order(drive(e.JoinersReady(num=1), after_s=5.0)).has_deadline
    reform = e.Reform(generation=1, world_size=2, without=frozenset({1}))
    assert left(drive, 2)[-1] == reform


def test_too_few_beside_it_save_and_hold_when_nobody_comes():
    drive = paced(2, step_s=0.1, save_s=0.5)
    drive(draining(1))
    assert drive(e.Tick(), after_s=20.0) == []
    commands = drive(e.Tick(), after_s=6.0)
    assert order(commands).has_deadline and drive.now.leave_by_s is None
    assert left(drive, 2)[-1] == e.LookForCapacity()
    assert drive.now.phase is Phase.HOLDING and "1 of at least 2" in drive.now.reason
    drive(e.CapacitySeen(num_workers=2))
    reform = e.Reform(generation=1, world_size=2, without=frozenset({1}))
    assert drive(e.JoinersReady(num=1))[-1] == reform


def test_too_few_and_no_time_train_on_to_the_last():
    drive = paced(2, step_s=0.1, save_s=8.0)
    drive(draining(1, left_s=5.0))
    assert drive.now.phase is Phase.RUNNING
    gone = e.WorkerDied(generation=0, world_rank=1, node_lost=True, detail="gone")
    drive(gone, after_s=5.0)
    assert drive.now.phase is Phase.HOLDING


def test_too_few_and_no_deadline_save_and_hold_at_once():
    drive = paced(2, step_s=0.1, save_s=0.5)
    assert not order(drive(draining(1, left_s=None))).drop_step
    left(drive, 2)
    assert drive.now.phase is Phase.HOLDING


def test_what_takes_the_place_is_taken_in_without_waiting_as_for_a_growth():
    drive = paced(3, step_s=0.1, save_s=0.5)
    drive(draining(0))
    left(drive, 3)
    drive(e.GroupStarted(generation=1, world_size=2))
    assert drive(e.CapacitySeen(num_workers=3))[-1] == e.StartJoiners(num=1)


def test_it_starts_while_the_group_still_leaves():
    drive = paced(3, step_s=0.1, save_s=0.5)
    drive(draining(0))
    assert drive(e.CapacitySeen(num_workers=3))[-1] == e.StartJoiners(num=1)
    left(drive, 3)
    drive(e.JoinersReady(num=1))
    assert order(drive(e.GroupStarted(generation=1, world_size=2)))


def test_a_node_that_goes_before_its_time_is_lost_as_any_other():
    drive = Drive(WARM).running(4)
    drive(draining(1))
    gone = e.WorkerDied(generation=0, world_rank=1, node_lost=True, detail="gone")
    assert drive(gone)[-1] == e.Reform(generation=1, world_size=3, without=frozenset({1}))


def test_a_death_meanwhile_leaves_out_both():
    drive = Drive(WARM).running(4)
    drive(draining(1))
    died = e.WorkerDied(generation=0, world_rank=3, node_lost=False, detail="killed")
    assert drive(died)[-1] == e.Reform(generation=1, world_size=2, without=frozenset({1}))


# --- stops --------------------------------------------------------------------------------------


def stop(within_s: float | None = 3.0) -> e.StopRequested:
    return e.StopRequested(reason="SIGTERM", within_s=within_s)


def test_a_stop_within_a_time_ends_with_what_is_committed():
    drive = paced(2, step_s=0.1, save_s=0.5)
    assert order(drive(stop())).has_deadline
    assert drive(e.Tick(), after_s=1.9) == []
    drive(e.Tick(), after_s=0.2)
    assert drive.now.phase is Phase.STOPPED
    assert drive.now.reason.startswith("SIGTERM")
    assert "what counts is the checkpoint of step 30" in drive.now.reason


def test_a_stop_drops_a_long_step_and_tries_a_save_that_may_not_fit():
    assert order(paced(2, step_s=9.0, save_s=0.5)(stop())).drop_step
    assert order(paced(2, step_s=0.1, save_s=9.0)(stop())).drop_step
    assert not order(paced(2, step_s=9.0, save_s=0.5)(stop(within_s=None))).drop_step


@pytest.mark.parametrize("is_reforming", [False, True])
def test_a_stop_does_not_wait_for_a_group_on_its_way(is_reforming):
    drive = Drive(WARM)
    drive(e.CapacitySeen(num_workers=3))
    if is_reforming:
        drive(e.GroupStarted(generation=0, world_size=3))
        drive(e.WorkerDied(generation=0, world_rank=1, node_lost=False, detail="killed"))
    drive(stop(within_s=None))
    assert drive.now.phase in (Phase.STARTING, Phase.REFORMING)
    assert drive(stop())[-1] == e.End(outcome="stopped", reason=drive.now.reason)
    assert "SIGTERM" in drive.now.reason


def test_a_stop_does_not_wait_for_processes_that_do_not_end():
    drive = paced(2, step_s=0.1, save_s=0.5)
    drive(stop())
    left(drive, 2)
    assert drive.now.phase is Phase.STOPPED
    drive = paced(2, step_s=0.1, save_s=0.5)
    drive(stop(within_s=None))
    left(drive, 2)
    assert drive.now.phase is Phase.STOPPING
    drive(stop())
    assert drive(e.Tick(), after_s=2.4) == []
    drive(e.Tick(), after_s=0.2)
    assert drive.now.phase is Phase.STOPPED


def test_a_stop_while_it_leaves_a_node_or_gathers():
    drive = paced(3, step_s=0.1, save_s=0.5)
    drive(draining(0))
    assert order(drive(stop())).has_deadline
    left(drive, 3)
    assert drive.now.phase is Phase.STOPPED
    drive = paced(3, step_s=0.1, save_s=0.5)
    victim = e.RankError(world_rank=0, type_name="RuntimeError", message="gloo", is_victim=True)
    drive(e.RankFailed(generation=0, error=victim))
    drive(stop())
    assert drive.now.phase is Phase.GATHERING
    assert drive(e.Tick(), after_s=2.4)[-1] == e.StopGroup(generation=0)


def test_the_first_of_several_times_counts():
    drive = paced(2, step_s=0.1, save_s=0.5)
    drive(stop(within_s=None))
    assert drive.now.leave_by_s is None
    drive(stop(within_s=30.0), stop(within_s=3.0), stop(within_s=60.0))
    assert drive.now.leave_by_s == pytest.approx(drive.time_s + 2.0)


def test_without_a_time_a_stop_is_left_in_peace():
    rules = dataclasses.replace(WARM, leave_s=600.0)
    drive = Drive(rules).running(2)
    drive(stop(within_s=None))
    assert drive(e.Tick(), after_s=599.0) == []
    assert drive(e.Tick(), after_s=2.0)[-1] == e.StopGroup(generation=0)
