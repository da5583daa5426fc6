"""A node where workers fail again and again is kept out, and let back in when it is allowed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from ray.train import RunConfig, ScalingConfig

from elastic import ElasticConfig, ElasticTrainer
from elastic.cli import main
from elastic.cluster import capacity
from elastic.cluster.capacity import NODE_ID
from tests.cluster import functions
from tests.cluster.local_cluster import Fit, Job, LocalCluster, wait_for
from tests.cluster.test_drains import steps_after

FLAGS = (
    *("--steps", "1000000", "--global-batch", "12", "--micro-batch", "2", "--model", "nano"),
    *("--sequence-length", "64", "--save-every", "20", "--grow-interval", "1", "--quiet"),
)


CAUSE = "worker_killed"


# --- what fits, with and without them -------------------------------------------------------------


@contextlib.contextmanager
def listed(*node_ids: str) -> Iterator[list[dict[str, Any]]]:
    """What Ray tells of nodes with two CPUs each, behind which something listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield [
            {
                "node_id": node_id,
                "address": "127.0.0.1",
                "port": server.getsockname()[1],
                "available": {"CPU": 2.0},
                "total": {"CPU": 2.0},
                "labels": {NODE_ID: node_id},
            }
            for node_id in node_ids
        ]


def test_a_node_that_is_kept_out_counts_for_nothing_and_is_named() -> None:
    out = {"b": "node b (10.0.0.2), 3 strikes in 12 min: hang 3", "gone": "node gone"}
    with listed("a", "b", "c") as nodes:
        nodes.append({**nodes[0], "node_id": "head", "total": {}, "available": {}})
        found = capacity.look({"CPU": 1.0}, {"a": 0, "b": 2}, read=lambda: nodes, kept_out=out)
        every = capacity.look({"CPU": 1.0}, {}, read=lambda: nodes)
    assert found.num_workers == 4 and every.num_workers == 6
    assert found.selector == {NODE_ID: "!in(b,gone)"} and every.selector == {}
    assert found.nodes == every.nodes == {"a", "b", "c"}
    assert found.note.endswith("kept out: node b (10.0.0.2), 3 strikes in 12 min: hang 3")
    assert "kept out" not in every.note


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (None, "!in(b,c)"),
        ("a", "in(a)"),
        ("in(a,b)", "in(a)"),
        ("b", "in(b)"),  # all that were named are out: none is left, and none is taken
        ("!a", "!in(a,b,c)"),
        ("!in(a, b)", "!in(a,b,c)"),
    ],
)
def test_a_selector_of_nodes_of_the_owners_own_still_holds(rule: str | None, expected: str) -> None:
    assert capacity.without(rule, ["c", "b"]) == expected
    selector = {} if rule is None else {NODE_ID: rule}
    with listed("a", "b", "d") as nodes:
        found = capacity.look(
            {"CPU": 1.0}, {}, selector, read=lambda: nodes, kept_out={"b": "b", "c": "c"}
        )
    assert found.selector == {NODE_ID: expected}
    fitting = {"in(a)": 1, "in(b)": 0, "!in(a,b,c)": 1, "!in(b,c)": 2}
    assert found.num_workers == 2 * fitting[expected]


# --- a run ----------------------------------------------------------------------------------------


