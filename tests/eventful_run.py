"""A run that has suffered of everything, as its driver would have written it down.

Made through the storage room alone, so that no cluster is needed to look at it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from elastic.policy.budgets import Failure, as_recorded
from elastic.policy.causes import Cause
from elastic.storage.checkpoints import Catalog
from elastic.storage.ledger import LedgerEvent, LedgerWriter
from elastic.storage.metrics import MetricsWriter
from elastic.storage.rank_logs import log_path
from elastic.storage.stacks import stacks_path
from tests.made_run import BORN_S, add_checkpoint, make_run

RULES = {
    "max_failures": 3,
    "max_failures_without_progress": 5,
    "max_failures_by_cause": {"hang": 2},
}
NODES = [f"{letter * 12}4862032e6a9e0fd72e59e169188340b40d15" for letter in "abcd"]
PHASES_S = {"diagnose": 0.1, "connect": 0.25, "load": 1.5, "first_step": 0.75, "wait": 0.4}
HANG_STACKS = stacks_path(4, 7)
CAUSES = ["worker_killed", "node_lost", "drain", "growth", "hang", "user_exception"]
"""Of its restarts, in order."""


class Story:
    """Writes a run's ledger and metrics, one happening after another; `time_s` is wall time."""

    def __init__(self, root: Path, name: str, *, born_s: float = BORN_S) -> None:
        self.catalog: Catalog = make_run(root, name)
        self.fs = self.catalog.fs
        self.ledger = LedgerWriter(self.fs, 0, "life0")
        self.metrics = MetricsWriter(self.fs)
        self.time_s = born_s
        self.generation = -1
        self.step = 0
        self.saved_step = -1
        self.size = 0
        self.told: list[LedgerEvent] = []

    def tell(self, kind: str, after_s: float = 0.5, **facts: Any) -> LedgerEvent:
        self.time_s += after_s
        facts.setdefault("generation", self.generation)
        event = self.ledger.append(kind, time_s=self.time_s, **facts)
        self.told.append(event)
        return event

    def begin(self, size: int) -> None:
        facts = {"name": self.catalog.fs.root.rsplit("/", 1)[-1], "rules": RULES}
        facts["dashboard_url"] = "http://192.0.2.1:8265"
        self.tell("run_started", data=facts)
        why = "each 30 s: a save stalls for 0.1 s, and a failure is expected each 2 h"
        self.tell("save_interval", reason=why, data={"seconds": 30.0})
        self.tell("generation_planned", generation=0, data={"world_size": size})
        self.stand(size)
        self.tell("started", step=0)

    def stand(self, size: int, nodes: list[str] | None = None) -> None:
        self.generation += 1
        self.size = size
        ranks = [
            {
                "world_rank": rank,
                "node_id": (nodes or NODES)[rank],
                "node_ip": f"192.0.2.{2 + NODES.index((nodes or NODES)[rank])}",
                "pid": 90 + rank,
            }
            for rank in range(size)
        ]
        self.tell("generation_started", data={"world_size": size, "ranks": ranks})

    def train(self, num_steps: int, *, each_s: float = 0.5) -> None:
        self.metrics.start(self.generation, self.step + 1, self.time_s)
        for _ in range(num_steps):
            self.step += 1
            values = {"loss": 4.0 / (1 + self.step / 20), "tokens": 2048.0, "step_s": each_s}
            facts = {"state": "RUNNING", "phase": "forward-backward", "loss": values["loss"]}
            self.tell("progress", each_s, step=self.step, data=facts | {"tokens_per_s": 4096.0})
            self.metrics.add(self.generation, self.step, self.time_s, values)
        self.metrics.flush()

    def save(self) -> None:
        add_checkpoint(self.catalog, self.step, self.generation)
        self.saved_step = self.step
        facts = {"bytes": 5000, "stall_s": 0.08, "duration_s": 0.9, "write_s": 0.8}
        self.tell("checkpoint_committed", step=self.step, data=facts)

    def decide(self, cause: str, rank: int, reason: str, **data: Any) -> None:
        facts = {"cause": cause, "then": "restart", "recovery": "warm", "world_size": self.size}
        facts |= {"evidence": "", "cause_text": reason} | data
        failure = Failure(cause=Cause(cause), step=self.step, text=reason, headline=reason)
        facts["counted"] = as_recorded(failure, self.saved_step)
        self.tell("failure_decided", step=self.step, world_rank=rank, reason=reason, data=facts)

    def go_on(
        self,
        size: int,
        from_step: int,
        reason: str,
        nodes: list[str] | None = None,
        *,
        source: str = "storage",
    ) -> None:
        """The next group stands, holds the state of `from_step`, and makes its first new step."""
        old, lost = self.size, self.step - from_step
        self.stand(size, nodes)
        self.tell("resumed", 1.0, step=from_step)
        self.step = from_step
        facts = {"lost_steps": lost, "old_world_size": old, "new_world_size": size}
        facts |= {"phases_s": PHASES_S, "source": source}
        self.tell("recovered", 1.5, step=from_step + 1, reason=reason, data=facts)


