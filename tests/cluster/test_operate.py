"""A newcomer's day: nothing but the command `elastic`, `kill` and `ray job stop`."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp

from elastic.dashboard.status import read_status
from elastic.storage.filesystem import Filesystem
from elastic.storage.run_file import load_run_file
from jobs.model import PRESETS, ModelConfig, build
from tests.cluster.local_cluster import PATH, RAY, ROOT, LocalCluster, wait_for

JOB = [
    *("--model", "nano", "--global-batch", "4", "--micro-batch", "2", "--sequence-length", "32"),
    *("--num-workers", "1:2", "--steps", "1000000", "--save-every", "1000000"),
]


class Job:
    """`elastic submit`, waiting in another terminal."""

    def __init__(self, words: list[str], environment: dict[str, str], log: Path) -> None:
        self.log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "elastic", "submit", *words],
                cwd=ROOT,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def said(self, code: int) -> str:
        """All that it printed, once it has ended with this exit code."""
        found = self.process.wait(timeout=150)
        text = self.log.read_text(errors="replace")
        assert found == code, f"exit code {found}:\n{text}"
        return text


class Newcomer:
    """Types commands into one terminal, and reads what they say."""

    def __init__(self, cluster: LocalCluster, storage: Path) -> None:
        self.storage = storage
        self.run = str(storage / "demo")
        self.environment = {**os.environ, "PATH": PATH, "RAY_ADDRESS": cluster.dashboard_url}
        self.jobs: list[Job] = []

    def elastic(self, *words: str, code: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "elastic", *words],
            cwd=ROOT,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
        assert done.returncode == code, f"{words}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def asks(self, *words: str) -> Any:
        return json.loads(self.elastic(*words, "--json"))

    def submits(self) -> Job:
        words = ["jobs/pretrain.py", "--name", "demo", "--storage", str(self.storage), *JOB]
        log = self.storage / f"job-{len(self.jobs)}.log"
        self.jobs.append(Job(words, self.environment, log))
        return self.jobs[-1]

    def wait_until(self, what: str, **expected: Any) -> dict[str, Any]:
        """What `elastic status` says once these fields have at least these values."""

        def is_so() -> bool:
            # In this process, since a command for each look would slow down what it looks at.
            fs = Filesystem.at(self.run)
            run_file = load_run_file(fs)
            if run_file is None:
                return False
            status = asdict(read_status(fs, run_file, now_s=time.time()))
            return all(
                status[key] == value if isinstance(value, str) else (status[key] or -1) >= value
                for key, value in expected.items()
            )

        wait_for(what, is_so, timeout_s=150)
        status: dict[str, Any] = self.asks("status", self.run)
        return status

    def ends(self) -> None:
        for job in self.jobs:
            job.process.kill()
            job.process.wait()


@pytest.mark.timeout(500)
def test_a_newcomers_day(one_node: LocalCluster, tmp_path: Path) -> None:
    newcomer = Newcomer(one_node, tmp_path)
    try:
        begin_twice(newcomer)
        saved = kill_and_save(newcomer)
        stopped = stop(newcomer)
        assert stopped >= saved
        export(newcomer)
        resume_and_stop_through_ray(newcomer, stopped)
        go_back(newcomer, saved)
    finally:
        newcomer.ends()


def begin_twice(newcomer: Newcomer) -> None:
    """Of two submissions of one name one wins, and the other says who it was."""
    pair = [newcomer.submits(), newcomer.submits()]
    loser: Job = wait_for(
        "one of two submissions to give way",
        lambda: next((job for job in pair if job.process.poll() is not None), None),
    )
    said = loser.said(1)
    assert re.search(r"is held by process \d+ on \S+ \(job \w+ on the Ray cluster at ", said), said
    assert "Nothing was changed" in said and "FAILED" in said
    newcomer.wait_until("the first steps", state="RUNNING", step=3)
    assert [e["kind"] for e in newcomer.asks("events", newcomer.run)].count("run_started") == 1


def kill_and_save(newcomer: Newcomer) -> int:
    status = newcomer.asks("status", newcomer.run)
    os.kill(status["ranks"][-1]["pid"], signal.SIGKILL)
    newcomer.wait_until("a restart", restarts=1)
    (death,) = newcomer.asks("events", newcomer.run, "--kind", "worker_died")
    assert death["world_rank"] == status["ranks"][-1]["world_rank"]
    newest = newcomer.elastic("logs", newcomer.run, "--rank", "0")
    assert all(line.startswith(("g1 rank0 | ", "g2 rank0 | ")) for line in newest.splitlines())
    newcomer.wait_until("steps after it", state="RUNNING", step=3)
    said = newcomer.elastic("save", newcomer.run, "--timeout", "60")
    step = int(re.fullmatch(r"saved step (\d+)\n", said)[1])
    complete = [c["step"] for c in newcomer.asks("checkpoints", "list", newcomer.run)]
    assert step in complete
    return step


def stop(newcomer: Newcomer) -> int:
    said = newcomer.elastic("stop", newcomer.run, "--timeout", "60")
    step = int(re.match(r"stopped at step (\d+); ", said)[1])
    status = newcomer.asks("status", newcomer.run)
    assert status["state"] == "STOPPED" and status["checkpoint_step"] == step
    assert status["reason"].startswith("stop asked by ")
    winner = next(job for job in newcomer.jobs if job.process.poll() != 1)
    told = winner.said(0)
    assert f"stopped at step {step}; the same command resumes" in told
    assert f"elastic stop {newcomer.run}" in told and "SUCCEEDED" in told
    (row,) = newcomer.asks("runs", "--storage", str(newcomer.storage))
    assert (row["name"], row["state"]) == ("demo", "STOPPED") and 0 < row["goodput"] < 1
    newcomer.elastic("stop", newcomer.run, code=2)  # nobody is at it any more
    return step


def export(newcomer: Newcomer) -> None:
    """The file gives the logits of the checkpoint, as torch's own loader reads it."""
    out = newcomer.storage / "model.pt"
    newcomer.elastic("export", newcomer.run, "--out", str(out))
    checkpoint = newcomer.asks("checkpoints", "list", newcomer.run)[-1]
    exported, expected = (build(ModelConfig(**vars(PRESETS["nano"])), seed=n) for n in (1, 2))
    exported.load_state_dict(torch.load(out, weights_only=True))
    state = {"model": expected.state_dict()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # one process is what is meant here
        dcp.load(state, checkpoint_id=f"{newcomer.run}/{checkpoint['path']}")
    expected.load_state_dict(state["model"])
    tokens = torch.arange(64).reshape(2, 32)
    assert torch.equal(exported(tokens), expected(tokens))


def resume_and_stop_through_ray(newcomer: Newcomer, stopped: int) -> None:
    job = newcomer.submits()
    newcomer.wait_until("steps of the second job", state="RUNNING", step=stopped + 2)
    resumed = newcomer.asks("events", newcomer.run, "--kind", "resumed")
    assert resumed[-1]["step"] == stopped
    job_id = re.search(r"^job (\w+) submitted", job.log.read_text(), re.MULTILINE)[1]
    subprocess.run(
        [RAY, "job", "stop", job_id], env=newcomer.environment, capture_output=True, check=True
    )
    status = newcomer.wait_until("the stop through Ray", state="STOPPED")
    assert status["checkpoint_step"] > stopped, "what was trained was saved first"
    assert "SIGTERM" in status["reason"]
    assert "STOPPED" in job.said(1)


def go_back(newcomer: Newcomer, step: int) -> None:
    done = newcomer.asks("rollback", newcomer.run, "--to", str(step))
    assert done["set_aside"]
    complete = [c["step"] for c in newcomer.asks("checkpoints", "list", newcomer.run)]
    assert newcomer.asks("status", newcomer.run)["checkpoint_step"] == step
    assert len(complete) >= len(done["set_aside"]) + 1, "nothing was deleted"
