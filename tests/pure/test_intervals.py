"""Save intervals and the MTBF they need: published figures, and the minimum by brute force."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from elastic.policy.durations import parse_duration_s, told
from elastic.policy.intervals import (
    DOUBTFUL_SHARE,
    SaveCosts,
    available_interval_s,
    best_interval,
    daly_interval_s,
    doubts,
    young_interval_s,
)
from elastic.policy.mtbf import (
    GPU_MTBF_S,
    cluster_mtbf_s,
    history_mtbf,
    mtbf_with_prior_s,
)

HOUR_S = 3600.0


def costs_of() -> st.SearchStrategy[SaveCosts]:
    """From a laptop's stall to a day's write, from a failure a minute to one a year."""
    some = st.floats(0, 86_400)
    return st.builds(
        SaveCosts,
        mtbf_s=st.floats(60, 3e7),
        stall_s=st.floats(1e-3, 1e4),
        write_s=some,
        recovery_s=some,
        detection_s=some,
    )


# --- published figures ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stall_s", "interval_s", "overhead"), [(90, 2277, 0.079), (3, 416, 0.014)]
)
def test_an_mtbf_of_8_hours(stall_s: float, interval_s: float, overhead: float) -> None:
    mtbf_s = 28_800.0
    young_s = young_interval_s(mtbf_s, stall_s)
    costs = SaveCosts(mtbf_s=mtbf_s, stall_s=stall_s)
    assert young_s == pytest.approx(interval_s, abs=0.5)
    assert costs.overhead(young_s) == pytest.approx(overhead, abs=0.0005)
    assert costs.overhead(young_s) == pytest.approx(math.sqrt(2 * stall_s / mtbf_s))
    assert costs.lost_work_s(young_s) == young_s / 2
    best = best_interval(costs)
    assert best.seconds == pytest.approx(young_s, rel=0.05)
    assert costs.overhead(best.seconds) == pytest.approx(overhead, abs=0.0005)


@pytest.mark.parametrize(
    ("mtbf_min", "working_min", "digit"),
    [(24 * 60, 117, 0.5), (6 * 60, 57, 0.5), (15, 9.1, 0.05)],
)
def test_dalys_own_examples(mtbf_min: float, working_min: float, digit: float) -> None:
    """Daly 2006, figures 3 to 5: dumps of 5 minutes; tau there is the working time alone."""
    assert daly_interval_s(mtbf_min, 5) - 5 == pytest.approx(working_min, abs=digit)


def test_dalys_interval_beyond_its_range_is_the_mtbf() -> None:
    assert daly_interval_s(100, 200) - 200 == 100
    assert daly_interval_s(100, 500) - 500 == 100


def test_the_availability_optimum_with_recovery() -> None:
    """arXiv 2410.18124: T_c = T_s + sqrt(2 (T_f + T_r) T_s + T_s^2)."""
    assert available_interval_s(6000, 10, 600) == pytest.approx(10 + math.sqrt(132_100))
    costs = SaveCosts(mtbf_s=6000, stall_s=10, recovery_s=500, detection_s=100)
    assert best_interval(costs).seconds == available_interval_s(6000, 10, 600)


# --- the minimum ---------------------------------------------------------------------------------


@given(costs_of())
def test_the_interval_is_the_minimum_that_brute_force_finds(costs: SaveCosts) -> None:
    floor_s = costs.save_s()
    best = best_interval(costs)
    assert best.seconds >= floor_s
    low, high = math.log(floor_s * (1 + 1e-9)), math.log(floor_s + 50 * best.seconds)
    grid = [math.exp(low + (high - low) * i / 500) for i in range(501)]
    least = min(range(501), key=lambda i: costs.lost_share(grid[i]))
    around = grid[max(0, least - 1)], grid[min(500, least + 1)]
    found_s = narrowed(costs, *around)
    assert costs.lost_share(best.seconds) <= costs.lost_share(found_s) * (1 + 1e-9)
    assert best.seconds == pytest.approx(found_s, rel=1e-3)


def narrowed(costs: SaveCosts, low_s: float, high_s: float) -> float:
    """The minimum between the two, by the sign of a numerical slope: flat functions hide theirs."""
    for _ in range(60):
        middle_s = (low_s + high_s) / 2
        step_s = middle_s * 1e-4
        if costs.lost_share(middle_s + step_s) < costs.lost_share(middle_s - step_s):
            low_s = middle_s
        else:
            high_s = middle_s
    return (low_s + high_s) / 2


@given(st.floats(60, 3e7), st.floats(1e-3, 1e4))
def test_youngs_interval_is_the_minimum_of_the_overhead(mtbf_s: float, stall_s: float) -> None:
    costs = SaveCosts(mtbf_s=mtbf_s, stall_s=stall_s)
    least = costs.overhead(young_interval_s(mtbf_s, stall_s))
    for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2):
        assert costs.overhead(factor * young_interval_s(mtbf_s, stall_s)) > least


def complete_waste(costs: SaveCosts, interval_s: float) -> float:
    """Under Daly's complete cost function, where failures strike saves and recovery too."""
    m, r = costs.mtbf_s, costs.down_s()
    return 1 - (interval_s - costs.stall_s) / (m * math.exp(r / m) * math.expm1(interval_s / m))


