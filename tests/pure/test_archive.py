"""The archive: what belongs there gets there whole, and only then may go from the run's storage."""

from __future__ import annotations

import errno
import json
import os
import pickle
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from click.testing import CliRunner

from elastic.cli import main
from elastic.dashboard.page.saves import saves_of
from elastic.policy.retention import Retention
from elastic.storage import local_store, retention
from elastic.storage.archive import (
    Archive,
    ArchiveTaken,
    ArchiveUnusable,
    archive_of,
    check_archive,
)
from elastic.storage.archiver import Archiver
from elastic.storage.checkpoints import Catalog
from elastic.storage.copying import CopyDamaged, copy_checkpoint
from elastic.storage.fence import raise_fence
from elastic.storage.filesystem import Filesystem
from elastic.storage.ledger import LedgerEvent, LedgerWriter, read_ledger
from elastic.storage.run_file import RunFile, create_run_file, load_run_file
from elastic.storage.verification import verify
from tests.made_run import add_checkpoint

POLICY = Retention(keep=2, keep_every=20)


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """That data is synced, and in which order, is what test_filesystem.py is about."""
    monkeypatch.setattr(local_store.os, "fsync", lambda descriptor: None)


@pytest.fixture
def run_file(tmp_path: Path) -> RunFile:
    return _run_file(tmp_path / "runs" / "demo")


@pytest.fixture
def catalog(tmp_path: Path, run_file: RunFile) -> Catalog:
    return Catalog(Filesystem.at(str(tmp_path / "runs" / "demo")), run_file.run_id)


@pytest.fixture(params=["local", "object"])
def archive(request: pytest.FixtureRequest, tmp_path: Path, run_file: RunFile) -> Archive:
    url = str(tmp_path / "archive") if request.param == "local" else f"memory://{uuid.uuid4().hex}"
    return Archive(Filesystem.at(f"{url}/demo"), run_file)


Words = list[tuple[str, int, str]]
Start = Callable[..., tuple[Archiver, Words]]


@pytest.fixture
def start(catalog: Catalog) -> Iterator[Start]:
    begun: list[Archiver] = []

    def start(archive: Archive, may_publish: Callable[[], object] = lambda: None) -> Any:
        words: Words = []
        archiver = Archiver(
            catalog,
            archive,
            POLICY,
            tell=lambda kind, step, reason, data: words.append((kind, step, reason)),
            before_publishing=may_publish,
        )
        begun.append(archiver)
        return archiver, words

    yield start
    for archiver in begun:
        archiver.close()


def _run_file(root: Path) -> RunFile:
    nothing: dict[str, Any] = {"config": {}, "identity": {}, "operational": {}, "versions": {}}
    fs = Filesystem.at(str(root))
    return create_run_file(fs, name="demo", created_s=0.0, seed=0, **nothing)


def test_what_the_archive_has_not_yet_stays(catalog: Catalog, archive: Archive) -> None:
    for step in range(0, 70, 10):
        add_checkpoint(catalog, step)

    def held(steps: Any) -> set[int]:
        return archive.holding(catalog, steps, POLICY)

    assert retention.apply(catalog, POLICY, (), held) == [10, 30]
    archive.take(catalog, 20)
    assert retention.apply(catalog, POLICY, (), held) == [20]
    assert catalog.complete_steps() == [0, 40, 50, 60]
    assert archive.catalog.complete_steps() == [20]
    assert [one.result for one in verify(archive.catalog)] == ["good"]


def test_the_archiver_takes_all_that_is_due_oldest_first(
    catalog: Catalog, archive: Archive, start: Start
) -> None:
    for step in range(0, 50, 10):
        add_checkpoint(catalog, step)
    archiver, words = start(archive)
    assert archiver.close(wait_s=60)
    assert [(kind, step) for kind, step, _ in words] == [
        ("checkpoint_archived", step) for step in (0, 20, 40)
    ]
    assert archive.catalog.complete_steps() == [0, 20, 40]
    assert archiver.holding(catalog.complete_steps()) == {0, 20, 40}
    assert load_run_file(archive.fs) is not None, "it is to be read as a run"


def test_a_life_after_it_knows_what_is_there_and_takes_the_rest(
    catalog: Catalog, archive: Archive, run_file: RunFile, start: Start
) -> None:
    add_checkpoint(catalog, 20)
    archive.take(catalog, 20)
    add_checkpoint(catalog, 40)
    archiver, words = start(Archive(archive.fs, run_file))
    assert archiver.close(wait_s=60)
    assert [(kind, step) for kind, step, _ in words] == [("checkpoint_archived", 40)]


