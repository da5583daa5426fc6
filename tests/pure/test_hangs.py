"""When a group is taken to stand still, and who is blamed for it."""

from __future__ import annotations

from typing import Any

import pytest

from elastic.policy.culprits import (
    DATA,
    DRIVER,
    OWN,
    PEERS,
    STORAGE,
    RankLook,
    are_all_at_work,
    find_culprits,
)
from elastic.policy.hangs import HangLimits, HangWatch, Heartbeat

LIMITS = HangLimits(step_s=3.0, first_s=60.0, storage_s=30.0, evaluation_s=40.0)


class Clock:
    """A watch that is looked at four times a second, as the driver does."""

    def __init__(self, world_size: int, limits: HangLimits = LIMITS) -> None:
        self.watch = HangWatch(limits)
        self.time_s = 100.0
        self.watch.begin(world_size, self.time_s)

    def until_stall(self, *beats: Heartbeat | None, within_s: float) -> tuple[float, str]:
        """Ranks go on with what they do (None: in silence); when the stall is told, and how."""
        begun_s = self.time_s
        while self.time_s < begun_s + within_s:
            self.time_s += 0.25
            for rank, beat in enumerate(beats):
                if beat is not None:
                    age_s = beat.age_s + self.time_s - begun_s
                    told = {**vars(beat), "age_s": age_s}
                    self.watch.heard(rank, Heartbeat(**told), self.time_s)
            if detail := self.watch.stall(self.time_s):
                return self.time_s - begun_s, detail
        return within_s, ""


def beat(phase: str, **others: Any) -> Heartbeat:
    return Heartbeat(phase=phase, age_s=0.0, **others)


@pytest.mark.parametrize(
    ("phase", "limit_s"),
    [
        ("data", 3.0),
        ("forward-backward", 3.0),
        ("optimizer", 3.0),
        ("first batch", 60.0),
        ("first step", 60.0),
        ("compile", 60.0),
        ("build", 60.0),
        ("load", 30.0),
        ("save", 30.0),
        ("evaluation", 40.0),
    ],
)
def test_each_phase_has_its_limit_and_is_caught_soon_after(phase: str, limit_s: float):  # B82
    took_s, detail = Clock(2).until_stall(beat(phase), beat(phase), within_s=3 * limit_s)
    assert limit_s < took_s <= limit_s + 0.5
    assert f"rank 1 in {phase}" in detail and f"limit {limit_s:g} s" in detail


@pytest.mark.parametrize("phase", ["save", "load", "first batch", "evaluation", "compile"])
def test_who_waits_for_a_rank_in_a_long_phase_proves_nothing(phase: str):  # B82
    clock = Clock(2)
    assert clock.until_stall(beat("forward-backward"), beat(phase), within_s=29.0)[1] == ""
    assert clock.until_stall(beat("forward-backward"), beat(phase), within_s=90.0)[1] != ""


def test_a_silent_rank_is_caught_whatever_it_was_doing():
    clock = Clock(2)
    clock.watch.heard(1, beat("save"), clock.time_s)
    took_s, detail = clock.until_stall(beat("forward-backward"), None, within_s=30.0)
    assert took_s < 3.6 and "rank 1 silent" in detail


def test_slow_phases_of_the_run_raise_their_limit_and_no_other():
    clock = Clock(1)
    seen = {"forward-backward": 2.0}
    took_s, _ = clock.until_stall(beat("forward-backward", slowest_s=seen), within_s=60.0)
    assert 20.0 < took_s < 21.0
    clock.watch.begin(1, clock.time_s)  # known from then on, in later generations too
    assert 20.0 < clock.until_stall(beat("forward-backward"), within_s=60.0)[0] < 21.0
    clock.watch.begin(1, clock.time_s)
    assert clock.until_stall(beat("data"), within_s=60.0)[0] < 4.0


def test_time_for_bytes_is_granted_to_save_and_load():
    limits = HangLimits(storage_s=10.0, slowest_bytes_per_s=1e6)
    assert limits.limit_s("load", num_bytes=50_000_000) == 60.0
    assert limits.limit_s("data", num_bytes=50_000_000) == limits.step_s


def test_a_save_that_is_stuck_behind_training_is_seen():
    clock = Clock(2)
    for _ in range(200):
        clock.time_s += 0.25
        age_s = clock.time_s - 100.0
        for rank in range(2):
            training = Heartbeat(phase="forward-backward", age_s=0.0, save_age_s=age_s)
            clock.watch.heard(rank, training, clock.time_s)
        if detail := clock.watch.stall(clock.time_s):
            break
    assert 30.0 < clock.time_s - 100.0 < 31.0 and "a save in flight" in detail


def test_a_driver_that_was_kept_from_looking_blames_nobody():
    clock = Clock(2)
    clock.until_stall(beat("data"), beat("data"), within_s=0.5)
    clock.time_s += 50.0  # nothing was heard, and nothing looked at
    assert clock.watch.stall(clock.time_s) == ""
    assert clock.until_stall(None, None, within_s=2.0)[1] == ""
    assert "rank 1" in clock.until_stall(None, None, within_s=5.0)[1]


