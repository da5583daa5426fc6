"""The rehearsal: passes a function that forgets nothing, and names what another one forgets."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from elastic.training.rehearsal.__main__ import NothingToRehearse, main, rehearse
from elastic.training.rehearsal.comparison import is_same
from elastic.training.rehearsal.plan import Plan
from elastic.training.rehearsal.report import report
from elastic.training.rehearsal.verdict import Rehearsal
from elastic.verbs.rehearse import rehearse as verb

ROOT = Path(__file__).resolve().parents[2]
FORGETFUL = str(Path(__file__).with_name("forgetful.py"))


def rehearsed(*arguments: str, function: str = "", **options: Any) -> Rehearsal:
    plan = {"steps": 8, "workers": 1, "other_workers": 0, "limit_s": 110.0, **options}
    return rehearse(Plan(target=FORGETFUL + function, arguments=arguments, **plan))


# --- what forgets nothing -------------------------------------------------------------------------


def test_the_default_job_passes(tmp_path: Path) -> None:
    command = [
        *(sys.executable, "-m", "elastic", "rehearse"),
        *("jobs/pretrain.py", "--steps", "8", "--json", f"{tmp_path}/found.json", "--"),
        *("--model", "nano", "--dtype", "float64", "--data", str(ROOT / "jobs")),
        *("--global-batch", "6", "--micro-batch", "2", "--sequence-length", "16"),
    ]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    tree = json.loads((tmp_path / "found.json").read_text())
    before, same, other = tree["comparisons"]
    assert tree["verdict"] in ("exact", "within tolerance")
    assert (tree["killed_at"], tree["resumed_from"]) == (4, 4)
    assert before["is_exact"] and same["is_exact"] and other["is_equal"]
    assert (same["first_step"], same["last_step"], same["num_workers"]) == (5, 8, 2)
    assert (other["num_workers"], other["tolerance"]) == (3, 1e-9)
    assert tree["suspects"] == [] and tree["tracked"] == ["model", "optimizer", "scheduler"]
    curves = list(tree["curves"].values())
    assert [len(curve) for curve in curves] == [8, 4, 4]
    assert all(is_same(curves[0][step], value) for step, value in curves[1].items())
    assert found.stdout.splitlines()[3].startswith("COMPARED")


def test_a_function_that_tracks_everything_passes() -> None:
    found = rehearsed("--use", "data,scheduler,ema,counter,optimizer", workers=2, other_workers=3)
    assert found.verdict == "within tolerance" and not found.suspects, report(found)
    assert [one.is_exact for one in found.comparisons] == [True, True, False]
    assert "EQUAL: exact at 2 ranks; within 1e-09 (float64) at 3" in report(found)


def test_noise_that_goes_on_is_exact_and_not_compared_at_another_size() -> None:
    found = rehearsed("--use", "rng,noise", other_workers=2)
    assert found.exit_code == 0 and found.comparisons[1].is_exact, report(found)
    assert found.draws and not found.counts(found.comparisons[2])
    assert "not comparable at 2" in report(found)


def test_a_loop_of_ones_own_is_compared_by_its_parameters() -> None:
    found = rehearsed(function=":own_loop")
    assert (found.metric, found.verdict) == ("parameter_norm", "exact"), report(found)


# --- what forgets something -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "forgets, uses, kind, name",
    [
        ("data", "data,scheduler", "data position", "sampler"),
        ("rng", "rng,scheduler", "RNG", "noise.generator"),
        ("scheduler", "data,scheduler,ema,counter", "scheduler", "scheduler"),
        ("ema", "data,scheduler,ema,counter", "EMA", "average"),
        ("counter", "data,scheduler,ema,counter", "counter", "counter"),
        ("optimizer", "data,scheduler,ema,counter", "optimizer", "optimizer"),
    ],
)
def test_a_forgotten_piece_is_named(forgets: str, uses: str, kind: str, name: str) -> None:
    found = rehearsed("--forget", forgets, "--use", uses)
    said = report(found)
    assert (found.verdict, found.exit_code) == ("parted", 1), said
    same = found.comparisons[-1]
    assert same.name == "after the resume" and same.parted_at is not None
    assert same.parted_at > 4 and same.largest > 0
    likely = found.suspects[0]
    assert (likely.kind, likely.name, likely.where) == (kind, name, "train()"), said
    assert f"parts at step {same.parted_at}" in said and f"{kind}: {name}" in said
    if forgets == "data":
        assert "those that the uninterrupted run saw at step 1" in said
    if forgets == "scheduler":
        assert "lr of optimizer at step 6: 0.0059049 uninterrupted, 0.009 here" in said
    if forgets == "counter":
        assert "counter['seen'] at the start of step 5: 24 uninterrupted, 0 here" in said


def test_what_no_loss_shows_is_told_all_the_same() -> None:
    found = rehearsed("--forget", "ema", "--use", "scheduler")
    assert (found.verdict, found.exit_code) == ("exact", 0)
    assert "not tracked, and not equal after the resume" in report(found)
    assert "EMA: average (AveragedModel) in train()" in report(found)


def test_what_is_overwritten_after_it_was_restored() -> None:
    found = rehearsed("--fault", "overwrite", "--use", "scheduler")
    assert (found.suspects[0].kind, found.suspects[0].name) == ("tracked state", "model")


def test_a_counter_in_a_loop_of_ones_own() -> None:
    found = rehearsed(function=":own_forgetful_loop")
    assert found.exit_code == 1
    assert (found.suspects[0].kind, found.suspects[0].name) == ("counter", "num_done"), found


def test_a_seed_from_nowhere_is_no_forgotten_state() -> None:
    found = rehearsed("--fault", "own-seed", "--use", "rng")
    assert (found.verdict, found.exit_code) == ("not reproducible", 1)
    assert "the model saw other inputs at step 1" in report(found)


def test_a_batch_of_each_rank_parts_at_another_size() -> None:
    found = rehearsed("--fault", "local-batch", "--use", "scheduler", other_workers=2)
    assert found.verdict == "parted" and found.comparisons[1].is_exact, report(found)
    assert "the model saw 6 rows in all on 1 rank, and 8 on 2" in report(found)


def test_a_function_that_cannot_resume() -> None:
    found = rehearsed("--fault", "grow", "--use", "scheduler")
    assert (found.verdict, found.exit_code) == ("failed", 1)
    assert "StateMismatch" in found.failure and "0.weight" in found.failure


def test_a_function_that_does_not_train() -> None:
    with pytest.raises(NothingToRehearse, match="ZeroDivisionError"):
        rehearsed("--fault", "raise")
    with pytest.raises(NothingToRehearse, match="ended at step 3 of 8: take --steps 3"):
        rehearsed("--fault", "short")
    with pytest.raises(NothingToRehearse, match="'fun' was logged at each step; logged were loss"):
        rehearsed(metric="fun")


@pytest.mark.parametrize(
    "target, arguments, told",
    [
        ("none.py", (), "no file none.py"),
        ("jobs.none", (), "no module 'jobs.none'"),
        (f"{FORGETFUL}:none", (), "has no function none; it has"),
        (FORGETFUL, ("--forget", "keys"), "invalid choice: 'keys'"),
        ("jobs/pretrain.py", ("--model", "none"), "--model is one of"),
    ],
)
def test_nothing_to_rehearse(
    capsys: pytest.CaptureFixture[str], target: str, arguments: tuple[str, ...], told: str
) -> None:
    assert main([Plan(target=target, arguments=arguments).to_json()]) == 2
    said = capsys.readouterr().err
    assert told in said and "Traceback" not in said


@pytest.mark.parametrize(
    "flags, told",
    [
        (("--steps", "3"), "at least 4 steps"),
        (("--other-workers", "2"), "must be another one"),
        (("--json", "/none/a.json"), "there is no such directory"),
    ],
)
def test_wrong_usage(flags: tuple[str, ...], told: str) -> None:
    found = CliRunner().invoke(verb, ["jobs/pretrain.py", *flags])
    assert found.exit_code == 2 and told in found.output
