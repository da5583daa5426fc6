"""All runs below a storage root, whatever state they and their directories are in."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from elastic.dashboard.run_list import list_runs
from elastic.storage.filesystem import Filesystem
from elastic.storage.ledger import LedgerWriter
from elastic.storage.metrics import MetricsWriter
from tests.pure.test_cli import NOW_S, ARun, ask


@pytest.fixture(autouse=True)
def now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic.verbs.runs.time.time", lambda: NOW_S)


def trained(root: Path, name: str, last_word_ago_s: float = 2.0) -> ARun:
    """107 slot-seconds, of which 28 in steps that count: step 2 was done twice."""
    run = ARun(root, name)
    run.event("run_started", 40 + last_word_ago_s)
    run.event("generation_started", 39 + last_word_ago_s, generation=0, data={"world_size": 3})
    run.event("started", 39 + last_word_ago_s, generation=0, step=0)
    metrics = MetricsWriter(run.fs)
    for generation, step in ((0, 1), (0, 2), (1, 2), (1, 3)):
        metrics.start(generation, step, NOW_S) if step != 3 else None
        metrics.add(generation, step, NOW_S, {"loss": 2.0, "step_s": 4.0})
    metrics.flush()
    run.event("failure_decided", 20 + last_word_ago_s, reason="x", data={"cause": "node_lost"})
    run.event("generation_started", 10 + last_word_ago_s, generation=1, data={"world_size": 2})
    run.event("resumed", 10 + last_word_ago_s, generation=1, step=1)
    data = {"state": "RUNNING", "loss": 1.25}
    run.event("progress", last_word_ago_s, generation=1, step=3, data=data)
    return run


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[Path]:
    with closing(trained(tmp_path, "live")):
        with closing(trained(tmp_path, "done", 5000)) as done:
            done.event("run_finished", 5000, generation=1, step=3)
        with closing(ARun(tmp_path, "new [1]")):
            pass
        (tmp_path / "thesis").mkdir()
        (tmp_path / "thesis" / "notes.txt").write_text("")
        (tmp_path / "file").write_text("")
        yield tmp_path


def listed(storage: Path) -> dict[str, dict[str, Any]]:
    result = ask("runs", "--storage", storage, "--json")
    assert result.exit_code == 0, result.output
    return {row["directory"]: row for row in json.loads(result.stdout)}


def test_each_run_is_a_row_the_last_to_speak_first(storage: Path) -> None:
    rows = listed(storage)
    assert list(rows) == ["live", "new [1]", "done"]
    assert rows["live"] == {
        "directory": "live",
        "problem": "",
        "name": "live",
        "state": "RUNNING",
        "step": 3,
        "until": 60,
        "loss": 1.25,
        "world_size": 2,
        "restarts": 1,
        "goodput": pytest.approx(28 / 107),
        "age_s": 100.0,
        "last_word_age_s": 2.0,
    }
    assert rows["done"]["state"] == "FINISHED"
    new = rows["new [1]"]
    assert (new["step"], new["loss"], new["goodput"], new["restarts"]) == (None, None, None, 0)


def test_the_table_reads_well(storage: Path) -> None:
    text = ask("runs", "--storage", storage).stdout
    head, live, *rest = [" ".join(line.split()) for line in text.splitlines()]
    assert head == "NAME STATE STEP LOSS WORKERS RESTARTS GOODPUT AGE LAST WORD"
    assert live == "live RUNNING 3/60 1.2500 2 1 26 % 2 min 2 s ago"
    assert len(rest) == 2


def test_goodput_counts_time_at_the_run_and_each_step_once(tmp_path: Path) -> None:
    with closing(trained(tmp_path, "run")) as run:
        pass
    second = LedgerWriter(run.fs, 1, "second")  # submitted again a day later, and 20 s at it
    second.append("run_started", time_s=NOW_S + 86_400)
    second.append("generation_planned", time_s=NOW_S + 86_400, data={"world_size": 2})
    second.append("progress", time_s=NOW_S + 86_420)
    second.close()
    rollback = LedgerWriter(run.fs, 2, "rollback")
    rollback.append("rolled_back", time_s=NOW_S + 200_000)
    rollback.append("rolled_back", time_s=NOW_S + 200_500)
    rollback.close()
    (row,) = list_runs(Filesystem.at(str(tmp_path)), now_s=NOW_S + 86_421)
    assert row.goodput == pytest.approx(28 / (107 + 40))


# --- damaged and foreign directories -------------------------------------------------------------


def test_a_damaged_run_is_listed_with_its_problem(storage: Path) -> None:
    (storage / "live" / "run.json").write_text("{")
    (storage / "done" / "run.json").unlink()
    newer = storage / "new [1]" / "run.json"
    newer.write_text(json.dumps(json.loads(newer.read_text()) | {"format_version": 99}))
    with closing(trained(storage, "sound")):
        rows = listed(storage)
        text = ask("runs", "--storage", storage).stdout
    assert next(iter(rows)) == "sound" and rows["sound"]["problem"] == ""
    assert {name: row["state"] for name, row in rows.items() if name != "sound"} == dict.fromkeys(
        ("live", "done", "new [1]"), "DAMAGED"
    )
    assert "cannot be read" in rows["live"]["problem"]
    assert rows["done"]["problem"] == "its run.json is missing"
    assert "99" in rows["new [1]"]["problem"]
    assert text.splitlines()[0].endswith("PROBLEM") and "its run.json is missing" in text


@pytest.mark.parametrize("seed", range(20))
def test_no_damage_hides_the_other_runs(storage: Path, seed: int) -> None:
    rng = random.Random(seed)
    files = sorted(path for path in (storage / "live").rglob("*") if path.is_file())
    victim = rng.choice(files)
    kind = rng.choice(["gone", "empty", "half", "noise", "directory"])
    data = victim.read_bytes()
    victim.unlink()
    if kind == "directory":
        victim.mkdir()
    elif kind != "gone":
        noise = rng.randbytes(len(data))
        victim.write_bytes({"empty": b"", "half": data[: len(data) // 2], "noise": noise}[kind])
    before = sorted(storage.rglob("*"))
    rows = listed(storage)
    assert rows["done"]["state"] == "FINISHED" and "live" in rows, (victim, kind)
    assert sorted(storage.rglob("*")) == before


def test_names_cannot_repaint_the_terminal(tmp_path: Path) -> None:
    with closing(trained(tmp_path, "a\x1b[2Jb")):
        assert "a\\x1b[2Jb" in ask("runs", "--storage", tmp_path).stdout


# --- the storage ---------------------------------------------------------------------------------


def test_an_empty_storage_has_no_runs(tmp_path: Path) -> None:
    assert ask("runs", "--storage", tmp_path).stdout == "no runs\n"
    assert listed(tmp_path) == {}


def test_storage_that_is_not_there_or_is_a_run(storage: Path) -> None:
    missing = ask("runs", "--storage", storage / "nowhere")
    assert missing.exit_code == 2 and "there is no such directory" in missing.stderr
    a_run = ask("runs", "--storage", storage / "done")
    assert a_run.exit_code == 2 and "is a run itself" in a_run.stderr
    secret = ask("runs", "--storage", "s3://user:secret@bucket/runs")
    assert secret.exit_code == 2 and "secret" not in secret.stderr


def test_storage_is_the_jobs_default_unless_given(
    storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(storage))
    assert "~/elastic-runs" in ask("runs", "--help").stdout
    assert ask("runs").exit_code == 2
    shutil.copytree(storage / "done", storage / "elastic-runs" / "done")
    assert "FINISHED" in ask("runs").stdout


def test_help_defines_goodput() -> None:
    told = " ".join(ask("runs", "--help").stdout.split())
    assert "GOODPUT is the time spent in steps that count, each step once" in told
