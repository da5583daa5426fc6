"""A notice that a node will be taken: it is drained through Ray, and runs leave it in time."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elastic.cluster.notices.notice import Notice
from elastic.cluster.own_node import NodeUnknown, OwnNode, node_of
from elastic.cluster.ray_internals import ClusterView
from elastic.storage.ledger import LedgerEvent
from tests.cluster.local_cluster import ROOT, Job, LocalCluster, is_running, wait_for

FLAGS = (
    *("--steps", "1000000", "--global-batch", "12", "--micro-batch", "2", "--model", "nano"),
    *("--sequence-length", "64", "--save-every", "1000000", "--grow-interval", "1", "--quiet"),
)


class Command:
    """`elastic node`, in another terminal."""

    def __init__(self, log: Path, *words: str) -> None:
        self._log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "elastic", "node", *words],
                cwd=ROOT,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def said(self) -> list[dict[str, Any]]:
        """The events that it has printed so far."""
        lines = self._log.read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def wait_to_say(self, event: str) -> dict[str, Any]:
        def look() -> dict[str, Any] | None:
            return next((said for said in self.said() if said["event"] == event), None)

        found: dict[str, Any] = wait_for(f"{event} in {self._log}", look, timeout_s=30)
        return found

    def ends_with(self, code: int) -> None:
        assert self.process.wait(timeout=60) == code, self._log.read_text()


@contextlib.contextmanager
def running(log: Path, *words: str) -> Iterator[Command]:
    command = Command(log, *words)
    try:
        yield command
    finally:
        if command.process.poll() is None:
            command.process.kill()
        command.process.wait()


class Leaving:
    """A run that nothing else happens to, and what it says of each node that it left."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def next(self) -> dict[str, Any]:
        """The rank whose node is the next to go."""
        return self.job.ranks()[0]

    def is_left(self, going: dict[str, Any], world_size: int) -> LedgerEvent:
        """Wait until the run has left that node; with no step lost."""
        node = going["node_id"][:12]
        found = self.job.wait_for_event("recovered", lambda e: node in e.reason, timeout_s=60.0)
        assert found.data["lost_steps"] == 0 and found.data["new_world_size"] == world_size
        wait_for("the end of its worker", lambda: not is_running(going["pid"]), 10.0)
        return found


@pytest.mark.timeout(240)
def test_nodes_are_left_whoever_brings_the_notice(three_nodes: LocalCluster, tmp_path: Path):
    """The run's own agent on the node, `elastic node agent`, SIGTERM to it, `elastic node drain`;
    one node after the other, and never is a step lost."""
    files = f"file:{tmp_path}/{{node_id}}"
    flags = (*FLAGS, "--num-workers", "1:5", "--notices", files)
    with two_more(three_nodes), Job(three_nodes, tmp_path, "run", *flags) as job:
        started = job.wait_for_event("generation_started")
        assert started.data["world_size"] == 5
        job.wait_for_event("started")
        run = Leaving(job)
        the_runs_own_agent_hears_of_it(run, tmp_path)
        an_agent_hears_of_it(run, three_nodes, tmp_path)
        an_agent_is_told_to_end(run, three_nodes, tmp_path)
        it_is_drained_by_hand(run, three_nodes, tmp_path)
        assert job.events("failure_decided", "worker_died", "node_lost") == []


@contextlib.contextmanager
def two_more(cluster: LocalCluster) -> Iterator[None]:
    """Five nodes, and afterwards three, none of which drains or has gone by itself."""
    cluster.add()
    cluster.add()
    try:
        yield
    finally:
        view = ClusterView(cluster.address)
        draining = set(view.draining_nodes())  # first: once idle they go, and are in neither
        stay = set(view.living_nodes()) - draining
        for node_id in [node.node_id for node in cluster.nodes]:
            if node_id not in stay:
                cluster.remove(node_id)
        while len(cluster.nodes) > 3:
            cluster.remove(cluster.nodes[-1].node_id)
        while len(cluster.nodes) < 3:
            cluster.add()


def the_runs_own_agent_hears_of_it(run: Leaving, tmp_path: Path) -> None:
    going = run.next()
    (tmp_path / going["node_id"]).write_text("20s\nrack 7 goes\n")
    found = run.is_left(going, world_size=4)
    told = re.search(r"which goes in (\d+) s", found.reason)
    assert told is not None and 0 < int(told[1]) <= 20


def an_agent_hears_of_it(run: Leaving, cluster: LocalCluster, tmp_path: Path) -> None:
    going = run.next()
    words = ("agent", "--json", "--address", cluster.address, "--node-id", going["node_id"])
    file = tmp_path / "notice"
    with running(tmp_path / "agent.log", *words, "--source", f"file:{file}") as agent:
        agent.wait_to_say("watching")
        file.touch()
        found = run.is_left(going, world_size=3)
        assert "which goes at a time not told" in found.reason
        said = agent.wait_to_say("draining")
        assert said["is_news"] and said["deadline_ms"] == 0 and said["node_id"] == going["node_id"]
        agent.process.send_signal(signal.SIGINT)
        agent.ends_with(130)


