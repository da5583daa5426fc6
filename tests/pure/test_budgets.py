"""What a run forgives: budgets by class, the same failure again, backoff, sizes that do not fit."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from elastic.policy import budgets, fitting
from elastic.policy import events as e
from elastic.policy.budgets import Budgets, Failure
from elastic.policy.causes import Cause
from elastic.policy.fitting import Fitting
from elastic.policy.situation import Phase, Rules
from tests.pure.test_policy import Drive

RULES = Rules(min_workers=2, max_workers=4, grow_interval_s=10.0, max_failures=-1)
LOW = "1 worker(s) were killed due to the node running low on memory.\nOOM kill reason: 61 of 62 GB"


def fail(drive: Drive, name: str = "ValueError", text: str = "boom", **others: Any) -> None:
    """One rank of the running group raises, and the group is gone."""
    generation = drive.now.generation
    error = e.RankError(world_rank=1, type_name=name, message=text, **others)
    drive(e.RankFailed(generation=generation, error=error))
    drive(e.GroupStopped(generation=generation))


def die(drive: Drive, told: str = "", *, node_lost: bool = False, rank: int = 1) -> None:
    generation = drive.now.generation
    gone = {"world_rank": rank, "node_lost": node_lost, "detail": "gone", "told": told}
    drive(e.WorkerDied(generation=generation, **gone))
    if drive.now.phase is Phase.STOPPING:
        drive(e.GroupStopped(generation=generation))


def draining(rank: int) -> e.NodesDraining:
    return e.NodesDraining(generation=0, world_ranks=frozenset({rank}), detail="node a")


def decided(drive: Drive) -> list[dict[str, Any]]:
    records = [one for one in drive.commands if isinstance(one, e.Record)]
    return [one.data for one in records if one.kind == "failure_decided"]


# --- budgets ------------------------------------------------------------------------------------


def test_memory_kills_have_a_bound_of_their_own_that_names_memory_and_the_step():  # B78
    rules = dataclasses.replace(RULES, max_failures_without_progress=99)
    drive = Drive(rules)
    for num, step in enumerate((40, 41, 42)):
        drive.running(3)
        drive(e.Progressed(generation=drive.now.generation, step=step))
        die(drive, LOW)
        assert (drive.now.phase is Phase.FAILED) == (num == 2)
    assert [one["cause"] for one in decided(drive)] == ["host_memory"] * 3
    assert decided(drive)[0]["evidence"] == LOW.splitlines()[0]
    assert "host_memory 3 times in a row" in drive.now.reason
    assert "after step 42" in drive.now.reason and "memory" in drive.now.reason


def test_memory_kills_at_the_same_step_end_the_run_at_once():  # B78
    drive = Drive(RULES)
    for num in range(2):
        drive.running(3)
        drive(e.Progressed(generation=drive.now.generation, step=40))
        die(drive, LOW)
        assert (drive.now.phase is Phase.FAILED) == (num == 1)
    assert "2nd time after step 40" in drive.now.reason


def test_five_nodes_and_one_bug_leave_the_run_alive_and_two_more_bugs_do_not():  # B85
    drive = Drive(dataclasses.replace(RULES, max_failures=2))
    for step in range(5):
        drive.running(3)
        drive(e.Progressed(generation=drive.now.generation, step=step))
        die(drive, node_lost=True)
    for step in (7, 8, 9):
        drive.running(3)
        assert drive.now.phase is Phase.RUNNING
        fail(drive, step=step)
    assert drive.now.phase is Phase.FAILED
    assert drive.now.budgets.in_total == {"user_exception": 3}
    assert "restarts granted for exceptions: 2" in drive.now.reason


def test_an_exception_on_a_node_that_drains_counts_once():  # B85
    drive = Drive(dataclasses.replace(RULES, max_failures=1, warm=True)).running(3)
    drive(draining(1))
    fail(drive, step=7)  # while the group leaves
    drive(e.WorkerDied(generation=0, world_rank=1, node_lost=True, detail="gone"))
    assert decided(drive)[-1]["cause"] == "user_exception"
    assert drive.now.budgets.in_total == {"user_exception": 1}
    assert drive.running(3).now.phase is Phase.RUNNING


def test_a_death_on_a_node_that_drains_is_no_failure_of_the_run():  # B85
    drive = Drive(dataclasses.replace(RULES, max_failures_without_progress=0, warm=True)).running(3)
    drive(draining(1))
    die(drive)
    assert decided(drive)[-1]["cause"] == "preemption"
    assert drive.now.phase is Phase.REFORMING and drive.now.budgets.in_total == {}


def test_a_node_lost_while_the_group_starts_is_tried_again_and_not_counted():  # B87
    drive = Drive(dataclasses.replace(RULES, max_failures=0, max_failures_without_progress=0))
    for _ in range(20):
        drive(e.CapacitySeen(num_workers=3))
        reason = "starting 3 workers failed: The actor died because its node has died. Node Id: 5f"
        failed = e.GroupStartFailed(
            generation=drive.now.generation, reason=reason, is_capacity=False
        )
        assert e.LookForCapacity() in drive(failed)
    assert drive.now.budgets.in_total == {}
    assert drive.running(3).now.phase is Phase.RUNNING


def test_a_status_that_cannot_be_read_is_asked_for_again():  # B87
    """Unknown is not dead: the driver answers with what it has, and nothing is restarted."""
    drive = Drive(RULES)
    for _ in range(3):  # nothing runs yet
        drive(e.CapacitySeen(num_workers=0, note="node table unreadable: RpcError"), after_s=1.0)
        assert drive.now.phase is Phase.WAITING and "unreadable" in drive.now.reason
    drive.running(3)
    for _ in range(3):
        assert drive(e.CapacitySeen(num_workers=3, note="node table unreadable"), after_s=9.0) == []
    assert drive.now.phase is Phase.RUNNING and drive.now.generation == 0


def test_classes_with_a_number_of_their_own_are_counted_alone():
    alone = {"nccl_error": 7, "user_exception": 1}
    rules = dataclasses.replace(
        RULES, max_failures=0, max_failures_without_progress=1, max_failures_by_cause=alone
    )
    drive = Drive(rules)
    for step in range(7):
        drive.running(3)
        fail(drive, "DistBackendError", "ncclInvalidUsage: Duplicate GPU detected", step=step)
    fail(drive.running(3), step=20)
    assert drive.running(3).now.phase is Phase.RUNNING
    fail(drive, step=21)
    assert "restarts granted for user_exception: 1" in drive.now.reason


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"preemption": 3}, "preemption is never counted"),
        ({"nccl": 3}, "no cause 'nccl'; expected one of .*nccl_error"),
        ({"nccl_error": -2}, "found -2"),
        ({"nccl_error": 1.5}, "found 1.5"),
    ],
)
def test_impossible_numbers_are_refused(limits: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(RULES, max_failures_by_cause=limits)


# --- the same failure again ---------------------------------------------------------------------


def test_a_deterministic_exception_ends_the_run_after_two_tries_with_a_report():
    drive = Drive(dataclasses.replace(RULES, max_failures=3))
    drive(e.Committed(step=10))
    for number in (4711, 815):
        fail(drive.running(3), text=f"bad sample in shard {number}", step=17)
    assert drive.now.phase is Phase.FAILED
    assert drive.now.reason.startswith("rank 1 raised ValueError: bad sample in shard 815; ")
    assert "user_exception for the 2nd time after step 17" in drive.now.reason
    assert "traceback" in drive.now.reason


@pytest.mark.parametrize("between", ["checkpoint", "node", "other step", "other words"])
def test_it_is_not_the_same_after_something_has_changed(between: str):
    drive = Drive(RULES)
    drive(e.Committed(step=10))
    fail(drive.running(3), step=17)
    drive.running(3)
    if between == "checkpoint":
        drive(e.Committed(step=15))
    if between == "node":
        die(drive, node_lost=True)
        drive.running(3)
    text = "bang" if between == "other words" else "boom"
    fail(drive, text=text, step=18 if between == "other step" else 17)
    assert drive.now.phase is Phase.LOOKING


def test_kills_without_words_may_be_chance_and_take_one_more():
    drive = Drive(RULES)
    for num in range(3):
        die(stepped(drive.running(3), 17))
        assert (drive.now.phase is Phase.FAILED) == (num == 2)
    assert "3rd time after step 17" in drive.now.reason and "dmesg" in drive.now.reason


def test_kills_before_a_step_was_made_say_nothing_of_the_step():
    drive = Drive(RULES)
    for num in range(6):
        die(drive.running(3))
        assert (drive.now.phase is Phase.FAILED) == (num == 5)
    assert "6 failures in a row" in drive.now.reason


def test_an_outage_says_the_same_each_time_and_is_waited_out():
    drive = Drive(RULES)
    for num in range(6):
        fail(drive.running(3), "OSError", "[Errno 5] Input/output error", step=17)
        assert (drive.now.phase is Phase.FAILED) == (num == 5)
    assert "6 failures in a row" in drive.now.reason


# --- backoff ------------------------------------------------------------------------------------


def test_the_first_try_comes_at_once_and_the_next_ones_ever_later():
    drive = Drive(dataclasses.replace(RULES, max_failures_without_progress=99))
    waits_s = []
    for step in range(9):
        fail(drive.running(3), step=step)
        waits_s.append(drive.now.not_before_s - drive.time_s)
    assert waits_s == [0, 1, 2, 4, 8, 16, 32, 60, 60]
    drive(e.CapacitySeen(num_workers=3), after_s=59.0)
    assert drive.now.phase is Phase.WAITING and "backing off for 60 s" in drive.now.reason
    assert drive(e.CapacitySeen(num_workers=3), after_s=0.5) == []  # said once
    assert drive(e.CapacitySeen(num_workers=3), after_s=0.5)[-1] == e.StartGroup(
        generation=9, world_size=3
    )


def test_a_new_checkpoint_ends_the_waiting():
    drive = Drive(RULES)
    for step in range(4):
        fail(drive.running(3), step=step)
    drive.running(3)(e.Committed(step=20))
    fail(drive, step=21)
    assert drive.now.not_before_s == drive.time_s


def test_survivors_and_lost_nodes_never_wait():
    drive = Drive(dataclasses.replace(RULES, warm=True, max_workers=9)).running(9)
    for _ in range(4):
        die(drive)
        assert drive.now.phase is Phase.REFORMING
        drive(e.GroupStarted(generation=drive.now.generation, world_size=drive.now.world_size))
    drive = Drive(RULES)
    for _ in range(9):
        die(drive.running(3), node_lost=True)
        assert drive.now.not_before_s <= drive.time_s


# --- what survives the driver -------------------------------------------------------------------


@dataclasses.dataclass
class Told:
    """An event as a reader of the ledger has it."""

    kind: str
    data: dict[str, Any] = dataclasses.field(default_factory=dict)
    step: int = -1


def test_a_driver_that_takes_over_goes_on_counting_and_a_new_submission_does_not():
    drive = Drive(dataclasses.replace(RULES, max_failures=2))
    for step in (3, 4):
        fail(drive.running(3), step=step)
    records = [one for one in drive.commands if isinstance(one, e.Record)]
    events = [Told(one.kind, dict(one.data), one.step) for one in records]
    assert budgets.fold(budgets.since_last_end(events)) == drive.now.budgets
    taken_over = Drive(drive.rules)
    taken_over.now = dataclasses.replace(taken_over.now, budgets=budgets.fold(events))
    fail(taken_over.running(3), step=5)
    assert taken_over.now.phase is Phase.FAILED
    assert budgets.since_last_end([*events, Told("run_failed")]) == []
    assert len(budgets.since_last_end([Told("run_stopped"), *events])) == len(events)


def test_what_older_versions_recorded_is_left_out():
    old = [Told("failure_decided", {"cause": "worker_died"}), Told("start_failed")]
    newer = Told("failure_decided", {"cause": "cosmic_ray", "counted": {"step": 1}})
    assert budgets.fold([*old, newer]) == Budgets()


def test_counting_itself():
    failure = Failure(cause=Cause.HANG, step=3, text="x")
    one = Budgets().count(failure, -1)
    two = one.count(failure, -1)
    assert (two.num_same, two.in_a_row) == (2, {"hang": 2})
    assert two.count(failure, 4).in_a_row == {"hang": 1}
    assert two.count(failure, 4).in_total == {"hang": 3}
    assert two.count(Failure(cause=Cause.NODE_LOST, step=3), -1).num_same == 0


# --- sizes that do not fit ----------------------------------------------------------------------


def run_out(drive: Drive, step: int = 0) -> None:
    fail(drive, "OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB", step=step)


def stepped(drive: Drive, step: int = 7) -> Drive:
    """With word of two steps, the last of which is this one."""
    for told in (step - 2, step):
        drive(e.Progressed(generation=drive.now.generation, step=told))
    return drive


def test_a_step_that_raises_is_told_and_proves_nothing():
    drive = Drive(dataclasses.replace(RULES, max_failures=0)).running(4)
    for told in (7, 8):  # where it resumed, and the step in which it runs out
        drive(e.Progressed(generation=0, step=told))
    run_out(drive, step=8)
    assert drive.now.fitting.infeasible == {4}


def test_out_of_cuda_memory_after_a_loss_waits_for_the_size_that_fits():
    drive = Drive(dataclasses.replace(RULES, max_failures=0))
    die(stepped(drive.running(4)), node_lost=True)
    run_out(drive.running(3))
    assert drive.now.phase is Phase.LOOKING and "3 workers have made no step" in drive.now.reason
    assert drive(e.CapacitySeen(num_workers=3)) != []
    assert drive.now.phase is Phase.WAITING
    assert "of at least 4 workers" in drive.now.reason
    assert "out of CUDA memory at 3 workers" in drive.now.reason
    assert drive(e.CapacitySeen(num_workers=4))[-1] == e.StartGroup(generation=2, world_size=4)
    assert drive.kinds().count("size_infeasible") == 1 and drive.now.budgets == Budgets().count(
        Failure(cause=Cause.NODE_LOST, step=7), -1
    )


def test_survivors_are_held_where_so_few_do_not_fit():
    drive = Drive(dataclasses.replace(RULES, warm=True))
    drive.now = dataclasses.replace(
        drive.now, fitting=Fitting(tried=frozenset({4}), ran_out=frozenset({3}))
    )
    die(drive.running(4))
    assert drive.now.phase is Phase.HOLDING and "3 of at least 4" in drive.now.reason


def test_out_of_cuda_memory_after_growth_goes_back_to_the_old_size():
    drive = Drive(dataclasses.replace(RULES, max_failures=0))
    stepped(drive.running(3))
    drive(e.CapacitySeen(num_workers=4), after_s=10.0)
    drive(*[e.RankLeft(generation=0, world_rank=rank, step=8) for rank in range(3)])
    drive(e.GroupStopped(generation=0))
    run_out(drive.running(4))
    assert drive(e.CapacitySeen(num_workers=4))[-1] == e.StartGroup(generation=2, world_size=3)
    drive(e.GroupStarted(generation=2, world_size=3))
    assert drive(e.CapacitySeen(num_workers=4), after_s=99.0) == []  # never again


def test_out_of_cuda_memory_at_every_size_ends_the_run():
    drive = Drive(dataclasses.replace(RULES, max_failures=0))
    run_out(drive.running(4))
    run_out(drive.running(3))
    assert drive.now.phase is Phase.FAILED  # fewer have larger shards
    assert "no size from 2 to 3 workers is left" in drive.now.reason


def test_out_of_cuda_memory_at_a_size_that_has_made_steps_is_a_failure():
    drive = Drive(dataclasses.replace(RULES, max_failures=0))
    for step in (7, 8, 9):
        run_out(stepped(drive.running(3)), step=step)
    assert drive.now.phase is Phase.FAILED and "cuda_memory 3 times" in drive.now.reason
    assert "size_infeasible" not in drive.kinds()


def test_which_sizes_are_ruled_out():
    assert Fitting().without(4).infeasible == {4}
    assert Fitting().without(4).without(3).infeasible == {1, 2, 3, 4}
    assert Fitting().without(3).stepped(4).infeasible == {1, 2, 3}
    assert Fitting().stepped(2).without(4).stepped(6).infeasible == {3, 4}
    assert Fitting().stepped(2).without(4).largest(4) == 3
    assert Fitting().without(1).largest(1) == 0


def test_sizes_are_known_to_the_next_driver():
    events = [
        Told("generation_started", {"world_size": 4}),
        Told("checkpoint_committed", step=0),
        Told("generation_started", {"world_size": 3}, step=0),
        Told("size_infeasible", {"ran_out": [3], "tried": [4]}),
        Told("generation_started", {"world_size": 5}, step=0),
        Told("checkpoint_committed", step=20),
    ]
    assert fitting.fold(events) == Fitting(tried=frozenset({4, 5}), ran_out=frozenset({3}))
    assert fitting.fold(events[:3]) == Fitting()
