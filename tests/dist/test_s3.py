"""Object stores, on a real S3 server: what a run needs of one, its faults, and a run on it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

import elastic
from elastic.cli import main
from elastic.storage.access import StorageRefused, check_access
from elastic.storage.checkpoints import Catalog, SaveIncomplete
from elastic.storage.filesystem import Filesystem
from elastic.storage.object_store import ObjectStore
from elastic.storage.steady_store import Patience, SteadyStore, retries
from elastic.storage.store_errors import StoreStuck
from elastic.training import process_group
from jobs import pretrain
from tests.dist import standalone_run
from tests.dist.processes import RankFailed, run_ranks
from tests.dist.standalone_run import Recipe
from tests.dist.torchrun_job import SMALL
from tests.made_run import FILES, add_checkpoint
from tests.pure.test_crash_matrix import RUN, SCENES, begin, check
from tests.s3_server import Fault, S3Server, s3_server

__all__ = ["s3_server"]

QUICK = Patience(call_s=20.0, tries=3, first_wait_s=0.01, longest_wait_s=0.05)
NAME = "runs/a b [x] é%20"


@pytest.fixture
def fs(s3_server: S3Server) -> Filesystem:
    return Filesystem(SteadyStore(ObjectStore("s3"), QUICK), f"bucket/{NAME}")


def test_what_a_run_needs_of_a_store(s3_server: S3Server, fs: Filesystem) -> None:
    assert fs.list() == []
    fs.write_bytes("dir/one", b"1")
    fs.write_bytes("dir/one", b"one")
    with fs.open_output("dir/two") as file:
        file.write(b"tw")
        file.write(b"o")
    with fs.open_output("empty"):
        pass
    assert [(each.name, each.bytes) for each in fs.list("dir")] == [("one", 3), ("two", 3)]
    assert [(each.name, each.is_dir) for each in fs.list()] == [("dir", True), ("empty", False)]
    assert (fs.size("empty"), fs.size("no"), fs.exists("dir"), fs.exists("di")) == (
        0,
        None,
        True,
        False,
    )
    with fs.open_input("dir/two") as file:
        file.seek(1)
        assert file.read() == b"wo"
    with pytest.raises(FileNotFoundError):
        fs.read_bytes("no")
    fs.remove_tree("dir")
    assert not fs.exists("dir")
    lies_in = [path for path in s3_server.folder.rglob("*") if path.is_file()]
    assert lies_in == [s3_server.folder / NAME / "empty"]


def test_of_several_at_once_one_makes_the_file(fs: Filesystem) -> None:
    made: list[int] = []

    def make(number: int) -> None:
        if fs.create_new("lease/1", str(number).encode()):
            made.append(number)

    threads = [threading.Thread(target=make, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [str(number).encode() for number in made] == [fs.read_bytes("lease/1")]


def first(fault: Fault, method: str) -> Callable[[str, str], Fault | None]:
    """The fault for the first request of this method for each key."""
    # The client itself asks once more, when a connection ends that it has used before.
    left: dict[str, int] = defaultdict(lambda: 2 if fault.is_cut else 1)

    def strike(asked: str, key: str) -> Fault | None:
        left[key] -= asked == method
        return fault if asked == method and left[key] >= 0 else None

    return strike


@pytest.mark.parametrize(
    "fault",
    [
        Fault(status=503, code="SlowDown"),
        Fault(status=500, code="InternalError"),
        Fault(status=400, code="ExpiredToken"),
        Fault(is_cut=True),
    ],
    ids=lambda fault: fault.code or "cut",
)
def test_a_fault_of_a_moment_is_got_over(  # B56, B58
    s3_server: S3Server, fs: Filesystem, fault: Fault
) -> None:
    catalog = Catalog(fs, "me")
    before = retries.total()
    for method in ("PUT", "GET"):
        s3_server.strike = first(fault, method)
        add_checkpoint(catalog, 10 if method == "PUT" else 20)
    assert fs.create_new("lease/1", b"ours")
    s3_server.strike = first(fault, "PUT")
    assert fs.create_new("lease/2", b"ours")
    assert catalog.complete_steps() == [10, 20]
    assert catalog.verify_files(20) == []
    assert retries.total() > before


def test_what_is_not_allowed_is_asked_for_once(s3_server: S3Server, fs: Filesystem) -> None:  # B56
    s3_server.strike = lambda method, key: Fault(status=403, code="AccessDenied")
    with pytest.raises(PermissionError):
        fs.write_bytes("a", b"x")
    assert s3_server.requests == {"PUT": 1}


def test_an_object_that_was_acknowledged_and_lost(s3_server: S3Server, fs: Filesystem) -> None:
    """No marker for it. B61"""
    catalog = Catalog(fs, "me")
    add_checkpoint(catalog, 10)
    lost = next(name for name in FILES if name.endswith("_0.distcp"))
    s3_server.strike = lambda method, key: (
        Fault(is_lost=True) if method == "PUT" and key.endswith(lost) else None
    )
    with pytest.raises(SaveIncomplete, match=f"{lost} is missing"):
        add_checkpoint(catalog, 20)
    assert catalog.complete_steps() == [10]
    assert not fs.exists("checkpoints/step-20/_COMPLETE")


def test_a_server_that_does_not_answer_holds_nobody(s3_server: S3Server) -> None:
    hasty = Patience(call_s=0.3, tries=2, first_wait_s=0.01, longest_wait_s=0.02)
    fs = Filesystem(SteadyStore(ObjectStore("s3"), hasty), "bucket/run")
    fs.list()
    s3_server.strike = lambda method, key: Fault(hold_s=2.0)
    with pytest.raises(StoreStuck, match="no answer within"):
        fs.read_bytes("a")
    s3_server.strike = lambda method, key: None
    fs.write_bytes("b", b"x")


def test_data_is_read_from_it(s3_server: S3Server, tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"tokens": range(336)}), path, row_group_size=16)
    Filesystem.at("s3://bucket/data").write_bytes("x.parquet", path.read_bytes())
    Filesystem.at("s3://bucket/lines").write_bytes("a.jsonl", b'{"n": 1}\n{"n": 2}\n')
    there, here = (elastic.ParquetTokens(p, length=4) for p in ("s3://bucket/data", path))
    assert len(there) == len(here)
    for index in (0, 40, 82):
        assert there[index]["input_ids"].tolist() == here[index]["input_ids"].tolist()
    assert elastic.ParquetRows("s3://bucket/data")[17] == {"tokens": 17}
    assert elastic.JsonLines("s3://bucket/lines")[1] == {"n": 2}


def on_s3(
    rank: int, world_size: int, recipe: Recipe, environment: dict[str, str], folder: str
) -> Any:
    """A rank of a run there. What it notes for the test lies in `folder`."""
    os.environ.update(environment)
    os.chdir(folder)
    Path("s3:/bucket").mkdir(parents=True, exist_ok=True)  # "s3://bucket" as a path of this machine
    return standalone_run._rank(rank, world_size, recipe)


def test_a_run_is_killed_and_resumes_on_it(s3_server: S3Server, tmp_path: Path) -> None:
    url = "s3://bucket/run"
    # The save of step 10 waits for that of step 5, and may be through before the ranks are killed.
    recipe = Recipe(root=url, until=12, save_every=5, keep=2, die_at=11)
    told = (dict(s3_server.environment), str(tmp_path))
    with pytest.raises(RankFailed):
        run_ranks(on_s3, 2, recipe, *told)
    catalog = standalone_run.catalog(url)
    newest = catalog.complete_steps()[-1]
    assert newest in (5, 10)

    again = Recipe(root=url, until=12, save_every=5, keep=2)
    ended = run_ranks(on_s3, 1, again, *told)
    assert (ended[0]["resumed"], ended[0]["step"]) == (newest, 12)
    assert catalog.complete_steps() == [10, 12]
    assert catalog.verify_files(12) == []
    assert len(standalone_run.curve(url)) == 12

    for words, expected in (
        (["status", url], "FINISHED"),
        (["checkpoints", "list", url], "12"),
        (["checkpoints", "verify", url], "good"),
        (["export", url, "--out", str(tmp_path / "model.safetensors")], "model.safetensors"),
    ):
        found = CliRunner().invoke(main, words)
        assert found.exit_code == 0, found.output
        assert expected in found.output
    assert (tmp_path / "model.safetensors").stat().st_size > 0


@pytest.mark.parametrize(
    "url, changed, told",
    [
        ("s3://nosuch/runs/one", {}, "bucket does not exist; .*make the bucket, or correct"),
        (
            "s3://bucket/runs/one",
            {"AWS_SECRET_ACCESS_KEY": "other"},
            "PermissionError: .*every node",
        ),
        ("s3://bucket/runs/one", {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "Could not connect"),
    ],
    ids=["no bucket", "wrong secret", "dead endpoint"],
)
def test_what_cannot_be_written_is_said_in_one_sentence(
    s3_server: S3Server,
    monkeypatch: pytest.MonkeyPatch,
    url: str,
    changed: dict[str, str],
    told: str,
) -> None:
    for name, value in changed.items():
        monkeypatch.setenv(name, value)
    place = Filesystem.at(url)
    with pytest.raises(StorageRefused, match=told) as caught:
        check_access(Filesystem(SteadyStore(ObjectStore("s3"), QUICK), place.root), "a test")
    assert "\n" not in str(caught.value)
    if not changed:
        for words in (["status", url], ["runs", "--storage", "s3://nosuch/runs"]):
            found = CliRunner().invoke(main, words)
            assert found.exit_code == 2 and "there is no bucket s3://nosuch" in found.output


def test_pretrain_under_torchrun_ends_with_2_where_nothing_can_be_written(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = process_group.open_store("127.0.0.1")
    place = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": server.port}
    agent = {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_USE_AGENT_STORE": True}
    for name, value in {**place, **agent}.items():
        monkeypatch.setenv(name, str(value))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        code = pretrain.main([*SMALL, "--name", "one", "--storage", "s3://nosuch/runs"])
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    said = capsys.readouterr().err
    assert (code, said.count("\n")) == (2, 1), said
    assert said.startswith("pretrain: cannot write to the run directory s3://nosuch/runs/one")


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize("scene", SCENES)
def test_the_crash_matrix(s3_server: S3Server, scene: str) -> None:
    """After each request that changes something no other one reaches the server."""
    act, allowed = SCENES[scene]
    places = []
    for cut in range(200):
        root, left = f"bucket/run-{cut}", [cut]

        def dead(method: str, key: str, left: list[int] = left) -> Fault | None:
            left[0] -= method in ("PUT", "POST", "DELETE")
            return Fault(status=403, code="AccessDenied") if left[0] < 0 else None

        store = SteadyStore(ObjectStore("s3"), QUICK)
        begin(Catalog(Filesystem(store, root), RUN))
        s3_server.strike = dead
        with contextlib.suppress(PermissionError):
            act(Catalog(Filesystem(store, root), RUN))
        s3_server.strike = lambda method, key: None
        places.append(check(store, root, allowed))
        if left[0] >= 0:
            break
    assert places == sorted(places)
    assert set(places) == set(range(len(allowed)))
