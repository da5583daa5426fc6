"""A loss that is not finite after a load: which checkpoint is passed by, and when none is."""

from __future__ import annotations

import functools
import json

import pytest
from click.testing import CliRunner

from elastic.cli import main
from elastic.policy.events import Record
from elastic.policy.retention import Retention
from elastic.policy.suspicion import SUSPECT_STEPS, Doubt, Suspicion, Then, fold, rule
from elastic.storage import pruning, retention
from elastic.storage.checkpoints import Catalog
from elastic.storage.filesystem import Filesystem
from elastic.storage.ledger import read_ledger
from elastic.storage.suspects import (
    highest_trusted,
    lift,
    rule_on,
    suspect_steps,
    trusted_steps,
    why_suspect,
)
from tests.made_run import add_checkpoint, make_run


def doubt(loaded_step: int, loss_step: int, generation: int = 0) -> Doubt:
    return Doubt(generation=generation, loaded_step=loaded_step, loss_step=loss_step, loss="nan")


# --- the rule ------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", range(1, SUSPECT_STEPS + 3))
def test_the_first_steps_after_a_load_make_it_suspect(steps: int) -> None:
    ruling = rule(doubt(100, 100 + steps), None, older_step=90)
    assert (ruling.then is Then.STEP_BACK) == (steps <= 3)
    if ruling.record is None:
        assert ruling.then is Then.GO_ON
        return
    assert (ruling.record.kind, ruling.record.step) == ("checkpoint_suspect", 100)
    assert ruling.reason == ruling.record.reason
    after = "1 step after" if steps == 1 else f"{steps} steps after"
    assert f"the loss of step {100 + steps} is nan, {after}" in ruling.reason
    assert "the run goes back to step 90" in ruling.reason
    assert fold([ruling.record]) == Suspicion(step=100, loss_step=100 + steps)


def test_without_an_older_one_the_run_goes_on() -> None:
    assert rule(doubt(0, 1), None, older_step=None).then is Then.GO_ON


@pytest.mark.parametrize("loaded_step", [99, 90, 10])
def test_the_same_step_from_an_older_one_ends_the_run(loaded_step: int) -> None:
    past = Suspicion(step=100, loss_step=101)
    ruling = rule(doubt(loaded_step, 101), past, older_step=5)
    assert ruling.then is Then.FAIL
    assert "the bytes are not the cause" in ruling.reason
    assert "the data of that step" in ruling.reason
    assert ruling.record is not None
    assert (ruling.record.kind, ruling.record.step) == ("checkpoint_trusted", 100)
    assert fold([Record(kind="checkpoint_suspect", step=100), ruling.record]) is None


def test_another_step_right_after_the_next_load_steps_back_again() -> None:
    past = Suspicion(step=100, loss_step=101)
    assert rule(doubt(90, 91), past, older_step=80).then is Then.STEP_BACK
    assert rule(doubt(90, 96), past, older_step=80).then is Then.GO_ON


def test_a_rollback_or_word_of_trust_ends_a_suspicion() -> None:
    suspect = Record(kind="checkpoint_suspect", step=100, data={"loss_step": 101})
    assert fold([suspect, Record(kind="resumed", step=90)]) == Suspicion(step=100, loss_step=101)
    for kind in ("checkpoint_trusted", "rolled_back"):
        assert fold([suspect, Record(kind=kind, step=100)]) is None
    assert fold([]) is None


# --- the checkpoints -----------------------------------------------------------------------------


@pytest.fixture(params=["disk", "object store"])
def catalog(request: pytest.FixtureRequest, tmp_path: object) -> Catalog:
    url = f"{tmp_path}/run" if request.param == "disk" else f"memory://suspicion{tmp_path}"
    made = make_run(url)
    for step in (80, 90, 100):
        add_checkpoint(made, step)
    return made


def steps(found: Catalog) -> tuple[int | None, list[int]]:
    highest = highest_trusted(found)
    return None if highest is None else highest.step, sorted(suspect_steps(found))


