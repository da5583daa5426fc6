"""The state machine as a whole: total, illegal only where said, and right on whole histories."""

from __future__ import annotations

import dataclasses
import random

import pytest

from elastic.policy import culprits, growth
from elastic.policy import events as e
from elastic.policy.cause import first_cause, headline, is_victim
from elastic.policy.situation import FINAL, Phase, Rules, Situation, Then
from elastic.policy.transitions import EVENTS, FINAL_ERRORS, TABLE, IllegalEvent, decide

ILLEGAL = TABLE[Phase.LOOKING, e.GroupStopped]

COLD = Rules(min_workers=2, max_workers=4, grow_interval_s=10.0, warm=False)
WARM = dataclasses.replace(COLD, warm=True)
RULES = COLD


def error(rank: int, name: str = "ValueError", text: str = "boom", victim: bool = False):
    return e.RankError(world_rank=rank, type_name=name, message=text, is_victim=victim)


SAMPLES: dict[type[e.Event], e.Event] = {
    e.CapacitySeen: e.CapacitySeen(num_workers=3),
    e.GroupStarted: e.GroupStarted(generation=4, world_size=3),
    e.GroupStartFailed: e.GroupStartFailed(generation=4, reason="gone", is_capacity=True),
    e.GroupStopped: e.GroupStopped(generation=4),
    e.JoinersReady: e.JoinersReady(num=1),
    e.JoinersFailed: e.JoinersFailed(reason="no room"),
    e.ReformFailed: e.ReformFailed(generation=4, reason="rank 1 did not come out"),
    e.WorkerDied: e.WorkerDied(generation=4, world_rank=1, node_lost=False, detail="killed"),
    e.RankFailed: e.RankFailed(generation=4, error=error(2)),
    e.RankLeft: e.RankLeft(generation=4, world_rank=0, step=7),
    e.RankFinished: e.RankFinished(generation=4, world_rank=0, step=7),
    e.Progressed: e.Progressed(generation=4, step=7),
    e.Committed: e.Committed(step=6),
    e.Unrecoverable: e.Unrecoverable(generation=4, reason="no sound checkpoint"),
    e.Stalled: e.Stalled(generation=4, detail="rank 0 in data for 9 s"),
    e.HangFound: e.HangFound(generation=4, culprits=(), stacks="stacks/g4-1"),
    e.StallPassed: e.StallPassed(generation=4, why="it went on"),
    e.NodesDraining: e.NodesDraining(
        generation=4, world_ranks=frozenset({1}), detail="node a, which goes in 30 s"
    ),
    e.StopRequested: e.StopRequested(reason="asked"),
    e.SaveRequested: e.SaveRequested(reason="asked"),
    e.Tick: e.Tick(),
}


class Drive:
    """A situation, and what the policy has commanded so far."""

    def __init__(self, rules: Rules = RULES) -> None:
        self.rules, self.now, self.time_s = rules, Situation(), 0.0
        self.commands: list[e.Command] = []

    def __call__(self, *events: e.Event, after_s: float = 0.0) -> list[e.Command]:
        self.time_s += after_s
        new: list[e.Command] = []
        for event in events:
            decision = decide(self.rules, self.now, event, self.time_s)
            self.now = decision.situation
            new += decision.commands
        self.commands += new
        return new

    def running(self, size: int = 3) -> Drive:
        wait_s = max(0.0, self.now.not_before_s - self.time_s)
        self(e.CapacitySeen(num_workers=size), after_s=wait_s)
        self(e.GroupStarted(generation=self.now.generation, world_size=size))
        assert self.now.phase is Phase.RUNNING
        return self

    def kinds(self) -> list[str]:
        return [command.kind for command in self.commands if isinstance(command, e.Record)]


