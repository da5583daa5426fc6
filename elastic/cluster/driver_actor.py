"""The driver as a Ray actor: what the owner of a run and its ranks may call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elastic.cluster.driver import Driver
from elastic.cluster.driver_config import DriverConfig
from elastic.cluster.ray_internals import Controller
from elastic.policy.coverage import Resume, Snapshot
from elastic.policy.suspicion import Doubt
from elastic.storage.access import StorageRefused, check_access
from elastic.storage.filesystem import Filesystem
from elastic.training.coordinator import CommitResult, Shard


class DriverActor(Controller):
    """A `Driver` with a Ray Train controller for its hands. Lives as long as the job's script."""

    def __init__(self, *, driver_config: DriverConfig, **arguments: Any) -> None:
        self._refused: StorageRefused | None = None
        filesystem = Filesystem.at(driver_config.run_url)
        try:
            if not filesystem.is_local:  # else the submitting process, on this node, has looked
                check_access(filesystem, "the driver's process")
        except StorageRefused as error:
            # `run` raises it: what an actor raises while it is made reaches nobody as what it is.
            self._refused = error
            return
        super().__init__(**arguments)
        self._driver = Driver(driver_config, self)

    async def run(self) -> None:
        """Train until the run is over; then `outcome` tells how it ended."""
        self._check()
        await self._driver.run()

    async def stop(self, reason: str, within_s: float | None = None) -> None:
        """Ask for a save at an agreed step and a stop; see `Driver.stop`."""
        self._driver.stop(reason, within_s)

    async def status(self) -> dict[str, Any]:
        """Where the run stands, for a progress line."""
        self._check()
        return self._driver.status()

    def _check(self) -> None:
        if self._refused is not None:
            raise self._refused

    async def outcome(self) -> dict[str, Any]:
        """How the run ended: outcome, reason, and the figures of its summary."""
        return self._driver.outcome()

    async def rank_event(
        self, generation: int, world_rank: int, kind: str, data: Mapping[str, Any]
    ) -> None:
        """A rank's word: see `Coordinator.notify`."""
        self._driver.rank_event(generation, world_rank, kind, data)

    async def commit(self, shard: Shard) -> CommitResult:
        """A rank's shard of a save; answers when the save is committed or has failed."""
        return await self._driver.commit(shard)

    async def step_back(self, generation: int, step: int, reason: str) -> tuple[int | None, str]:
        """Quarantine a checkpoint whose bytes are bad; the next older one, or why there is none."""
        return await self._driver.step_back(generation, step, reason)

    async def reject_snapshot(
        self, generation: int, snapshot: Snapshot, reason: str
    ) -> tuple[Resume | None, str]:
        """What to resume in place of a snapshot that cannot be loaded, or why there is nothing."""
        return await self._driver.reject_snapshot(generation, snapshot, reason)

    async def doubt(self, doubt: Doubt) -> tuple[str, str]:
        """A loss that is not finite: what follows, and why; see `Coordinator.doubt`."""
        return await self._driver.doubt(doubt)
