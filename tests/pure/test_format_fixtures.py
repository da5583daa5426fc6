"""Run directories of every format version there ever was: read as recorded, for ever."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from elastic.cli import main
from elastic.storage import fence, lease, ledger, manifest, metrics, pins, requests, run_file
from elastic.storage.checkpoints import Catalog
from elastic.storage.filesystem import Filesystem
from elastic.storage.format import UnsupportedFormat
from tests.format_fixture import DISK, FIXTURES, STORE, expected_of, holds, told, unpacked, uploaded
from tests.made_run import fingerprint

every_fixture = pytest.mark.parametrize("fixture", FIXTURES, ids=lambda path: path.name)


def test_each_format_that_was_ever_written_has_its_fixture() -> None:
    formats = [fence, lease, ledger, manifest, metrics, pins, requests, run_file]
    newest = max(module.FORMAT_VERSION for module in formats)
    assert [path.name for path in FIXTURES] == [f"format-{n + 1}" for n in range(newest)]


@every_fixture
def test_a_run_on_a_disk_is_read_as_recorded(fixture: Path, tmp_path: Path) -> None:
    root, expected = unpacked(fixture, tmp_path), expected_of(fixture)
    before = fingerprint(root)
    assert holds(told(Filesystem.at(str(root)), now_s=expected["now_s"]), expected[DISK]) == ""
    assert fingerprint(root) == before


@every_fixture
def test_a_run_on_an_object_store_is_read_as_recorded(fixture: Path, tmp_path: Path) -> None:
    expected = expected_of(fixture)
    fs = uploaded(unpacked(fixture, tmp_path, STORE), f"memory://{fixture.name}")
    assert holds(told(fs, now_s=expected["now_s"]), expected[STORE]) == ""


@every_fixture
def test_the_verbs_answer(fixture: Path, tmp_path: Path) -> None:
    root, expected = unpacked(fixture, tmp_path), expected_of(fixture)[DISK]

    def said(*verb: str) -> Any:
        result = CliRunner().invoke(main, [*verb, str(root), "--json"])
        assert result.exit_code == 0, result.output
        return json.loads(result.output)

    aging = {"last_word_age_s", "checkpoint_age_s"}
    status = {key: value for key, value in expected["status"].items() if key not in aging}
    assert holds(said("status"), status) == ""
    assert holds(said("events"), expected["events"]) == ""
    assert holds(said("checkpoints", "list"), expected["checkpoints"]) == ""
    verdicts = said("checkpoints", "verify")
    assert [(one["step"], one["result"]) for one in verdicts] == [(3, "good")]


def test_a_difference_is_found_at_any_depth() -> None:
    expected = {"a": [{"b": 1}, {"c": None}]}
    assert holds({"a": [{"b": 1, "new": 2}, {"c": None}], "new": 3}, expected) == ""
    assert holds({"a": [{"b": 2}, {"c": None}]}, expected) == ".a[0].b: expected 1, found 2"
    assert holds({"a": [{"b": True}, {"c": None}]}, expected)
    assert holds({"a": [{"b": 1}, {}]}, expected) == ".a[1].c is missing"
    assert holds({"a": [{"b": 1}]}, expected)


# --- newer formats -------------------------------------------------------------------------------


def newer_json(path: Path) -> None:
    tree = json.loads(path.read_text())
    assert tree["format_version"] == 1
    path.write_text(json.dumps(tree | {"format_version": 99}))


def newer_ledger(path: Path) -> None:
    with pa.ipc.open_stream(path.read_bytes()) as stream:
        schema = stream.schema
        assert schema.metadata == {b"format_version": b"1"}
        batches = list(stream)
    newer = schema.with_metadata({"format_version": "99"})
    with path.open("wb") as file, pa.ipc.new_stream(file, newer) as writer:
        for batch in batches:
            writer.write_batch(batch)


def newer_metrics(path: Path) -> None:
    table = pq.read_table(path)
    assert table.schema.metadata == {b"format_version": b"1"}
    pq.write_table(table.replace_schema_metadata({"format_version": "99"}), path)


def catalog_of(fs: Filesystem) -> Catalog:
    found = run_file.load_run_file(fs)
    assert found is not None
    return Catalog(fs, found.run_id)


CHECKPOINT = "checkpoints/step-3/"
KINDS: dict[str, tuple[Callable[[Path], None], Callable[[Filesystem], object]]] = {
    "run.json": (newer_json, run_file.load_run_file),
    "lease/000002.json": (newer_json, lease.read),
    "checkpoints/fence.json": (newer_json, lambda fs: catalog_of(fs).begin(9, 9, 0)),
    f"{CHECKPOINT}manifest.json": (newer_json, lambda fs: catalog_of(fs).highest()),
    f"{CHECKPOINT}_COMPLETE": (newer_json, lambda fs: catalog_of(fs).highest()),
    "ledger/000001-*.arrows": (newer_ledger, ledger.read_ledger),
    "metrics/g00001-*.parquet": (newer_metrics, metrics.read_metrics),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_newer_file_is_refused_by_number(kind: str, tmp_path: Path) -> None:
    root = unpacked(FIXTURES[0], tmp_path)
    make_newer, read = KINDS[kind]
    (path,) = root.glob(kind)
    read(Filesystem.at(str(root)))
    make_newer(path)
    newest = manifest.FORMAT_VERSION if kind.startswith(CHECKPOINT) else 1
    reads = f"format version 99, this program reads up to {newest}"
    with pytest.raises(UnsupportedFormat, match=reads):
        read(Filesystem.at(str(root)))


def test_a_newer_request_is_refused_by_number(tmp_path: Path) -> None:
    root = unpacked(FIXTURES[0], tmp_path)
    newer_json(next((root / "requests").iterdir()))
    (found,) = requests.pending(Filesystem.at(str(root)))
    assert "format version 99, this program reads up to 1" in found.flaw


@pytest.mark.parametrize("kind", ["manifest.json", "_COMPLETE"])
def test_nothing_is_swept_away_from_under_a_newer_checkpoint(kind: str, tmp_path: Path) -> None:
    fs = uploaded(unpacked(FIXTURES[0], tmp_path, STORE), f"memory://newer-{kind}")
    where = "step-4" if kind == "_COMPLETE" else "step-4.tmp-0-0"
    path = f"checkpoints/{where}/{kind}"
    fs.write_bytes(
        path, fs.read_bytes(path).replace(b'"format_version": 1', b'"format_version": 9')
    )
    with pytest.raises(UnsupportedFormat):
        catalog_of(fs).sweep(7)
    with pytest.raises(UnsupportedFormat):
        catalog_of(fs).discard("checkpoints/step-4.tmp-0-0")
    assert fs.exists("checkpoints/step-4.tmp-0-0/__0_0.distcp")