def test_table_is_total():
    assert set(TABLE) == {(phase, event) for phase in Phase for event in EVENTS}
    assert set(SAMPLES) == set(EVENTS)


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("event", EVENTS)
def test_every_pair_answers_or_says_it_is_illegal(phase: Phase, event: type[e.Event]):
    before = Situation(phase=phase, generation=4, world_size=3)
    if TABLE[phase, event] is ILLEGAL:
        assert event in (e.GroupStarted, e.GroupStartFailed, e.GroupStopped, e.ReformFailed)
        with pytest.raises(IllegalEvent, match=f"{event.__name__}.*{phase.value}"):
            decide(RULES, before, SAMPLES[event], 1.0)
        return
    after = decide(RULES, before, SAMPLES[event], 1.0)
    if phase in FINAL:
        assert after.situation == before and not after.commands


def test_word_of_an_older_generation_changes_nothing():
    drive = Drive()
    drive.now = Situation(phase=Phase.RUNNING, generation=4, world_size=3)
    stale = dataclasses.replace(SAMPLES[e.WorkerDied], generation=3)
    before = drive.now
    assert drive(stale) == [] and drive.now == before


def test_shrinks_to_what_is_alive_and_grows_back_after_a_save():
    drive = Drive().running(3)
    died = e.WorkerDied(generation=0, world_rank=0, node_lost=True, detail="node gone")
    commands = drive(died)
    assert commands[-1] == e.StopGroup(generation=0)
    assert drive(e.GroupStopped(generation=0)) == [e.LookForCapacity()]
    assert drive(e.CapacitySeen(num_workers=2))[-1] == e.StartGroup(generation=1, world_size=2)
    drive(e.GroupStarted(generation=1, world_size=2))
    assert drive(e.CapacitySeen(num_workers=3), after_s=1.0) == []  # too soon
    assert isinstance(drive(e.CapacitySeen(num_workers=3), after_s=10.0)[-1], e.OrderLeave)
    left = [e.RankLeft(generation=1, world_rank=rank, step=40) for rank in range(2)]
    assert drive(*left)[-1] == e.StopGroup(generation=1)
    drive(e.GroupStopped(generation=1))
    assert drive(e.CapacitySeen(num_workers=9))[-1] == e.StartGroup(generation=2, world_size=4)


def test_waits_below_the_minimum_and_fails_at_its_deadline():
    drive = Drive()
    assert drive.now.phase is Phase.LOOKING
    drive(e.CapacitySeen(num_workers=1, note="node a fits 1"))
    assert drive.now.phase is Phase.WAITING and "1 of at least 2" in drive.now.reason
    drive(e.CapacitySeen(num_workers=1, note="node a fits 1"), after_s=5.0)
    assert drive.kinds().count("waiting") == 1  # said once, not at each look
    drive(e.Tick(), after_s=293.0)
    assert drive.now.phase is Phase.WAITING
    commands = drive(e.Tick(), after_s=3.0)
    assert drive.now.phase is Phase.FAILED
    assert isinstance(commands[-1], e.End) and "node a fits 1" in commands[-1].reason


def test_a_start_without_room_is_tried_smaller_and_the_wait_stays_bounded():
    drive = Drive()
    drive(e.CapacitySeen(num_workers=4))
    failed = e.GroupStartFailed(generation=0, reason="no room", is_capacity=True)
    assert e.LookForCapacity() in drive(failed, after_s=10.0)
    assert drive(e.CapacitySeen(num_workers=4))[-1] == e.StartGroup(generation=1, world_size=3)
    drive(dataclasses.replace(failed, generation=1), after_s=10.0)
    drive(e.CapacitySeen(num_workers=4))
    drive(dataclasses.replace(failed, generation=2), after_s=10.0)
    drive(e.CapacitySeen(num_workers=4))  # never below the minimum
    assert drive.now.world_size == 2
    drive(dataclasses.replace(failed, generation=3), after_s=300.0)
    assert drive.now.phase is Phase.FAILED