@settings(suppress_health_check=[HealthCheck.filter_too_much])  # doubts are common in this range
@given(st.floats(1e-5, 0.1), st.floats(0, 0.25))
def test_where_there_is_no_doubt_the_interval_is_good_under_the_complete_model_too(
    stall: float, recovery: float
) -> None:
    costs = SaveCosts(mtbf_s=1, stall_s=stall, recovery_s=recovery)
    chosen_s = best_interval(costs).seconds
    assume(not doubts(costs, chosen_s))
    grid = (stall + 3 * 10 ** (-i / 100) for i in range(600))
    least = min(complete_waste(costs, interval_s) for interval_s in grid)
    assert complete_waste(costs, chosen_s) <= 1.005 * least


# --- monotony and bounds -------------------------------------------------------------------------


@given(costs_of(), st.floats(1.01, 100), st.sampled_from(["mtbf_s", "stall_s", "recovery_s"]))
def test_rarer_failures_and_dearer_saves_mean_longer_intervals(
    costs: SaveCosts, factor: float, name: str
) -> None:
    more = replace(costs, **{name: getattr(costs, name) * factor})
    assert best_interval(more).seconds >= best_interval(costs).seconds


@given(costs_of(), st.floats(1.01, 100))
def test_more_failures_cost_more(costs: SaveCosts, factor: float) -> None:
    worse = replace(costs, mtbf_s=costs.mtbf_s / factor)
    best_s, worst_s = best_interval(costs).seconds, best_interval(worse).seconds
    assert worse.lost_share(worst_s) >= costs.lost_share(best_s) * (1 - 1e-9)
    assert 0 < costs.lost_share(best_s) < 1


@given(costs_of())
def test_no_save_begins_before_the_one_before_it_is_written(costs: SaveCosts) -> None:
    best = best_interval(costs)
    assert best.seconds >= costs.stall_s + costs.write_s
    assert best.held_by_write == (best.seconds > best.formula_s)
    assert best.seconds in (best.formula_s, costs.save_s())
    assert ("a save takes" in best.why) == best.held_by_write


def test_the_stall_counts_and_not_the_write_time() -> None:
    """67 s of write behind 0.78 s of stall: the write time for C spaces saves 9 times too far."""
    day = SaveCosts(mtbf_s=86_400, stall_s=0.78, write_s=67)
    assert best_interval(day).seconds == pytest.approx(young_interval_s(86_400, 0.78), rel=0.01)
    wrong = young_interval_s(86_400, 67)
    assert wrong / best_interval(day).seconds == pytest.approx(math.sqrt(67 / 0.78), rel=0.01)


def test_the_reason_says_what_it_rests_on() -> None:
    free = best_interval(SaveCosts(mtbf_s=35 * 60, stall_s=0.4))
    assert free.why == "every 41.4 s: stall 400 ms, MTBF 35 min"
    held = best_interval(SaveCosts(mtbf_s=35 * 60, stall_s=0.4, write_s=98))
    assert (held.seconds, held.held_by_write) == (98.4, True)
    assert held.why.endswith("; the formula says 42.3 s, and a save takes 98.4 s")


def test_doubts_begin_where_the_model_ends() -> None:
    sound = SaveCosts(mtbf_s=1000, stall_s=1, detection_s=10)
    assert doubts(sound, 45) == []
    (crowded,) = doubts(sound, DOUBTFUL_SHARE * 1000)
    assert "a second one may come" in crowded
    (late,) = doubts(replace(sound, detection_s=60), 45)
    assert "noticed after 60 s, later than the next save" in late


@pytest.mark.parametrize("name", ["mtbf_s", "stall_s", "write_s", "recovery_s", "detection_s"])
@pytest.mark.parametrize("value", [-1, math.nan, math.inf])
def test_costs_that_are_no_durations_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} must be finite"):
        SaveCosts(**{"mtbf_s": 1.0, "stall_s": 1.0, name: value})


