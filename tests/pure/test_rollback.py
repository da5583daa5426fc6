"""Back to an earlier checkpoint: the newer ones set aside, recorded, and none deleted."""

from __future__ import annotations

import json
import pickle
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from elastic.storage import lease
from elastic.storage.checkpoints import Catalog
from elastic.storage.filesystem import Filesystem
from elastic.storage.ledger import LedgerWriter, read_ledger
from elastic.storage.manifest import FileDigest, Manifest
from elastic.storage.rollback import Rollback, RollbackRefused, roll_back, steps_above
from elastic.storage.run_file import free_name
from jobs.report import stopped_line
from tests.pure.test_cli import ARun, ask

STEPS = (0, 20, 30, 40)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[ARun]:
    with closing(ARun(tmp_path)) as made:
        made.event("run_started", 50)
        made.event("progress", 40, generation=0, step=44)
        made.event("run_stopped", 30, generation=0, step=44)
        for step in STEPS:
            made.checkpoint(step)
        yield made


def catalog(run: ARun) -> Catalog:
    return Catalog(run.fs, run.run_file.run_id)


@pytest.fixture(params=["local", "object"])
def anywhere(request: pytest.FixtureRequest, tmp_path: Path) -> Catalog:
    url = str(tmp_path / "run") if request.param == "local" else f"memory://{uuid.uuid4().hex}"
    made = Catalog(Filesystem.at(url), "me")
    for step in STEPS:
        path = made.begin(step, 0, 0)
        made.fs.write_bytes(f"{path}/shard", b"x" * step)
        digest = FileDigest(path="shard", bytes=step, digest="sha256:00")
        manifest = Manifest(
            run_id="me",
            step=step,
            world_size=1,
            generation=0,
            attempt=0,
            created_s=1.0,
            counters={},
            tensors={},
            files=[digest],
        )
        made.commit(manifest, path)
    return made


# --- the rollback itself -------------------------------------------------------------------------


def test_newer_checkpoints_are_set_aside_and_none_is_lost(anywhere: Catalog) -> None:
    ledger = LedgerWriter(anywhere.fs, 0, "a")
    done = roll_back(anywhere, ledger, 20, "a loss spike", time_s=5.0)
    assert anywhere.complete_steps() == [0, 20]
    assert done.to_step == 20 and list(done.set_aside) == [40, 30]
    kept = {one.step: one for one in anywhere.list() if not one.complete}
    assert sorted(kept) == [30, 40]
    for step, path in done.set_aside.items():
        assert kept[step].path == path and kept[step].bytes >= step
        assert "rolled back to step 20: a loss spike" in kept[step].reason
    (event,) = read_ledger(anywhere.fs)
    assert (event.kind, event.step, event.reason) == ("rolled_back", 20, "a loss spike")
    assert event.data == {"set_aside": [40, 30]} and event.time_s == 5.0


def test_what_is_asked_for_must_be_complete(anywhere: Catalog) -> None:
    ledger = LedgerWriter(anywhere.fs, 0, "a")
    anywhere.fs.remove_tree("checkpoints/step-30/_COMPLETE")
    for step in (30, 25, 50):
        with pytest.raises(RollbackRefused, match=r"steps 0, 20, 40") as refused:
            roll_back(anywhere, ledger, step, "why", time_s=5.0)
        assert f"back to step {step}" in str(refused.value)
        assert str(pickle.loads(pickle.dumps(refused.value))) == str(refused.value)
    assert anywhere.complete_steps() == [0, 20, 40] and read_ledger(anywhere.fs) == []