def test_a_start_that_no_try_can_mend_ends_the_run_in_its_own_words():
    drive = Drive()
    drive(e.CapacitySeen(num_workers=4))
    why = "3 checkpoints were committed, and none is complete now"
    failed = e.GroupStartFailed(generation=0, reason=why, is_capacity=False)
    assert drive(failed)[-1] == e.LookForCapacity()  # any other fault is tried again
    drive = Drive()
    drive(e.CapacitySeen(num_workers=4))
    commands = drive(dataclasses.replace(failed, is_final=True))
    assert drive.now.phase is Phase.FAILED
    assert [one.kind for one in commands[:-1]] == ["start_failed", "run_failed"]
    assert commands[0].data["cause"] == "storage"
    assert commands[-2].reason == why and commands[-1] == e.End(outcome="failed", reason=why)


def test_death_during_the_start_is_kept_until_the_group_stands():
    drive = Drive()
    drive(e.CapacitySeen(num_workers=3))
    drive(e.WorkerDied(generation=0, world_rank=1, node_lost=False, detail="killed"))
    assert drive.now.phase is Phase.STARTING
    assert drive(e.GroupStarted(generation=0, world_size=3))[-1] == e.StopGroup(generation=0)


def test_first_cause_wins_over_victims_that_report_earlier():  # B81
    drive = Drive().running(3)
    lost = "RuntimeError", "[gloo] Connection closed by peer [127.0.0.1]:4711", True
    assert drive(e.RankFailed(generation=0, error=error(0, *lost)))[-1].kind == "rank_failed"
    drive(e.RankFailed(generation=0, error=error(1, *lost)))
    assert drive.now.phase is Phase.GATHERING
    drive(e.RankFailed(generation=0, error=error(2, "ValueError", "boom-7f")), after_s=1.0)
    assert "rank 2 raised ValueError: boom-7f" in drive.now.reason
    drive(e.GroupStopped(generation=0))
    assert drive.now.phase is Phase.FAILED  # max_failures is 0, as in Ray Train
    assert drive.now.error is not None and drive.now.error.world_rank == 2


def test_own_error_ends_the_group_without_waiting_for_the_others():  # B79
    drive = Drive().running(3)
    commands = drive(e.RankFailed(generation=0, error=error(1)))
    assert commands[-1] == e.StopGroup(generation=0)


def test_victims_alone_are_given_up_after_the_window():
    drive = Drive().running(3)
    lost = "RuntimeError", "Connection reset by peer", True
    drive(e.RankFailed(generation=0, error=error(0, *lost)))
    assert drive(e.Tick(), after_s=2.0) == []
    assert drive(e.Tick(), after_s=2.0)[-1] == e.StopGroup(generation=0)
    assert drive.now.then is Then.RESTART and "no rank was found at fault" in drive.now.reason


def test_node_losses_never_use_up_a_budget_and_deaths_without_progress_do():
    drive = Drive(dataclasses.replace(RULES, max_failures_without_progress=2))
    for _ in range(20):
        drive.running(3)
        generation = drive.now.generation
        drive(e.WorkerDied(generation=generation, world_rank=1, node_lost=True, detail="gone"))
        drive(e.GroupStopped(generation=generation))
    assert drive.now.phase is Phase.LOOKING
    for num in range(3):
        drive.running(3)
        generation = drive.now.generation
        drive(e.WorkerDied(generation=generation, world_rank=1, node_lost=False, detail="killed"))
        drive(e.GroupStopped(generation=generation))
        assert (drive.now.phase is Phase.FAILED) == (num == 2)


def test_a_new_checkpoint_between_failures_refills_the_budget():
    drive = Drive(dataclasses.replace(RULES, max_failures_without_progress=1))
    for step in range(1, 10):
        drive.running(3)
        generation = drive.now.generation
        drive(e.Committed(step=step))
        drive(e.WorkerDied(generation=generation, world_rank=1, node_lost=False, detail="killed"))
        drive(e.GroupStopped(generation=generation))
        assert drive.now.phase is Phase.LOOKING


def test_exceptions_have_their_own_budget():
    drive = Drive(dataclasses.replace(RULES, max_failures=2))
    for num in range(3):
        drive.running(3)
        generation = drive.now.generation
        drive(e.Committed(step=num))
        drive(e.RankFailed(generation=generation, error=error(1)))
        drive(e.GroupStopped(generation=generation))
        assert (drive.now.phase is Phase.FAILED) == (num == 2)