def eventful_run(root: Path, name: str = "eventful", *, born_s: float = BORN_S) -> Story:
    """Worker kill, node loss, drain, growth, hang with a corrupt checkpoint, user exception."""
    now = Story(root, name, born_s=born_s)
    now.begin(3)
    now.train(10)
    now.save()
    now.train(2)
    last = {"last_lines": ["loss 3.9", "loss 3.8"], "node_id": NODES[1], "node_ip": "192.0.2.3"}
    now.tell("worker_died", world_rank=1, step=12, reason="SIGKILL", data=last)
    now.decide("worker_killed", 1, "rank 1 died: SIGKILL")
    now.go_on(2, 10, "rank 1 died: SIGKILL", [NODES[0], NODES[2]])
    now.train(10)
    now.save()
    now.train(3)
    gone = {"last_lines": [], "node_id": NODES[2], "node_ip": "192.0.2.4"}
    now.tell("node_lost", world_rank=1, step=now.step, reason="its node is gone", data=gone)
    now.decide("node_lost", 1, "rank 1 was lost with its node", node_id=NODES[2])
    now.go_on(2, 20, "rank 1 was lost with its node", [NODES[0], NODES[3]])
    now.train(10)
    now.save()
    notice = {"world_ranks": [1], "remaining_s": 30.0, "way": "save", "predicted": "a save fits"}
    now.tell("drain_noticed", step=30, reason="node of rank 1: spot reclaim in 30 s", data=notice)
    now.tell("leave_ordered", step=30, reason="leaving the node before it goes")
    now.go_on(1, 30, "leaving the node before it goes", [NODES[0]])
    now.train(5)
    now.save()
    now.tell("growth_planned", reason="starting 2 workers")
    now.tell("leave_ordered", step=35, reason="growing from 1 to 3 workers")
    now.go_on(3, 35, "growing from 1 to 3 workers")
    now.train(5)
    now.save()
    _hang(now)
    _raise(now)
    now.ledger.close()
    return now


def _hang(now: Story) -> None:
    now.train(2)
    now.tell("stall_seen", 5.0, step=42, reason="no rank has gone on for 5 s")
    places = ["rank 0 in all_reduce", "rank 1 in time.sleep", "rank 2 in all_reduce"]
    why = "rank 1 holds up the others"
    now.tell("hang_found", reason=why, data={"stacks": HANG_STACKS, "places": places})
    for rank in range(3):
        text = f"rank {rank}\n  File 'train.py', line {rank}, in step\n"
        now.fs.write_bytes(stacks_path(now.generation, 7, rank), text.encode())
    where = {"node_id": NODES[1], "node_ip": "192.0.2.3", "hang": why, "last_lines": ["waiting"]}
    now.tell("worker_died", world_rank=1, step=42, reason="ended: it hung", data=where)
    now.decide("hang", 1, "rank 1 held up the others")
    until = {
        "node_id": NODES[1],
        "node_ip": "192.0.2.3",
        "until_s": 4e9,
        "strikes": [
            {"cause": "worker_killed", "time_s": now.time_s - 40},
            {"cause": "hang", "time_s": now.time_s},
        ],
    }
    now.tell("node_kept_out", reason="2 strikes: worker_killed 1, hang 1", data=until)
    now.tell("checkpoint_quarantined", step=40, reason="__0_0.distcp: digest differs")
    now.catalog.quarantine(40, "__0_0.distcp: digest differs")
    now.go_on(2, 35, "rank 1 held up the others", [NODES[0], NODES[2]])


def _raise(now: Story) -> None:
    now.train(10)
    log = b"step 44\n\x1b[31mValueError: bad sample\x1b[0m\nlast words\n"
    now.fs.write_bytes(log_path(now.generation, 0), log)
    raised = {"traceback": "Traceback\n  train.py, line 9\nValueError: bad sample 7"}
    raised["last_lines"] = "last words".splitlines()
    reason = "ValueError: bad sample 7"
    now.tell("rank_failed", world_rank=0, step=now.step, reason=reason, data=raised)
    now.decide("user_exception", 0, reason, then="fail")
    now.tell("run_failed", world_rank=0, step=now.step, reason=f"rank 0 raised {reason}")


def long_run(root: Path, *, num_events: int = 20_000, num_generations: int = 200) -> Story:
    """So many events and generations, written without a sync for each."""
    now = Story(root, "long")
    lines: list[bytes] = []
    now.ledger._extend = lambda file, data: lines.append(data)  # type: ignore[method-assign]
    now.begin(3)
    each = num_events // num_generations - 8
    for number in range(num_generations - 1):
        now.train(each)
        saved = {"bytes": 5000, "stall_s": 0.08, "duration_s": 0.9}
        now.tell("checkpoint_committed", step=now.step - 2, data=saved)
        rank = number % 3
        where = {"last_lines": [], "node_id": NODES[rank], "node_ip": f"192.0.2.{2 + rank}"}
        now.tell("worker_died", world_rank=rank, step=now.step, reason="SIGKILL", data=where)
        now.decide("worker_killed", rank, f"rank {rank} died: SIGKILL")
        now.go_on(3, now.step - 2, f"rank {rank} died: SIGKILL")
    while len(now.told) < num_events:
        now.train(1)
    now.tell("run_finished", step=now.step)
    assert now.ledger._file is not None
    now.ledger._file.write(b"".join(lines))
    now.ledger.close()
    return now
