"""What a rehearsal concludes from what it saw: comparison, diagnosis and report, without a rank."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from elastic.training.rehearsal.comparison import (
    compare,
    difference,
    is_constant,
    is_same,
    tolerance_of,
)
from elastic.training.rehearsal.diagnosis import suspects, unequal
from elastic.training.rehearsal.holding import (
    COUNTER,
    DATA,
    EMA,
    OPTIMIZER,
    RNG,
    SCHEDULER,
    STATE,
    TRACKED,
    Holding,
    kind_by_name,
)
from elastic.training.rehearsal.notes import Notebook, StepSeen, Trace, as_data, read
from elastic.training.rehearsal.plan import Plan
from elastic.training.rehearsal.report import report, sparkline
from elastic.training.rehearsal.target import NoTarget, load
from elastic.training.rehearsal.verdict import AFTER, BEFORE, OTHER, Rehearsal


class TestPlan:
    @pytest.mark.parametrize("steps", range(4, 60))
    def test_half_is_saved(self, steps: int) -> None:
        plan = Plan(target="a.py", steps=steps)
        assert plan.half % plan.save_every == 0 and plan.half == steps // 2

    def test_there_and_back(self) -> None:
        plan = Plan(target="a.py:f", arguments=["--x", "1"], tolerance=1e-3)
        assert Plan.from_json(plan.to_json()) == plan

    @pytest.mark.parametrize(
        "wrong", [{"steps": 3}, {"workers": 0}, {"other_workers": 2}, {"limit_s": 0}]
    )
    def test_impossible(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match="found"):
            Plan(target="a.py", **wrong)


class TestComparison:
    def compared(self, expected: list[float], found: list[float], tolerance: float = 0.0) -> Any:
        curves = [dict(enumerate(curve, start=1)) for curve in (expected, found)]
        steps = range(1, len(expected) + 1)
        return compare(AFTER, *curves, steps, num_workers=2, tolerance=tolerance)

    def test_equal_to_the_bit(self) -> None:
        found = self.compared([1.0, math.nan, math.inf], [1.0, math.nan, math.inf])
        assert found.is_exact and found.is_equal and found.largest == 0

    def test_one_bit_is_a_difference_unless_it_is_allowed(self) -> None:
        near = math.nextafter(2.0, 3.0)
        exact, loose = (self.compared([1.0, 2.0], [1.0, near], t) for t in (0.0, 1e-9))
        assert (exact.parted_at, exact.expected, exact.found) == (2, 2.0, near)
        assert loose.is_equal and not loose.is_exact and loose.largest_at == 2

    def test_zeros_of_two_signs_are_not_the_same_bits(self) -> None:
        assert self.compared([0.0], [-0.0]).parted_at == 1

    def test_the_first_step_beyond_and_the_largest(self) -> None:
        found = self.compared([1.0, 1.0, 1.0], [1.0 + 1e-12, 1.0 + 2e-9, 2.0], 1e-9)
        assert (found.parted_at, found.largest_at, found.largest) == (2, 3, 0.5)

    def test_what_is_not_finite_is_infinitely_far(self) -> None:
        assert difference(1.0, math.nan) == math.inf
        assert self.compared([1.0], [math.nan], 0.5).parted_at == 1

    def test_tolerances(self) -> None:
        assert (tolerance_of("float64"), tolerance_of("float32")) == (1e-9, 1e-5)
        assert tolerance_of("none") == max(map(tolerance_of, ("float16", "bfloat16")))

    def test_a_curve_that_shows_nothing(self) -> None:
        assert is_constant([1.0, 1.0]) and not is_constant([1.0, 2.0])
        assert is_same(math.nan, -math.nan)


# --- diagnosis ------------------------------------------------------------------------------------


def held(kind: str, path: str, value: str) -> Holding:
    root = path.partition(".")[0]
    return Holding(
        where="train()", root=root, owner=root, type_name="T", kind=kind, path=path, value=value
    )


def trace(*holdings: Holding, inputs: str = "abcdefgh", **seen: Any) -> Trace:
    """One rank's notes on steps 1 to 8; `seen` has a value for each of them."""
    steps = {
        step: StepSeen(
            inputs=[inputs[step - 1]],
            random_streams={"torch": seen.get("streams", "-" * 8)[step - 1]},
            rates={"lr of optimizer": seen.get("rates", [0.1] * 8)[step - 1]},
        )
        for step in range(1, 9)
    }
    tracked = {"model.weight": seen.get("tracked", "same")}
    return Trace(steps=steps, holdings={5: list(holdings)}, tracked={5: tracked})


