"""The claimed run: its directory in the driver's hands, from the claim to the release."""

from __future__ import annotations

import logging
import time
import uuid

from elastic.cluster import whereabouts
from elastic.cluster.driver_config import DriverConfig
from elastic.cluster.inheritance import Inheritance
from elastic.cluster.injections import Injections
from elastic.cluster.own_page import OwnPage
from elastic.cluster.ray_metrics import RayMetrics
from elastic.cluster.recovery import Recovery
from elastic.policy import budgets, fitting
from elastic.policy.cadence import Cadence
from elastic.policy.events import Record
from elastic.policy.situation import Situation
from elastic.storage.archive import archive_of
from elastic.storage.checkpoints import Catalog
from elastic.storage.claim import claim
from elastic.storage.expected import PASSED_BY
from elastic.storage.filesystem import Filesystem
from elastic.storage.late_visibility import AWAITED
from elastic.storage.ledger import LedgerWriter, next_life, read_ledger
from elastic.storage.rollback import roll_back, steps_above
from elastic.training.loggers.fan_out import FannedOutMetrics, FanOut

logger = logging.getLogger("elastic")

_WARNED = (AWAITED, PASSED_BY, "archive_failed", "storage_short", "local_disk_failed")


class ClaimedRun:
    """All that writes to the run. Nothing is written without the claim, nor after the release.

    Raises what `claim` and `roll_back` raise; then the run is nobody's again.
    """

    def __init__(self, config: DriverConfig) -> None:
        self.filesystem = filesystem = Filesystem.at(config.run_url)
        self._rules = config.rules
        self._take_over = config.take_over
        self._claim = claim(filesystem, config.spec, whereabouts.in_words())
        self.run_id = self._claim.run_file.run_id
        self.epoch = self._claim.lease.epoch
        try:
            self.past = read_ledger(filesystem)
            """What earlier lives of the driver have recorded."""
            self._warnings: list[str] = []
            self.cadence = Cadence(config.save, config.mtbf_s)
            """How often to save; it hears all that is recorded."""
            self.cadence.hear_past(self.past)
            self.inheritance = Inheritance(config.take_over, self.past)
            self.catalog = Catalog(filesystem, self.run_id)
            self.archive = archive_of(self._claim.run_file)
            if self.archive is not None:
                self.archive.check(self.past, is_again=config.take_over is not None)
            if config.from_step is not None:
                # Refuses before anything is written.
                steps_above(self.catalog, config.from_step, self.archive)
            self._ledger = LedgerWriter(filesystem, next_life(filesystem), uuid.uuid4().hex[:8])
            self._injections = Injections()
            self._loggers = FanOut(config.loggers)
            self._ray_metrics = RayMetrics(self._claim.run_file.name)
            self.metrics = FannedOutMetrics(filesystem, self._loggers)
            if config.from_step is not None:
                why = "asked for on submission"
                roll_back(
                    self.catalog,
                    self._ledger,
                    config.from_step,
                    why,
                    time_s=time.time(),
                    archive=self.archive,
                )
            self.page = OwnPage(filesystem.url, config.page, config.page_token)
        except BaseException:
            self._claim.lease.release()
            raise

    def told(self) -> dict[str, object]:
        """For whoever submitted it: where its page is, and warnings so far, one a line."""
        return {**self.page.where(), "warnings": list(self._warnings)}

    def last_generation(self) -> int:
        """Of earlier lives; -1 when there was none."""
        return max((event.generation for event in self.past), default=-1)

    def situation(self, time_s: float) -> Situation:
        """Where the run stands, as earlier lives of the driver have recorded it.

        `time_s` is monotonic. What failures have used up is counted on, unless the run has ended.
        """
        past = budgets.since_last_end(self.past)
        return Situation(
            generation=self.last_generation(),
            since_s=time_s,
            budgets=budgets.fold(past),
            fitting=fitting.fold(past),
        )

    def before_publishing(self) -> None:
        """The last thing before a commit, on the storage thread. Raises `LeaseLost`."""
        self.check_lease()
        self.metrics.flush()

    def check_lease(self) -> None:
        """From any thread. Raises `LeaseLost` if another driver has taken the run over."""
        self._claim.lease.check()

    def record(self, record: Record) -> None:
        """Into the ledger; a disk that takes nothing more does not end the run."""
        time_s = time.time()
        record = self._injections.marked(record, time_s)
        self.cadence.hear(record.kind, record.step, record.data, time_s)
        self._loggers.heard(record.kind, record.step, record.reason, record.data)
        self._ray_metrics.heard(record, time_s)
        if record.kind in _WARNED:
            what = record.kind.replace("_", " ")
            at = f", step {record.step}" if record.step >= 0 else ""
            self._warnings.append(f"{what}{at}: {record.reason}")
        try:
            self._ledger.append(
                record.kind,
                generation=record.generation,
                step=record.step,
                world_rank=record.world_rank,
                reason=record.reason,
                data=record.data,
                time_s=time_s,
            )
        except OSError as error:
            logger.error("the ledger could not take %s: %s", record.kind, error)

    def record_start(self, recovery: Recovery) -> None:
        """Who has taken the run up, and what is different from the last time."""
        before = self._take_over
        if before is not None:
            generation, step = self.last_generation(), self.inheritance.step
            lost = Record(kind="driver_lost", generation=generation, step=step, reason=before.cause)
            self.record(lost)
        data = {
            "run_id": self.run_id,
            "name": self._claim.run_file.name,
            **whereabouts.in_fields(),
            "lease_epoch": self.epoch,
            "rules": {**vars(self._rules), "mesh": str(self._rules.mesh)},
            "page_url": self.page.url,
        }
        if before is not None:
            data["take_over"] = before.number
        self.record(Record(kind="run_started", data=data))
        for change in self._claim.changed:
            self.record(Record(kind="config_changed", reason=str(change)))
        if before is not None:
            took_s = max(0.0, time.time() - before.noticed_s)
            told: dict[str, object] = {"take_over": before.number, "took_s": took_s}
            self.record(Record(kind="driver_took_over", reason=before.cause, data=told))
            recovery.inherit(
                before.cause,
                took_s,
                world_size=self.inheritance.world_size,
                step=self.inheritance.step,
                count=self.inheritance.num_recovered,
            )

    def close(self) -> None:
        """The last event was recorded: give the run back."""
        self.page.close()
        self._ledger.close()
        self._claim.lease.release()
        self._loggers.close()  # last, since it may take its time
