"""The lookout: what could run now, asked of Ray off the event loop, and told as an event."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from elastic.cluster import capacity
from elastic.cluster.driver_config import DriverConfig
from elastic.cluster.group import Group
from elastic.cluster.kept_out import KeptOutNodes
from elastic.cluster.ray_internals import Controller
from elastic.policy.events import CapacitySeen, Event

logger = logging.getLogger("elastic")


class Lookout:
    """Use from the event loop only."""

    def __init__(
        self,
        config: DriverConfig,
        host: Controller,
        group: Group,
        kept_out: KeptOutNodes,
        *,
        post: Callable[[Event], None],
        world_size: Callable[[], int],
    ) -> None:
        self._config = config
        self._host = host
        self._group = group
        self._kept_out = kept_out
        self._post = post
        self._world_size = world_size
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="elastic-look")
        self.is_looking = False

    async def look(self) -> None:
        """Post `CapacitySeen`, and tell Ray's autoscaler what the run would take."""
        self._kept_out.settle()
        self.is_looking = True
        try:
            found = await asyncio.get_running_loop().run_in_executor(
                self.thread,
                lambda: capacity.look(
                    self._config.resources_per_worker,
                    self._group.held(),
                    self._config.label_selector,
                    mix_accelerators=self._config.mix_accelerators,
                    kept_out=self._kept_out.told,
                ),
            )
            self._kept_out.saw(found.nodes)
            self._host.place_on(found.selector)
            event = CapacitySeen(num_workers=found.num_workers, note=found.note)
            await self._group.on_thread(self._host.ask_for_resources)
        except Exception as error:  # noqa: BLE001 - unknown is not none: ask again
            logger.warning("could not read Ray's node table: %s", error)
            event = CapacitySeen(
                num_workers=self._world_size(), note=f"node table unreadable: {error}"
            )
        finally:
            self.is_looking = False
        self._post(event)