def test_a_step_that_was_trained_again_is_taken_again(catalog: Catalog, archive: Archive) -> None:
    add_checkpoint(catalog, 20)
    archive.take(catalog, 20)
    catalog.quarantine(20, "trained again")
    add_checkpoint(catalog, 20, generation=3)
    assert archive.holding(catalog, [20], POLICY) == set(), "the older one is not this one"
    archive.take(catalog, 20)
    assert archive.holding(catalog, [20], POLICY) == {20}
    assert archive.catalog.manifest(20).generation == 3


def test_an_archive_that_fails_is_told_once_and_tried_again(
    catalog: Catalog, archive: Archive, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    whole = archive.fs.store
    broken = threading.Event()
    broken.set()

    class Broken:
        scheme = whole.scheme
        num_tries = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(whole, name)

        def open_output(self, path: str) -> Any:
            Broken.num_tries += 1
            if broken.is_set():
                raise OSError(5, "Input/output error")
            return whole.open_output(path)

    archive.fs.store = cast(Any, Broken())
    add_checkpoint(catalog, 20)
    archiver, words = start(archive)
    _until(lambda: len(words) == 1)
    for tries in (2, 3):
        archiver.wake()
        _until(lambda tries=tries: Broken.num_tries == tries)
    assert [(kind, step) for kind, step, _ in words] == [("archive_failed", 20)]
    assert "Input/output error" in words[0][2]
    warned = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len([one for one in warned if "takes not the checkpoint of step 20" in one]) == 1
    assert retention.apply(catalog, Retention(keep=1, keep_every=20), (), archiver.holding) == []
    broken.clear()
    archiver.wake()
    assert archiver.close(wait_s=60)
    assert [kind for kind, _, _ in words] == ["archive_failed", "checkpoint_archived"]


def test_damaged_bytes_are_not_archived_and_hold_up_nothing(
    catalog: Catalog, archive: Archive, start: Start
) -> None:
    add_checkpoint(catalog, 20)
    add_checkpoint(catalog, 40)
    assert catalog.fs.local_root is not None
    file = Path(catalog.fs.local_root, catalog.data_path(20), "__0_0.distcp")
    data = bytearray(file.read_bytes())
    data[0] ^= 1
    file.write_bytes(data)
    archiver, words = start(archive)
    _until(lambda: len(words) == 2)
    add_checkpoint(catalog, 60)
    archiver.wake()
    assert archiver.close(wait_s=60)
    assert [(kind, step) for kind, step, _ in words] == [
        ("archive_failed", 20),
        ("checkpoint_archived", 40),
        ("checkpoint_archived", 60),
    ], "the damaged one is tried again, and told once"
    assert "CopyDamaged" in words[0][2]
    assert archive.catalog.complete_steps() == [40, 60]


def test_bytes_that_arrived_otherwise_are_not_called_archived(
    catalog: Catalog, archive: Archive
) -> None:
    add_checkpoint(catalog, 20)
    whole = archive.fs.store

    class Liar:
        """Acknowledges what it is given, and keeps something else of the same size."""

        scheme = whole.scheme

        def __getattr__(self, name: str) -> Any:
            return getattr(whole, name)

        def open_output(self, path: str) -> Any:
            stream = whole.open_output(path)
            write = stream.write
            stream.write = lambda data: write(bytes(len(data)))  # type: ignore[method-assign]
            return stream

    archive.fs.store = cast(Any, Liar())
    with pytest.raises(CopyDamaged, match="as it arrived"):
        archive.take(catalog, 20)
    assert archive.catalog.complete_steps() == []


def test_who_has_lost_the_lease_archives_nothing(
    catalog: Catalog, archive: Archive, start: Start
) -> None:
    def lost() -> None:
        raise RuntimeError("the lease is lost")

    add_checkpoint(catalog, 20)
    archiver, words = start(archive, lost)
    assert archiver.close(wait_s=60)
    assert "the lease is lost" in words[0][2]
    assert archive.catalog.complete_steps() == []


class Refusing:
    """A store that can be read, and takes nothing."""

    def __init__(self, whole: Any, error: OSError) -> None:
        self.scheme = whole.scheme
        self._whole = whole
        self._error = error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)

    def write_bytes(self, path: str, data: bytes) -> None:
        if data:  # a full disk has room for a name yet
            raise self._error

    def create_new(self, path: str, data: bytes) -> bool:
        raise self._error


def _error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


