"""The verb `elastic plan`: its numbers, its words, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from elastic.cli import main
from elastic.dashboard.failure_history import read_failure_times
from elastic.policy.intervals import young_interval_s

GB = 1e9
BIG = ["--params", "70e9", "--dtype", "bf16", "--optimizer", "adamw", "--gpus", "256"]


def ask(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["plan", *map(str, arguments)])


def answer(*arguments: object) -> Any:
    result = ask(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def refused(*arguments: object) -> str:
    result = ask(*arguments)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    return result.output


# --- numbers -------------------------------------------------------------------------------------


def test_the_70_billion_example() -> None:
    found = answer(*BIG)
    checkpoint = found["checkpoint"]
    assert checkpoint["parameters_bytes"] == 140 * GB
    assert checkpoint["optimizer_bytes"] == 840 * GB
    assert checkpoint["num_bytes"] == 980 * GB
    assert checkpoint["per_rank_bytes"] == 980 * GB / 256
    assert [one["num_gpus"] for one in found["forecasts"]] == [256, 1024, 10_000]
    first = found["forecasts"][0]
    assert first["host_bytes_per_node"] == 8 * 980 * GB / 256
    assert first["blocking"]["costs"]["stall_s"] == pytest.approx(98)
    assert first["blocking"]["costs"]["write_s"] == 0
    assert first["asynchronous"]["costs"]["stall_s"] == pytest.approx(0.3828, abs=1e-4)
    assert first["asynchronous"]["costs"]["write_s"] == pytest.approx(98)
    assert {"--mtbf", "--bandwidth-to-host"} <= set(found["defaults"])
    assert "--gpus" not in found["defaults"]


def test_the_formula_is_followed_at_an_mtbf_of_8_hours() -> None:
    """C = 90 s and 3 s at M = 28,800 s: 2,277 s and 7.9 %, 416 s and 1.4 %, less recovery."""
    found = answer(*BIG, "--mtbf", "8h", "--bandwidth-to-storage", 980 / 90)
    saves = found["forecasts"][0]["blocking"]
    assert saves["costs"]["stall_s"] == pytest.approx(90)
    assert saves["young_s"] == pytest.approx(2277, abs=1)
    interval_s, costs = saves["interval"]["seconds"], saves["costs"]
    down_s = costs["recovery_s"] + costs["detection_s"]
    assert interval_s == pytest.approx(90 + (2 * (28_800 + down_s) * 90 + 8100) ** 0.5)
    assert saves["overhead"] - down_s / 28_800 == pytest.approx(0.079, abs=0.0005)
    assert saves["lost_work_s"] == interval_s / 2

    found = answer(*BIG, "--mtbf", 8, "--bandwidth-to-host", 980 / 256 / 3)
    saves = found["forecasts"][0]["asynchronous"]
    assert saves["young_s"] == pytest.approx(416, abs=1)
    assert saves["interval"]["seconds"] == pytest.approx(416, rel=0.015)
    assert saves["lost_work_s"] == pytest.approx(saves["interval"]["seconds"] / 2 + 98)


def test_an_mtbf_is_carried_over_to_other_cluster_sizes() -> None:
    hours = [one["mtbf_s"] / 3600 for one in answer(*BIG, "--mtbf", "40h")["forecasts"]]
    assert hours == pytest.approx([40, 10, 1.024])
    hours = [
        one["mtbf_s"] / 3600
        for one in answer(*BIG, "--mtbf", "40h", "--mtbf-gpus", 1024)["forecasts"]
    ]
    assert hours == pytest.approx([160, 40, 4.096])


def test_any_number_of_gpus_has_its_row() -> None:
    assert [one["num_gpus"] for one in answer("--params", "7B", "--gpus", 3)["forecasts"]] == [
        3,
        256,
        1024,
        10_000,
    ]


def test_saves_never_overlap_on_any_cluster() -> None:
    for one in answer(*BIG, "--mtbf", "30min")["forecasts"]:
        saves = one["asynchronous"]
        assert saves["interval"]["seconds"] >= saves["costs"]["stall_s"] + saves["costs"]["write_s"]
        assert saves["young_s"] == pytest.approx(
            young_interval_s(one["mtbf_s"], saves["costs"]["stall_s"])
        )


@pytest.mark.parametrize(
    ("text", "number"),
    [("70B", 70e9), ("7.5b", 7.5e9), ("350M", 350e6), ("1_000,000", 1e6), ("1.2e12", 1.2e12)],
)
def test_numbers_of_parameters(text: str, number: float) -> None:
    assert answer("--params", text, "--gpus", 8)["num_params"] == number


# --- words ---------------------------------------------------------------------------------------


def test_the_answer_reads_well() -> None:
    result = ask(*BIG)
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[0] == (
        "70 billion parameters in bf16 with adamw, on 256 GPUs (32 nodes of 8). GB is 1e9 bytes."
    )
    assert "parameters        bf16   546.9 MB  140.0 GB" in lines
    assert "optimizer state            3.3 GB  840.0 GB" in lines
    assert "in all                     3.8 GB  980.0 GB" in lines
    shown = result.output
    for word in ("2410.18124", "sqrt(2 M C)", "2407.21783", "419 unexpected", "deviates from"):
        assert word in shown, word
    assert shown.count("(default)") == 5  # what was not given is called assumed


def test_the_readmes_example_is_what_the_command_prints() -> None:
    readme = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
    block = readme.split("    $ elastic plan ", 1)[1].split("\n\nBelow", 1)[0]
    arguments, *lines = block.splitlines()
    shown = "\n".join(line.removeprefix("    ") for line in lines)
    assert ask(*arguments.split()).output.startswith(shown + "\n"), "put its output there again"


def test_the_table_of_intervals() -> None:
    lines = ask(*BIG).output.splitlines()
    start = lines.index("How often to save")
    table = [line.split("  ") for line in lines[start + 1 : start + 8]]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in table]
    assert cells[1][:6] == ["256", "8.25 days", "blocking", "98 s", "3.31 h", "1.7 %"]
    assert cells[2][:3] == ["asynchronous", "383 ms", "12.3 min"]
    assert cells[6][2] == "98.1 s*" or cells[6][2] == "98 s*"
    assert any(line.startswith("*: as long as one save takes") for line in lines)


def test_given_values_are_not_called_defaults() -> None:
    shown = ask(
        *BIG, "--mtbf=8h", "--bandwidth-to-storage=100", "--bandwidth-to-host=25",
        "--detection=2s", "--restart=5s",
    ).output  # fmt: skip
    assert "(default)" not in shown
    assert "8 h on 256 GPUs (--mtbf)" in shown


def test_a_doubt_is_told_once_where_it_begins() -> None:
    shown = ask(*BIG, "--mtbf", "30min").output
    assert shown.count("Doubtful from") == 2
    assert "Doubtful from 256 GPUs on, blocking saves" in shown
    assert "Doubtful" not in ask(*BIG).output


def test_a_run_that_loses_more_than_it_does_says_so() -> None:
    assert "over 100 %" in ask(*BIG, "--mtbf", "1min").output


# --- the scheduler's history ---------------------------------------------------------------------


def history(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "failures.csv"
    path.write_text(text, encoding="utf-8")
    return path


SACCT = """JobID|State|Start|End
1|NODE_FAIL|2026-10-31T00:00:00|2026-11-01T00:00:00
2|NODE_FAIL|2026-10-31T00:00:00|2026-11-01T00:00:20
3|FAILED|2026-11-01T01:00:00|2026-11-02T00:00:20
"""


def test_a_history_and_its_prior_make_the_mtbf(tmp_path: Path) -> None:
    path = history(tmp_path, SACCT)
    found = answer(*BIG, "--mtbf-from", path, "--mtbf", "48h")
    assert found["forecasts"][0]["mtbf_s"] == pytest.approx((48 * 3600 + 86_420) / 2)
    shown = " ".join(ask(*BIG, "--mtbf-from", path, "--mtbf", "48h").output.split())
    assert "from 3 failures in 24 h" in shown
    assert "1 of them within 60 s of another" in shown
    assert "prior: one failure in 2 days (--mtbf)" in shown
    shown = " ".join(ask(*BIG, "--mtbf-from", path).output.split())
    assert "prior: one failure in 8.25 days (the default for one GPU)" in shown


@pytest.mark.parametrize(
    "text",
    [
        "2026-11-01T00:00:00\n2026-11-02T00:00:00Z\n",
        "1793491200\n1793577600.0\n",
        "node,time\na,2026-11-01 00:00\nb,2026-11-02 01:00+01:00\n",
        "\ufeffTime;Node\r\n2026-11-01;a\r\n\r\n# two days\r\n2026-11-02;b\r\n",
        'what,why\n"2026-11-01T00:00:00","a, b"\n"2026-11-02T00:00:00",c\n',
        "Node\tEnd Time\n7\t1793491200\n8\t1793577600\n",
    ],
)
def test_times_are_read_from_any_usual_table(tmp_path: Path, text: str) -> None:
    assert read_failure_times(history(tmp_path, text)) == [1_793_491_200, 1_793_577_600]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no lines"),
        ("# nothing\n\n", "holds no lines"),
        ("time\n", "a header and no failures"),
        ("node,cause\na,b\n", "no column that is known to hold times: found node, cause"),
        ("1793491200000\n", "no column that is known to hold times"),  # milliseconds
        ("17\n18\n", "no column that is known to hold times"),
        ("time\n2026-11-01\nUnknown\n", "line 3: cannot read a time from 'Unknown'"),
        ("node,time\na,2026-11-01\nb\n", "line 3: cannot read a time from ''"),
        ("2026-11-01,2026-11-02\n", "has 2 columns of times"),
    ],
)
def test_a_history_without_times_is_refused(tmp_path: Path, text: str, said: str) -> None:
    output = refused(*BIG, "--mtbf-from", history(tmp_path, text))
    assert said in output
    assert "failures.csv" in output


def test_a_history_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "failures.csv"
    path.write_bytes(b"\xff\xfe\x00")
    assert "is not text in UTF-8" in refused(*BIG, "--mtbf-from", path)
    assert "does not exist" in refused(*BIG, "--mtbf-from", tmp_path / "none")
    assert "is a directory" in refused(*BIG, "--mtbf-from", tmp_path)


# --- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--gpus 8", "Missing option '--params'"),
        ("--params 7B", "Missing option '--gpus'"),
        ("--params 0 --gpus 8", "'0' is not a number of parameters"),
        ("--params 7.5 --gpus 8", "a whole number of at least 1"),
        ("--params inf --gpus 8", "'inf' is not a number of parameters"),
        ("--params 7X --gpus 8", "'7X' is not a number of parameters"),
        ("--params 7B --gpus 0", "'--gpus': 0 is not in the range x>=1"),
        ("--params 7B --gpus 8 --gpus-per-node 0", "x>=1"),
        ("--params 7B --gpus 8 --dtype int3", "'int3' is not one of 'fp64'"),
        ("--params 7B --gpus 8 --optimizer adm", "'adm' is not one of"),
        ("--params 7B --gpus 8 --dtype fp32 --master-weights", "these are fp32 already"),
        ("--params 7B --gpus 8 --mtbf soon", "cannot read a duration from 'soon'"),
        ("--params 7B --gpus 8 --mtbf 0", "must be above 0"),
        ("--params 7B --gpus 8 --mtbf=-3", "cannot read a duration from '-3'"),
        ("--params 7B --gpus 8 --mtbf-gpus 4", "--mtbf-gpus needs --mtbf or --mtbf-from"),
        ("--params 7B --gpus 8 --bandwidth-to-storage 0", "'0' is not a bandwidth"),
        ("--params 7B --gpus 8 --bandwidth-to-host nan", "'nan' is not a bandwidth"),
        ("--params 7B --gpus 8 --restart never", "Invalid value for '--restart'"),
    ],
)
def test_bad_options_are_one_clear_error(arguments: str, said: str) -> None:
    assert said in refused(*arguments.split())


def test_the_help_says_what_is_assumed() -> None:
    shown = ask("-h").output
    assert "[default: 10]" in shown
    assert "--mtbf-from" in shown