@pytest.mark.parametrize("name", ["mtbf_s", "stall_s"])
def test_with_nothing_to_balance_there_is_no_interval(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be finite and above 0; found 0"):
        SaveCosts(**{"mtbf_s": 1.0, "stall_s": 1.0, name: 0})


@pytest.mark.parametrize(("share", "short"), [(1 / 600, 0.01), (0.1, 0.08)])
def test_how_far_youngs_interval_is_from_dalys(share: float, short: float) -> None:
    assert 1 - short < young_interval_s(1, share) / daly_interval_s(1, share) < 1


# --- mean time between failures ------------------------------------------------------------------


@pytest.mark.parametrize(("num_gpus", "hours"), [(256, 197.96), (1_024, 49.49), (10_000, 5.068)])
def test_the_mtbf_falls_with_the_number_of_gpus(num_gpus: int, hours: float) -> None:
    """419 interruptions in 54 days on 16,384 GPUs: one each 3.09 hours."""
    assert cluster_mtbf_s(num_gpus=num_gpus) / HOUR_S == pytest.approx(hours, rel=1e-4)
    assert math.isclose(GPU_MTBF_S / 16_384, 3.093 * HOUR_S, rel_tol=1e-3)


def test_the_rates_of_gpus_and_nodes_add_up() -> None:
    assert cluster_mtbf_s(num_nodes=32, node_mtbf_s=10 * HOUR_S) == pytest.approx(1125)
    both = cluster_mtbf_s(num_gpus=10, gpu_mtbf_s=100, num_nodes=2, node_mtbf_s=20)
    assert both == pytest.approx(5)


@pytest.mark.parametrize(
    "counts",
    [
        {},
        {"num_gpus": 0},
        {"num_gpus": -1},
        {"num_gpus": 1, "gpu_mtbf_s": 0},
        {"num_nodes": 3},
        {"num_nodes": 3, "node_mtbf_s": -1},
    ],
)
def test_a_cluster_that_cannot_fail_has_no_mtbf(counts: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"nothing can fail|above 0"):
        cluster_mtbf_s(**counts)  # type: ignore[arg-type]


def test_the_prior_decides_until_something_is_seen() -> None:
    assert mtbf_with_prior_s(num_failures=0, observed_s=0, prior_s=50) == 50
    assert mtbf_with_prior_s(num_failures=0, observed_s=100, prior_s=50) == 150
    assert mtbf_with_prior_s(num_failures=9, observed_s=950, prior_s=50) == 100
    for wrong in ({"num_failures": -1}, {"observed_s": math.nan}, {"prior_s": 0}):
        values = {"num_failures": 1, "observed_s": 1.0, "prior_s": 1.0, **wrong}
        with pytest.raises(ValueError, match="prior above 0"):
            mtbf_with_prior_s(**values)  # type: ignore[arg-type]


def test_failures_of_one_moment_are_one_interruption() -> None:
    found = history_mtbf([5000, 0, 20, 50, 1000], prior_s=1000)
    assert (found.num_failures, found.num_interruptions) == (5, 3)
    assert (found.observed_s, found.mtbf_s) == (5000, 2000)  # (1000 + 5000) / (1 + 2)


def test_a_single_failure_leaves_the_prior() -> None:
    assert history_mtbf([123.0], prior_s=77).mtbf_s == 77
    with pytest.raises(ValueError, match="no failure times"):
        history_mtbf([], prior_s=77)


def test_a_long_history_outweighs_a_wrong_prior() -> None:
    chance, time_s, times_s = random.Random(1), 0.0, []
    for _ in range(2000):
        time_s += 60 + chance.expovariate(1 / HOUR_S)
        times_s.append(time_s)
    found = history_mtbf(times_s, prior_s=100 * HOUR_S)
    assert found.mtbf_s == pytest.approx(HOUR_S + 60, rel=0.1)


# --- durations -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("8h", 28_800),
        ("30min", 1800),
        ("1h30min", 5400),
        ("90 s", 90),
        ("2 days", 172_800),
        (".5H", 1800),
        ("250ms", 0.25),
        ("8", 28_800),
    ],
)
def test_durations_are_read(text: str, seconds: float) -> None:
    assert parse_duration_s(text, bare_unit="h") == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "h", "8x", "-3h", "nan", "inf", "1e3", "8h,", "0", "0s"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected a number with ms|must be above 0"):
        parse_duration_s(text, bare_unit="h")


def test_a_bare_number_needs_a_unit_where_none_is_meant() -> None:
    with pytest.raises(ValueError, match="cannot read a duration from '8'"):
        parse_duration_s("8")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0098, "9.8 ms"),
        (0.383, "383 ms"),
        (98.04, "98 s"),
        (2277, "38 min"),
        (28_800, "8 h"),
        (712_645, "8.25 days"),
        (1e9, "11,574 days"),
    ],
)
def test_durations_are_told(seconds: float, text: str) -> None:
    assert told(seconds) == text
