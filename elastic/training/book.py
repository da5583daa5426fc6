"""The book of a run without Ray: ledger, metrics and catalog, in the hands of rank 0's process.

Claims the run, says where it resumes, publishes its saves. Knows no process group and no store.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from elastic.policy import suspicion
from elastic.policy.cadence import Cadence
from elastic.policy.events import Record
from elastic.policy.retention import Retention
from elastic.storage.archive import archive_of
from elastic.storage.archiver import ARCHIVED_S, Archiver
from elastic.storage.checkpoints import Catalog
from elastic.storage.claim import RunSpec, claim
from elastic.storage.expected import Expected
from elastic.storage.filesystem import Filesystem
from elastic.storage.late_visibility import wait_for
from elastic.storage.ledger import LedgerWriter, next_life, read_ledger
from elastic.storage.metrics import MetricsWriter
from elastic.storage.readmission import BRING_BACK
from elastic.storage.room import RoomWatch
from elastic.storage.suspects import highest_trusted, rule_on
from elastic.training.coordinator import CommitResult, NoSoundCheckpoint, Orders, Shard
from elastic.training.failed_saves import FULL, clean_up
from elastic.training.membership import TrainingConfig
from elastic.training.pacing import Pacing
from elastic.training.publishing import publish
from elastic.training.wishes import Wishes

logger = logging.getLogger("elastic")

_PROGRESS_S = 5.0
_TELL_S = 1.0


class Launcher:
    """Whoever started the ranks, as they see it. This one says nothing and asks for nothing."""

    what = "ranks of one machine"
    """For the lease: who holds the run, in words."""
    restarts = 0
    """How often it has started this group before."""
    reached_step = -1
    """The last step that those starts finished; -1 where that is not known."""
    may_restart = False
    """Whether it will start the group again if this start fails."""

    @contextmanager
    def training(self, generation: int, world_rank: int) -> Iterator[None]:
        """Around this rank's training, once it knows its place."""
        yield

    def is_stop_asked(self) -> bool:
        """Whether the run shall save and stop. Local, no waiting."""
        return False

    def reached(self, step: int) -> None:
        """Rank 0 has finished this step."""

    def tell(self, status: Mapping[str, Any]) -> None:
        """How the run stands, on rank 0, about once a second: the keys of `ElasticTrainer.fit`."""


