"""What Prometheus is told of runs: equal to the ledger's figures, bounded, escaped, and all that
dashboard and alert rules name."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from elastic.dashboard import prometheus
from elastic.dashboard.prometheus import CAUSES, MOST_RUNS, NAMES, OTHER, PHASES, metrics_text
from elastic.dashboard.run_picture import Readers, RunReader
from elastic.policy.goodput import BUCKETS
from elastic.storage.filesystem import Filesystem
from elastic.storage.metrics import MetricsWriter
from tests.pure.test_cli import NOW_S, ARun, ask

HERE = Path(prometheus.__file__).parent
DASHBOARD = HERE / "grafana" / "elastic.json"
RULES = HERE / "alerts" / "elastic.yaml"
PHASES_S = {"diagnose": 0.5, "connect": 0.25, "load": 1.0, "first_step": 0.25}
SNAPSHOTS = {"every": 2, "step": 18, "kept_s": NOW_S - 9.0, "skipped": 1, "problem": ""}
METRIC = re.compile(r"\belastic_[a-z_]+")

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="Debian's package prometheus brings promtool"
)

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[ARun]:
    with closing(ARun(tmp_path)) as made:
        yield made


def killed_at_12(run: ARun) -> None:
    """B88: 3 workers, a checkpoint at 10, a kill at 12, and 2 that go on to 20."""
    metrics = MetricsWriter(run.fs)
    rules = {"max_failures": 0, "max_failures_by_cause": {}, "max_failures_without_progress": 5}
    run.event("run_started", 90, data={"rules": rules})
    run.event("generation_planned", 85, generation=0, data={"world_size": 3})
    run.event("generation_started", 80, generation=0, data={"world_size": 3})
    run.event("started", 75, generation=0, step=0)
    metrics.start(0, 1, NOW_S - 75)
    for step in range(1, 13):
        metrics.add(0, step, NOW_S - 75 + step, {"loss": 5.0 - step / 10, "step_s": 1.0})
    facts = {"stall_s": 0.25, "duration_s": 0.5}
    run.event("checkpoint_committed", 64, generation=0, step=10, data=facts)
    run.checkpoint(10)
    counted = {"step": 12, "text": "", "has_stepped": True, "headline": "", "committed_step": 10}
    failure = {"cause": "worker_killed", "then": "restart", "counted": counted}
    run.event("failure_decided", 62, generation=0, step=12, data=failure)
    run.event("generation_planned", 62, generation=1, data={"world_size": 2})
    run.event("generation_started", 61, generation=1, data={"world_size": 2})
    run.event("resumed", 60, generation=1, step=10)
    metrics.start(1, 11, NOW_S - 60)
    for step in range(11, 21):
        metrics.add(1, step, NOW_S - 70 + step, {"loss": 4.0 - step / 10, "step_s": 1.0})
    told = {"lost_steps": 2, "phases_s": PHASES_S, "old_world_size": 3, "new_world_size": 2}
    run.event("recovered", 59, generation=1, step=11, data=told)
    run.event("save_interval", 50, reason="every 20 s: ...", data={"seconds": 20.0})
    progress = {"loss": 2.0, "tokens_per_s": 640.0, "state": "RUNNING", "phase": "data"}
    run.event("progress", 3, generation=1, step=20, data=progress)
    metrics.flush()


def samples(text: bytes) -> Samples:
    found: Samples = {}
    for family in text_string_to_metric_families(text.decode()):
        assert family.documentation, f"{family.name} has no help"
        for sample in family.samples:
            key = sample.name, frozenset(sample.labels.items())
            assert key not in found, f"twice: {key}"
            found[key] = sample.value
    return found


def told(root: Path, now_s: float = NOW_S) -> Samples:
    return samples(metrics_text(Readers(Filesystem.at(str(root))), now_s))


def of_demo(found: Samples, name: str, **labels: str) -> float:
    return found[name, frozenset({"run": "demo", **labels}.items())]


# --- the figures ---------------------------------------------------------------------------------


def test_b88_a_restart_is_told_once_with_its_cause_and_its_lost_steps(run: ARun) -> None:
    killed_at_12(run)
    found = told(run.root.parent)
    assert of_demo(found, "elastic_restarts_total", cause="worker_killed") == 1
    restarts = [value for (name, _), value in found.items() if name == "elastic_restarts_total"]
    assert sum(restarts) == 1
    assert of_demo(found, "elastic_lost_steps_total") == 2


def test_snapshots_are_told_of_a_run_that_keeps_them(run: ARun) -> None:
    def names() -> set[str]:
        return {name for name, _ in told(run.root.parent)}

    gauges = {"elastic_snapshot_step", "elastic_snapshot_age_seconds"}
    run.event("run_started", 60)
    assert not names() & gauges
    run.event("progress", 8, step=20, data={"snapshots": SNAPSHOTS})
    found = told(run.root.parent)
    assert of_demo(found, "elastic_snapshot_age_seconds") == 9
    assert of_demo(found, "elastic_snapshot_step") == 18
    run.event("run_finished", 0)
    assert not names() & gauges, "gone with the run"


def test_each_figure_is_the_ledgers(run: ARun) -> None:
    killed_at_12(run)
    found = told(run.root.parent)
    assert of_demo(found, "elastic_world_size") == 2
    assert of_demo(found, "elastic_generation") == 1
    assert of_demo(found, "elastic_step") == 20
    assert of_demo(found, "elastic_loss") == 2.0
    assert of_demo(found, "elastic_tokens_per_second") == 640.0
    assert of_demo(found, "elastic_last_word_age_seconds") == 3
    assert of_demo(found, "elastic_checkpoint_age_seconds") == 64
    assert of_demo(found, "elastic_checkpoint_step") == 10
    assert of_demo(found, "elastic_checkpoints_committed_total") == 1
    assert of_demo(found, "elastic_save_stall_seconds_total") == 0.25
    assert of_demo(found, "elastic_save_interval_seconds") == 20
    for phase, took_s in PHASES_S.items():
        assert of_demo(found, "elastic_reform_seconds_total", phase=phase) == took_s
    assert of_demo(found, "elastic_budget_left", budget="failures in a row") == 4
    assert of_demo(found, "elastic_budget_granted", budget="failures in a row") == 5


def test_the_state_is_one_of_those_that_are_listed(run: ARun) -> None:
    killed_at_12(run)
    for now_s, state in ((NOW_S, "RUNNING"), (NOW_S + 60, "UNKNOWN")):
        found = told(run.root.parent, now_s)
        states = {
            dict(labels)["state"]: value
            for (name, labels), value in found.items()
            if name == "elastic_run_state"
        }
        assert [name for name, value in states.items() if value] == [state]


def test_every_bucket_is_told_and_they_add_up(run: ARun) -> None:
    killed_at_12(run)
    goodput = run.status().goodput
    found = told(run.root.parent)
    buckets = {name: of_demo(found, "elastic_slot_seconds", bucket=name) for name in BUCKETS}
    assert buckets == goodput.slot_seconds
    assert sum(buckets.values()) == pytest.approx(goodput.whole_slot_seconds, rel=1e-9)
    assert of_demo(found, "elastic_goodput_ratio") == goodput.share


def test_one_run_or_all_below_a_root(run: ARun) -> None:
    killed_at_12(run)
    with closing(ARun(run.root.parent, "other")):
        both, one = told(run.root.parent), told(run.root)
    assert {dict(labels).get("run") for _, labels in both} == {"demo", "other", None}
    assert {dict(labels).get("run") for _, labels in one} == {"demo", None}
    assert of_demo(one, "elastic_step") == of_demo(both, "elastic_step")


def test_a_run_that_cannot_be_read_hides_no_other(run: ARun) -> None:
    killed_at_12(run)
    with closing(ARun(run.root.parent, "broken")) as broken:
        broken.fs.write_bytes("run.json", b"{")
    found = told(run.root.parent)
    damaged = {"run": "broken", "state": "DAMAGED"}
    assert found["elastic_run_state", frozenset(damaged.items())] == 1
    assert of_demo(found, "elastic_step") == 20


# --- bounds --------------------------------------------------------------------------------------


def test_what_users_name_stays_one_label_value(tmp_path: Path) -> None:
    """B92: quotes, backslashes and line ends would else end a label, or forge another line."""
    name = 'a"b\\c\nelastic_step{run="forged"} 1'
    with closing(ARun(tmp_path, name)) as run:
        killed_at_12(run)
        found = told(tmp_path)
    assert found["elastic_step", frozenset({("run", name)})] == 20
    assert ("elastic_step", frozenset({("run", "forged")})) not in found


def test_a_name_that_is_no_text_does_not_end_the_answer(tmp_path: Path) -> None:
    with closing(ARun(tmp_path, "odd\udcff")) as run:
        killed_at_12(run)
        found = told(tmp_path)
    assert found["elastic_step", frozenset({("run", "odd\\udcff")})] == 20


def test_causes_and_phases_that_are_not_known_share_one_series(run: ARun) -> None:
    killed_at_12(run)
    for number in range(50):
        run.event("failure_decided", 2, generation=1, data={"cause": f"made up {number}"})
        run.event("recovered", 1, generation=1, data={"phases_s": {f"odd {number}": 1.0}})
    found = told(run.root.parent)
    assert of_demo(found, "elastic_restarts_total", cause=OTHER) == 50
    for name, label, known in (
        ("elastic_restarts_total", "cause", CAUSES),
        ("elastic_reform_seconds_total", "phase", PHASES),
    ):
        values = {dict(labels)[label] for (told_name, labels) in found if told_name == name}
        assert values == {*known, OTHER}


def test_at_most_so_many_runs_are_told_of_and_the_others_counted(
    run: ARun, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MOST_RUNS >= 100
    monkeypatch.setattr(prometheus, "MOST_RUNS", 2)
    run.event("progress", 1, step=1)
    for number in range(3):
        with closing(ARun(run.root.parent, f"older{number}")) as older:
            older.event("progress", 10 + number, step=1)
    found = told(run.root.parent)
    assert {dict(labels).get("run") for _, labels in found} == {"demo", "older0", None}
    assert found["elastic_runs_left_out", frozenset()] == 2


# --- the verb ------------------------------------------------------------------------------------


def test_the_verb_prints_one_run_or_all(run: ARun) -> None:
    killed_at_12(run)
    one, all_runs = ask("metrics", run.root), ask("metrics", "--storage", run.root.parent)
    for result in (one, all_runs):
        assert result.exit_code == 0, result.output
        assert 'elastic_lost_steps_total{run="demo"} 2.0\n' in result.output


@pytest.mark.parametrize("arguments", [[], ["RUN", "--storage", "ROOT"], ["RUN", "--alert-rules"]])
def test_the_verb_wants_one_thing(arguments: list[str]) -> None:
    result = ask("metrics", *arguments)
    assert result.exit_code == 2
    assert "give one of RUN, --storage URL" in result.output


def test_the_verb_hands_out_rules_and_dashboard() -> None:
    assert ask("metrics", "--alert-rules").output == RULES.read_text()
    assert ask("metrics", "--grafana-dashboard").output == DASHBOARD.read_text()


def test_the_verb_tells_what_is_not_there(tmp_path: Path) -> None:
    assert "no storage at" in ask("metrics", "--storage", tmp_path / "none").output
    result = ask("metrics", tmp_path)
    assert result.exit_code == 2 and "no run at" in result.output


# --- dashboard and alert rules -------------------------------------------------------------------


def expressions() -> dict[str, str]:
    """Every query of the dashboard and of the rules, by where it stands."""
    dashboard = json.loads(DASHBOARD.read_text())
    found = {
        f"{panel['title']} {target['refId']}": target["expr"]
        for panel in dashboard["panels"]
        for target in panel["targets"]
    }
    for variable in dashboard["templating"]["list"]:
        found[variable["name"]] = variable.get("definition", "")
    for note in dashboard["annotations"]["list"]:
        found[note["name"]] = note["expr"]
    for rule in rules():
        found[rule["alert"]] = rule["expr"]
    return found


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    return list(group["rules"])


def test_every_metric_that_is_asked_for_is_one_we_tell(run: ARun) -> None:
    asked = {name for text in expressions().values() for name in METRIC.findall(text)}
    assert len(asked) > 15
    assert not asked - NAMES
    killed_at_12(run)
    run.event("save_interval", 1, reason="every 20 steps: ...", data={"steps": 20})
    run.event("save_interval", 1, reason="every 20 s: ...", data={"seconds": 20, "steps": 20})
    progress = {"snapshots": SNAPSHOTS, "loss": 2.0, "tokens_per_s": 640.0}
    run.event("progress", 1, step=20, data=progress)
    assert {name for name, _ in told(run.root.parent)} == NAMES


def test_every_label_value_that_is_asked_for_exists() -> None:
    known = {
        "state": set(prometheus.STATES),
        "cause": {*CAUSES, OTHER},
        "phase": {*PHASES, OTHER},
        "bucket": set(BUCKETS),
    }
    pairs = {
        (label, value)
        for text in expressions().values()
        for label, values in re.findall(r'(\w+)[=!]~?"([^"$]*)"', text)
        for value in values.split("|")
    }
    assert pairs
    assert not [pair for pair in pairs if pair[1] not in known[pair[0]]]


def test_names_carry_their_units() -> None:
    totals = {name for name, kind, *_ in prometheus._FAMILIES if "Counter" in kind.__name__}
    assert all(name.endswith("_total") == (name in totals) for name in NAMES)
    for name in NAMES:
        assert not re.search(r"_(s|sec|ms|pct|percent)(_|$)", name), name


def test_each_alert_says_what_to_do() -> None:
    for rule in rules():
        assert "$labels.run" in rule["annotations"]["summary"]
        assert rule["annotations"]["description"].rstrip().endswith(".")
        assert rule["labels"]["severity"] in ("warning", "critical")


@needs_promtool
def test_prometheus_accepts_the_text(run: ARun) -> None:
    killed_at_12(run)
    text = metrics_text(Readers(run.fs), NOW_S)
    found = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, check=False
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert not found.stdout + found.stderr


@needs_promtool
def test_prometheus_accepts_the_rules_and_the_dashboards_queries(tmp_path: Path) -> None:
    queries = {where: text for where, text in expressions().items() if "label_values" not in text}
    recorded = [
        {"record": f"query:{number}", "expr": text.replace("$run", ".*")}
        for number, text in enumerate(filter(None, queries.values()))
    ]
    file = tmp_path / "queries.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": recorded}]}))
    for path in (RULES, file):
        found = promtool("check", "rules", path)
        assert found.returncode == 0, found.stdout + found.stderr


def promtool(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["promtool", *map(str, arguments)], capture_output=True, text=True, check=False
    )


RUNNING = 'elastic_run_state{run="demo",state="RUNNING"}'
# What each alert fires on, and what it must not fire on: series a minute apart, when to look.
CASES: tuple[tuple[str, dict[str, str], str, bool], ...] = (
    (
        "ElasticCheckpointTooOld",
        {
            RUNNING: "1x30",
            'elastic_checkpoint_age_seconds{run="demo"}': "0+60x30",
            'elastic_save_interval_seconds{run="demo"}': "60x30",
        },
        "6m",
        True,
    ),
    (
        "ElasticCheckpointTooOld",
        {
            RUNNING: "1x30",
            'elastic_checkpoint_age_seconds{run="demo"}': "0+60x2 0+60x2 0+60x2 0+60x2 0+60x2",
            'elastic_save_interval_seconds{run="demo"}': "60x30",
        },
        "12m",
        False,
    ),
    (
        "ElasticCheckpointTooOld",
        {  # over, and so of any age
            RUNNING: "0x30",
            'elastic_checkpoint_age_seconds{run="demo"}': "0+60x30",
            'elastic_save_interval_seconds{run="demo"}': "60x30",
        },
        "10m",
        False,
    ),
    (
        "ElasticCheckpointTooOld",
        {
            RUNNING: "1x30",
            'elastic_step{run="demo"}': "100+10x30",
            'elastic_checkpoint_step{run="demo"}': "100x30",
            'elastic_save_interval_steps{run="demo"}': "10x30",
        },
        "6m",
        True,
    ),
    (
        "ElasticGoodputFalling",
        {
            RUNNING: "1x90",
            'elastic_slot_seconds{run="demo",bucket="useful"}': "0+60x30 1800+10x60",
            'elastic_slot_seconds{run="demo",bucket="recomputed"}': "0x30 0+50x60",
        },
        "80m",
        True,
    ),
    (
        "ElasticGoodputFalling",
        {
            RUNNING: "1x90",
            'elastic_slot_seconds{run="demo",bucket="useful"}': "0+50x90",
            'elastic_slot_seconds{run="demo",bucket="idle"}': "0+10x90",
        },
        "80m",
        False,
    ),
    (
        "ElasticCrashLoop",
        {'elastic_restarts_total{run="demo",cause="nccl_error"}': "0x5 1+1x10"},
        "10m",
        True,
    ),
    (
        "ElasticCrashLoop",
        {'elastic_restarts_total{run="demo",cause="preemption"}': "0x5 1+1x10"},
        "10m",
        False,
    ),
    (
        "ElasticWaitingForCapacity",
        {'elastic_run_state{run="demo",state="WAITING"}': "0x2 1x10"},
        "8m",
        True,
    ),
    (
        "ElasticWaitingForCapacity",
        {'elastic_run_state{run="demo",state="WAITING"}': "0x2 1 0x10"},
        "8m",
        False,
    ),
    (
        "ElasticBudgetNearlyUsed",
        {
            RUNNING: "1x9",
            'elastic_budget_left{run="demo",budget="failures in a row"}': "1x9",
            'elastic_budget_granted{run="demo",budget="failures in a row"}': "5x9",
        },
        "3m",
        True,
    ),
    (
        "ElasticBudgetNearlyUsed",
        {
            RUNNING: "1x9",
            'elastic_budget_left{run="demo",budget="the same worker_killed"}': "1x9",
            'elastic_budget_granted{run="demo",budget="the same worker_killed"}': "2x9",
        },
        "3m",
        False,
    ),
    (
        "ElasticBudgetNearlyUsed",
        {  # none was ever granted
            RUNNING: "1x9",
            'elastic_budget_left{run="demo",budget="exceptions"}': "0x9",
            'elastic_budget_granted{run="demo",budget="exceptions"}': "0x9",
        },
        "3m",
        False,
    ),
    (
        "ElasticDriverSilent",
        {'elastic_run_state{run="demo",state="UNKNOWN"}': "1x9"},
        "4m",
        True,
    ),
    ("ElasticRunFailed", {'elastic_run_state{run="demo",state="FAILED"}': "1x9"}, "1m", True),
)


@needs_promtool
def test_alerts_fire_on_what_they_are_for_and_on_nothing_else(tmp_path: Path) -> None:
    assert {case[0] for case in CASES if case[3]} == {rule["alert"] for rule in rules()}
    names = [
        {"alertname": alert, "eval_time": when, "exp_alerts": []} for alert, _, when, _ in CASES
    ]
    for fires in (True, False):
        chosen = [
            (series, expected)
            for (_, series, _, does_fire), expected in zip(CASES, names, strict=True)
            if does_fire is fires
        ]
        for series, expected in chosen:
            found = promtool("test", "rules", rule_test(tmp_path, series, expected))
            # Expected are none: promtool fails where there is one, and shows it.
            assert (found.returncode != 0) is fires, (expected, found.stdout + found.stderr)
            if fires:
                assert f'alertname="{expected["alertname"]}"' in found.stdout + found.stderr


def rule_test(folder: Path, series: dict[str, str], expected: dict[str, Any]) -> Path:
    tested = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": [expected],
    }
    file = folder / "test.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "tests": [tested]}))
    return file


def test_the_picture_is_what_status_tells(run: ARun) -> None:
    killed_at_12(run)
    picture = RunReader(run.fs).picture(run.run_file, now_s=NOW_S)
    assert picture.status == run.status()
    assert len(picture.restarts) == 1