@pytest.mark.parametrize("is_begun", [False, True])
@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EACCES])
def test_an_archive_that_takes_nothing_is_refused_at_the_start(
    archive: Archive, run_file: RunFile, number: int, is_begun: bool
) -> None:
    if is_begun:  # it has the run's file by now, and nothing else
        archive.check()
        assert [entry.name for entry in archive.fs.list()] == ["run.json"], "no probe is left"
    again = Archive(archive.fs, run_file)
    again.fs.store = cast(Any, Refusing(archive.fs.store, _error(number)))
    with pytest.raises(ArchiveUnusable) as refused:
        again.check()
    said = str(refused.value)
    assert archive.fs.url in said and os.strerror(number) in said and "leave archive out" in said
    assert str(pickle.loads(pickle.dumps(refused.value))) == said


def test_a_file_in_place_of_an_archive_is_refused_at_the_start(
    tmp_path: Path, run_file: RunFile
) -> None:
    (tmp_path / "cold").write_text("no directory")
    with pytest.raises(ArchiveUnusable, match="cold/demo takes nothing"):
        Archive(Filesystem.at(str(tmp_path / "cold" / "demo")), run_file).check()


def test_what_may_pass_and_what_has_worked_is_a_warning(
    archive: Archive, run_file: RunFile, caplog: pytest.LogCaptureFixture
) -> None:
    whole = archive.fs.store
    taken = _event("checkpoint_archived", 0, archive=archive.fs.url)
    elsewhere = _event("checkpoint_archived", 0, archive="/mnt/other/demo")

    def again(number: int) -> Archive:
        archive.fs.store = cast(Any, Refusing(whole, _error(number)))
        return Archive(archive.fs, run_file)

    again(errno.ETIMEDOUT).check()
    again(errno.ENOSPC).check([elsewhere, taken])
    again(errno.ENOSPC).check(is_again=True)
    warned = [record.message for record in caplog.records if "takes nothing now" in record.message]
    assert len(warned) == 3
    with pytest.raises(ArchiveUnusable):
        again(errno.ENOSPC).check([elsewhere])


def test_another_runs_archive_is_not_touched(tmp_path: Path, archive: Archive) -> None:
    archive.claim()
    other = Archive(archive.fs, _run_file(tmp_path / "others" / "demo"))
    with pytest.raises(ArchiveTaken, match=archive.catalog.run_id):
        other.claim()
    found = load_run_file(archive.fs)
    assert found is not None and found.run_id == archive.catalog.run_id


def test_an_archived_checkpoint_comes_back_past_the_fence(
    catalog: Catalog, archive: Archive
) -> None:
    add_checkpoint(catalog, 20)
    archive.take(catalog, 20)
    catalog.remove(20)
    raise_fence(catalog.fs, 9)
    copy_checkpoint(archive.catalog, 20, catalog)
    assert catalog.complete_steps() == [20]
    assert [one.result for one in verify(catalog)] == ["good"]