@pytest.mark.parametrize("name", FINAL_ERRORS)
def test_what_a_restart_cannot_mend_is_not_retried(name: str):
    drive = Drive(dataclasses.replace(RULES, max_failures=-1)).running(3)
    drive(e.RankFailed(generation=0, error=error(1, name)))
    drive(e.GroupStopped(generation=0))
    assert drive.now.phase is Phase.FAILED


@pytest.mark.parametrize(
    ("name", "phase"), [("StorageFull", Phase.FAILED), ("SaveFailed", Phase.LOOKING)]
)
def test_want_of_room_ends_the_run_at_once_and_other_failed_saves_do_not(name: str, phase: Phase):
    drive = Drive().running(3)
    drive(e.RankFailed(generation=0, error=error(1, name)))
    causes = [told.data.get("cause") for told in drive.commands if isinstance(told, e.Record)]
    assert "storage" in causes
    drive(e.GroupStopped(generation=0))
    assert drive.now.phase is phase


def test_finish_needs_every_rank():
    drive = Drive().running(2)
    drive(e.RankFinished(generation=0, world_rank=0, step=60))
    assert drive.now.phase is Phase.RUNNING
    drive(e.RankFinished(generation=0, world_rank=1, step=60))
    assert drive.now.phase is Phase.STOPPING
    commands = drive(e.GroupStopped(generation=0))
    assert isinstance(commands[-1], e.End) and commands[-1].outcome == "finished"


@pytest.mark.parametrize("phase", list(Phase))
def test_a_stop_ends_the_run_from_every_phase(phase: Phase):
    drive = Drive()
    drive.now = Situation(phase=phase, generation=0, world_size=2)
    drive(e.StopRequested(reason="asked"))
    if drive.now.phase in (Phase.STARTING, Phase.REFORMING):
        drive(e.GroupStarted(generation=0, world_size=2))
    if drive.now.phase is Phase.GATHERING:
        drive(e.Tick(), after_s=60.0)
    if drive.now.phase is Phase.LEAVING:
        drive(*[e.RankLeft(generation=0, world_rank=rank, step=5) for rank in range(2)])
    if drive.now.phase is Phase.STOPPING:
        drive(e.GroupStopped(generation=0))
    assert drive.now.phase is (phase if phase in FINAL else Phase.STOPPED)