class Book:
    """What rank 0 writes about the run. Called from its training, save and reporter threads."""

    def __init__(
        self, config: TrainingConfig, spec: RunSpec, keep: Retention, launcher: Launcher
    ) -> None:
        """Raises what `claim` raises, and then nothing was written."""
        filesystem = Filesystem.at(config.run_url)
        self._claim = claim(filesystem, spec, launcher.what)
        self._past = read_ledger(filesystem)
        self._ledger = LedgerWriter(filesystem, next_life(filesystem), uuid.uuid4().hex[:8])
        self._metrics = MetricsWriter(filesystem)
        self._catalog = Catalog(filesystem, self._claim.run_file.run_id)
        self._expected = Expected(self._catalog)
        self._expected.hear_past(self._past)
        self._passed_by: list[Record] = []
        self._room = RoomWatch(filesystem)
        self._short = ""
        self._keep = keep
        self._launcher = launcher
        self._lock = threading.RLock()
        self._cadence = Cadence(config.save, config.mtbf_s)
        self._cadence.hear_past(self._past)
        self._pacing = Pacing(self._cadence, record=self._record_as_told, order=self._order)
        self._save_every_s: float | None = None
        self._generation = max((event.generation for event in self._past), default=-1) + 1
        self._resumed: int | None = None
        self._protected: set[int] = set()
        self._recorded_s = self._told_s = time.monotonic()
        self._archiver = self._begin_archiving()
        self._wishes = Wishes(filesystem, self._claim.lease.epoch, self._record_wish)
        self._status: dict[str, Any] = {
            "state": "STARTING",
            "reason": "",
            "phase": "",
            "loss": None,
            "tokens_per_s": None,
            "generation": self._generation,
            "world_size": 0,
            "step": -1,
            "checkpoint_step": -1,
            "restarts": launcher.restarts,
            "warnings": [],
        }

    def choose(self) -> tuple[str, int, int | None]:
        """The run's id, the generation that begins, and the step to resume; None for step 0.

        Raises:
            NoSoundCheckpoint: checkpoints were committed and none is complete now.
        """
        self._catalog.sweep(self._generation)
        wait_for(self._catalog, self._expected.newest(), tell=self._record_as_told)
        found = highest_trusted(self._catalog)
        self._resumed = None if found is None else found.step
        self._short = "" if found is None else self._room.look(found.bytes)
        if found is None and (refusal := self._expected.refusal()):
            raise NoSoundCheckpoint(refusal)
        self._passed_by = [] if found is None else self._expected.passed_by(found.step)
        self._protected = set() if found is None else {found.step}
        return self._claim.run_file.run_id, self._generation, self._resumed

    def begin(self, world_size: int) -> None:
        """The group is connected."""
        step = -1 if self._resumed is None else self._resumed
        begins = "begins at step 0" if self._resumed is None else f"resumes from step {step}"
        plural = "" if world_size == 1 else "s"
        reason = f"{self._launcher.what}: {world_size} rank{plural}, {begins}"
        self._status.update(
            reason=reason, world_size=world_size, step=max(0, step), checkpoint_step=step
        )
        data = {
            "run_id": self._claim.run_file.run_id,
            "name": self._claim.run_file.name,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "under": self._launcher.what,
            "restarts": self._launcher.restarts,
            "lease_epoch": self._claim.lease.epoch,
        }
        if self._launcher.restarts:
            # Before this life's first word, since it is about the end of the life before.
            self._record(
                "failure_decided",
                reason=f"{self._launcher.what} started the group again "
                f"(restart {self._launcher.restarts})",
                data={"cause": "launcher restart", "then": "restart"},
            )
        self._record("run_started", data=data)
        self._record_passed_by(self._passed_by)
        self._record_short(self._short)
        for change in self._claim.changed:
            self._record("config_changed", reason=str(change))
        self._record(
            "generation_started", step=step, reason=reason, data={"world_size": world_size}
        )

    def hear(self, kind: str, data: Mapping[str, Any]) -> None:
        """A word of rank 0: see `Coordinator.notify`."""
        if kind == "restored_state":
            self._on_restored(int(data["step"]), bool(data["resumed"]))
        elif kind == "first_step":
            self._on_first_step(int(data["step"]))
        elif kind == "progress":
            self._on_progress(data)
        elif kind == "save_skipped":
            with self._lock:
                self._pacing.skipped(self._generation, int(data["step"]), data["since_s"])
        elif kind == "local_tier":
            self._record(data["kind"], reason=data["reason"])
        elif kind == "weights_loaded":
            self._record("weights_loaded", step=0, reason=f"from {data['from']}")
        elif kind == "data_read":
            self._record(kind, step=int(data["step"]), reason=data["reason"], data=data["facts"])
        elif kind == "rng_left_out":
            streams = ", ".join(data["streams"])
            self._record(
                "rng_left_out",
                reason=f"random streams not restored: {streams}; one side has no such device",
            )

    def _on_restored(self, step: int, resumed: bool) -> None:
        self._protected = set()
        self._resumed = step
        self._metrics.start(self._generation, step + 1, time.time())
        self._record("resumed" if resumed else "started", step=step)
        self._status["state"] = "RUNNING"

    def _on_first_step(self, step: int) -> None:
        if self._launcher.restarts and self._past:
            resumed = 0 if self._resumed is None else self._resumed
            self._record(
                "recovered",
                step=step,
                reason=f"restarted by {self._launcher.what}",
                data={
                    "lost_steps": max(0, self._launcher.reached_step - resumed),
                    "new_world_size": self._status["world_size"],
                },
            )

    def _on_progress(self, data: Mapping[str, Any]) -> None:
        status, now_s = self._status, time.monotonic()
        for row in data["rows"]:
            values = row["values"]
            self._metrics.add(self._generation, row["step"], row["time_s"], values)
            status["loss"] = values.get("loss", status["loss"])
            if values.get("step_s", 0.0) > 0:
                status["tokens_per_s"] = values.get("tokens", 0.0) / values["step_s"]
        with self._lock:
            self._pacing.look(self._generation, data["rows"])
        status["phase"] = data["phase"]
        if data["step"] > status["step"]:
            status["step"] = data["step"]
            self._launcher.reached(data["step"])
        if now_s - self._recorded_s >= _PROGRESS_S:
            self._recorded_s = now_s
            self._record_progress()
        if now_s - self._told_s >= _TELL_S:
            self._told_s = now_s
            self._launcher.tell(dict(status))
            try:
                self._wishes.look()
            except Exception as error:  # noqa: BLE001 - storage clients raise classes of their own
                logger.warning("cannot look for requests of people: %s", error)

    def orders(self) -> Orders:
        """What people want of the group now, as rank 0 has heard it so far, and how often to
        save."""
        return Orders(
            leave=self._wishes.stop,
            saves_asked=self._wishes.saves,
            save_every_s=self._save_every_s,
        )

    def commit(self, shards: Sequence[Shard]) -> CommitResult:
        """Publish the save that these shards are the whole of."""
        failures = [shard.failure for shard in shards if shard.failure]
        step = shards[0].step
        if failures:
            return self._failed(shards[0], failures[0])
        try:
            self._claim.lease.check()
            self._metrics.flush()
            done = publish(self._catalog, shards, self._keep, self._protected, self._archiver)
        except Exception as error:  # noqa: BLE001 - whatever storage raises fails the save
            return self._failed(shards[0], f"{type(error).__name__}: {error}")
        self._record("checkpoint_committed", step=step, data=done.record())
        self._record_short(self._room.look(done.bytes))
        self._status["checkpoint_step"] = step
        for old in done.removed:
            self._record("checkpoint_removed", step=old, reason="retention")
        return CommitResult(committed=True)

    def _record_short(self, words: str) -> None:
        if words:
            self._record("storage_short", reason=words)

    def _failed(self, shard: Shard, reason: str) -> CommitResult:
        self._record("checkpoint_failed", step=shard.step, reason=reason)
        right = self._claim.lease.check
        for old in clean_up(self._catalog, shard, reason, self._keep, self._protected, right):
            self._record("checkpoint_removed", step=old, reason=FULL)
        return CommitResult(committed=False, reason=reason)

    def step_back(self, step: int, reason: str) -> int:
        """The next older checkpoint than this bad one, which is put aside."""
        self._record("checkpoint_quarantined", step=step, reason=reason)
        self._expected.gone([step])
        if self._catalog.inspect(step).complete:
            self._catalog.quarantine(step, reason)
        found = highest_trusted(self._catalog, below=step)
        if found is None:
            raise NoSoundCheckpoint(
                f"no checkpoint with sound bytes is left; the last tried, step {step}: {reason}. "
                f"{BRING_BACK}, or use another name"
            )
        self._record_passed_by(self._expected.passed_by(found.step))
        self._protected = {found.step}
        return found.step

    def doubt(self, loaded_step: int, loss_step: int, loss: str) -> tuple[str, str]:
        """What follows from a loss that is not finite, and why; see `Coordinator.doubt`."""
        doubt = suspicion.Doubt(
            generation=self._generation, loaded_step=loaded_step, loss_step=loss_step, loss=loss
        )
        past = suspicion.fold(self._past)
        ruling = rule_on(self._catalog, doubt, past, time_s=time.time())
        if ruling.record is not None:
            self._record_as_told(ruling.record)
        return str(ruling.then), ruling.reason

    def end(self, outcome: str, step: int, reason: str) -> None:
        """The run is over for this process: `finished`, `stopped` or `failed`."""
        self._metrics.flush()
        if self._archiver is not None:
            self._archiver.close(ARCHIVED_S if outcome == "finished" else 0.0)
        self._record_progress()
        kind, state = f"run_{outcome}", outcome.upper()
        if outcome == "failed" and self._launcher.may_restart:
            # FAILED is for good, and this is not.
            kind, state = "generation_ended", "STARTING"
            reason = f"{reason}; {self._launcher.what} starts the group again"
        self._record(kind, step=step, reason=reason)
        self._launcher.tell({**self._status, "state": state, "reason": reason})
        self._ledger.close()
        self._claim.lease.release()

    def _begin_archiving(self) -> Archiver | None:
        """Raises `ArchiveRefused`; then the run is nobody's again."""
        archive = archive_of(self._claim.run_file)
        if archive is None:
            return None
        try:
            archive.check(self._past)
        except BaseException:
            self._claim.lease.release()
            raise

        def tell(kind: str, step: int, reason: str, data: dict[str, Any]) -> None:
            self._record(kind, step=step, reason=reason, data=data)

        check = self._claim.lease.check
        return Archiver(self._catalog, archive, self._keep, tell=tell, before_publishing=check)

    def _order(self, generation: int, every_s: float) -> None:
        self._save_every_s = every_s

    def _record_as_told(self, record: Record) -> None:
        self._record(record.kind, step=record.step, reason=record.reason, data=record.data)

    def _record_passed_by(self, found: Sequence[Record]) -> None:
        for word in found:
            warning = f"checkpoint passed by, step {word.step}: {word.reason}"
            logger.warning("%s", warning)
            self._status["warnings"] = [*self._status["warnings"], warning]
            self._record_as_told(word)

    def _record_wish(self, kind: str, *, reason: str, data: Mapping[str, Any]) -> None:
        self._record(kind, step=self._status["step"], reason=reason, data=data)

    def _record_progress(self) -> None:
        status = self._status
        shown = {key: status[key] for key in ("phase", "loss", "tokens_per_s", "state")}
        self._record("progress", step=status["step"], data=shown)

    def _record(
        self, kind: str, *, step: int = -1, reason: str = "", data: Mapping[str, Any] | None = None
    ) -> None:
        with self._lock:
            try:
                written = self._ledger.append(
                    kind,
                    generation=self._generation,
                    step=step,
                    reason=reason,
                    data=data,
                    time_s=time.time(),
                )
            except OSError as error:
                # A disk that takes nothing more does not end the run.
                logger.error("the ledger could not take %s: %s", kind, error)
                return
            self._cadence.hear_past([written])