def test_cut_short_it_has_moved_the_highest_and_can_be_done_again(
    anywhere: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = LedgerWriter(anywhere.fs, 0, "a")
    real = Catalog.quarantine

    def fails_at_30(self: Catalog, step: int, reason: str) -> str:
        if step == 30:
            raise OSError("storage went away")
        return real(self, step, reason)

    with monkeypatch.context() as patch:
        patch.setattr(Catalog, "quarantine", fails_at_30)
        with pytest.raises(OSError, match="went away"):
            roll_back(anywhere, ledger, 0, "why", time_s=5.0)
    assert anywhere.complete_steps() == [0, 20, 30]
    assert len(read_ledger(anywhere.fs)) == 1, "told before anything is moved"
    roll_back(anywhere, ledger, 0, "why", time_s=6.0)
    assert anywhere.complete_steps() == [0]


def test_back_to_the_newest_changes_and_tells_nothing(anywhere: Catalog) -> None:
    ledger = LedgerWriter(anywhere.fs, 0, "a")
    assert steps_above(anywhere, 40) == []
    done = roll_back(anywhere, ledger, 40, "why", time_s=5.0)
    assert done == Rollback(to_step=40, set_aside={})
    assert read_ledger(anywhere.fs) == [] and anywhere.complete_steps() == list(STEPS)


# --- the verb ------------------------------------------------------------------------------------


def test_the_verb_rolls_back_and_says_what_it_has_kept_where(run: ARun) -> None:
    result = ask("rollback", run.root, "--to", "20", "--reason", "spike")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == [
        "rolled back to step 20: the next submission resumes it. Set aside, and kept:",
        "  step 40 to checkpoints/quarantine/step-40-0",
        "  step 30 to checkpoints/quarantine/step-30-0",
    ]
    assert catalog(run).complete_steps() == [0, 20]
    status = run.status()
    assert (status.state, status.step, status.submissions) == ("STOPPED", 20, 1)
    event = read_ledger(run.fs)[-1]
    assert (event.life, event.kind, event.step, event.reason) == (1, "rolled_back", 20, "spike")
    assert lease.read(run.fs)[1].released


def test_the_verb_answers_in_json(run: ARun) -> None:
    result = ask("rollback", run.root, "--to", "30", "--json")
    assert json.loads(result.stdout) == {
        "to_step": 30,
        "set_aside": {"40": "checkpoints/quarantine/step-40-0"},
        "trusted": False,
    }


def test_a_run_that_somebody_holds_is_left_alone(
    run: ARun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "BEAT_S", 0.05)
    held = lease.acquire(run.fs, "job 01000000 on a cluster")
    result = ask("rollback", run.root, "--to", "20")
    held.release()
    assert result.exit_code == 1 and "held by process" in result.stderr
    assert "job 01000000 on a cluster" in result.stderr
    assert catalog(run).complete_steps() == list(STEPS)
    assert [event.life for event in read_ledger(run.fs)] == [0, 0, 0]


def test_a_step_that_was_set_aside_is_told_with_what_brings_it_back(run: ARun) -> None:
    assert ask("rollback", run.root, "--to", "20", "--reason", "spike").exit_code == 0
    refused = ask("rollback", run.root, "--to", "40")
    assert refused.exit_code == 2
    said = " ".join(refused.stderr.split())
    assert "step 40: in the quarantine, checkpoints/quarantine/step-40-0, since 20" in said
    assert "rolled back to step 20: spike" in said
    assert f"`elastic checkpoints restore {run.root} --step 40` brings it back" in said
    assert "never committed" not in said
    for step in (0, 20):
        catalog(run).quarantine(step, "bad bytes")
    said = " ".join(ask("rollback", run.root, "--to", "40").stderr.split())
    assert "it has no complete checkpoint (step 40: in the quarantine" in said


def test_a_step_that_is_not_there_is_refused_and_nothing_is_written(run: ARun) -> None:
    before = sorted(path for path in run.root.rglob("*"))
    result = ask("rollback", run.root, "--to", "25")
    assert result.exit_code == 2
    assert "complete checkpoints, which are those of the steps 0, 20, 30, 40" in result.stderr
    assert sorted(run.root.rglob("*")) == before


def test_the_verb_has_nothing_to_do_at_the_newest(run: ARun) -> None:
    before = sorted(run.root.rglob("*"))
    result = ask("rollback", run.root, "--to", "40")
    assert result.exit_code == 0 and "nothing was changed" in result.stdout
    assert sorted(run.root.rglob("*")) == before


@pytest.mark.parametrize("arguments", [[], ["--to", "-1"], ["--to", "x"]])
def test_wrong_usage(run: ARun, arguments: list[str]) -> None:
    result = ask("rollback", run.root, *arguments)
    assert result.exit_code == 2 and "Usage" in result.stderr


def test_no_such_run(tmp_path: Path) -> None:
    result = ask("rollback", tmp_path / "nowhere", "--to", "1")
    assert result.exit_code == 2 and "no such directory" in result.stderr


# --- a new place ---------------------------------------------------------------------------------


def test_a_fresh_name_is_the_first_that_nothing_has(tmp_path: Path) -> None:
    storage = str(tmp_path / "runs [1] #2")
    assert free_name(storage, "demo") == "demo"
    for taken, expected in (("demo", "demo-2"), ("demo-2", "demo-3"), ("demo-4", "demo-3")):
        (tmp_path / "runs [1] #2" / taken).mkdir(parents=True)
        assert free_name(storage, "demo") == expected
    assert free_name(storage, "demo-2") == "demo-2-2"


def test_the_last_line_of_a_stopped_run_says_how_to_resume_it(run: ARun) -> None:
    url = str(run.root)
    same = stopped_line(url, "demo", is_same=True)
    assert same == "stopped at step 40; the same command resumes"
    other = stopped_line(url, "demo-2", is_same=False)
    assert other.endswith("with --name demo-2, without --fresh and --from-step, resumes")
    for step in STEPS:
        catalog(run).remove(step)
    assert "before its first checkpoint" in stopped_line(url, "demo", is_same=True)