class TestWarmGrowth:
    def grown(self) -> Drive:
        drive = Drive(WARM).running(3)
        commands = drive(e.CapacitySeen(num_workers=4), after_s=10.0)
        assert commands[-1] == e.StartJoiners(num=1) and drive.now.phase is Phase.RUNNING
        assert drive(e.CapacitySeen(num_workers=4), after_s=60.0) == []  # asked for already
        return drive

    def test_others_train_until_the_joiner_is_warm_and_then_all_re_form(self):
        drive = self.grown()
        assert isinstance(drive(e.JoinersReady(num=1))[-1], e.OrderLeave)
        left = [e.RankLeft(generation=0, world_rank=rank, step=40) for rank in range(3)]
        assert drive(*left)[-1] == e.Reform(generation=1, world_size=4)
        drive(e.GroupStarted(generation=1, world_size=4))
        assert drive.now.phase is Phase.RUNNING and drive.now.num_joiners == 0

    def test_a_death_meanwhile_takes_the_waiting_joiner_in(self):
        drive = self.grown()
        drive(e.JoinersReady(num=1))
        died = e.WorkerDied(generation=0, world_rank=0, node_lost=False, detail="killed")
        assert drive(died)[-1] == e.Reform(generation=1, world_size=3)

    def test_a_joiner_that_is_ready_during_a_re_form_is_taken_in_after_it(self):
        drive = self.grown()
        drive(e.WorkerDied(generation=0, world_rank=0, node_lost=False, detail="killed"))
        assert drive(e.JoinersReady(num=1)) == []
        commands = drive(e.GroupStarted(generation=1, world_size=2))
        assert isinstance(commands[-1], e.OrderLeave) and drive.now.then is Then.REFORM

    def test_a_failed_try_is_told_and_repeated_after_the_interval(self):
        drive = self.grown()
        drive(e.JoinersFailed(reason="no room"))
        assert "growth_failed" in drive.kinds()
        assert drive(e.CapacitySeen(num_workers=4), after_s=5.0) == []
        assert drive(e.CapacitySeen(num_workers=4), after_s=10.0)[-1] == e.StartJoiners(num=1)

    def test_a_flapping_node_causes_a_bounded_number_of_tries(self):
        drive = Drive(WARM).running(3)
        for _ in range(1000):
            drive(e.CapacitySeen(num_workers=4), e.JoinersFailed(reason="gone"), after_s=0.1)
        assert drive.kinds().count("growth_planned") <= 10

    def come(self, drive: Drive) -> None:
        """A fourth worker is taken in."""
        generation, size = drive.now.generation, drive.now.world_size
        drive(e.JoinersReady(num=1))
        drive(*[e.RankLeft(generation=generation, world_rank=r, step=40) for r in range(size)])
        drive(e.GroupStarted(generation=generation + 1, world_size=size + 1))

    def go(self, drive: Drive) -> None:
        """The last rank is lost with its node."""
        lost = {"world_rank": drive.now.world_size - 1, "node_lost": True, "detail": "gone"}
        drive(e.WorkerDied(generation=drive.now.generation, **lost))
        drive(e.GroupStarted(generation=drive.now.generation, world_size=drive.now.world_size))

    @pytest.mark.parametrize("stays_s", [0.0, 3.0, 9.0])
    def test_a_node_that_comes_and_goes_causes_few_re_forms(self, stays_s: float):
        drive = Drive(WARM).running(3)
        num_grown = 0
        while drive.time_s < 3600.0:
            if drive(e.CapacitySeen(num_workers=4), after_s=1.0):
                self.come(drive)
                num_grown += 1
                drive(e.Tick(), after_s=stays_s)
                self.go(drive)
        assert 3 < num_grown <= 9  # 10 + 20 + 40 + ... s of waiting fill the hour

    def test_a_growth_that_lasts_ends_the_suspicion(self):
        drive = Drive(WARM).running(3)
        for stays_s in (1.0, 1.0, 100.0):
            while not drive(e.CapacitySeen(num_workers=4), after_s=1.0):
                pass
            self.come(drive)
            drive(e.Tick(), after_s=stays_s)
            self.go(drive)
        assert drive.now.num_flaps == 0
        assert drive(e.CapacitySeen(num_workers=4), after_s=11.0)[-1] == e.StartJoiners(num=1)

    def test_a_stop_goes_before_growth(self):
        drive = self.grown()
        drive(e.JoinersReady(num=1))
        drive(e.StopRequested(reason="asked"))
        left = [e.RankLeft(generation=0, world_rank=rank, step=40) for rank in range(3)]
        assert drive(*left)[-1] == e.StopGroup(generation=0)
        drive(e.GroupStopped(generation=0))
        assert drive.now.phase is Phase.STOPPED