def an_agent_is_told_to_end(run: Leaving, cluster: LocalCluster, tmp_path: Path) -> None:
    """What it runs hears of SIGTERM after the run has saved, and ends with 3."""
    going = run.next()
    found = tmp_path / "found"
    script = f"trap 'date +%s.%N > {found}; exit 3' TERM; while :; do sleep 0.1; done"
    words = ("agent", "--json", "--address", cluster.address, "--node-id", going["node_id"])
    words += ("--source", "none", "--grace", "40s", "--", "sh", "-c", script)
    with running(tmp_path / "wrapper.log", *words) as agent:
        agent.wait_to_say("watching")
        asked_s = time.time()
        agent.process.send_signal(signal.SIGTERM)
        run.is_left(going, world_size=2)
        agent.ends_with(3)
        saved = run.job.wait_for_event("checkpoint_committed", lambda e: e.time_s > asked_s)
        assert saved.time_s < float(found.read_text()) < asked_s + 40
        assert [said["event"] for said in agent.said()] == ["watching", "draining", "free"]


def it_is_drained_by_hand(run: Leaving, cluster: LocalCluster, tmp_path: Path) -> None:
    going = run.next()
    words = ("--address", cluster.address, "--node-id", going["node_id"], "--json")
    with running(tmp_path / "drain.log", "drain", *words, "--grace", "40s") as command:
        command.ends_with(0)
        assert [said["event"] for said in command.said()] == ["draining", "free"]
    run.is_left(going, world_size=1)


def test_a_drain_is_not_put_off_by_a_later_notice(connected: LocalCluster):
    """Ray itself would take the last one's word, also when that has no time to tell. And a node is
    free when nothing holds resources of it any more, or when it is gone."""
    going = connected.add().node_id
    node, now_s = OwnNode(connected.address, going), time.time()
    try:
        worker = an_actor_on(going, num_cpus=1)
        watcher = an_actor_on(going, num_cpus=0)  # for the node would go, with nothing on it
        found = [
            node.drain(a_notice(deadline_s))
            for deadline_s in (None, now_s + 90, now_s + 120, None, now_s + 60)
        ]
        assert [one.is_news for one in found] == [True, True, False, False, True]
        told_s = [one.deadline_ms / 1000 - now_s for one in found[1:]]
        assert told_s == pytest.approx([90, 90, 90, 60], abs=0.01) and found[0].deadline_ms == 0
        assert ClusterView(connected.address).draining_nodes()[going] == found[-1].deadline_ms

        (holder,) = node.wait_until_free(going, until_s=time.time())
        assert holder.startswith("Idler (pid ")
        ray.kill(worker)
        assert node.wait_until_free(going, until_s=time.time() + 30) == []
        assert going in ClusterView(connected.address).living_nodes()
        ray.kill(watcher)
    finally:
        connected.remove(going)
    wait_for("its end", lambda: going not in ClusterView(connected.address).living_nodes())
    assert node.wait_until_free(going, until_s=time.time() + 30) == []
    with pytest.raises(NodeUnknown, match="lives in the cluster"):
        node.drain(a_notice(None))  # for Ray, which is not asked, that would be done already


def a_notice(deadline_s: float | None) -> Notice:
    return Notice(kind="file", deadline_s=deadline_s, text="a test")


class Idler:
    def ping(self) -> None:
        """Answers once it is there."""


def an_actor_on(node_id: str, num_cpus: int) -> Any:
    where = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
    made = ray.remote(num_cpus=num_cpus)(Idler).options(scheduling_strategy=where).remote()
    ray.get(made.ping.remote())
    return made


def test_the_node_of_a_machine_is_told_by_its_address_and_else_by_its_name():
    nodes = {"a": ("10.0.0.1", "one"), "b": ("10.0.0.2", "two"), "c": ("10.0.0.3", "two")}
    assert node_of("10.0.0.2", "two", nodes) == "b"
    assert node_of("127.0.0.1", "one", nodes) == "a"
    with pytest.raises(NodeUnknown, match=r"2 nodes \(b, c\)"):
        node_of("127.0.0.1", "two", nodes)
    with pytest.raises(NodeUnknown, match="no node of this machine"):
        node_of("10.0.0.4", "four", nodes)


def test_a_machine_with_several_nodes_is_asked_which(three_nodes: LocalCluster, tmp_path: Path):
    with running(tmp_path / "log", "drain", "--address", three_nodes.address) as command:
        command.ends_with(2)
    said = (tmp_path / "log").read_text()
    assert "say which with --node-id" in said
    assert all(node.node_id in said for node in three_nodes.nodes)


def test_what_the_agent_runs_is_not_held_up_without_a_cluster(tmp_path: Path):
    """Its exit status is the agent's; SIGTERM reaches it although nobody can be asked to drain."""
    told = 'test "$RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S" = 0 && exit 7'  # it drains, Ray need not
    for end, code in ((told, 7), ("kill -9 $$", 137)):
        with running(tmp_path / "log", "agent", "--source", "none", "sh", "-c", end) as agent:
            agent.ends_with(code)
    words = ("agent", "--json", "--address", "127.0.0.1:9", "--grace", "20s", "--source", "none")
    script = "trap 'exit 5' TERM; while :; do sleep 0.1; done"
    with running(tmp_path / "log", *words, "sh", "-c", script) as agent:
        agent.wait_to_say("watching")
        agent.process.send_signal(signal.SIGTERM)
        agent.ends_with(5)
        assert [said["event"] for said in agent.said()] == ["watching", "trouble"]
