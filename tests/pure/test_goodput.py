"""Every second of every slot goes into exactly one bucket, and the buckets add up to the whole."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.dashboard.goodput import goodput_text, share_text
from elastic.policy.goodput import BUCKETS, Goodput, goodput, money
from elastic.storage.ledger import LedgerEvent
from elastic.storage.metrics import MetricsWriter, StepTime, step_times
from tests.pure.test_cli import ARun, answer, ask


@dataclass
class AHistory:
    """Words and timed steps, as driver and ranks tell them, at times that the test sets."""

    events: list[LedgerEvent] = field(default_factory=list)
    steps: list[StepTime] = field(default_factory=list)
    life: int = 0

    def at(
        self, time_s: float, kind: str, generation: int = -1, step: int = -1, **data: Any
    ) -> None:
        self.events.append(
            LedgerEvent(
                life=self.life,
                seq=len(self.events),
                time_s=time_s,
                kind=kind,
                generation=generation,
                step=step,
                data=data,
            )
        )

    def stepped(
        self, generation: int, first: int, last: int, *, end_s: float, lost_after: int = 10**9
    ) -> None:
        """Steps of 1 s, the last of them told at `end_s`; those after `lost_after` are lost."""
        for step in range(first, last + 1):
            self.steps.append(
                StepTime(
                    generation=generation,
                    step=step,
                    time_s=end_s - (last - step),
                    step_s=1.0,
                    counts=step <= lost_after,
                )
            )

    def start(self, world_size: int = 3) -> None:
        """10 s from the plan to a group that trains."""
        self.at(0.0, "run_started")
        self.at(0.0, "generation_planned", 0, world_size=world_size)
        self.at(6.0, "generation_started", 0, world_size=world_size)
        self.at(10.0, "started", 0, 0)

    def told(self) -> Goodput:
        found = goodput(self.events, self.steps)
        adds_up(found)
        return found

    def buckets(self) -> dict[str, float]:
        """Those that hold something."""
        return {name: held for name, held in self.told().slot_seconds.items() if held > 1e-9}


def adds_up(found: Goodput) -> None:
    assert list(found.slot_seconds) == list(BUCKETS)
    assert min(found.slot_seconds.values()) >= -1e-9 * max(1.0, found.whole_slot_seconds)
    total = math.fsum(found.slot_seconds.values())
    assert total == pytest.approx(found.whole_slot_seconds, rel=1e-9, abs=1e-9)


def failed(**of_failure: Any) -> AHistory:
    """Three workers, 20 steps, a stall of 5 s; then two, which go on from step 16."""
    run = AHistory()
    run.start()
    run.stepped(0, 1, 20, end_s=30.0, lost_after=16)
    run.at(22.0, "checkpoint_committed", 0, 16, stall_s=0.5, duration_s=3.0)
    run.at(31.5, "stall_seen", 0, 20)
    run.at(36.5, "failure_decided", 0, 20, **of_failure)
    run.at(36.5, "generation_planned", 1, world_size=2)
    run.at(40.5, "generation_started", 1, world_size=2)
    run.at(44.5, "resumed", 1, 16)
    run.stepped(1, 17, 26, end_s=54.5)
    phases_s = {"diagnose": 5.0, "start": 3.0, "connect": 1.0, "load": 2.0, "first_step": 1.0}
    run.at(45.5, "recovered", 1, 17, lost_steps=4, phases_s=phases_s)
    run.at(55.0, "run_finished", 1, 26)
    return run


# --- by hand -------------------------------------------------------------------------------------


def test_a_failure_costs_detection_a_re_form_and_steps_done_again() -> None:
    run = failed()
    assert run.buckets() == pytest.approx(
        {
            "start_up": 30.0,
            "useful": 16 * 3 + 10 * 2,
            "recomputed": 4 * 3,
            "save_stall": 0.5 * 3,
            # Of the 1.5 s since the last step one may have been work.
            "detection": (5.0 + 0.5) * 3,
            "reform_start": 3 * 2,
            "reform_connect": 1 * 2,
            "reform_load": 2 * 2,
            "reform_wait": 2 * 2,
            "idle": 0.5 * 3 + 0.5 * 2,
        }
    )
    found = run.told()
    assert found.whole_slot_seconds == pytest.approx(36.5 * 3 + 18.5 * 2)
    assert found.share == pytest.approx(68 / found.whole_slot_seconds)


def test_what_an_injected_failure_cost_stands_apart() -> None:
    plain, injected = failed().told(), failed(injected=True).told()
    costs = ("detection", "recomputed", "reform_start", "reform_connect", "reform_load")
    taken = sum(plain.slot_seconds[name] for name in (*costs, "reform_wait"))
    assert injected.slot_seconds["injected"] == pytest.approx(taken)
    assert injected.share == plain.share
    assert sum(injected.slot_seconds[name] for name in costs) == 0.0


def test_lost_steps_that_no_metric_tells_of_are_counted_all_the_same() -> None:
    run = failed()
    run.steps = [one for one in run.steps if one.counts or one.step <= 18]
    assert run.buckets()["recomputed"] == pytest.approx(4 * 3)
    run.steps = [one for one in run.steps if one.generation == 1]
    assert run.buckets()["recomputed"] == pytest.approx(4 * 3), "as long as the run's other steps"


def test_a_stall_that_passes_is_training() -> None:
    run = AHistory()
    run.start()
    run.stepped(0, 1, 10, end_s=20.0)
    run.at(12.0, "stall_seen", 0, 1)
    run.at(18.0, "stall_passed", 0, 1)
    run.at(20.0, "failure_decided", 0, 10)
    assert run.buckets() == pytest.approx({"start_up": 30.0, "useful": 30.0})


def test_the_end_of_one_submission_is_no_part_of_the_next() -> None:
    run = AHistory()
    run.start(1)
    run.at(10.0, "failure_decided", 0, 0, then="fail")
    run.at(15.0, "run_failed", 0, 0)
    run.life = 1
    run.at(20.0, "run_started")
    run.at(20.0, "generation_planned", 1, world_size=1)
    run.at(21.0, "resumed", 1, 0)
    run.at(21.0, "failure_decided", 1, 0)
    run.at(23.0, "progress", 1, 0, state="STARTING")
    assert run.buckets() == pytest.approx({"start_up": 11.0, "idle": 5.0, "reform_wait": 2.0})


def test_a_clock_that_was_set_back_takes_nothing_away() -> None:
    run = AHistory()
    run.start(1)
    run.at(20.0, "progress", 0, 0, state="RUNNING")
    run.at(4.0, "progress", 0, 0, state="RUNNING")
    run.at(5.0, "run_stopped", 0, 0)
    assert run.buckets() == pytest.approx({"start_up": 10.0, "idle": 10.0})


def test_joiners_start_up_while_the_others_train() -> None:
    run = AHistory()
    run.start(2)
    run.stepped(0, 1, 10, end_s=20.0)
    run.at(14.0, "growth_planned", 0, old_world_size=2, new_world_size=3)
    run.at(19.0, "leave_ordered", 0)
    run.at(20.5, "checkpoint_committed", 0, 10, stall_s=0.1, duration_s=0.5)
    run.at(20.5, "generation_planned", 1, world_size=3)
    run.at(21.5, "resumed", 1, 10)
    run.stepped(1, 11, 13, end_s=24.5)
    run.at(24.5, "run_stopped", 1, 13)
    assert run.buckets() == pytest.approx(
        {
            "start_up": 20.0 + 6.5,
            "useful": 10 * 2 + 3 * 3,
            "save_stall": 0.5 * 2,
            "reform_wait": 1.0 * 3,
        }
    )


def test_survivors_that_wait_hold_their_slots_and_a_lost_node_none() -> None:
    run = AHistory()
    run.start()
    run.stepped(0, 1, 10, end_s=20.0)
    run.at(20.0, "node_lost", 0, 10)
    run.at(20.0, "failure_decided", 0, 10)
    run.at(20.0, "holding", 0, 10)
    run.at(50.0, "waiting")
    run.at(80.0, "generation_planned", 1, world_size=2)
    run.at(85.0, "resumed", 1, 10)
    run.at(85.0, "run_stopped", 1, 10)
    assert run.buckets() == pytest.approx(
        {
            "start_up": 30.0,
            "useful": 30.0,
            "waiting_for_capacity": 30.0 * 2,
            "reform_wait": 5.0 * 2,
        }
    )
    assert run.told().without_slots_s == 30.0


def test_the_time_between_two_submissions_is_nobodys() -> None:
    run = AHistory()
    run.start(2)
    run.at(20.0, "run_stopped", 0, 0)
    run.life = 1
    run.at(86_400.0, "run_started")
    run.at(86_401.0, "generation_planned", 1, world_size=2)
    run.at(86_411.0, "progress", state="STARTING")
    assert run.buckets() == pytest.approx({"start_up": 40.0, "idle": 20.0})
    assert run.told().without_slots_s == 1.0


def test_a_dead_drivers_slots_are_held_until_another_takes_over() -> None:
    run = AHistory()
    run.start(2)
    run.stepped(0, 1, 10, end_s=20.0)
    run.at(20.0, "progress", 0, 10, state="RUNNING", phase="data")
    run.life = 1
    run.at(27.0, "driver_lost", 0, 10)
    run.at(28.0, "run_started", take_over=1)
    run.at(29.0, "generation_planned", 1, world_size=2)
    run.at(33.0, "resumed", 1, 10)
    run.at(33.0, "recovered", 1, 11, lost_steps=0, phases_s={"take_over": 2.0, "start": 4.0})
    run.at(34.0, "progress", 1, 10, state="RUNNING", phase="first batch")
    assert run.buckets() == pytest.approx(
        {
            "start_up": 20.0,
            "useful": 20.0,
            "detection": 14.0,
            "reform_take_over": 4.0,
            "reform_start": 8.0,
            "idle": 2.0,
        }
    )


def test_what_is_written_while_nobody_is_at_the_run_does_not_count() -> None:
    run = AHistory()
    run.start(2)
    run.at(20.0, "run_stopped", 0, 0)
    before = run.told()
    run.life = 1
    run.at(9_000.0, "rolled_back")
    run.at(9_500.0, "rolled_back")
    assert run.told() == before


def test_compile_and_evaluation_are_taken_out_of_the_steps_they_happen_in() -> None:
    run = AHistory()
    run.start(1)
    run.stepped(0, 1, 20, end_s=30.0)
    phases = ("compile", "evaluation", "forward-backward", "data")
    for number, phase in enumerate(phases, start=1):
        run.at(10.0 + 5.0 * number, "progress", 0, 5 * number, state="RUNNING", phase=phase)
    assert run.buckets() == pytest.approx(
        {"start_up": 10.0, "useful": 10.0, "compile": 5.0, "evaluation": 5.0}
    )


def test_what_a_first_step_takes_longer_belongs_to_the_start() -> None:
    run = AHistory()
    run.start(1)
    run.stepped(0, 2, 6, end_s=20.0)
    run.steps.append(StepTime(generation=0, step=1, time_s=15.0, step_s=5.0, counts=True))
    run.at(20.0, "run_finished", 0, 6)
    assert run.buckets() == pytest.approx({"start_up": 14.0, "useful": 6.0})


def test_a_loop_that_times_no_steps_has_its_time_shared_among_them() -> None:
    run = failed()
    run.steps = []
    found = run.buckets()
    assert found["recomputed"] == pytest.approx(21.0 * 3 * 4 / 20)
    assert found["useful"] == pytest.approx(21.0 * 3 * 16 / 20 + 10.5 * 2)


def test_the_first_and_the_last_save_are_waited_for() -> None:
    run = AHistory()
    run.start(1)
    run.at(12.0, "checkpoint_committed", 0, 0, stall_s=0.1, duration_s=2.0)
    run.stepped(0, 1, 5, end_s=17.0)
    run.at(15.0, "checkpoint_committed", 0, 3, stall_s=0.5, duration_s=2.0)
    run.at(20.0, "checkpoint_committed", 0, 5, stall_s=0.1, duration_s=1.5)
    run.at(20.0, "run_finished", 0, 5)
    found = run.buckets()
    assert found["save_stall"] == pytest.approx(2.0 + 0.5 + 1.5)
    assert found["idle"] == pytest.approx(1.0)


def test_a_run_of_torchrun_has_no_plans() -> None:
    run = AHistory()
    run.at(0.0, "run_started", under="torchrun")
    run.at(1.0, "generation_started", 0, world_size=2)
    run.at(2.0, "started", 0, 0)
    run.stepped(0, 1, 3, end_s=5.0)
    run.at(5.0, "run_finished", 0, 3)
    assert run.buckets() == pytest.approx({"start_up": 2.0, "useful": 6.0})


def test_nothing_held_has_no_share() -> None:
    assert goodput([], []).share is None
    run = AHistory()
    run.at(0.0, "run_started")
    run.at(60.0, "waiting")
    assert (run.told().share, run.told().without_slots_s) == (None, 60.0)


# --- generated -----------------------------------------------------------------------------------


class AGeneratedRun:
    """A plausible history of many failures and growths, and what it cost, told apart meanwhile."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.history = AHistory()
        self.truth = dict.fromkeys(
            ("useful", "recomputed", "detection", "start_up", "reform", "waiting", "whole"), 0.0
        )
        self.now_s = 1_700_000_000.0
        self.slots = 0

    def takes(self, seconds: float, bucket: str) -> None:
        self.now_s += seconds
        self.truth[bucket] += seconds * self.slots
        self.truth["whole"] += seconds * self.slots

    def says(self, kind: str, generation: int = -1, step: int = -1, **data: Any) -> None:
        self.history.at(self.now_s, kind, generation, step, **data)

    def run(self) -> None:
        some = self._random.uniform
        self.says("run_started")
        self.slots = self._random.randint(2, 8)
        done = saved = 0
        for generation in range(self._random.randint(1, 12)):
            bucket = "reform" if generation else "start_up"
            self.says("generation_planned", generation, world_size=self.slots)
            self.takes(some(0, 5), bucket)
            self.says("generation_started", generation, world_size=self.slots)
            self.takes(some(0, 2), bucket)
            self.says("resumed" if generation else "started", generation, saved)
            lost, done = done - saved, saved
            if generation:
                phases = {name: some(0, 4) for name in ("start", "load", "wait", "first_step")}
                self.says("recovered", generation, saved + 1, lost_steps=lost, phases_s=phases)
            done, saved = self._train(generation, done)
            self._fail(generation, done)
        self.says("run_failed")

    def _train(self, generation: int, first: int) -> tuple[int, int]:
        step_s = self._random.uniform(0.1, 2.0)
        num = self._random.randint(0, 30)
        saved = first + self._random.randint(0, num)
        for step in range(first + 1, first + num + 1):
            self.takes(step_s, "useful" if step <= saved else "recomputed")
            self.history.steps.append(
                StepTime(
                    generation=generation,
                    step=step,
                    time_s=self.now_s,
                    step_s=step_s,
                    counts=step <= saved,
                )
            )
            if self._random.random() < 0.3:
                self.says("progress", generation, step, phase="data", state="RUNNING")
        return first + num, saved

    def _fail(self, generation: int, step: int) -> None:
        if self._random.random() < 0.5:
            self.says("stall_seen", generation, step)
            self.takes(self._random.uniform(0, 9), "detection")
        if self._random.random() < 0.5:
            self.says("node_lost", generation, step)
            self.slots -= 1
        self.says("failure_decided", generation, step, then="restart")
        self.takes(self._random.uniform(0, 3), "reform")
        if self._random.random() < 0.3:
            self.says("holding", generation, step)
            self.takes(self._random.uniform(0, 60), "waiting")
        if self._random.random() < 0.3:
            self.says("waiting")
            self.now_s += self._random.uniform(0, 600)
        self.slots = self._random.randint(2, 8)


