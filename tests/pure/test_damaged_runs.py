"""Damaged run directories: every verb that reads answers in words, and leaves all as it lies."""

from __future__ import annotations

import json
import shutil
import traceback
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner

from elastic.cli import main
from elastic.storage import ledger, pins
from tests.damage import damage
from tests.made_run import BORN_S, add_checkpoint, add_history, fingerprint, make_run

VERBS = [
    ["status"],
    ["status", "--json"],
    ["events", "--all"],
    ["events", "--json"],
    ["explain"],
    ["explain", "--restart", "1"],
    ["goodput", "--price-per-slot-hour", "2"],
    ["checkpoints", "list"],
    ["checkpoints", "verify"],
    ["checkpoints", "verify", "--json", "--step", "8"],
    ["checkpoints", "prune", "--keep", "1"],
    ["logs"],
    ["runs", "--storage"],
]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two lives, three checkpoints, one of them pinned, one in quarantine, one save on its way."""
    root = tmp_path_factory.mktemp("sound") / "demo"
    catalog = make_run(root)
    for life in (0, 1):
        add_history(catalog, life)
    for step in (0, 2, 4, 8):
        add_checkpoint(catalog, step)
    pins.pin(catalog, 4, time_s=BORN_S)
    catalog.quarantine(2, "bad bytes")
    catalog.fs.write_bytes("logs/g1/rank0.log", b"half a line, and \xff\x1b[2J")
    catalog.fs.write_bytes(f"{catalog.begin(12, 1, 0)}/__0_0.distcp", b"half")
    return root


def answers(verb: list[str], root: Path) -> tuple[int, str]:
    """Exit code and all that was said; a traceback fails."""
    place = root.parent if verb[0] == "runs" else root
    result = CliRunner().invoke(main, [*verb, str(place)])
    if not isinstance(result.exception, SystemExit | None):
        shown = "".join(traceback.format_exception(result.exception))
        raise AssertionError(f"elastic {' '.join(verb)} raised\n{shown}")
    assert "Traceback" not in result.output
    return result.exit_code, result.output


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_a_sound_run_is_answered_for(verb: list[str], sound: Path) -> None:
    before = fingerprint(sound)
    code, said = answers(verb, sound)
    assert (code, fingerprint(sound)) == (0, before)
    assert said


@pytest.mark.parametrize("seed", range(100))
def test_a_damaged_run_is_answered_for_and_left_alone(
    seed: int, sound: Path, tmp_path: Path
) -> None:
    root = tmp_path / "demo"
    shutil.copytree(sound, root)
    done = damage(root, seed)
    print(f"seed {seed}: {'; '.join(done)}")
    before = fingerprint(root)
    for verb in VERBS:
        code, said = answers(verb, root)
        print(f"  {' '.join(verb)}: {code} {said.splitlines()[-1:]}")
        assert code in (0, 1, 2), verb
        assert said.strip() or verb == ["logs"], verb  # a log may have nothing in it
        if code == 2:
            assert said.startswith("Error: "), said
            assert len(said.strip().splitlines()) == 1, said
        assert fingerprint(root) == before, f"{verb} changed the run"


# --- what the seeds have found -------------------------------------------------------------------


@pytest.fixture
def run(sound: Path, tmp_path: Path) -> Path:
    shutil.copytree(sound, tmp_path / "demo")
    return tmp_path / "demo"


def answer(root: Path, *verb: str) -> Any:
    code, said = answers([*verb, "--json"], root)
    assert code == 0, said
    return json.loads(said)


@pytest.mark.parametrize(
    "text",
    [
        '{"format_version": 1, "run_id": "%s", "step": 1e999}',
        "[" * 100_000,
        "\ufeff",
    ],
    ids=["infinite", "deep", "no JSON"],
)
def test_one_bad_manifest_does_not_hide_the_other_checkpoints(run: Path, text: str) -> None:
    run_id = json.loads((run / "run.json").read_text())["run_id"]
    manifest = run / "checkpoints" / "step-8" / "manifest.json"
    manifest.write_text(text.replace("%s", run_id))
    found = {one["path"]: one for one in answer(run, "checkpoints", "list")}
    assert "manifest.json is unreadable" in found["checkpoints/step-8"]["reason"]
    assert found["checkpoints/step-4"]["complete"]
    assert answer(run, "status")["checkpoint_step"] == 4


def test_a_link_that_leads_to_itself_stops_nothing(run: Path) -> None:
    before = answer(run, "checkpoints", "list")
    for place in ("checkpoints", "checkpoints/step-8", "ledger", "checkpoints/quarantine"):
        (run / place / "loop").symlink_to("loop")
    assert answer(run, "checkpoints", "list") == before
    assert answer(run, "status")["checkpoint_step"] == 8
    marker = run / "checkpoints" / "step-8" / "_COMPLETE"
    marker.unlink()
    marker.symlink_to("_COMPLETE")
    assert answer(run, "status")["checkpoint_step"] == 4


@pytest.mark.parametrize(
    ("field", "value"), [("name", None), ("created_s", "x"), ("operational", []), ("run_id", 5)]
)
def test_a_run_file_with_a_field_of_another_type_is_named(
    run: Path, field: str, value: object
) -> None:
    file = run / "run.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {field: value}))
    code, said = answers(["status"], run)
    assert (code, f"{field} is {value!r}" in said) == (2, True)


def _events(*odd: dict[str, Any]) -> bytes:
    """A ledger file whose events have these values, and sound ones else."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, ledger._SCHEMA) as stream:
        for seq, values in enumerate(odd):
            event = {"seq": seq, "time_s": BORN_S, "kind": "progress", "generation": 0, "step": 3}
            event |= {"world_rank": -1, "reason": "", "data": "{}"} | values
            stream.write_batch(pa.RecordBatch.from_pylist([event], schema=ledger._SCHEMA))
    return sink.getvalue().to_pybytes()


def test_events_that_make_no_sense_are_left_out(run: Path) -> None:
    odd: list[dict[str, Any]] = [
        {"data": "[1]"},
        {"data": "[" * 100_000},
        {"kind": None},
        {"time_s": float("nan")},
        {"time_s": 1e300},
        {"data": '{"ranks": null, "world_size": "x", "cause": 5}', "kind": "generation_started"},
    ]
    (run / "ledger" / "000007-odd.arrows").write_bytes(_events(*odd))
    assert [one["seq"] for one in answer(run, "events") if one["life"] == 7] == [4, 5]
    assert answers(["status"], run)[0] == 0
    assert "1e+300 s" in answers(["events", "--all"], run)[1]


def test_a_file_in_the_ledger_that_is_none_is_named(run: Path) -> None:
    sink = pa.BufferOutputStream()
    schema = pa.schema([("x", pa.int64())], metadata={"format_version": "1"})
    with pa.ipc.new_stream(sink, schema) as stream:
        stream.write_batch(pa.RecordBatch.from_pylist([{"x": 1}], schema=schema))
    (run / "ledger" / "000007-odd.arrows").write_bytes(sink.getvalue().to_pybytes())
    code, said = answers(["events"], run)
    assert (code, "ledger/000007-odd.arrows is none: it has the columns x" in said) == (2, True)
