"""What ranks tell the driver, turned into events, ledger records, metrics and recovery times."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from elastic.cluster.recovery import Recovery
from elastic.cluster.standstill import Standstill
from elastic.policy.events import (
    Event,
    Progressed,
    RankError,
    RankFailed,
    RankFinished,
    RankLeft,
    Record,
)
from elastic.storage.metrics import MetricsWriter
from elastic.training.pacing import Pacing

logger = logging.getLogger("elastic")

Data = Mapping[str, Any]

NO_WORD: Data = {"phase": "", "loss": None, "tokens_per_s": None}
"""What is known of rank 0 before it has spoken."""
_NO_SNAPSHOTS: Data = {"every": None, "step": None, "kept_s": None, "skipped": 0, "problem": ""}


class RankWords:
    """Listens to the ranks of the current generation, one method for each kind of word."""

    def __init__(
        self,
        *,
        recovery: Recovery,
        metrics: MetricsWriter,
        post: Callable[[Event], None],
        record: Callable[[Record], None],
        on_connected: Callable[[int], None],
        on_restored: Callable[[], None],
        standstill: Standstill,
        pacing: Pacing,
    ) -> None:
        self._recovery = recovery
        self._metrics = metrics
        self._post = post
        self._record = record
        self._on_connected_rank = on_connected
        self._on_restored = on_restored
        self._standstill = standstill
        self._pacing = pacing
        self._generation = -1
        self._world_size = 0
        self._restored: set[int] = set()
        self._told_of_disks: set[tuple[str, str]] = set()
        self._posted_step = -1
        self._source = ""
        self._told_of_snapshots: set[tuple[object, ...]] = set()
        self.resumed_step = -1
        """Where the current generation began; -1 before all its ranks have said so."""
        self.latest: dict[str, Any] = dict(NO_WORD)
        """Rank 0's phase, loss and speed, for people; and of a run with them its `snapshots`: the
        newest whole one that is kept (`step`, `kept_s` in wall time), how many this driver saw
        `skipped`, and the `problem` of one that has failed since."""

    def begin(self, generation: int, world_size: int) -> None:
        """From now on only this generation is listened to."""
        self._recovery.begin_start()  # what the one before still told is no part of this start
        self._generation, self._world_size = generation, world_size
        self._restored, self._told_of_snapshots = set(), set()
        self.resumed_step = self._posted_step = -1
        self._standstill.begin(world_size)

    def hear(self, generation: int, rank: int, kind: str, data: Data) -> None:
        """One word of one rank; that of an older generation is not heard."""
        if generation == self._generation:
            getattr(self, f"_on_{kind}")(rank, data)

    def _on_connected(self, rank: int, data: Data) -> None:
        self._recovery.took("connect", data["connect_s"])
        self._on_connected_rank(rank)

    def _on_restored_state(self, rank: int, data: Data) -> None:
        self._recovery.took("build", data["build_s"])
        self._recovery.took("load", data["load_s"])
        self._restored.add(rank)
        if len(self._restored) < self._world_size:
            return
        self.resumed_step = int(data["step"])
        self._on_restored()
        self._metrics.start(self._generation, self.resumed_step + 1, time.time())
        self._source = data["source"]
        snapshots = self.latest.get("snapshots")
        if snapshots and (self._source != "memory" or snapshots["step"] != self.resumed_step):
            found = self.resumed_step if self._source == "memory" else None
            self._snapshots_are(step=found, kept_s=None)  # what was not resumed is dropped
        kind = "resumed" if data["resumed"] else "started"
        told: dict[str, object] = {"source": self._source} if self._source else {}
        self._record(
            Record(kind=kind, generation=self._generation, step=self.resumed_step, data=told)
        )

    def _on_first_step(self, rank: int, data: Data) -> None:
        if rank != 0:
            return
        lost_steps = self._recovery.lost_steps(self.resumed_step)
        found = self._recovery.finish(float(data["first_step_s"]))
        if found is None:
            return
        self._record(
            Record(
                kind="recovered",
                generation=self._generation,
                step=int(data["step"]),
                reason=self._recovery.reason,
                data={
                    "lost_steps": lost_steps,
                    "source": self._source,
                    "old_world_size": self._recovery.old_world_size,
                    "new_world_size": self._world_size,
                    "phases_s": found,
                },
            )
        )

    def _on_progress(self, rank: int, data: Data) -> None:
        step = int(data["step"])
        self._recovery.reached(step)
        self._standstill.heard(rank, data["heartbeat"])
        if rank != 0:
            return
        self.latest["phase"] = data["phase"]
        slowest_s = max((row["values"].get("step_s", 0.0) for row in data["rows"]), default=None)
        for row in data["rows"]:
            values = row["values"]
            self._metrics.add(self._generation, row["step"], row["time_s"], values)
            self.latest["loss"] = values.get("loss", self.latest["loss"])
            if values.get("step_s", 0.0) > 0:
                self.latest["tokens_per_s"] = values.get("tokens", 0.0) / values["step_s"]
        self._pacing.look(self._generation, data["rows"])
        if step > self._posted_step:
            self._posted_step = step
            self._post(
                Progressed(
                    generation=self._generation,
                    step=step,
                    step_s=slowest_s,
                    save_age_s=data["heartbeat"]["save_age_s"],
                )
            )

    def _on_save_skipped(self, rank: int, data: Data) -> None:
        self._pacing.skipped(self._generation, int(data["step"]), data["since_s"])

    def _on_snapshots_on(self, rank: int, data: Data) -> None:
        self._snapshots_are(every=int(data["every"]))

    def _on_snapshot_kept(self, rank: int, data: Data) -> None:
        """All ranks' parts of it are kept."""
        step = int(data["step"])
        self._snapshots_are(step=step, kept_s=time.time(), problem="")
        self._tell_of_snapshot(
            "snapshot_kept",
            step,
            "the first of this generation: its later ones are not written down, and `elastic "
            "status` tells the newest",
            data={name: data[name] for name in ("bytes", "stall_s", "took_s")},
        )

    def _on_snapshot_skipped(self, rank: int, data: Data) -> None:
        skipped = self.latest.get("snapshots", _NO_SNAPSHOTS)["skipped"]
        self._snapshots_are(skipped=skipped + 1)
        why = f"{data['why']}; the next ones skipped for this are counted in `elastic status` only"
        self._tell_of_snapshot("snapshot_skipped", int(data["step"]), why)

    def _on_snapshot_failed(self, rank: int, data: Data) -> None:
        self._snapshots_are(problem=data["reason"])
        self._tell_of_snapshot("snapshot_failed", int(data["step"]), data["reason"], rank=rank)

    def _snapshots_are(self, **now: object) -> None:
        self.latest["snapshots"] = {**self.latest.get("snapshots", _NO_SNAPSHOTS), **now}

    def _tell_of_snapshot(
        self, kind: str, step: int, reason: str, *, rank: int = -1, data: Data | None = None
    ) -> None:
        """Written down once a generation: at a short interval it would fill the ledger."""
        if (kind, rank, reason) in self._told_of_snapshots:
            return
        self._told_of_snapshots.add((kind, rank, reason))
        if kind != "snapshot_kept":
            logger.warning("%s, step %d: %s", kind, step, reason)
        self._record(
            Record(
                kind=kind,
                generation=self._generation,
                world_rank=rank,
                step=step,
                reason=reason,
                data=dict(data or {}),
            )
        )

    def _on_weights_loaded(self, rank: int, data: Data) -> None:
        if rank == 0:
            told = f"from {data['from']}"
            generation = self._generation
            self._record(Record(kind="weights_loaded", generation=generation, step=0, reason=told))

    def _on_data_read(self, rank: int, data: Data) -> None:
        self._record(
            Record(
                kind="data_read",
                generation=self._generation,
                step=int(data["step"]),
                reason=data["reason"],
                data=data["facts"],
            )
        )

    def _on_local_tier(self, rank: int, data: Data) -> None:
        """A node's own disk: each of its ranks says so when that fails, and once is enough."""
        kind = str(data["kind"])
        if (
            kind not in ("local_copy_damaged", "local_disk_read")
            and (kind, data["host"]) in self._told_of_disks
        ):
            return
        self._told_of_disks.add((kind, data["host"]))
        self._record(
            Record(kind=kind, generation=self._generation, world_rank=rank, reason=data["reason"])
        )

    def _on_rng_left_out(self, rank: int, data: Data) -> None:
        streams = ", ".join(data["streams"])
        self._record(
            Record(
                kind="rng_left_out",
                generation=self._generation,
                world_rank=rank,
                reason=f"random streams not restored: {streams}; one side has no such device",
            )
        )

    def _on_failed(self, rank: int, data: Data) -> None:
        self._standstill.ended(rank)
        self._recovery.reached(int(data["step"]))
        error = RankError(
            world_rank=rank,
            type_name=data["type_name"],
            message=data["message"],
            traceback=data["traceback"],
            is_victim=data["is_victim"],
            last_lines=tuple(data["last_lines"]),
            step=int(data["step"]),
        )
        self._post(RankFailed(generation=self._generation, error=error))

    def _on_left(self, rank: int, data: Data) -> None:
        self._standstill.ended(rank)
        self._recovery.reached(int(data["step"]))
        self._post(RankLeft(generation=self._generation, world_rank=rank, step=int(data["step"])))

    def _on_finished(self, rank: int, data: Data) -> None:
        self._standstill.ended(rank)
        self._post(
            RankFinished(generation=self._generation, world_rank=rank, step=int(data["step"]))
        )
