"""How often a run saves: as the simulation says best, from what counts, and with its reason."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from elastic.policy.cadence import Cadence
from elastic.policy.events import Record
from elastic.policy.exposure import MOST_SILENCE_S, Exposure
from elastic.policy.intervals import SaveCosts, best_interval
from elastic.policy.mtbf import (
    DEFAULT_PRIOR_S,
    cluster_mtbf_s,
    learned_mtbf_s,
    mtbf_with_prior_s,
    prior_mtbf_s,
)
from elastic.policy.saves import SaveInterval
from elastic.policy.slow_down import (
    LEAST_APART,
    LEAST_SAVES,
    MOST_APART,
    MOST_SAVES,
    MOST_STEPS,
    SlowDown,
)
from elastic.training.pacing import Pacing
from jobs.bench.intervals import (
    COMPUTED,
    WEIBULL,
    Conditions,
    compare,
    failure_traces,
    fixed_intervals,
    lost_with_cadence,
    lost_with_fixed,
    uptimes,
)

HOUR_S = 3600.0
DIED = {"cause": "worker_died", "then": "restart"}


def saved(stall_s: float, write_s: float, num_bytes: int = 1_000_000) -> dict[str, object]:
    return {"stall_s": stall_s, "duration_s": stall_s + write_s, "bytes": num_bytes}


class ARun:
    """A cadence, and a clock for its words."""

    def __init__(self, asked: SaveInterval = COMPUTED, mtbf_s: float | None = 8 * HOUR_S) -> None:
        self.cadence = Cadence(asked, mtbf_s)
        self.time_s = 1e9
        self.step = 0

    def hear(self, kind: str, **data: Any) -> None:
        self.cadence.hear(kind, self.step, data, self.time_s)

    def train(self, seconds: float) -> None:
        for _ in range(int(seconds / 5)):
            self.time_s += 5
            self.hear("progress")

    def save(self, stall_s: float = 0.4, write_s: float = 2.0) -> None:
        self.hear("checkpoint_committed", **saved(stall_s, write_s))

    def fail(self, **data: Any) -> None:
        self.hear("failure_decided", **DIED, **data)
        self.time_s += 1
        self.hear("resumed")
        self.hear("recovered", phases_s={"load": 0.25, "wait": 0.75})

    def reason(self) -> str:
        record = self.cadence.look()
        assert record is not None and record.kind == "save_interval"
        assert record.data["seconds"] == self.cadence.every_s
        return record.reason


# --- against the best fixed interval in hindsight ------------------------------------------------


# Fewer saves between failures than by default, so that the simulation is done sooner.
QUICK = Conditions(stall_s=8.0, write_s=20.0)


@pytest.mark.parametrize("prior", [1.0, 4.0, 0.25], ids=["right", "too long", "too short"])
def test_within_5_percent_of_the_best_fixed_interval(prior: float) -> None:
    """The sum over 200 traces of 20 failures, against the same sum for the fixed interval that is
    best for all of them; also when the prior is wrong by a factor of 4."""
    conditions = QUICK
    row = compare("", conditions, prior * conditions.mtbf_s, num_traces=200, seed=1)
    assert -0.01 < row.excess < 0.05
    assert min(fixed_intervals(conditions)) < row.best_interval_s < max(fixed_intervals(conditions))
    assert row.own_best_s < row.best_lost_s


def test_within_5_percent_when_failures_come_in_bursts() -> None:
    conditions = replace(QUICK, shape=WEIBULL)
    assert compare("", conditions, conditions.mtbf_s, num_traces=100, seed=1).excess < 0.05


class Fixed(Cadence):
    """Says what it was made with, whatever it hears."""

    def __init__(self, interval_s: float) -> None:
        super().__init__(COMPUTED)
        self.interval_s = interval_s

    @property
    def every_s(self) -> float:
        return self.interval_s


@pytest.mark.parametrize("interval_s", [12.0, 97.3, 400.0])
def test_both_simulations_are_of_the_same_run(interval_s: float) -> None:
    conditions = Conditions(down_s=120.0, mtbf_s=600.0)
    for trace in failure_traces(conditions, 20, seed=3):
        expected = lost_with_fixed(trace, conditions, interval_s)
        found = lost_with_cadence(trace, conditions, Fixed(interval_s))
        assert found == pytest.approx(expected, abs=1e-6)


def test_the_simulation_by_hand() -> None:
    """Saves at 100 and 200 stall for 10 and count from 130 and 230 on; a failure at 229 leaves the
    first, which holds 100 s of work. The second start works from 249 to 300: one save too late."""
    conditions = Conditions(stall_s=10, write_s=20, down_s=20, mtbf_s=300, num_failures=1)
    assert list(uptimes([229], conditions)) == [(0, 229, True), (249, 300, False)]
    assert lost_with_fixed([229], conditions, 100) == 300 - (100 + 51)
    assert lost_with_fixed([231], conditions, 100) == 300 - (190 + 49)
    assert lost_with_fixed([], conditions, 200) == 10


def test_traces_have_the_mean_that_is_asked_for() -> None:
    for shape in (1.0, WEIBULL):
        conditions = Conditions(shape=shape)
        num_failures = sum(map(len, failure_traces(conditions, 400, seed=7)))
        assert num_failures / 400 == pytest.approx(conditions.num_failures, rel=0.05)


# --- the interval and its reason -----------------------------------------------------------------


def test_the_first_interval_is_of_the_first_save_and_the_prior() -> None:
    run = ARun()
    assert run.cadence.look() is None and run.cadence.every_s is None
    run.save()
    reason = run.reason()
    assert reason.endswith("(prior 8 h, no failure in 0 ms)")
    costs = SaveCosts(
        mtbf_s=learned_mtbf_s(num_failures=0, observed_s=0, prior_s=8 * HOUR_S),
        stall_s=0.4,
        write_s=2.0,
    )
    assert run.cadence.every_s == pytest.approx(best_interval(costs).seconds)


def test_failures_bring_it_down_and_are_told() -> None:
    run = ARun()
    run.hear("generation_started", world_size=2)
    run.hear("started")
    run.save()
    run.train(20 * 60)
    assert "(prior 8 h, no failure in 20 min)" in run.reason()
    quiet_s = run.cadence.every_s
    for _ in range(3):
        run.fail()
        run.train(30 * 60)
    reason = run.reason()
    assert reason.startswith("every ") and ": stall 400 ms, MTBF " in reason
    assert " from 3 failures in 1.83 h (prior 8 h)" in reason
    assert quiet_s is not None and run.cadence.every_s is not None
    assert run.cadence.every_s < 0.8 * quiet_s


def test_the_default_prior_is_told_as_such() -> None:
    run = ARun(mtbf_s=None)
    run.hear("generation_started", world_size=2)
    run.save()
    assert "prior 8 h by default" in run.reason()


def test_what_was_measured_is_in_the_record() -> None:
    run = ARun()
    run.hear("started")
    for step in range(1, 8):
        run.cadence.stepped(step, 2.0, run.time_s)
    run.time_s += 9  # one step of 2 s was under way, so 7 s went by unnoticed
    run.fail()
    run.save(0.4, 2.0)
    record = run.cadence.look()
    assert record is not None
    expected = {"stall_s": 0.4, "write_s": 2.0, "recovery_s": 1.0, "detection_s": 7.0}
    assert {key: record.data[key] for key in expected} == pytest.approx(expected)
    assert record.data["num_failures"] == 1 and record.data["prior_s"] == 8 * HOUR_S


def test_one_slow_save_changes_nothing() -> None:
    run = ARun()
    run.save()
    run.save()
    assert run.reason()
    run.save(stall_s=40.0, write_s=300.0)
    assert run.cadence.look() is None


def test_small_changes_are_not_recorded() -> None:
    run = ARun()
    run.save(0.4)
    run.reason()
    before_s = run.cadence.every_s
    for _ in range(20):
        run.save(0.4 * 1.15)  # the interval is as the root of it
    assert run.cadence.look() is None and run.cadence.every_s == before_s
    for _ in range(20):
        run.save(0.4 * 1.6)
    assert run.reason()


def test_it_is_never_below_what_one_save_takes() -> None:
    run = ARun(mtbf_s=60.0)
    run.save(0.4, 30.0)
    reason = run.reason()
    assert run.cadence.every_s == pytest.approx(30.4)
    assert "would be best, and a save takes 30.4 s: storage takes 33.3 kB/s, 1 MB each " in reason
    assert " need " in reason


def test_an_interval_that_is_asked_for_is_told_once_and_not_computed() -> None:
    run = ARun(SaveInterval.parse("100steps"))
    assert run.cadence.look() is not None
    run.save()
    run.fail()
    assert run.cadence.look() is None and run.cadence.every_s is None
    record = ARun(SaveInterval.parse("60s")).cadence.look()
    assert record is not None
    assert (record.reason, record.data) == ("every 60 s: as asked for", {"seconds": 60.0})
    assert (
        str(SaveInterval(steps=1)) == "every step" and str(SaveInterval(steps=2)) == "every 2 steps"
    )
    record = ARun(SaveInterval()).cadence.look()
    assert record is not None and record.data == {}


def test_auto_is_computed() -> None:
    assert SaveInterval.parse("auto") == COMPUTED and str(COMPUTED) == "as computed"
    assert not COMPUTED.is_due(step=9, last_step=0, now_s=1e9, last_s=0)
    with pytest.raises(ValueError, match="one of them"):
        SaveInterval(seconds=1, is_computed=True)
    with pytest.raises(ValueError, match="expected auto, steps"):
        SaveInterval.parse("often")


@pytest.mark.parametrize("bad", ["x", None, -1.0, math.nan, math.inf])
def test_a_damaged_past_is_no_measurement(bad: object) -> None:
    run = ARun()
    run.hear("checkpoint_committed", stall_s=bad, duration_s=1.0, bytes=bad)
    assert run.cadence.look() is None
    run.hear("generation_started", world_size=bad)
    run.hear("started")
    run.hear("failure_decided")
    run.hear("recovered", phases_s={"load": bad, "wait": 2.0})
    run.save()
    assert run.reason()


# --- handing it on -------------------------------------------------------------------------------


class APacing:
    """A pacing of a cadence, and what it has said."""

    def __init__(self, run: ARun) -> None:
        self.records: list[Record] = []
        self.orders: list[tuple[int, float]] = []
        self.pacing = Pacing(
            run.cadence,
            record=self.records.append,
            order=lambda generation, every_s: self.orders.append((generation, every_s)),
        )


def test_each_generation_is_told_once_and_again_when_it_changes() -> None:
    run = ARun()
    told = APacing(run)
    told.pacing.look(0, [])
    assert told.orders == [] and told.records == []
    run.save()
    for generation in (0, 0, 1, 1):
        told.pacing.look(generation, [])
    assert [generation for generation, _ in told.orders] == [0, 1]
    assert [(one.kind, one.generation) for one in told.records] == [("save_interval", 0)]
    run.hear("started")
    run.fail()
    told.pacing.look(2, [])
    assert told.orders[-1] == (2, run.cadence.every_s) and len(told.records) == 2


def test_steps_that_rank_0_tells_of_are_measured() -> None:
    run = ARun(SaveInterval.parse("4steps"))
    told = APacing(run)
    told.pacing.look(0, [{"step": 1, "values": {"step_s": 0.5}}, {"step": 2, "values": {}}])
    run.save()
    told.pacing.skipped(0, 4, 9.0)
    assert told.records[-1].data["needed_bytes_per_s"] == 500_000


def test_each_skipped_save_is_recorded_and_the_log_is_not_flooded(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told = APacing(ARun())
    for step in range(50):
        told.pacing.skipped(3, step, 1.0)
    assert [(one.step, one.generation) for one in told.records] == [(n, 3) for n in range(50)]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "step 0: the save before it was still being written" in caplog.text


# --- failures that count -------------------------------------------------------------------------


def heard(*words: tuple[str, float] | tuple[str, float, Mapping[str, object]]) -> Exposure:
    exposure = Exposure()
    for kind, time_s, *data in words:
        exposure.hear(kind, data[0] if data else {}, time_s)
    return exposure


def test_time_and_failures_of_a_plain_run() -> None:
    found = heard(
        *(("run_started", 0), ("started", 20), ("progress", 50), ("failure_decided", 60)),
        *(("generation_started", 61), ("resumed", 65), ("progress", 100), ("run_finished", 105)),
    )
    assert (found.num_failures, found.observed_s) == (1, 40 + 40)


def test_injected_failures_do_not_count() -> None:
    injected = {"injected": True}
    found = heard(("started", 0), ("failure_decided", 10, injected), ("resumed", 20))
    assert (found.num_failures, found.observed_s) == (0, 10)
    run = ARun()
    run.hear("started")
    run.save()
    run.reason()
    run.fail(injected=True)
    assert run.cadence.look() is None


def test_what_loses_no_work_is_no_failure() -> None:
    found = heard(
        *(("started", 0), ("leave_ordered", 10), ("generation_started", 11), ("resumed", 12)),
        *(("drain_noticed", 20), ("leave_ordered", 20), ("resumed", 24), ("run_stopped", 30)),
        *(("run_started", 1000), ("resumed", 1010), ("run_finished", 1030)),
    )
    assert (found.num_failures, found.observed_s) == (0, 30 + 20)


def test_a_node_that_is_left_without_a_save_loses_work() -> None:
    found = heard(
        *(("started", 0), ("drain_noticed", 10), ("left_unsaved", 11), ("generation_started", 12)),
        *(("resumed", 13), ("drain_noticed", 20), ("leave_ordered", 21), ("resumed", 23)),
    )
    assert found.num_failures == 1


def test_failing_again_before_training_began_is_one_failure() -> None:
    found = heard(
        *(("started", 0), ("failure_decided", 10), ("generation_started", 11)),
        *(("failure_decided", 12), ("run_failed", 13)),
    )
    assert found.num_failures == 1


def test_a_driver_that_vanished_is_a_failure_of_its_own() -> None:
    """The next life tells: the driver's first word, or torchrun's restart."""
    restart = {"cause": "launcher restart"}
    for first in (("run_started", 9000.0), ("failure_decided", 9000.0, restart)):
        found = heard(("started", 0), ("progress", 10), first, ("run_started", 9001))
        assert (found.num_failures, found.observed_s) == (1, 10 + MOST_SILENCE_S)


def test_waiting_is_not_training() -> None:
    found = heard(("started", 0), ("holding", 10), ("progress", 30), ("resumed", 50), ("save", 60))
    assert (found.num_failures, found.observed_s) == (0, 20)


# --- the prior -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "observed"), [(0, 0.0), (0, 3.0), (1, 0.1), (5, 2.0), (40, 1.0)]
)
def test_the_mtbf_is_the_mean_of_what_is_believed(number: int, observed: float) -> None:
    """By adding up the rates, a thousandth of a decade apart, each as likely as Bayes says."""
    rates = [10 ** (k / 1000) for k in range(-6000, 6001)]
    likely = [
        rate ** (number + 1)  # one power is of the logarithmic steps
        * sum(6.0 ** -abs(k) * 4.0**k * math.exp(-rate * (4.0**k + observed)) for k in range(-4, 5))
        for rate in rates
    ]
    mean = sum(map(math.prod, zip(rates, likely, strict=True))) / sum(likely)
    found = learned_mtbf_s(num_failures=number, observed_s=observed * HOUR_S, prior_s=HOUR_S)
    assert found == pytest.approx(HOUR_S / mean, rel=1e-3)


def test_a_prior_that_is_far_off_is_given_up_sooner() -> None:
    seen = {"num_failures": 3, "observed_s": 3 * 35 * 60.0}
    far = learned_mtbf_s(**seen, prior_s=8 * HOUR_S)
    assert far < 0.5 * mtbf_with_prior_s(**seen, prior_s=8 * HOUR_S)
    assert far == pytest.approx(58 * 60, rel=0.05)
    for prior_s in (60.0, 35 * 60, 1e7):
        found = learned_mtbf_s(num_failures=1000, observed_s=35_000 * 60.0, prior_s=prior_s)
        assert found == pytest.approx(35 * 60, rel=0.02)


def test_the_default_prior_falls_with_thousands_of_workers() -> None:
    assert prior_mtbf_s(0) == prior_mtbf_s(1) == prior_mtbf_s(6_000) == DEFAULT_PRIOR_S
    assert prior_mtbf_s(16_384) == cluster_mtbf_s(num_gpus=16_384) < DEFAULT_PRIOR_S


# --- slow-down -----------------------------------------------------------------------------------


def steps(slow_down: SlowDown, first: int, *times_s: float) -> int:
    for step, time_s in enumerate(times_s, start=first):
        slow_down.stepped(step, time_s)
    return first + len(times_s)


def after_saves(
    write_s: float, *beside_s: float, num_saves: int = LEAST_SAVES, apart_s: float = 1.0
) -> SlowDown:
    """So many saves, each with these steps after it and enough others before."""
    slow_down, step = SlowDown(), 1
    for _ in range(num_saves):
        step = steps(slow_down, step, *[apart_s] * LEAST_APART)
        slow_down.saved(step - 1, write_s)
        step = steps(slow_down, step, *beside_s)
    return slow_down


def test_steps_beside_a_save_that_take_longer_count() -> None:
    found = after_saves(4.5, 1.5, 1.5, 9.0, 1.0, 1.0).per_save_s()
    assert found == pytest.approx(3 * 0.5), "one slow step is no slow-down"


def test_a_few_saves_tell_nothing() -> None:
    assert after_saves(4.5, 1.5, 1.5, 1.5, num_saves=LEAST_SAVES - 1).per_save_s() == 0


def test_steps_beside_earlier_saves_are_not_compared_with() -> None:
    slow_down = SlowDown()
    step = steps(slow_down, 1, *[1.0] * LEAST_APART)
    for _ in range(LEAST_SAVES + 3):
        slow_down.saved(step - 1, 5.5)
        step = steps(slow_down, step, 2.0, 2.0, 2.0, 1.0)
    assert slow_down.per_save_s() == pytest.approx(3.0)


def test_a_run_that_becomes_slower_by_itself_is_not_slowed_down_by_its_saves() -> None:
    slow_down = SlowDown()
    step = steps(slow_down, 1, *[1.0] * 500, *[2.0] * MOST_APART)
    for _ in range(LEAST_SAVES):
        slow_down.saved(step - 1, 3.0)
        step = steps(slow_down, step, *[2.0] * 8)
    assert slow_down.per_save_s() == 0.0


def test_a_save_does_not_slow_down_by_more_than_it_is_written_for() -> None:
    assert after_saves(0.1, 7.0, 1.0).per_save_s() == pytest.approx(0.1)


def test_nor_does_it_speed_up() -> None:
    assert after_saves(1.0, 0.5, 0.5).per_save_s() == 0.0


def test_word_of_the_save_may_come_before_or_after_its_steps() -> None:
    late, step = SlowDown(), 1
    for _ in range(LEAST_SAVES):
        step = steps(late, step, *[1.0] * LEAST_APART, 1.5, 1.5, 1.0, 1.0)
        late.saved(step - 5, 3.0)
    assert late.per_save_s() == after_saves(3.0, 1.5, 1.5, 1.0, 1.0).per_save_s() == 1.0


def test_slow_down_is_part_of_the_stall() -> None:
    run = ARun()
    step = 1
    for _ in range(LEAST_SAVES):
        for step_s in (*[1.0] * LEAST_APART, 1.3, 1.3):
            run.cadence.stepped(step, step_s, run.time_s)
            run.step = step - 2
            step += 1
        run.save(0.4, 2.5)
    assert ": stall 1 s, 600 ms of it slower steps, MTBF" in run.reason()


def test_what_cannot_be_compared_counts_nothing() -> None:
    slow_down, step = SlowDown(), 1
    for _ in range(LEAST_SAVES):
        step = steps(slow_down, step, *[1.0] * LEAST_APART)
        slow_down.begin()  # those were of another size
        step = steps(slow_down, step, 2.0)
        slow_down.saved(step - 1, 1.0)
        step = steps(slow_down, step, 2.0)
    assert slow_down.per_save_s() == 0.0


def test_a_long_run_keeps_little() -> None:
    slow_down = SlowDown()
    for step in range(1, MOST_STEPS + 100):
        slow_down.stepped(step, 1.0)
        if step % 20 == 0:
            slow_down.saved(step + 10**6, 1.0)  # never settled
    assert len(slow_down._step_s) == MOST_STEPS and len(slow_down._open) <= MOST_SAVES


# --- storage that is too slow --------------------------------------------------------------------


def test_a_skipped_save_tells_the_bandwidth_seen_and_needed() -> None:
    run = ARun(SaveInterval.parse("10steps"))
    run.cadence.stepped(1, 0.5, run.time_s)
    run.hear("checkpoint_committed", **saved(0.1, 20.0, 400_000_000))
    record = run.cadence.skipped(30, 5.0)
    assert (record.kind, record.step) == ("checkpoint_skipped", 30)
    assert record.reason == (
        "the save before it was still being written after 5 s; "
        "storage takes 20 MB/s, 400 MB each 5 s need 80 MB/s"
    )
    assert record.data == {
        "bytes": 400_000_000,
        "seen_bytes_per_s": 20e6,
        "needed_bytes_per_s": 80e6,
    }
    assert run.cadence.skipped(40, 40.0).data["seen_bytes_per_s"] == 10e6, "slower than the last"


def test_what_is_needed_is_told_for_each_kind_of_interval() -> None:
    run = ARun(SaveInterval.parse("2s"))
    run.save()
    assert run.cadence.skipped(3, 9.0).data["needed_bytes_per_s"] == 500_000
    run = ARun()
    run.save()
    run.reason()
    assert run.cadence.every_s is not None
    needed = run.cadence.skipped(3, 9.0).data["needed_bytes_per_s"]
    assert needed == pytest.approx(1_000_000 / run.cadence.every_s)
    run = ARun(SaveInterval.parse("2steps"))
    run.save()
    assert "needed_bytes_per_s" not in run.cadence.skipped(3, 9.0).data, "no step is known yet"


def test_skipped_before_anything_was_written() -> None:
    record = ARun().cadence.skipped(3, 9.0)
    assert record.reason == "the save before it was still being written after 9 s"