class TestWarm:
    def died(self, generation: int, rank: int, *, node_lost: bool = False) -> e.WorkerDied:
        return e.WorkerDied(
            generation=generation, world_rank=rank, node_lost=node_lost, detail="killed"
        )

    def test_survivors_keep_their_processes(self):
        drive = Drive(WARM).running(4)
        assert drive(self.died(0, 0))[-1] == e.Reform(generation=1, world_size=3)
        assert drive.now.phase is Phase.REFORMING
        drive(e.GroupStarted(generation=1, world_size=3))
        assert drive.now.phase is Phase.RUNNING and drive.now.world_size == 3

    def test_another_death_meanwhile_makes_another_generation(self):
        drive = Drive(WARM).running(4)
        drive(self.died(0, 0))
        assert drive(self.died(1, 2))[-1] == e.Reform(generation=2, world_size=2)
        assert drive(self.died(0, 3)) == []  # word of a group that is no more
        drive(self.died(2, 1))  # below the minimum
        assert drive.now.phase is Phase.HOLDING
        assert drive.now.then is Then.RESTART

    def test_too_few_left_wait_for_new_ones(self):
        drive = Drive(WARM).running(2)
        assert drive(self.died(0, 1))[-1] == e.LookForCapacity()
        assert drive.now.phase is Phase.HOLDING and "1 of at least 2" in drive.now.reason
        assert drive(e.CapacitySeen(num_workers=1)) == []  # its own slot alone
        assert drive(e.CapacitySeen(num_workers=2)) == [e.StartJoiners(num=1)]
        assert drive(e.CapacitySeen(num_workers=2)) == []  # one at a time
        drive(e.JoinersFailed(reason="gone again"))
        assert drive(e.CapacitySeen(num_workers=3)) == [e.StartJoiners(num=2)]
        assert drive(e.JoinersReady(num=2))[-1] == e.Reform(generation=1, world_size=3)
        drive(e.GroupStarted(generation=1, world_size=3))
        assert drive.now.phase is Phase.RUNNING and drive.now.waiting_since_s is None

    def test_who_waits_in_vain_is_let_go(self):
        drive = Drive(WARM).running(2)
        drive(self.died(0, 1))
        assert drive(e.Tick(), after_s=WARM.hold_s - 1.0) == []
        assert drive(e.Tick(), after_s=2.0)[-1] == e.StopGroup(generation=0)
        assert drive(e.GroupStopped(generation=0)) == [e.LookForCapacity()]
        # What was waited so far counts.
        drive(e.CapacitySeen(num_workers=1))
        assert drive.now.phase is Phase.WAITING and "asked for 4" in drive.now.reason
        drive(e.Tick(), after_s=WARM.wait_for_capacity_s - WARM.hold_s - 2.0)
        assert drive.now.phase is Phase.WAITING
        drive(e.Tick(), after_s=2.0)
        assert drive.now.phase is Phase.FAILED

    def test_when_the_last_one_that_waits_dies_all_start_anew(self):
        drive = Drive(WARM).running(2)
        drive(self.died(0, 1))
        assert drive(self.died(0, 0))[-1] == e.StopGroup(generation=0)

    def test_a_stop_is_heard_while_they_wait(self):
        drive = Drive(WARM).running(2)
        drive(self.died(0, 1))
        drive(e.StopRequested(reason="asked"))
        drive(e.GroupStopped(generation=0))
        assert drive.now.phase is Phase.STOPPED

    def test_exceptions_go_cold(self):
        drive = Drive(dataclasses.replace(WARM, max_failures=3)).running(4)
        drive(e.RankFailed(generation=0, error=error(1)))
        assert drive.commands[-1] == e.StopGroup(generation=0)

    def test_a_reform_that_fails_goes_cold_and_says_why(self):
        drive = Drive(WARM).running(4)
        drive(self.died(0, 0))
        failed = e.ReformFailed(generation=1, reason="rank 2 did not join within 10 s")
        assert drive(failed)[-1] == e.StopGroup(generation=1)
        assert "did not join" in drive.now.reason and "reform_failed" in drive.kinds()
        drive(e.GroupStopped(generation=1))
        assert drive(e.CapacitySeen(num_workers=4))[-1] == e.StartGroup(generation=2, world_size=4)

    def test_words_that_come_before_the_group_stands(self):
        drive = Drive(WARM).running(3)
        drive(self.died(0, 0))
        drive(*[e.RankFinished(generation=1, world_rank=rank, step=9) for rank in range(2)])
        assert drive(e.GroupStarted(generation=1, world_size=2))[-1] == e.StopGroup(generation=1)
        assert drive.now.then is Then.FINISH

    def test_deaths_without_progress_still_end_the_run(self):
        rules = dataclasses.replace(WARM, min_workers=1, max_failures_without_progress=2)
        drive = Drive(rules).running(4)
        for generation in range(2):
            drive(self.died(generation, 0))
            drive(e.GroupStarted(generation=generation + 1, world_size=3 - generation))
        drive(self.died(2, 0))
        drive(e.GroupStopped(generation=2))
        assert drive.now.phase is Phase.FAILED


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("seed", range(200))
def test_random_histories_stay_sane(seed: int, warm: bool):
    """Two groups never overlap, generations never repeat, and nothing follows a final state."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    drive = Drive(dataclasses.replace(RULES, max_failures=3, warm=warm))
    begun: list[int] = []
    alive: int | None = None
    for _ in range(120):
        event = next_event(rng, drive.now)
        if event is None:
            continue
        if isinstance(event, e.GroupStartFailed | e.GroupStopped):
            alive = None
        was_final = drive.now.phase in FINAL
        for command in drive(event, after_s=rng.random() * 3):
            assert not was_final
            if isinstance(command, e.StartGroup | e.Reform):
                assert (alive is None) == isinstance(command, e.StartGroup)
                assert command.generation not in begun
                assert RULES.min_workers <= command.world_size <= RULES.max_workers
                begun.append(command.generation)
                alive = command.generation
            if isinstance(command, e.StopGroup):
                assert command.generation == alive
            if isinstance(command, e.End):
                assert drive.now.phase in FINAL and alive is None


def next_event(rng: random.Random, now: Situation) -> e.Event | None:
    """Something that could happen now."""
    generation = now.generation
    started = e.GroupStarted(generation=generation, world_size=now.world_size)
    if now.phase is Phase.STARTING and rng.random() < 0.5:
        is_capacity = rng.random() < 0.5
        failed = e.GroupStartFailed(generation=generation, reason="x", is_capacity=is_capacity)
        return rng.choice([started, failed])
    if now.phase is Phase.REFORMING and rng.random() < 0.5:
        return rng.choice([started, e.ReformFailed(generation=generation, reason="x")])
    if now.phase is Phase.STOPPING and rng.random() < 0.5:
        return e.GroupStopped(generation=generation)
    illegal = (e.GroupStarted, e.GroupStartFailed, e.GroupStopped, e.ReformFailed)
    kind = rng.choice([kind for kind in EVENTS if kind not in illegal])
    if kind is e.StopRequested and rng.random() < 0.9:
        return None
    if kind in (e.JoinersReady, e.JoinersFailed) and not now.is_joining:
        return None
    event = SAMPLES[kind]
    if event.generation != -1:
        event = dataclasses.replace(event, generation=generation)
    return event


@pytest.mark.parametrize(
    ("name", "text", "victim"),
    [
        ("RuntimeError", "[../gloo/transport/tcp/pair.cc:534] Connection closed by peer", True),
        ("DistBackendError", "NCCL communicator was aborted on rank 2", True),
        ("RuntimeError", "shape mismatch: [3] and [4]", False),
        ("ValueError", "Connection closed by peer", False),
        ("OutOfMemoryError", "CUDA out of memory", False),
    ],
)
def test_victims_are_told_from_causes(name: str, text: str, victim: bool):
    assert is_victim(name, text) is victim


def test_headline_names_rank_and_first_line():
    cause = first_cause([error(2, "KeyError", "'x'\nmore")], [])
    assert headline(cause, []) == "rank 2 raised KeyError: 'x'"


@pytest.mark.parametrize("low,high", [(0, 2), (3, 2), (-1, 1)])
def test_rules_refuse_impossible_sizes(low: int, high: int):
    with pytest.raises(ValueError, match=f"{low}:{high}"):
        Rules(min_workers=low, max_workers=high)


# --- whether growth pays ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "cost_s", "lifetimes_s", "quiet_s", "pays"),
    [
        ((2, 3), 5.0, (), 0.0, True),  # nothing was lost yet
        ((2, 3), 5.0, (19.0,), 1.0, False),  # 9.5 s of work for 5 s
        ((2, 3), 5.0, (21.0,), 1.0, True),
        ((2, 3), 5.0, (3.0, 3.0), 21.0, True),  # quiet for so long
        ((1, 3), 5.0, (6.0,), 1.0, True),
        ((64, 65), 1.0, (100.0,), 1.0, False),
    ],
)
def test_growth_pays_when_it_gains_twice_its_cost(sizes, cost_s, lifetimes_s, quiet_s, pays):
    found = growth.judge(*sizes, cost_s=cost_s, lifetimes_s=lifetimes_s, quiet_s=quiet_s)
    assert found.pays is pays


def test_a_node_that_comes_and_goes_is_taken_in_ever_less_often():
    drive = Drive(WARM).running(3)
    num_growths = 0
    for _ in range(3600):
        generation = drive.now.generation
        commands = drive(e.CapacitySeen(num_workers=4), after_s=1.0)
        if not any(isinstance(command, e.StartJoiners) for command in commands):
            continue
        num_growths += 1
        drive(e.JoinersReady(num=1))
        drive(*[e.RankLeft(generation=generation, world_rank=r, step=9) for r in range(3)])
        drive(e.GroupStarted(generation=generation + 1, world_size=4), after_s=1.0)
        drive(e.Progressed(generation=generation + 1, step=10))
        assert drive.now.growth_cost_s == 1.0  # measured
        gone = {"world_rank": 3, "node_lost": True, "detail": "gone again"}
        drive(e.WorkerDied(generation=generation + 1, **gone), after_s=2.0)
        drive(e.GroupStarted(generation=generation + 2, world_size=3))
        assert drive.now.phase is Phase.RUNNING and drive.now.world_size == 3
    assert 3 <= num_growths <= 12  # in an hour
    assert drive.kinds().count("growth_declined") <= num_growths  # said once each time


# --- hangs ------------------------------------------------------------------------------------

STALLED = e.Stalled(generation=0, detail="rank 0 in data for 9 s (limit 3 s)")
CULPRIT = culprits.Culprit(world_rank=1, kind="loop", text="runs on at train.py:4")


def test_a_stall_is_looked_into_once_and_who_is_at_fault_is_ended():
    drive = Drive(WARM).running(3)
    assert drive(STALLED)[-1] == e.Diagnose(generation=0)
    assert drive(STALLED) == []
    found = e.HangFound(generation=0, culprits=(CULPRIT,), stacks="stacks/g0-1")
    assert drive(found)[-1] == e.EndRanks(generation=0, culprits=(CULPRIT,))
    died = e.WorkerDied(
        generation=0, world_rank=1, node_lost=False, detail="ended", hang=CULPRIT.text
    )
    commands = drive(died)
    assert commands[-1] == e.Reform(generation=1, world_size=2)
    decided = next(c for c in commands if getattr(c, "kind", "") == "failure_decided")
    assert decided.data["cause"] == "hang"
    assert drive.now.reason == "rank 1 hung: runs on at train.py:4"
    assert not drive.now.is_stalled


def test_a_stall_that_passes_changes_nothing():
    drive = Drive(WARM).running(3)
    drive(STALLED)
    assert [c.kind for c in drive(e.StallPassed(generation=0, why="w"))] == ["stall_passed"]
    assert drive.now.phase is Phase.RUNNING and not drive.now.is_stalled
    late = e.HangFound(generation=0, culprits=(CULPRIT,), stacks="")
    assert drive(late) == []  # nobody is ended on old evidence


def test_where_nobody_is_at_fault_all_start_anew():
    drive = Drive(WARM).running(3)
    drive(STALLED)
    found = e.HangFound(generation=0, culprits=(), stacks="", places=("rank 0 in data at a.py:1",))
    commands = drive(found)
    assert commands[-1] == e.StopGroup(generation=0)
    decided = next(c for c in commands if getattr(c, "kind", "") == "failure_decided")
    assert decided.data["cause"] == "hang" and decided.data["recovery"] == "cold"
    assert "a.py:1" in decided.reason


def test_a_group_that_hangs_while_it_leaves_is_freed_too():
    drive = Drive(WARM).running(3)
    drive(e.StopRequested(reason="asked"))
    assert drive.now.phase is Phase.LEAVING
    assert drive(STALLED)[-1] == e.Diagnose(generation=0)
