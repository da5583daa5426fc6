"""The verbs verify, prune, pin and unpin: what they find, what they remove, what they never do."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from elastic.cli import main
from elastic.policy.retention import Retention
from elastic.storage import (
    late_visibility,
    lease,
    local_store,
    pins,
    pruning,
    retention,
    verification,
)
from elastic.storage.checkpoints import Catalog, NotComplete
from elastic.storage.completeness import digest_problem
from elastic.storage.filesystem import Filesystem
from elastic.storage.ledger import LedgerWriter, read_ledger
from elastic.storage.readmission import ReadmissionRefused, readmit
from tests.made_run import BORN_S, add_checkpoint, fingerprint, make_run

STEPS = [0, 10, 20, 30, 40]


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """That data is synced, and in which order, is what test_filesystem.py is about."""
    monkeypatch.setattr(local_store.os, "fsync", lambda descriptor: None)


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    made = make_run(tmp_path / "demo")
    for step in STEPS:
        add_checkpoint(made, step)
    return made


@pytest.fixture(params=["local", "object"])
def any_catalog(request: pytest.FixtureRequest, tmp_path: Path) -> Catalog:
    if request.param == "local":
        fs = Filesystem.at(str(tmp_path))
    else:
        fs = Filesystem.at(f"memory://{tmp_path.name}-{id(tmp_path)}")
    made = Catalog(fs, "me")
    for step in STEPS:
        add_checkpoint(made, step)
    return made


def root(catalog: Catalog) -> Path:
    assert catalog.fs.local_root is not None
    return Path(catalog.fs.local_root)


def ask(verb: str, catalog: Catalog, *arguments: object) -> Result:
    result = CliRunner().invoke(
        main, ["checkpoints", verb, str(root(catalog)), *map(str, arguments)]
    )
    assert isinstance(result.exception, SystemExit | None), "a traceback"
    return result


def answer(verb: str, catalog: Catalog, *arguments: object, code: int = 0) -> Any:
    result = ask(verb, catalog, *arguments, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def spoil(catalog: Catalog, step: int, name: str = "__0_0.distcp") -> Path:
    """One other byte, the size as it was."""
    file = root(catalog) / "checkpoints" / f"step-{step}" / name
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    return file


# --- verify --------------------------------------------------------------------------------------


def test_sound_checkpoints_are_good(catalog: Catalog) -> None:
    before = fingerprint(root(catalog))
    found = answer("verify", catalog)
    assert [one["step"] for one in found] == STEPS
    assert {one["result"] for one in found} == {"good"}
    assert found[1] == {
        "step": 10,
        "result": "good",
        "num_files": 4,
        "bytes": catalog.inspect(10).bytes,
        "problems": [],
        "pinned": False,
    }
    assert fingerprint(root(catalog)) == before
    lines = ask("verify", catalog).output.splitlines()
    assert lines[0].split() == ["STEP", "RESULT", "FILES", "SIZE", "PINNED", "WHAT", "WAS", "FOUND"]
    assert lines[-1].startswith("5 good, ")


def test_one_other_byte_is_found_and_told(catalog: Catalog) -> None:  # B10
    spoil(catalog, 20)
    before = fingerprint(root(catalog))
    found = {one["step"]: one for one in answer("verify", catalog, code=1)}
    assert found[20]["result"] == "bad"
    assert "__0_0.distcp: expected sha256:" in found[20]["problems"][0]
    assert [step for step, one in found.items() if one["result"] == "good"] == [0, 10, 30, 40]
    assert answer("verify", catalog, "--step", 10, "--step", 30)[1]["step"] == 30
    result = ask("verify", catalog, "--step", 20)
    assert result.exit_code == 1
    assert "1 bad" in result.output
    assert fingerprint(root(catalog)) == before, "verify quarantines nothing"


@pytest.mark.parametrize("name", ["__0_0.distcp", "manifest.json", ".metadata"])
def test_a_published_one_that_lacks_a_file_is_bad(catalog: Catalog, name: str) -> None:
    (root(catalog) / "checkpoints" / "step-20" / name).unlink()
    found = {one["step"]: one for one in answer("verify", catalog, code=1)}
    assert (found[20]["result"], len(found)) == ("bad", 5)
    assert f"{name} is missing" in found[20]["problems"][0]


def test_saves_on_their_way_are_none_of_its_business(catalog: Catalog) -> None:
    catalog.fs.write_bytes(f"{catalog.begin(50, 1, 0)}/__0_0.distcp", b"half")
    catalog.fs.write_bytes("checkpoints/step-60/__0_0.distcp", b"renamed, and then a crash")
    assert [one["step"] for one in answer("verify", catalog)] == STEPS
    refused = ask("verify", catalog, "--step", 60)
    assert refused.exit_code == 2
    assert "Complete ones: 0, 10, 20, 30, 40" in refused.stderr


def test_trouble_in_reading_is_told_apart_from_bad_bytes(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Filesystem.open_input

    def broken(self: Filesystem, path: str) -> Any:
        if path.endswith("step-20/__1_0.distcp"):
            raise OSError(5, "Input/output error")
        return read(self, path)

    monkeypatch.setattr(Filesystem, "open_input", broken)
    found = {one["step"]: one for one in answer("verify", catalog, code=1)}
    assert found[20]["result"] == "unreadable"
    assert "Input/output error" in found[20]["problems"][0]


def test_one_that_retention_takes_meanwhile_is_no_problem(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    def taken(fs: Filesystem, path: str, file: Any, *rest: Any) -> str:
        if path.endswith("step-0"):
            catalog.remove(0)
        return digest_problem(fs, path, file, *rest)

    monkeypatch.setattr(verification, "digest_problem", taken)
    found = {one["step"]: one["result"] for one in answer("verify", catalog)}
    assert found == {0: "gone", 10: "good", 20: "good", 30: "good", 40: "good"}


def test_files_are_read_in_parallel(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    met = threading.Barrier(2, timeout=20)

    def together(*arguments: Any) -> str:
        met.wait()
        return ""

    monkeypatch.setattr(verification, "digest_problem", together)
    files = [("x", file) for file in catalog.manifest(10).files]
    assert verification.check_files(catalog.fs, files) == [("good", "")] * 4


def test_progress_adds_up(any_catalog: Catalog) -> None:
    told: list[tuple[int, int]] = []
    verdicts = verification.verify(any_catalog, tell=lambda done, all: told.append((done, all)))
    assert {verdict.result for verdict in verdicts} == {"good"}
    total = sum(file.bytes for step in STEPS for file in any_catalog.manifest(step).files)
    assert told[-1] == (total, total)


def test_who_stops_waiting_stops_the_reading(catalog: Catalog) -> None:
    def interrupted(done: int, all: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        verification.verify(catalog, tell=interrupted)


def test_a_run_without_checkpoints(tmp_path: Path) -> None:
    empty = make_run(tmp_path / "demo")
    assert answer("verify", empty) == []
    assert ask("verify", empty).output == "no checkpoints\n"
    assert "nothing to remove" in ask("prune", empty, "--keep", 1).output


# --- prune ---------------------------------------------------------------------------------------


def test_prune_shows_and_only_with_yes_removes(catalog: Catalog) -> None:
    before = fingerprint(root(catalog))
    shown = ask("prune", catalog, "--keep", 2, "--keep-every", 20)
    assert shown.exit_code == 0
    assert [line.split()[0::3][:2] for line in shown.output.splitlines()[1:6]] == [
        ["0", "keep"],
        ["10", "remove"],
        ["20", "keep"],
        ["30", "keep"],
        ["40", "keep"],
    ]
    assert "would remove 1" in shown.output
    assert fingerprint(root(catalog)) == before
    planned = answer("prune", catalog, "--keep", 2, "--keep-every", 20)
    assert (planned["applied"], planned["removed"], planned["freed_bytes"]) == (False, [], 0)
    size = catalog.inspect(10).bytes
    done = answer("prune", catalog, "--keep", 2, "--keep-every", 20, "--yes")
    assert (done["applied"], done["removed"], done["freed_bytes"]) == (True, [10], size)
    assert done["checkpoints"][1] == {
        "step": 10,
        "bytes": size,
        "pinned": False,
        "remove": True,
        "why": "",
    }
    assert [one["why"] for one in done["checkpoints"] if not one["remove"]] == [
        "one of every 20 steps",
        "one of every 20 steps",
        "among the newest 2",
        "the newest",
    ]
    assert catalog.complete_steps() == [0, 20, 30, 40]


def test_neither_the_newest_nor_a_pinned_one_can_be_pruned(catalog: Catalog) -> None:
    pins.pin(catalog, 10, time_s=BORN_S)
    assert answer("prune", catalog, "--keep", 1, "--yes")["removed"] == [0, 20, 30]
    assert catalog.complete_steps() == [10, 40]
    assert "nothing to remove" in ask("prune", catalog, "--keep", 1, "--yes").output


@pytest.mark.parametrize("keep", ["0", "-1", "x"])
def test_keeping_none_cannot_be_asked_for(catalog: Catalog, keep: str) -> None:  # B16
    assert ask("prune", catalog, "--keep", keep, "--yes").exit_code == 2
    assert ask("prune", catalog, "--yes").exit_code == 2
    assert catalog.complete_steps() == STEPS


def test_a_damaged_newest_one_keeps_all_the_others(catalog: Catalog) -> None:
    spoil(catalog, 40)
    refused = ask("prune", catalog, "--keep", 1, "--yes")
    assert refused.exit_code == 1
    assert "nothing was removed: the newest checkpoint, step 40, is bad" in refused.stderr
    shown = ask("prune", catalog, "--keep", 1)
    assert shown.exit_code == 1, "what is shown is what --yes does"
    assert "would be removed: the newest checkpoint, step 40, is bad" in shown.stderr
    assert catalog.complete_steps() == STEPS


def test_what_changed_since_the_plan_is_left_alone(any_catalog: Catalog) -> None:
    fates = pruning.plan(any_catalog, Retention(keep=1))
    pins.pin(any_catalog, 0, time_s=BORN_S)
    any_catalog.quarantine(10, "bad")
    add_checkpoint(any_catalog, 10, generation=7)  # the run went back and saved it anew
    any_catalog.remove(20)
    assert list(pruning.perform(any_catalog, fates)) == [30]
    assert any_catalog.complete_steps() == [0, 10, 40]


def test_a_removal_that_fails_tells_what_went_before(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove = Catalog.remove

    def broken(self: Catalog, step: int) -> None:
        if step == 20:
            raise PermissionError(13, "Permission denied")
        remove(self, step)

    monkeypatch.setattr(Catalog, "remove", broken)
    failed = ask("prune", catalog, "--keep", 1, "--yes")
    assert failed.exit_code == 1
    assert "Permission denied (removed before that: 0, 10)" in failed.stderr.replace("\n", " ")


# --- back from the quarantine --------------------------------------------------------------------


def test_what_was_set_aside_last_comes_back(any_catalog: Catalog) -> None:
    any_catalog.quarantine(40, "an older history")
    add_checkpoint(any_catalog, 40, generation=3)
    any_catalog.quarantine(40, "rolled back to step 30")
    ledger = LedgerWriter(any_catalog.fs, 0, "a")
    done = readmit(any_catalog, ledger, 40, "why not", time_s=BORN_S)
    assert (done.step, done.path) == (40, "checkpoints/quarantine/step-40-1")
    any_catalog.sweep(9)
    assert any_catalog.complete_steps() == STEPS
    assert any_catalog.manifest(40).generation == 3
    assert {one.result for one in verification.verify(any_catalog)} == {"good"}
    left = [one.path for one in any_catalog.list() if not one.complete]
    assert left == ["checkpoints/quarantine/step-40-0"]
    (event,) = read_ledger(any_catalog.fs)
    assert (event.kind, event.step, event.reason) == ("checkpoint_restored", 40, "why not")
    assert late_visibility.committed_steps([event]) == {40}
    with pytest.raises(ReadmissionRefused, match="a complete one is at checkpoints/step-40"):
        readmit(any_catalog, ledger, 40, "again", time_s=BORN_S)


def test_restore_brings_back_and_says_what_is_resumed(catalog: Catalog) -> None:
    for step in (20, 40):
        catalog.quarantine(step, "tried")
    said = ask("restore", catalog, "--step", 20).stdout
    assert "step 20 is back from checkpoints/quarantine/step-20-0" in said
    assert "resumes step 30" in said and "pin" in said, "retention may take it again"
    assert answer("restore", catalog, "--step", 40) == {
        "step": 40,
        "path": "checkpoints/quarantine/step-40-0",
        "bytes": sum(file.bytes for file in catalog.manifest(30).files),
        "resumed_next": 40,
    }
    assert catalog.complete_steps() == STEPS
    assert catalog.inspect(40).bytes == catalog.inspect(30).bytes, "without the reason"


def test_restore_takes_no_bad_bytes_and_nobodys_place(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "BEAT_S", 0.05)
    assert ask("restore", catalog, "--step", 40).exit_code == 2, "nothing of it was set aside"
    spoil(catalog, 40)
    catalog.quarantine(40, "tried")
    refused = ask("restore", catalog, "--step", 40)
    assert refused.exit_code == 1
    said = " ".join(refused.stderr.split())
    assert "step-40-0 is not what was saved (__0_0.distcp: expected sha256:" in said
    (catalog.fs.sub("checkpoints/quarantine/step-40-0")).write_bytes("__0_0.distcp", b"a" * 3000)
    held = lease.acquire(catalog.fs, "job 01000000 on a cluster")
    refused = ask("restore", catalog, "--step", 40)
    held.release()
    assert refused.exit_code == 1 and "job 01000000 on a cluster" in refused.stderr
    assert catalog.complete_steps() == STEPS[:-1]
    assert answer("restore", catalog, "--step", 40)["resumed_next"] == 40


# --- pins ----------------------------------------------------------------------------------------


def test_a_pinned_one_stays_for_ever(any_catalog: Catalog) -> None:
    assert pins.pin(any_catalog, 10, time_s=BORN_S)
    assert not pins.pin(any_catalog, 10, time_s=BORN_S)
    for step in (50, 60, 70):
        add_checkpoint(any_catalog, step)
        retention.apply(any_catalog, Retention(keep=1), set())
    assert any_catalog.complete_steps() == [10, 70]
    assert any_catalog.verify_files(10) == []
    assert pins.unpin(any_catalog.fs, 10)
    assert not pins.unpin(any_catalog.fs, 10)
    assert retention.apply(any_catalog, Retention(keep=1), set()) == [10]


def test_pin_and_unpin_as_verbs(catalog: Catalog) -> None:
    assert answer("pin", catalog, 20) == {"step": 20, "pinned": True, "changed": True}
    assert answer("pin", catalog, 20) == {"step": 20, "pinned": True, "changed": False}
    listed = ask("list", catalog).output.splitlines()
    assert [line.split()[0] for line in listed if "pinned" in line] == ["20"]
    assert [one["step"] for one in answer("verify", catalog) if one["pinned"]] == [20]
    file = root(catalog) / "checkpoints" / "pins" / "step-20"
    assert json.loads(file.read_text())["step"] == 20
    assert answer("unpin", catalog, 20) == {"step": 20, "pinned": False, "changed": True}
    assert answer("unpin", catalog, 20) == {"step": 20, "pinned": False, "changed": False}
    assert not file.exists()


def test_what_is_not_there_cannot_be_pinned(catalog: Catalog) -> None:
    refused = ask("pin", catalog, 25)
    assert refused.exit_code == 2
    assert "Complete ones: 0, 10, 20, 30, 40" in refused.stderr
    (root(catalog) / "checkpoints" / "step-20" / "__0_0.distcp").unlink()
    refused = ask("pin", catalog, 20)
    assert refused.exit_code == 1
    assert "__0_0.distcp is missing" in refused.stderr
    assert ask("pin", catalog, -3).exit_code == 2
    assert ask("pin", catalog, "x").exit_code == 2
    assert pins.pinned_steps(catalog.fs) == set()


@pytest.mark.parametrize("content", [b"", b"\0\0\0", b"{}"])
def test_a_damaged_pin_still_pins(catalog: Catalog, content: bytes) -> None:
    catalog.fs.write_bytes("checkpoints/pins/step-10", content)
    catalog.fs.make_dirs("checkpoints/pins/step-20")
    catalog.fs.write_bytes("checkpoints/pins/step-030", content)
    catalog.fs.write_bytes("checkpoints/pins/.step-0.123.tmp", content)
    assert retention.apply(catalog, Retention(keep=1), set()) == [0, 30]


def test_pins_are_no_checkpoints(any_catalog: Catalog) -> None:
    before = any_catalog.list()
    pins.pin(any_catalog, 10, time_s=BORN_S)
    assert any_catalog.list() == before
    assert any_catalog.sweep(3) == []
    assert pins.pinned_steps(any_catalog.fs) == {10}


def test_a_pin_set_while_retention_removes_is_honoured(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove: Callable[[Catalog, int], None] = Catalog.remove

    def pin_the_next(self: Catalog, step: int) -> None:
        pins.pin(self, step + 10, time_s=BORN_S)
        remove(self, step)

    monkeypatch.setattr(Catalog, "remove", pin_the_next)
    assert retention.apply(catalog, Retention(keep=1), set()) == [0, 20]
    assert catalog.complete_steps() == [10, 30, 40]


def test_a_pin_that_comes_too_late_is_refused_and_leaves_nothing(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Filesystem.write_bytes

    def removed_first(self: Filesystem, path: str, data: bytes) -> None:
        catalog.remove(10)
        write(self, path, data)

    monkeypatch.setattr(Filesystem, "write_bytes", removed_first)
    with pytest.raises(NotComplete):
        pins.pin(catalog, 10, time_s=BORN_S)
    assert pins.pinned_steps(catalog.fs) == set()


def test_a_storage_that_takes_no_pin_says_so(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Filesystem, "write_bytes", read_only)
    failed = ask("pin", catalog, 10)
    assert failed.exit_code == 1
    assert "step 10 could not be pinned: OSError: [Errno 30] Read-only" in failed.stderr


# --- the verbs themselves ------------------------------------------------------------------------

VERBS = [
    ["verify"],
    ["prune", "--keep", "1"],
    ["pin", "1"],
    ["unpin", "1"],
    ["restore", "--step", "1"],
]


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_a_run_that_is_none_is_told(verb: list[str], tmp_path: Path) -> None:
    name, *rest = verb
    for place in (tmp_path / "nowhere", tmp_path, "nosuch://bucket/run"):
        result = CliRunner().invoke(main, ["checkpoints", name, str(place), *rest])
        assert result.exit_code == 2
        assert isinstance(result.exception, SystemExit), "a traceback"
        assert result.stderr.startswith("Error: ")
        assert result.stdout == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", ["verify", "prune", "pin", "unpin", "restore"])
def test_help_helps(verb: str) -> None:
    result = CliRunner().invoke(main, ["checkpoints", verb, "--help"])
    assert result.exit_code == 0
    assert "RUN" in result.output
    assert "Exit codes:" in result.output


def test_odd_characters_in_a_path_are_just_characters(tmp_path: Path) -> None:  # B62
    odd = make_run(tmp_path / "a [b] %20 #é" / "run *")
    for step in (0, 5):
        add_checkpoint(odd, step)
    assert answer("pin", odd, 0)["changed"]
    assert answer("unpin", odd, 0)["changed"]
    assert answer("prune", odd, "--keep", 1, "--yes")["removed"] == [0]
    assert answer("verify", odd)[0]["result"] == "good"
    assert [path.name for path in tmp_path.iterdir()] == ["a [b] %20 #é"]
