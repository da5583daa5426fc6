"""What the benchmark draws from an event log and from blocks of step times."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from elastic.storage.ledger import LedgerEvent
from jobs.bench import growth
from jobs.bench.events import EventLog, Recorder
from jobs.bench.ledger_phases import phases_of
from jobs.bench.recovery import Recovery, report, table
from jobs.bench.statistics import (
    bootstrap_interval,
    measure_growth,
    measure_recovery,
    median_ratio,
    paired_ratios,
)

KILLED_S = 100.0


def group(
    name: str,
    *,
    entered_s: float,
    world_size: int,
    steps: dict[int, float],
    ranks: int | None = None,
) -> list[dict[str, object]]:
    """Events of a group whose rank r does everything r tenths of a second after rank 0."""
    events: list[dict[str, object]] = []
    for rank in range(world_size if ranks is None else ranks):
        who = {"group": name, "rank": rank, "world_size": world_size}
        for offset_s, event in enumerate(("enter", "build", "load")):
            events.append({"event": event, "time_s": entered_s + offset_s + rank / 10, **who})
        for step, time_s in steps.items():
            events.append({"event": "step", "step": step, "time_s": time_s + rank / 10, **who})
    return events


OLD = group("old", entered_s=1.0, world_size=3, steps={step: 10.0 + step for step in range(1, 51)})


def test_recovery_is_the_first_step_that_every_rank_of_the_new_group_finished() -> None:
    new = group("new", entered_s=110.0, world_size=2, steps={41: 114.0, 42: 115.0})

    found = measure_recovery(OLD + new, KILLED_S)

    assert found is not None
    assert found.kill_to_step_s == pytest.approx(14.1)
    assert (found.first_step, found.world_size, found.lost_steps) == (41, 2, 10)


def test_phases_add_up_to_the_whole() -> None:
    new = group("new", entered_s=110.0, world_size=2, steps={41: 114.0})

    found = measure_recovery(OLD + new, KILLED_S)

    assert found is not None
    assert found.phases_s == pytest.approx(
        {"until_function": 10.1, "build": 1.0, "load": 1.0, "first_step": 2.0}
    )
    assert sum(found.phases_s.values()) == pytest.approx(found.kill_to_step_s)


def test_steps_of_the_old_group_after_the_kill_are_lost_work_and_no_recovery() -> None:
    """A worker whose raylet was killed trains on for seconds."""
    late = [{**OLD[-1], "step": 60, "time_s": 105.0}]

    assert measure_recovery(OLD + late, KILLED_S) is None
    new = group("new", entered_s=110.0, world_size=2, steps={41: 114.0})
    found = measure_recovery(OLD + late + new, KILLED_S)
    assert found is not None
    assert found.lost_steps == 20


def test_a_step_that_not_every_rank_has_finished_is_not_finished() -> None:
    new = group("new", entered_s=110.0, world_size=3, ranks=2, steps={41: 114.0})

    assert measure_recovery(OLD + new, KILLED_S) is None


def test_a_group_that_died_while_it_formed_is_passed_over() -> None:
    stillborn = group("stillborn", entered_s=103.0, world_size=3, steps={})
    new = group("new", entered_s=110.0, world_size=2, steps={41: 114.0})
    grown = group("grown", entered_s=130.0, world_size=3, steps={81: 134.0})

    found = measure_recovery(OLD + stillborn + new + grown, KILLED_S)

    assert found is not None
    assert (found.first_step, found.world_size) == (41, 2)


def test_nothing_is_lost_when_the_new_group_goes_on_where_the_old_one_stopped() -> None:
    new = group("new", entered_s=110.0, world_size=2, steps={51: 114.0})

    found = measure_recovery(OLD + new, KILLED_S)

    assert found is not None
    assert found.lost_steps == 0


SMALL = group("small", entered_s=1.0, world_size=2, steps={s: 10.0 + s for s in range(1, 51)})


def test_growth_stalls_from_the_last_step_of_the_small_group_to_the_first_of_the_large() -> None:
    large = group("large", entered_s=59.0, world_size=3, steps={51: 62.0, 52: 63.0})

    found = measure_growth(SMALL + large, 55.5)

    assert found is not None
    assert found.stall_s == pytest.approx(62.2 - 60.1)  # each when its last rank was done
    assert (found.lost_steps, found.first_step, found.world_size) == (0, 51, 3)
    assert found.added_to_step_s == pytest.approx(62.2 - 55.5)
    assert found.usual_step_s == found.slowest_step_s == pytest.approx(1.0)


def test_steps_that_both_groups_did_are_lost() -> None:
    """Also one that only a part of the small group had finished."""
    half = {**SMALL[-1], "rank": 0, "step": 51, "time_s": 60.5}
    large = group("large", entered_s=59.0, world_size=3, steps={41: 62.0})

    found = measure_growth([*SMALL, half, *large], 55.5)

    assert found is not None
    assert found.lost_steps == 11
    assert found.stall_s == pytest.approx(62.2 - 60.1)


def test_there_is_no_growth_until_a_larger_group_has_finished_a_step() -> None:
    again = group("again", entered_s=57.0, world_size=2, steps={51: 61.0})
    torn = group("large", entered_s=62.0, world_size=3, ranks=2, steps={52: 64.0})

    assert measure_growth([], 55.5) is None
    assert measure_growth(SMALL, 55.5) is None
    assert measure_growth([*SMALL, *again, *torn], 55.5) is None


def test_report_of_growths_has_the_shape_that_checks_rely_on() -> None:
    large = group("large", entered_s=59.0, world_size=3, steps={51: 62.0})
    found = measure_growth(SMALL + large, 55.5)
    assert found is not None

    result = growth.report([found, found], [{"repeat": 2, "message": "it ended"}])

    assert json.loads(json.dumps(result)) == result
    assert result["stall_s"] == [found.stall_s] * 2
    assert result["lost_steps"] == [0, 0]
    assert [g["first_step"] for g in result["growths"]] == [51, 51]
    assert "2.10 s" in growth.table(result)
    assert "no growth" in growth.table(growth.report([], result["failures"]))


def test_event_log_leaves_out_a_torn_last_line(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    assert log.read() == []
    Recorder(log, group="g0", rank=1, world_size=3, node_id="n").write("step", step=7)
    with (tmp_path / "events.jsonl").open("a") as stream:
        stream.write('{"event": "st')

    (event,) = log.read()

    assert (event["event"], event["step"], event["group"], event["rank"]) == ("step", 7, "g0", 1)


def ledger(*events: tuple[float, str]) -> list[LedgerEvent]:
    data = {"phases_s": {"stop": 0.1, "start": 3.0}}
    return [
        LedgerEvent(life=0, seq=seq, time_s=time_s, kind=kind, data=data)
        for seq, (time_s, kind) in enumerate(events)
    ]


def test_phases_of_our_service_are_those_of_the_recovery_from_this_fault() -> None:
    """An earlier re-form, and the growth that may follow, are not it."""
    earlier = [(50.0, "failure_decided"), (60.0, "recovered")]
    ours = [(100.2, "worker_died"), (100.5, "failure_decided"), (104.0, "recovered")]

    assert phases_of(ledger(*earlier), KILLED_S) is None
    assert phases_of(ledger(*earlier, *ours[:2]), KILLED_S) is None
    found = phases_of(ledger(*earlier, *ours, (200.0, "recovered")), KILLED_S)

    assert found == pytest.approx({"detect": 0.5, "stop": 0.1, "start": 3.0})


def recovery(kill_to_step_s: float) -> Recovery:
    return Recovery(
        kill_to_step_s=kill_to_step_s,
        lost_steps=10,
        first_step=41,
        world_size=2,
        phases_s={"detect": 0.5, "load": kill_to_step_s - 0.5},
    )


def test_report_has_the_shape_that_checks_rely_on() -> None:
    result = report(
        "node",
        {"elastic": [recovery(2.0), recovery(4.0), recovery(3.0)], "ray-train": [recovery(75.0)]},
        [],
    )

    assert json.loads(json.dumps(result)) == result
    assert result["fault"] == "node"
    assert result["engines"]["elastic"]["kill_to_step_s"] == [2.0, 4.0, 3.0]
    assert result["engines"]["elastic"]["lost_steps"] == [10, 10, 10]
    assert result["engines"]["elastic"]["detect_s"] == [0.5, 0.5, 0.5]
    assert result["engines"]["elastic"]["detected_to_step_s"] == [1.5, 3.5, 2.5]
    assert result["engines"]["ray-train"]["phases_s"] == [{"detect": 0.5, "load": 74.5}]
    assert result["median_ratio_to"] == {"ray-train": pytest.approx(3.0 / 75.0)}
    assert "ray-train" in table(result)


def test_report_of_an_engine_that_never_recovered_has_no_ratio() -> None:
    failures = [{"engine": "ray-train", "repeat": 0, "message": "it ended"}]

    result = report("node", {"elastic": [recovery(2.0)], "ray-train": []}, failures)

    assert result["median_ratio_to"] == {"ray-train": None}
    assert result["failures"] == failures
    assert "none" in table(result)


def test_median_ratio() -> None:
    assert median_ratio([1.0, 2.0, 9.0], [4.0]) == 0.5
    assert median_ratio([], [4.0]) is None


def test_paired_ratios_take_a_drift_of_the_machine_out() -> None:
    """The machine grows slower throughout, and the two sides cost the same."""
    times_s = [1.0 + block / 10 for block in range(9)]

    assert paired_ratios(times_s[1::2], times_s[0::2]) == pytest.approx([1.0] * 4)


def test_paired_ratios_refuse_blocks_that_do_not_alternate() -> None:
    with pytest.raises(ValueError, match="expected 3, found 2"):
        paired_ratios([1.0, 1.0], [1.0, 1.0])


def test_bootstrap_interval_holds_the_median_and_narrows_with_more_values() -> None:
    draw = random.Random(1)
    values = [draw.gauss(1.01, 0.02) for _ in range(100)]

    low, high = bootstrap_interval(values)
    few_low, few_high = bootstrap_interval(values[:10])

    assert low <= sorted(values)[50] <= high
    assert high - low < 0.015
    assert few_high - few_low > high - low
    assert bootstrap_interval(values) == (low, high)  # the same report from the same blocks


def test_bootstrap_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    draw = random.Random(2)
    covered = 0
    for _ in range(200):
        low, high = bootstrap_interval(
            [draw.gauss(0, 1) for _ in range(25)], num_resamples=200, seed=draw.randrange(10**6)
        )
        covered += low <= 0 <= high
    assert 178 <= covered <= 199


def test_bootstrap_interval_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one value"):
        bootstrap_interval([])