def test_ranks_that_are_done_are_not_waited_for():
    clock = Clock(2)
    clock.watch.ended(0)
    assert "rank 1" in clock.until_stall(None, beat("data"), within_s=9.0)[1]
    clock.watch.ended(1)
    assert clock.until_stall(None, None, within_s=90.0)[1] == ""


def test_more_time_is_granted_once_and_lasts_until_somebody_goes_on():
    clock = Clock(2)
    assert clock.watch.grant()
    took_s, _ = clock.until_stall(beat("data"), beat("data"), within_s=99.0)
    assert 60.0 < took_s < 61.0  # as long as a first step
    assert not clock.watch.grant()
    clock.watch.begin(2, clock.time_s)
    assert clock.watch.grant()
    clock.until_stall(beat("data"), beat("data"), within_s=2.0)
    took_s, _ = clock.until_stall(beat("optimizer"), beat("data"), within_s=99.0)
    assert took_s < 4.0


@pytest.mark.parametrize("wrong", [{"step_s": 0}, {"times_slowest": 0.5}, {"storage_s": -1}])
def test_limits_that_cannot_be_are_refused(wrong: dict[str, float]):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        HangLimits(**wrong)


def test_no_limit_is_above_what_a_collective_may_take():
    limits = HangLimits(most_s=100.0)
    assert limits.limit_s("first batch") == limits.limit_s("data", slowest_s=90.0) == 100.0


# --- culprits ---------------------------------------------------------------------------------


def waiting(rank: int, begun: int = 8, **others: Any) -> RankLook:
    look = {"phase": "forward-backward", "waits_for": PEERS, "place": "distributed_c10d.py:1"}
    return RankLook(world_rank=rank, num_begun={"0": begun}, **{**look, **others})


def at_work(rank: int, begun: int = 7, **others: Any) -> RankLook:
    return waiting(rank, begun, **{"waits_for": OWN, "place": "train.py:4 in f", **others})


@pytest.mark.parametrize(
    ("look", "kind", "words"),
    [
        (at_work(1, is_running=True), "loop", "runs on in forward-backward, at train.py:4"),
        (at_work(1), "blocked", "stands still in forward-backward, at train.py:4"),
        (at_work(1, phase="data"), "data", "waits for data, at train.py:4"),
        (
            at_work(1, waits_for=DATA, children=["pid 7 (stopped)"]),
            "data",
            "loader processes: pid 7 (stopped)",
        ),
        (at_work(1, waits_for=STORAGE, phase="load"), "storage", "for storage during load"),
        (
            waiting(1, 7, save_waits_for=STORAGE, save_place="local_store.py:9"),
            "storage",
            "its save waits for storage, at local_store.py:9",
        ),
        (RankLook(world_rank=1, answers=False, process_state="T"), "stopped", "SIGSTOP"),
        (RankLook(world_rank=1, answers=False, process_state="R"), "silent", "interpreter lock"),
        (RankLook(world_rank=1, answers=False, process_state="D"), "storage", "in the kernel"),
        (RankLook(world_rank=1, answers=False), "silent", "could not be looked at"),
    ],
)
def test_the_rank_that_is_waited_for_is_blamed_and_told(look: RankLook, kind: str, words: str):
    found = find_culprits([waiting(0), look, waiting(2)])
    assert [(one.world_rank, one.kind) for one in found] == [(1, kind)]
    assert words in found[0].text


def test_a_rank_ahead_of_its_peers_is_not_blamed_for_its_own_code():
    # Rank 0 has begun what the others have not, and does something else until it is done.
    found = find_culprits([at_work(0, 8), at_work(1, 7, is_running=True), waiting(2, 8)])
    assert [one.world_rank for one in found] == [1]


def test_several_are_blamed_together():
    stopped = [RankLook(world_rank=r, answers=False, process_state="T") for r in (1, 3)]
    found = find_culprits([waiting(0), stopped[0], waiting(2), stopped[1]])
    assert [one.world_rank for one in found] == [1, 3]


def test_nobody_is_blamed_when_all_wait_for_each_other_or_for_the_driver():
    assert find_culprits([waiting(0, 8), waiting(1, 7)]) == ()
    assert find_culprits([waiting(0), waiting(1, waits_for=DRIVER)]) == ()


def test_where_nobody_is_held_up_all_are_at_work():
    everyone = [at_work(rank, 7, is_running=True) for rank in range(3)]
    assert are_all_at_work(everyone, find_culprits(everyone))
    one_waits = [waiting(0), *everyone[1:]]
    assert not are_all_at_work(one_waits, find_culprits(one_waits))
    stopped = [RankLook(world_rank=0, answers=False, process_state="T")]
    assert not are_all_at_work(stopped, find_culprits(stopped))


def test_a_group_of_one_has_only_itself_to_blame():
    found = find_culprits([at_work(0, is_running=True)])
    assert [(one.world_rank, one.kind) for one in found] == [(0, "loop")]