def test_a_suspect_is_passed_by_and_nothing_of_it_is_lost(catalog: Catalog) -> None:
    assert steps(catalog) == (100, [])
    ruling = rule_on(catalog, doubt(100, 101, generation=1), None, time_s=1.0)
    assert ruling.then is Then.STEP_BACK
    assert steps(catalog) == (90, [100])
    assert suspect_steps(catalog)[100] == ruling.reason
    assert catalog.complete_steps() == [80, 90, 100]
    assert catalog.verify_files(100) == []
    # What the same generation still commits is no better; what a later one does is.
    add_checkpoint(catalog, 102, generation=1)
    assert steps(catalog) == (90, [100, 102])
    add_checkpoint(catalog, 95, generation=2)
    assert steps(catalog) == (95, [100, 102])
    assert highest_trusted(catalog, below=95).step == 90  # type: ignore[union-attr]
    catalog.quarantine(100, "saved again")
    add_checkpoint(catalog, 100, generation=2)
    assert steps(catalog) == (100, [102])
    assert trusted_steps(catalog) == [80, 90, 95, 100]
    assert lift(catalog.fs)
    assert not lift(catalog.fs)
    assert steps(catalog) == (102, [])


def test_the_same_loss_from_the_older_one_lifts_the_suspicion(catalog: Catalog) -> None:
    first = rule_on(catalog, doubt(100, 101), None, time_s=1.0)
    assert first.record is not None
    again = rule_on(catalog, doubt(90, 101), fold([first.record]), time_s=2.0)
    assert again.then is Then.FAIL
    assert steps(catalog) == (100, [])


def test_the_reason_stays_with_a_suspect_that_is_saved_again(catalog: Catalog) -> None:
    reason = rule_on(catalog, doubt(90, 91, generation=1), None, time_s=1.0).reason
    doubts = functools.partial(why_suspect, catalog)
    add_checkpoint(catalog, 100, generation=2, replace=True, doubts=doubts)
    add_checkpoint(catalog, 80, generation=2, replace=True, doubts=doubts)
    told = {one.step: one.reason for one in catalog.list() if "quarantined" in one.reason}
    replaced = "quarantined: replaced by a save of generation 2"
    assert told == {100: f"{replaced}; it was suspect: {reason}", 80: replaced}


def test_suspects_are_not_counted_among_those_that_are_kept(catalog: Catalog) -> None:
    rule_on(catalog, doubt(100, 101), None, time_s=1.0)
    fates = pruning.plan(catalog, Retention(keep=1))
    assert {fate.checkpoint.step: fate.why for fate in fates} == {
        80: "",
        90: "the newest",
        100: "suspect",
    }
    assert retention.make_room(catalog, Retention(keep=1), 95, set()) == [80]
    assert retention.apply(catalog, Retention(keep=1), set()) == []
    assert catalog.complete_steps() == [90, 100]


def test_a_spoilt_file_of_a_suspicion_stops_nobody(catalog: Catalog) -> None:
    catalog.fs.write_bytes("checkpoints/suspects/step-90", b"\xff")
    catalog.fs.write_bytes("checkpoints/suspects/notes", b"")
    assert steps(catalog) == (100, [])


def test_the_verbs_tell_of_it_and_rollback_lifts_it(tmp_path: object) -> None:
    root = f"{tmp_path}/run"
    made = make_run(root)
    for step in (90, 100):
        add_checkpoint(made, step)
    reason = rule_on(made, doubt(100, 101), None, time_s=1.0).reason

    def said(*verb: str) -> str:
        result = CliRunner().invoke(main, [*verb])
        assert result.exit_code == 0, result.output
        return result.output

    (line,) = (line for line in said("checkpoints", "list", root).splitlines() if " 100 " in line)
    assert "yes, suspect" in line
    assert reason[:40] in line
    told = {one["step"]: one for one in json.loads(said("checkpoints", "list", root, "--json"))}
    assert (told[90]["suspect"], told[100]["suspect"]) == ("", reason)
    assert "back to step 100, which is trusted again" in said("rollback", root, "--to", "100")
    assert steps(made) == (100, [])
    assert [event.kind for event in read_ledger(Filesystem.at(root))][-1] == "rolled_back"
    assert "nothing was changed" in said("rollback", root, "--to", "100")