def diagnosed(expected: Trace, found: Trace, parted_at: int = 5) -> list[tuple[str, str]]:
    named = suspects([expected], [found], first_step=5, parted_at=parted_at)
    return [(one.kind, one.name) for one in named]


def both(*pairs: tuple[str, str, str, str]) -> tuple[list[Holding], list[Holding]]:
    return (
        [held(kind, path, before) for kind, path, before, _ in pairs],
        [held(kind, path, after) for kind, path, _, after in pairs],
    )


SEVERAL = both(
    (STATE, "t0", "9", "8"),
    (COUNTER, "n", "4", "0"),
    (EMA, "ema.w", "x", "y"),
    (SCHEDULER, "sched.last", "4", "0"),
    (OPTIMIZER, "optimizer.state", "x", "y"),
    (RNG, "g", "x", "y"),
    (DATA, "sampler.i", "4", "0"),
)


@pytest.mark.parametrize(
    "parted_at, seen, likely",
    [
        (5, {"inputs": "efghabcd"}, (DATA, "sampler")),  # what it saw at step 1
        (5, {"inputs": "1234wxyz"}, (RNG, "g")),  # what it never saw: noise
        (7, {"rates": [0.1] * 5 + [0.5] * 3}, (SCHEDULER, "sched")),
        (6, {}, (OPTIMIZER, "optimizer")),  # the first loss was right
        (5, {}, (RNG, "g")),
        (5, {"tracked": "other"}, (TRACKED, "model")),
    ],
)
def test_the_way_to_the_loss_tells_which_of_several_it_was(
    parted_at: int, seen: dict[str, Any], likely: tuple[str, str]
) -> None:
    found = diagnosed(trace(*SEVERAL[0]), trace(*SEVERAL[1], **seen), parted_at)
    assert found[0] == likely and len(found) >= len(SEVERAL[0])


def test_what_was_equal_or_is_passing_is_no_suspect() -> None:
    same = held(COUNTER, "n", "4")
    passing = held(STATE, "loss", "0.5")
    assert diagnosed(trace(same, passing), trace(same)) == []


def test_a_way_without_anything_held_is_named_all_the_same() -> None:
    assert diagnosed(trace(), trace(inputs="efghabcd")) == [(DATA, "")]
    assert diagnosed(trace(), trace(streams="----xxxx")) == [(RNG, "")]
    assert diagnosed(trace(), trace(rates=[0.1] * 4 + [0.5] * 4)) == [(SCHEDULER, "")]


def test_state_that_only_one_run_has() -> None:
    before, after = held(OPTIMIZER, "o.state", "1"), held(OPTIMIZER, "o.lr", "0.1")
    (found,) = unequal([trace(before, after)], [trace(after)], first_step=5)
    assert "o.state at the start of step 5: 1 uninterrupted, (absent) here" in found.evidence


@pytest.mark.parametrize(
    "names, kind",
    [
        (("shadow", "dict"), EMA),
        (("remaining", "int"), None),  # no "ema" in it
        (("myLrSchedule",), SCHEDULER),
        (("state", "TokenSampler"), DATA),
        (("start_time",), STATE),
    ],
)
def test_what_a_name_gives_away(names: tuple[str, ...], kind: str | None) -> None:
    assert kind_by_name(*names) == kind


def test_notes_that_the_kill_has_cut_off(tmp_path: Path) -> None:
    notebook = Notebook(tmp_path / "notes")
    notebook.write("begin", 1, {"rates": {"lr": 0.1}, "random_streams": {}, "batches": None})
    notebook.write("finish", 1, {"inputs": ["a"], "num_rows": 3})
    notebook.write("holdings", 1, as_data([held(RNG, "g", "x")]))
    with (tmp_path / "notes").open("a") as file:
        file.write('["begin", 2, {"rat')
    found = read(tmp_path / "notes")
    assert found.steps == {1: StepSeen(rates={"lr": 0.1}, inputs=["a"], num_rows=3)}
    assert found.holdings == {1: [held(RNG, "g", "x")]}


# --- the report -----------------------------------------------------------------------------------


def rehearsal(found: list[float], other: list[float], **facts: Any) -> Rehearsal:
    plan, expected = Plan(target="mine.py", steps=8), [4.0, 3.0, 2.0, 1.0]
    curves = {AFTER: found, OTHER: other}
    whole = dict(enumerate([8.0, 7.0, 6.0, 5.0, *expected], start=1))
    done = Rehearsal(plan=plan, metric="loss", dtype="float64", resumed_from=4, **facts)
    done.curves["uninterrupted"] = whole
    done.comparisons.append(
        compare(BEFORE, whole, whole, range(1, 5), num_workers=2, tolerance=0.0)
    )
    for (name, values), workers, tolerance in zip(curves.items(), (2, 3), (0.0, 1e-9), strict=True):
        done.curves[name] = curve = dict(enumerate(values, start=5))
        done.comparisons.append(
            compare(name, whole, curve, range(5, 9), num_workers=workers, tolerance=tolerance)
        )
    return done