@pytest.mark.parametrize(
    ("place", "keep_every", "said"),
    [
        ("archive", 10, "absolute"),
        ("/mnt/runs/archive", 10, "lies in the storage"),
        ("/mnt/runs", 10, "lies in the storage"),
        ("/mnt/archive", None, "keep_every"),
        ("s3n://bucket/archive", 10, "no access"),
    ],
)
def test_an_archive_that_cannot_be_one_is_refused(
    place: str, keep_every: int | None, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        check_archive(place, "/mnt/runs", keep_every)


def test_an_archive_beside_the_storage_is_taken() -> None:
    check_archive("/mnt/runs-archive", "/mnt/runs", 10)
    check_archive(None, "/mnt/runs", None)


# --- what people see of it -----------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Catalog:
    """A run whose checkpoint of step 20 lies in its archive only."""
    fs = Filesystem.at(str(tmp_path / "seen" / "demo"))
    place = str(tmp_path / "cold" / "demo")
    nothing: dict[str, Any] = {"config": {}, "identity": {}, "versions": {}}
    operational = {"archive": place, "keep": 2, "keep_every": 20}
    run_file = create_run_file(
        fs, name="demo", created_s=0.0, seed=0, operational=operational, **nothing
    )
    made = Catalog(fs, run_file.run_id)
    for step in (20, 30, 40):
        add_checkpoint(made, step)
    archive = archive_of(run_file)
    assert archive is not None
    for step in (20, 40):
        archive.take(made, step)
    made.remove(20)
    return made


def ask(*arguments: object) -> str:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_list_tells_where_archived_checkpoints_are(run: Catalog, tmp_path: Path) -> None:
    lines = ask("checkpoints", "list", run.fs.url).splitlines()
    assert lines[1].split()[:2] == ["20", "archived"], "which is sound, and no damaged one"
    assert f"{tmp_path}/cold/demo/checkpoints/step-20" in lines[1]
    assert "in the archive only" in lines[1]
    assert lines[2].split()[:2] == ["30", "yes"] and "archived" not in lines[2]
    assert "yes, archived" in lines[3]
    rows = json.loads(ask("checkpoints", "list", run.fs.url, "--json"))
    assert [(row["step"], row["complete"], row["archived"] is not None) for row in rows] == [
        (20, False, True),
        (30, True, False),
        (40, True, True),
    ]


def test_an_archive_that_cannot_be_read_hides_nothing_else(run: Catalog, tmp_path: Path) -> None:
    (tmp_path / "cold" / "demo").rename(tmp_path / "moved")
    (tmp_path / "cold" / "demo").write_text("no directory")
    result = CliRunner().invoke(main, ["checkpoints", "list", run.fs.url])
    assert result.exit_code == 0
    assert [line.split()[0] for line in result.stdout.splitlines()[1:]] == ["30", "40"]
    assert "cannot be read" in result.stderr
    run.quarantine(40, "tried")
    refused = CliRunner().invoke(main, ["rollback", run.fs.url, "--to", "40"])
    said = " ".join(refused.stderr.split())
    assert refused.exit_code == 2
    assert "step 40: in the quarantine" in said and "the archive cannot be read: " in said


def test_a_rollback_brings_back_what_only_the_archive_has(run: Catalog, tmp_path: Path) -> None:
    said = ask("rollback", run.fs.url, "--to", 20)
    assert "rolled back to step 20" in said and "step 40 to" in said
    assert run.complete_steps() == [20]
    assert [one.result for one in verify(run, [20])] == ["good"]
    event = read_ledger(run.fs)[-1]
    assert (event.kind, event.data["set_aside"]) == ("rolled_back", [40, 30])
    assert event.data["from_archive"] == f"{tmp_path}/cold/demo"


def test_a_rollback_to_what_neither_has_changes_nothing(run: Catalog) -> None:
    result = CliRunner().invoke(main, ["rollback", run.fs.url, "--to", "10"])
    assert result.exit_code == 2
    assert run.complete_steps() == [30, 40]


def test_the_status_tells_how_far_the_archive_lags_and_why(run: Catalog, tmp_path: Path) -> None:
    place = f"{tmp_path}/cold/demo"
    ledger = LedgerWriter(run.fs, 0, "a")
    full = "OSError: [Errno 28] No space left on device"

    def told(kind: str, step: int, time_s: float, reason: str = "") -> str:
        data = {"archive": place}
        ledger.append(kind, step=step, time_s=time_s, reason=reason, data=data)
        lines = ask("status", run.fs.url).splitlines()
        return next(line for line in lines if line.startswith("archive")).split(maxsplit=1)[1]

    now_s = time.time()
    assert told("run_started", -1, now_s - 999) == f"{place}, nothing taken yet"
    told("checkpoint_committed", 20, now_s - 900)
    told("checkpoint_committed", 30, now_s - 800)
    assert told("checkpoint_archived", 20, now_s - 700) == f"{place}, up to step 20"
    told("checkpoint_committed", 40, now_s - 600)
    told("archive_failed", 40, now_s - 600, full)
    lags = told("checkpoint_committed", 60, now_s - 300)
    assert f"LAGS by 2 checkpoints (steps 40, 60), fails for 10 min: {full}" in lags
    found = json.loads(ask("status", run.fs.url, "--json"))
    archive = found["archive"]
    assert (archive["missing_steps"], archive["newest_step"]) == ([40, 60], 20)
    assert found["archive_failing_for_s"] >= 600 and archive["why"] == full
    told("checkpoint_archived", 40, now_s - 200)
    assert told("checkpoint_archived", 60, now_s - 100) == f"{place}, up to step 60"
    told("archive_failed", -1, now_s - 50, full)
    assert "LAGS by 0 checkpoints, fails for" in told("progress", 61, now_s)


def _event(kind: str, step: int, **data: Any) -> LedgerEvent:
    return LedgerEvent(
        life=0,
        seq=0,
        time_s=0.0,
        kind=kind,
        generation=0,
        step=step,
        world_rank=-1,
        reason="retention" if kind == "checkpoint_removed" else "",
        data=data,
    )


def test_the_page_tells_of_archived_ones() -> None:
    found = saves_of(
        [
            _event("checkpoint_committed", 20),
            _event("checkpoint_archived", 20, archive="s3://cold/demo"),
            _event("checkpoint_committed", 30),
            _event("checkpoint_removed", 20),
            _event("checkpoint_removed", 30),
        ],
        [],
        pinned=set(),
        retention=POLICY,
    )
    assert [(one.step, one.state, one.why) for one in found] == [
        (20, "archived", "in s3://cold/demo"),
        (30, "removed", "retention"),
    ]


def _until(is_so: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < until_s
        time.sleep(0.005)
