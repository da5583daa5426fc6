"""What the benchmark of preemptions draws from an event log, and how it reports it."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest

from jobs.bench import __main__ as bench
from jobs.bench.engine_process import MeasurementFailed
from jobs.bench.preemption import Measurement, Preemption, report, table
from jobs.bench.waste import measure_waste, new_steps

Events = list[dict[str, object]]


def group(name: str, world_size: int, steps: Mapping[int, float], *, ranks: int = 0) -> Events:
    """A step event of each rank, the last rank a tenth of a second after the first."""
    return [
        {"event": "step", "group": name, "rank": rank, "world_size": world_size}
        | {"step": step, "time_s": time_s + 0.1 * rank / max(1, world_size - 1)}
        for step, time_s in steps.items()
        for rank in range(ranks or world_size)
    ]


def each_second(first: int, last: int, begun_s: float) -> dict[int, float]:
    return {step: begun_s + number for number, step in enumerate(range(first, last + 1))}


BEFORE = group("a", 3, each_second(1, 20, 100.0))  # step 20 is finished at 119.1
NOTICED_S = 110.0


def test_nothing_is_wasted_where_nothing_happens() -> None:
    waste = measure_waste(BEFORE, NOTICED_S)

    assert (waste.wasted_steps, waste.wasted_s, waste.standstills) == (0, 0, [])
    assert (waste.num_new_steps, waste.trace_s) == (10, pytest.approx(9.1))
    assert waste.slower_s == pytest.approx(0)


def test_a_change_of_groups_wastes_what_is_beyond_a_step() -> None:
    smaller = group("b", 2, {21: 121.0, 22: 123.0, 23: 125.0, 24: 127.0})

    waste = measure_waste(BEFORE + smaller, NOTICED_S)

    assert waste.wasted_steps == 0
    (standstill,) = waste.standstills
    assert (standstill.gap_s, standstill.wasted_s) == (pytest.approx(2.0), pytest.approx(0.0))
    assert waste.usual_step_s == {2: pytest.approx(2.0), 3: pytest.approx(1.0)}
    assert (standstill.group_changed, standstill.world_size) == (True, 2)


def test_a_gap_is_measured_by_the_steps_of_the_group_that_ends_it() -> None:
    smaller = group("b", 2, {21: 121.0, 22: 123.0, 23: 125.0})  # steps of 2 s, of 1 s before
    whole = group("c", 3, {24: 128.0, 25: 129.0})

    waste = measure_waste(BEFORE + smaller + whole, NOTICED_S)

    assert [still.wasted_s for still in waste.standstills] == pytest.approx([0.0, 2.0])


def test_steps_done_again_are_wasted_and_so_is_the_time_they_take() -> None:
    """The old group goes on after the save, and all that it does then is done once more."""
    later = group("b", 3, each_second(16, 30, 130.0))

    waste = measure_waste(BEFORE + later, NOTICED_S)

    assert waste.wasted_steps == 5
    (standstill,) = waste.standstills
    assert standstill.gap_s == pytest.approx(135.1 - 119.1), "to the first step that is new"
    assert waste.wasted_s == pytest.approx(15.0)


def test_a_step_that_one_rank_alone_has_done_is_work_that_is_lost() -> None:
    torn = group("a", 3, {21: 120.0}, ranks=1)
    later = group("b", 3, each_second(21, 25, 122.0))

    waste = measure_waste(BEFORE + torn + later, NOTICED_S)

    assert waste.wasted_steps == 1
    assert waste.standstills[0].gap_s == pytest.approx(3.0), "nobody had finished it before"


def test_a_step_that_was_done_three_times_is_wasted_twice() -> None:
    later = group("b", 3, {20: 121.0}) + group("c", 3, each_second(20, 22, 130.0))

    assert measure_waste(BEFORE + later, NOTICED_S).wasted_steps == 2


def test_a_long_gap_within_a_group_is_a_standstill_and_a_short_one_is_not() -> None:
    """A save may take as long as some steps; a synchronous one of the rivals' is not held against
    them.
    """
    slow = group("a", 3, {21: 123.0, 22: 124.0, 23: 130.0, 24: 131.0})  # after 4 s, and after 6 s

    waste = measure_waste(BEFORE + slow, NOTICED_S)

    (standstill,) = waste.standstills
    assert (standstill.group_changed, standstill.wasted_s) == (False, pytest.approx(5.0))
    assert waste.slower_s == pytest.approx(3.0)


def test_what_was_before_the_first_notice_does_not_count() -> None:
    late = group("a", 3, each_second(21, 30, 150.0))

    waste = measure_waste(BEFORE + late, 155.0)

    assert (waste.wasted_s, waste.num_new_steps) == (0, 5)


def test_a_log_without_a_new_step_cannot_be_measured() -> None:
    with pytest.raises(ValueError, match="no new step"):
        measure_waste(BEFORE, 130.0)


def test_new_steps_are_those_that_all_ranks_did_for_the_first_time() -> None:
    later = group("b", 2, each_second(19, 22, 130.0)) + group("b", 2, {23: 134.0}, ranks=1)

    assert [(step.number, step.group) for step in new_steps(BEFORE + later)][-4:] == [
        (19, "a"),
        (20, "a"),
        (21, "b"),
        (22, "b"),
    ]


def measured(gap_s: float, first: int) -> Measurement:
    later = group("b", 3, each_second(first, 30, 119.0 + gap_s))
    preemption = Preemption(world_rank=1, group="a", step=10, noticed_s=110.0, lost_s=120.0)
    return Measurement(
        preemptions=[preemption], waste=measure_waste(BEFORE + later, preemption.noticed_s)
    )


def test_the_report_sets_us_against_the_others() -> None:
    result = report({"elastic": measured(2.0, 21), "ray-train": measured(11.0, 21)}, [])

    ours, theirs = result["engines"]["elastic"], result["engines"]["ray-train"]
    assert (ours["wasted_steps"], ours["wasted_s"]) == (0, pytest.approx(1.0))
    assert theirs["wasted_s"] == pytest.approx(10.0)
    assert result["share_of_wasted_s"] == {"ray-train": pytest.approx(0.1)}
    assert theirs["preemptions"][0]["lost_s"] == pytest.approx(10.0), "from the first notice"
    assert json.loads(json.dumps(result))["failures"] == []
    assert "0.100 of it" in table(result)


def test_an_engine_that_failed_is_told_and_nothing_is_set_against_it() -> None:
    failure = {"engine": "ray-train", "message": str(MeasurementFailed("it ended"))}

    result = report({"elastic": measured(2.0, 21)}, [failure])

    assert (result["share_of_wasted_s"], result["failures"]) == ({}, [failure])
    assert "elastic" in table(result)


def test_json_without_a_path_has_stdout_for_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(options: object) -> dict[str, object]:
        print("progress")
        return {"failures": []}

    monkeypatch.setattr(bench, "_preemption", run)

    assert bench.main(["preemption", "--json"]) == 0

    out, err = capsys.readouterr()
    assert json.loads(out) == {"failures": []}
    assert err == "progress\n"