@pytest.mark.parametrize("seed", range(200))
def test_a_generated_run_costs_what_it_was_made_to_cost(seed: int) -> None:
    made = AGeneratedRun(seed)
    made.run()
    found = made.history.told()
    held = found.slot_seconds
    told = {
        "whole": found.whole_slot_seconds,
        "waiting": held["waiting_for_capacity"],
        "reform": sum(held[name] for name in BUCKETS if name.startswith("reform_")),
        **{name: held[name] for name in ("useful", "recomputed", "detection", "start_up")},
    }
    # Wall times of today have a quarter of a microsecond between them.
    assert told == pytest.approx(made.truth, rel=1e-6, abs=1e-3)


_KINDS = [
    "run_started",
    "driver_lost",
    "driver_took_over",
    "generation_planned",
    "generation_started",
    "started",
    "resumed",
    "recovered",
    "stall_seen",
    "stall_passed",
    "failure_decided",
    "generation_ended",
    "holding",
    "waiting",
    "start_failed",
    "run_finished",
    "run_stopped",
    "run_failed",
    "node_lost",
    "worker_died",
    "growth_planned",
    "growth_failed",
    "leave_ordered",
    "checkpoint_committed",
    "progress",
    "unheard_of",
]
_ODD = st.one_of(
    st.none(), st.integers(-5, 20), st.floats(), st.text(max_size=3), st.booleans(), st.just([])
)
_DATA = st.fixed_dictionaries(
    {},
    optional={
        "world_size": st.integers(0, 8) | _ODD,
        "old_world_size": st.integers(0, 8) | _ODD,
        "new_world_size": st.integers(0, 8) | _ODD,
        "lost_steps": st.integers(0, 8) | _ODD,
        "stall_s": st.floats() | _ODD,
        "duration_s": st.floats() | _ODD,
        "phase": st.sampled_from(["compile", "evaluation", "data"]) | _ODD,
        "phases_s": st.dictionaries(st.sampled_from(["start", "load"]), st.floats() | _ODD) | _ODD,
        "injected": st.booleans() | _ODD,
        "then": st.sampled_from(["restart", "fail"]) | _ODD,
    },
)
_WORDS = st.lists(
    st.tuples(
        st.floats(-5, 20), st.sampled_from(_KINDS), st.integers(-1, 3), st.integers(-1, 9), _DATA
    ),
    max_size=40,
)
_STEPS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 9), st.floats(0, 200), st.floats(), st.booleans()),
    max_size=20,
)