def told(verb: str, *arguments: str) -> Any:
    result = CliRunner().invoke(main, [*verb.split(), *arguments, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def whole(job: Job) -> list[dict[str, Any]] | None:
    """The ranks of a group of three that has made a step."""
    ranks = job.ranks()
    newest = job.events("generation_started")[-1].generation
    has_begun = any(event.generation == newest for event in job.events("started", "recovered"))
    return ranks if len(ranks) == 3 and has_begun else None


def strike(job: Job, node_id: str) -> None:
    """Kill the worker on this node, and wait until the others go on."""
    ranks = wait_for("a group of three", lambda: whole(job))
    os.kill(next(one["pid"] for one in ranks if one["node_id"] == node_id), signal.SIGKILL)
    wait_for("a group of two", lambda: len(job.ranks()) == 2)
    died = job.events("worker_died")[-1]
    # What comes sooner is taken for the same incident.
    wait_for("steps after it", lambda: steps_after(job, died.time_s + 5.0))


@pytest.mark.thorough
@pytest.mark.timeout(180)
def test_its_node_is_left_out_until_it_is_allowed(three_nodes: LocalCluster, tmp_path: Path):
    flags = (*FLAGS, "--num-workers", "1:3", "--node-strikes", "2")
    with Job(three_nodes, tmp_path, "run", *flags) as job:
        job.wait_for_event("started")
        bad = job.ranks()[1]["node_id"]
        strike(job, bad)
        assert told("status", job.url)["kept_out"] == []
        strike(job, bad)
        out = job.wait_for_event("node_kept_out")
        assert out.data["node_id"] == bad and "2 strikes in" in out.reason
        wait_for("steps without it", lambda: steps_after(job, out.time_s + 3.0))
        assert bad not in [one["node_id"] for one in job.ranks()] and len(job.ranks()) == 2
        assert len(job.events("growth_planned")) == 1, "the one before the second strike"
        (shown,) = told("status", job.url)["kept_out"]
        assert shown["node_id"] == bad and [one["cause"] for one in shown["strikes"]] == [CAUSE] * 2

        added = three_nodes.add()  # its worker must not start in the place that is free on `bad`
        ranks = wait_for("a group of three", lambda: whole(job))
        assert bad not in [one["node_id"] for one in ranks]
        three_nodes.remove(added.node_id)
        wait_for("a group of two", lambda: len(job.ranks()) == 2)
        planned = job.events("growth_planned")

        done = told("node allow", job.url, bad[:12])
        assert done["node_id"] == bad and done["was_kept_out"]
        assert told("status", job.url)["kept_out"] == []
        ranks = wait_for("a group of three", lambda: whole(job))
        assert bad in [one["node_id"] for one in ranks]
        assert len(job.events("growth_planned")) == len(planned) + 1, "not tried before"
        assert [event.kind for event in job.events("growth_failed", "reform_failed")] == []


@pytest.mark.thorough
@pytest.mark.timeout(180)
def test_its_other_ranks_are_left_after_a_save(connected: LocalCluster, tmp_path: Path):
    trainer = ElasticTrainer(
        functions.plain,
        train_loop_config={"until": 100_000},
        scaling_config=ScalingConfig(
            num_workers=(4, 6),
            resources_per_worker={"CPU": 0.5},
            elastic_resize_monitor_interval_s=600.0,
        ),
        run_config=RunConfig(name="run", storage_path=str(tmp_path)),
        elastic_config=ElasticConfig(save_every="1000steps", node_strikes=1),
    )
    fit = Fit(trainer)
    (group,) = wait_for(
        "a step", lambda: fit.events("started") and fit.events("generation_started")
    )
    ranks = group.data["ranks"]
    assert len(ranks) == 6
    victim = ranks[0]
    functions.kill(victim["pid"])
    wait_for(
        "a group of four", lambda: fit.events("generation_started")[-1].data["world_size"] == 4
    )
    left = [one["pid"] for one in fit.events("generation_started")[-1].data["ranks"]]
    assert left == [one["pid"] for one in ranks if one["node_id"] != victim["node_id"]]
    wait_for("two recoveries", lambda: len(fit.events("recovered")) == 2)
    assert [event.data["new_world_size"] for event in fit.events("recovered")] == [5, 4]
    assert fit.events("recovered")[-1].data["lost_steps"] == 0
    (noticed,) = fit.events("drain_noticed")
    assert noticed.reason.endswith(f"1 strike: {CAUSE} 1, which is kept out")
    fit.stop()
    fit.join()