def test_what_is_equal_is_said_to_be_and_how() -> None:
    exact = rehearsal([4.0, 3.0, 2.0, 1.0], [4.0, 3.0, 2.0, 1.0])
    assert (exact.verdict, exact.exit_code) == ("exact", 0)
    within = rehearsal([4.0, 3.0, 2.0, 1.0], [4.0, 3.0, 2.0, 1.0 + 1e-12])
    assert (within.verdict, within.exit_code) == ("within tolerance", 0)
    assert "EQUAL: exact at 2 ranks; within 1e-09 (float64) at 3" in report(within)
    assert "loss at another size   3      5-8    within 1e-09  within  1e-12 at step 8" in report(
        within
    )


def test_what_parts_is_said_to_and_where() -> None:
    parted = rehearsal([4.0, 3.0, 2.5, 1.0], [4.0, 3.0, 2.0, 1.0])
    assert (parted.verdict, parted.exit_code) == ("parted", 1)
    assert "parts at step 7: 2.0 uninterrupted, 2.5 here, 0.2 apart" in report(parted)
    other = rehearsal([4.0, 3.0, 2.0, 1.0], [4.0, 3.0, 2.0, 1.1])
    assert (other.verdict, other.exit_code) == ("parted", 1)
    assert "0.091 apart where 1e-09 is allowed" in report(other)


def test_what_is_not_finite_is_still_json() -> None:
    found = rehearsal([math.nan, 3.0, 2.0, 1.0], [4.0, 3.0, 2.0, 1.0])
    assert found.verdict == "parted" and "nan here, inf apart" in report(found)
    assert json.dumps(found.to_json(), allow_nan=False)


def test_other_random_numbers_are_no_fault() -> None:
    found = rehearsal([4.0, 3.0, 2.0, 1.0], [4.0, 3.0, 2.0, 1.1], draws=True)
    assert found.exit_code == 0 and "not comparable at 3" in report(found)
    assert found.to_json()["comparisons"][2]["counts"] is False


def test_a_plot_of_one_row() -> None:
    assert sparkline([0.0, 1.0, 2.0, None, math.nan], 0.0, 2.0) == "▁▅█ !"
    assert len(sparkline([1.0] * 1_000, 0.0, 2.0)) == 60
    assert sparkline([3.0, 3.0], 3.0, 3.0) == "▁▁"


# --- the target -----------------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_a_plain_file(place: Path) -> None:
    (place / "plain_target.py").write_text("def train(run): ...\ndef other(run): ...\n")
    function, config = load("plain_target.py", [])
    assert (function.__name__, config) == ("train", {})
    assert load("plain_target.py:other", [])[0].__name__ == "other"
    assert load("plain_target:other", [])[0].__name__ == "other"
    with pytest.raises(NoTarget, match=r"has no function none; it has train, other"):
        load("plain_target.py:none", [])
    with pytest.raises(NoTarget, match=r"takes no arguments \(--lr 1\)"):
        load("plain_target.py", ["--lr", "1"])


def test_a_file_in_a_package_is_imported_as_its_module(place: Path) -> None:
    (place / "packed").mkdir()
    (place / "packed/__init__.py").touch()
    (place / "packed/own.py").write_text("WIDTH = 3\n")
    (place / "packed/job.py").write_text(
        "from packed.own import WIDTH\ndef train(run): ...\nCONFIG = {'width': WIDTH}\n"
    )
    function, config = load("packed/job.py", [])
    assert (function.__module__, config) == ("packed.job", {"width": 3})


def test_a_file_that_offers_a_rehearsal(place: Path) -> None:
    (place / "hooked.py").write_text(
        "def rehearsal(argv): return (print, {'argv': argv})\ndef train(run): ...\n"
    )
    assert load("hooked.py", ["-x"]) == (print, {"argv": ["-x"]})
    assert load("hooked.py:train", [])[1] == {}
    (place / "wrong.py").write_text("def rehearsal(argv): return 3\n")
    with pytest.raises(NoTarget, match=r"must give a training function train\(run\) and a dict"):
        load("wrong.py", [])


def test_a_module_whose_own_import_fails_says_so(place: Path) -> None:
    (place / "broken_target.py").write_text("import no_such_thing\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_thing"):
        load("broken_target", [])
    with pytest.raises(NoTarget, match="no module 'none_such'"):
        load("none_such", [])