@settings(deadline=None, max_examples=200)
@given(words=_WORDS, steps=_STEPS, begins=st.lists(st.integers(0, 40), max_size=3))
def test_whatever_a_ledger_says_the_buckets_add_up(
    words: list[tuple[float, str, int, int, Mapping[str, Any]]],
    steps: list[tuple[int, int, float, float, bool]],
    begins: list[int],
) -> None:
    run = AHistory()
    run.start()
    now_s = 10.0
    for number, (after_s, kind, generation, step, data) in enumerate(words):
        run.life += number in begins
        now_s += after_s
        run.at(now_s, kind, generation, step, **data)
    run.steps = [
        StepTime(generation=generation, step=step, time_s=time_s, step_s=step_s, counts=counts)
        for generation, step, time_s, step_s, counts in steps
    ]
    run.told()


# --- told ----------------------------------------------------------------------------------------


def test_money_adds_up_as_the_slots_do() -> None:
    found = failed().told()
    costs = money(found, price_per_slot_hour=36.0)
    assert costs["start_up"] == pytest.approx(0.30)
    assert sum(costs.values()) == pytest.approx(found.whole_slot_seconds * 0.01)


def written(root: Path) -> ARun:
    """`failed`, as a run directory."""
    run, history = ARun(root), failed()
    for event in history.events:
        run.ledger.append(
            event.kind,
            time_s=event.time_s,
            generation=event.generation,
            step=event.step,
            data=event.data,
        )
    metrics = MetricsWriter(run.fs)
    metrics.start(0, 1, 10.0)
    metrics.start(1, 17, 44.5)
    for one in history.steps:
        values = {"loss": 1.0, "step_s": one.step_s}
        metrics.add(one.generation, one.step, one.time_s, values)
    metrics.flush()
    return run


