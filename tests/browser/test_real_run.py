"""One run on a real cluster that everything happens to, and its own page in a browser beside it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import ray
from playwright.sync_api import Locator, Page, expect
from ray.train import RunConfig, ScalingConfig

from elastic import ElasticConfig, ElasticTrainer, HangLimits
from elastic.dashboard.page.server import PageServer
from elastic.dashboard.restarts import Restart, restarts_of
from elastic.dashboard.tries_left import tries_left
from elastic.storage.checkpoints import Catalog
from elastic.storage.filesystem import Filesystem
from elastic.storage.ledger import LedgerEvent, read_ledger
from elastic.storage.requests import SAVE, ask
from elastic.storage.run_file import load_run_file
from tests.cluster import functions
from tests.cluster.local_cluster import RAY, Fit, LocalCluster, started, wait_for

NAME = "everything"


class Trouble:
    """The run, and what is done to it."""

    def __init__(self, cluster: LocalCluster, root: Path) -> None:
        self.cluster = cluster
        self.boom = root / "boom"
        self.fs = Filesystem.at(str(root / "runs" / NAME))
        trainer = ElasticTrainer(
            functions.boom_when_told,
            train_loop_config={"boom": str(self.boom)},
            scaling_config=ScalingConfig(num_workers=(1, 3), elastic_resize_monitor_interval_s=1),
            run_config=RunConfig(name=NAME, storage_path=str(root / "runs")),
            elastic_config=ElasticConfig(save_every=None, hangs=HangLimits(step_s=3.0)),
        )
        self.fit = Fit(trainer)

    def ranks(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.fit.events("generation_started")[-1].data["ranks"]
        return found

    def recovered(self, since: int, size: int) -> int:
        """Waits for a new step at this size; the number of recoveries then."""

        def look() -> int:
            found = self.fit.events("recovered")
            is_there = len(found) > since and found[-1].data["new_world_size"] == size
            return len(found) if is_there else 0

        return int(wait_for(f"a new step of {size} workers", look))

    def save(self) -> None:
        before = len(self.fit.events("checkpoint_committed"))
        ask(self.fs, SAVE, who="a test", time_s=time.time(), epoch=1)
        wait_for("a commit", lambda: len(self.fit.events("checkpoint_committed")) > before)

    def corrupt_newest(self) -> int:
        """Flips a byte in the middle of each of its files of tensors; its step."""
        run_file = load_run_file(self.fs)
        assert run_file is not None
        catalog = Catalog(self.fs, run_file.run_id)
        newest = catalog.highest()
        assert newest is not None and self.fs.local_root is not None
        for file in Path(self.fs.local_root, catalog.data_path(newest.step)).rglob("*.distcp"):
            content = bytearray(file.read_bytes())
            content[len(content) // 2] ^= 0xFF
            file.write_bytes(content)
        return newest.step

    def drain(self, rank: int) -> None:
        command = [
            *(RAY, "drain-node", "--address", self.cluster.address),
            *("--node-id", self.ranks()[rank]["node_id"], "--reason-message", "spot"),
            *("--reason", "DRAIN_NODE_REASON_PREEMPTION", "--deadline-remaining-seconds", "60"),
        ]
        subprocess.run(command, check=True, capture_output=True)


@pytest.mark.timeout(240)
def test_every_trouble_of_a_real_run_is_seen_with_its_true_cause(
    tmp_path: Path, page: Page
) -> None:
    with started(num_nodes=3) as cluster:
        ray.init(address=cluster.address, log_to_driver=False)
        now = Trouble(cluster, tmp_path)
        page.goto(wait_for("a page", lambda: _url(now)))
        rows = page.locator("#restarts tbody tr")
        quarantined = make_trouble(now, rows)
        expect(page.locator("#saves tr", has_text="quarantined")).to_contain_text(str(quarantined))
        now.boom.touch()
        expect(page.locator("#state .state")).to_contain_text("FAILED", timeout=20_000)
        page.goto("about:blank")  # the page ends soon after the run
        assert "bad sample 7" in str(now.fit.failure())
    check_figures(page, tmp_path / "runs", read_ledger(now.fs))


def _url(now: Trouble) -> str:
    started = now.fit.events("started") and now.fit.events("run_started")
    return str(started[0].data["page_url"]) if started else ""


def make_trouble(now: Trouble, rows: Locator) -> int:
    """All but the last; each is seen on the page while the run goes on. Gives the step of the
    checkpoint that was damaged."""
    now.save()
    os.kill(now.ranks()[1]["pid"], signal.SIGKILL)
    seen = now.recovered(0, 2)
    expect(rows.first).to_contain_text("worker_killed")
    seen = now.recovered(seen, 3)
    expect(rows.first).to_contain_text("growth")

    now.cluster.remove(now.ranks()[2]["node_id"])
    seen = now.recovered(seen, 2)
    expect(rows.first).to_contain_text("node_lost")
    now.cluster.add()
    seen = now.recovered(seen, 3)

    now.drain(0)
    seen = now.recovered(seen, 2)
    expect(rows.first).to_contain_text("drain")

    os.kill(now.ranks()[1]["pid"], signal.SIGSTOP)
    seen = now.recovered(seen, 1)
    expect(rows.first).to_contain_text("hang")
    seen = now.recovered(seen, 2)

    now.save()
    step = now.corrupt_newest()
    os.kill(now.ranks()[1]["pid"], signal.SIGKILL)
    wait_for("word of bad bytes", lambda: now.fit.events("checkpoint_quarantined"))
    now.recovered(seen, 1)
    return step


def check_figures(page: Page, root: Path, events: list[LedgerEvent]) -> None:
    """Of the run that is over, each figure on the page is the ledger's."""
    restarts = restarts_of(events)
    causes = [one.causes for one in restarts]
    for cause in ("worker_killed", "growth", "node_lost", "drain", "hang", "user_exception"):
        assert [cause] in causes, causes
    with PageServer(Filesystem.at(str(root))) as server:
        page.goto(f"{server.url}runs/{NAME}")
        expect(page.locator("#state")).to_contain_text("FAILED")
        expect(page.locator("#state")).to_contain_text("bad sample 7")
        rows = page.locator("#restarts tbody tr")
        expect(rows).to_have_count(len(restarts))
        for row, one in zip(reversed(rows.all()), restarts, strict=True):
            check_row([cell.inner_text() for cell in row.locator("td").all()], one)
        nodes = page.locator("#nodes")
        for mark in ("death", "node lost", "drain", "error"):
            expect(nodes.locator(f".mark[aria-label^='{mark}']").first).to_be_visible()
        tries = page.locator("#tries")
        for left in tries_left(events) or []:
            row = tries.locator("tr", has_text=left.budget)
            assert row.locator("td").all_inner_texts()[2] == str(left.used)
        page.goto("about:blank")


def check_row(cells: list[str], one: Restart) -> None:
    assert cells[0] == str(one.number)
    assert cells[2].split()[-1] == one.causes[0]
    assert cells[4] == ("–" if one.lost_steps is None else str(one.lost_steps))
