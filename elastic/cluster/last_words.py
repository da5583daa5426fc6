"""The last words of a rank that died: what its log ends with.

A failed rank sends its own along; a dead one cannot. Reads storage off the event loop, and not for
long: a death whose log cannot be read is still a death.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor

from elastic.storage.filesystem import Filesystem
from elastic.storage.rank_logs import WrittenLog

logger = logging.getLogger("elastic")

_WAIT_S = 1.0


class LastWords:
    """Reads the logs of a run. Use from the event loop only."""

    def __init__(self, filesystem: Filesystem) -> None:
        self._filesystem = filesystem
        # One thread: several deaths are told in the order in which they came.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="elastic-last-words")

    async def of(self, generation: int, world_rank: int) -> tuple[str, ...]:
        """At most 20 lines and 4 kB, readable; none if they cannot be read within a second."""
        log = WrittenLog(self._filesystem, generation, world_rank)
        reading = asyncio.get_running_loop().run_in_executor(self._thread, log.last_lines)
        try:
            return tuple(await asyncio.wait_for(reading, _WAIT_S))
        except Exception as error:  # noqa: BLE001 - storage clients raise classes of their own
            logger.warning("cannot read the last lines of rank %d: %r", world_rank, error)
            return ()