def test_steps_that_were_done_again_do_not_count_twice(tmp_path: Path) -> None:
    with closing(written(tmp_path)) as run:
        assert step_times(run.fs) == failed().steps


def test_the_verb_reads_well(tmp_path: Path) -> None:
    with closing(written(tmp_path)) as run:
        said = ask("goodput", run.root, "--price-per-slot-hour", "36")
    assert said.exit_code == 0
    assert said.output.splitlines() == [
        "BUCKET            SLOT-SECONDS    SHARE  MONEY",
        "useful                    68.0   46.4 %   0.68",
        "recomputed                12.0    8.2 %   0.12",
        "save stall                 1.5    1.0 %   0.01",
        "detection                 16.5   11.3 %   0.17",
        "re-form: start             6.0    4.1 %   0.06",
        "re-form: connect           2.0    1.4 %   0.02",
        "re-form: load              4.0    2.7 %   0.04",
        "re-form: wait              4.0    2.7 %   0.04",
        "start up                  30.0   20.5 %   0.30",
        "idle                       2.5    1.7 %   0.03",
        "in all                   146.5  100.0 %   1.47",
    ]


def test_the_verb_and_the_status_tell_programs_the_same(tmp_path: Path) -> None:
    with closing(written(tmp_path)) as run:
        told = answer("goodput", run.root, "--price-per-slot-hour", "36")
        assert told["money"]["useful"] == pytest.approx(0.68)
        assert answer("goodput", run.root)["money"] is None
        status = answer("status", run.root)["goodput"]
        text = ask("status", run.root).output
    assert {name: told[name] for name in status} == status
    assert status["share"] == pytest.approx(68 / 146.5)
    assert "goodput     46.4 % of 146 slot-seconds; start up 20.5 %, detection 11.3 %" in text


