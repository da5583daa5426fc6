"""What a live run tells others of itself: Ray's own metrics, TensorBoard, and Prometheus' text."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from pathlib import Path

import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families
from ray.train import RunConfig, ScalingConfig
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from elastic import ElasticConfig, ElasticTrainer, TensorBoardLogger
from elastic.cluster import ray_metrics
from elastic.cluster.ray_metrics import COUNTERS, GAUGES
from elastic.dashboard.prometheus import CAUSES, NAMES, PHASES, metrics_text
from elastic.dashboard.restarts import restarts_of
from elastic.dashboard.run_picture import Readers
from elastic.dashboard.status import read_status
from elastic.policy.goodput import goodput
from elastic.storage.filesystem import Filesystem
from elastic.storage.ledger import read_ledger
from elastic.storage.metrics import current_metrics, step_times
from elastic.storage.run_file import load_run_file
from tests.cluster import functions
from tests.cluster.local_cluster import Fit, LocalCluster, wait_for

# No other test on the cluster calls its run so: nodes go on to tell what dead drivers have told.
RUN = "figures"

Samples = dict[tuple[str, str], float]


def samples(text: str, label: str) -> Samples:
    """Of the run `figures`, by name and the value of one more label."""
    return {
        (sample.name, sample.labels.get(label, "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels.get("run") == RUN
    }


def exported(label: str) -> Samples:
    """What Ray's nodes hand out to Prometheus."""
    found: Samples = {}
    for node in ray.nodes():
        if node["Alive"]:
            url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
            with urllib.request.urlopen(url, timeout=10) as answer:
                found |= samples(answer.read().decode(), label)
    return found


def check_own_page(url: str, fs: Filesystem) -> None:
    """The run serves its page from its driver's node, with the ledger's figures."""
    where, _, name = url.rpartition("/runs/")
    with urllib.request.urlopen(f"{where}/api/runs/{name}", timeout=20) as answer:
        shown = json.load(answer)
    assert shown["status"]["page_url"] == url and shown["status"]["state"] == "RUNNING"
    restarts = restarts_of(read_ledger(fs))
    assert [one["reason"] for one in shown["restarts"]] == [one.reason for one in restarts]
    assert shown["restarts"][0]["phases_s"] == restarts[0].phases_s


def check_page_is_gone(url: str) -> None:
    where = url.partition("/runs/")[0]
    wait_for("the end of the page", lambda: not answers(where))


def answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=5).close()
    except OSError:
        return False
    return True


@pytest.mark.thorough
@pytest.mark.timeout(240)
def test_b88_a_kill_is_told_everywhere_with_the_ledgers_figures(
    connected: LocalCluster, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trainer = ElasticTrainer(
        functions.plain,
        train_loop_config={"until": 100_000},
        scaling_config=ScalingConfig(num_workers=(1, 3)),
        run_config=RunConfig(name=RUN, storage_path=str(tmp_path)),
        elastic_config=ElasticConfig(
            save_every="25steps", loggers=[TensorBoardLogger(str(tmp_path / "tb"))]
        ),
    )
    fit = Fit(trainer)
    wait_for("a commit", lambda: [e for e in fit.events("checkpoint_committed") if e.step >= 25])
    functions.kill(fit.events("generation_started")[0].data["ranks"][1]["pid"])
    wait_for("the new step", lambda: fit.events("recovered"))
    by_cause, by_phase = (
        wait_for(
            f"Ray's metrics by {label}",
            lambda label=label: (
                lambda found: ("ray_elastic_step", "") in found and _counts(found) and found
            )(exported(label)),
        )
        for label in ("cause", "phase")
    )
    url = fit.events("run_started")[0].data["page_url"]
    check_own_page(url, Filesystem.at(f"{tmp_path}/{RUN}"))
    assert f"the run's page is at {url} on " in capfd.readouterr().err
    (recovered,) = [e for e in fit.events("recovered") if e.data["old_world_size"] == 3]
    assert by_cause["ray_elastic_restarts_total", "worker_killed"] == 1
    assert by_cause.get(("ray_elastic_lost_steps_total", ""), 0) == recovered.data["lost_steps"]
    load_s = recovered.data["phases_s"]["load"]
    assert by_phase["ray_elastic_reform_seconds_total", "load"] >= load_s * 0.999
    told = {name for name, _ in by_cause | by_phase if name.startswith("ray_elastic")}
    assert told <= {f"ray_{name}" for name in (*GAUGES, *COUNTERS)}
    fit.stop()
    fit.join()
    check_page_is_gone(url)

    fs = Filesystem.at(f"{tmp_path}/{RUN}")
    text = metrics_text(Readers(Filesystem.at(str(tmp_path))), time.time()).decode()
    assert samples(text, "cause")["elastic_restarts_total", "worker_killed"] == 1
    reader = EventAccumulator(str(tmp_path / "tb"), size_guidance={"scalars": 0})
    reader.Reload()
    shown = [(one.step, one.value) for one in reader.Scalars("loss")]
    kept = {step: values["loss"] for step, values in current_metrics(fs).items()}
    assert [step for step, _ in shown] == sorted(kept)
    assert dict(shown) == pytest.approx(kept, rel=1e-6)
    run_file = load_run_file(fs)
    assert run_file is not None
    status = read_status(fs, run_file, now_s=time.time())
    assert status.step is not None and status.loss == kept[status.step]
    found = goodput(read_ledger(fs), step_times(fs))
    assert sum(found.slot_seconds.values()) == pytest.approx(found.whole_slot_seconds, rel=1e-3)


def _counts(found: Samples) -> bool:
    return any(re.search("restarts_total|reform_seconds", name) for name, _ in found)


def test_both_ways_know_the_same_causes_phases_and_names() -> None:
    assert set(CAUSES) >= ray_metrics._CAUSES
    assert set(PHASES) == ray_metrics._PHASES
    assert {*GAUGES, *COUNTERS} <= NAMES