def test_damaged_metrics_do_not_hide_the_status(tmp_path: Path) -> None:
    with closing(written(tmp_path)) as run:
        for segment in (run.root / "metrics").iterdir():
            segment.write_bytes(b"noise")
        assert answer("status", run.root)["goodput"] is None
        assert "goodput     -\n" in ask("status", run.root).output
        assert ask("goodput", run.root).exit_code == 2


def test_a_price_must_be_one(tmp_path: Path) -> None:
    with closing(written(tmp_path)) as run:
        for price in ("-1", "nan", "inf", "cheap"):
            said = ask("goodput", run.root, "--price-per-slot-hour", price)
            assert (said.exit_code, "--price-per-slot-hour" in said.stderr) == (2, True), price


def test_a_run_that_has_held_nothing_says_so(tmp_path: Path) -> None:
    with closing(ARun(tmp_path)) as run:
        assert ask("goodput", run.root).output == "the run has held no slot yet\n"
        assert answer("goodput", run.root)["share"] is None
    nothing = goodput([], [])
    assert (share_text(nothing), share_text(None)) == ("-", "-")
    assert "no slot" in goodput_text(nothing, price_per_slot_hour=1.0)
    assert json.loads(json.dumps(nothing.slot_seconds)) == dict.fromkeys(BUCKETS, 0.0)
