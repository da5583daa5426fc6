"""What Ray Train's own workers have to tell: reports of `ray.train.report`, and late errors.

Deaths do not come from here: see `Group`. Makes events of what it finds, and decides nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from elastic.cluster.ray_internals import Controller
from elastic.policy.events import Event, RankError, RankFailed

logger = logging.getLogger("elastic")

_POLL_S = 0.25

OnThread = Callable[..., Awaitable[Any]]


class Polling:
    """Use from the event loop only. `on_thread` does what blocks, in the group's own order."""

    def __init__(
        self, host: Controller, *, on_thread: OnThread, post: Callable[[Event], None]
    ) -> None:
        self._host = host
        self._on_thread = on_thread
        self._post = post

    async def until(self, generation: int, is_over: Callable[[], bool]) -> None:
        """Collect what ranks give to `ray.train.report`, and errors of the serving loop itself."""
        while True:
            await asyncio.sleep(_POLL_S)
            if is_over():
                return
            try:
                status = await self._on_thread(self._poll_once, is_over)
                errors = {} if is_over() else self._host.hand_on(status)
            except Exception as problem:  # noqa: BLE001 - a user's callback, or an unknown state
                logger.warning("polling generation %d: %s", generation, problem)
                continue
            for rank, error in errors.items():
                # Deaths come by the watch.
                if not type(error).__name__.startswith("WorkerHealthCheck"):
                    inner = getattr(error, "_base_exc", error)
                    self.post_error(generation, rank, inner, "", traceback=str(error))

    def _poll_once(self, is_over: Callable[[], bool]) -> Any:
        return None if is_over() else self._host.poll_reports(timeout_s=0.1)

    def post_error(
        self,
        generation: int,
        rank: int,
        error: BaseException,
        what: str,
        *,
        is_victim: bool = False,
        traceback: str = "",
    ) -> None:
        """Make an event of an exception."""
        found = RankError(
            world_rank=rank,
            type_name=type(error).__name__,
            message=f"{what}: {error}" if what else str(error),
            traceback=traceback,
            is_victim=is_victim,
        )
        self._post(RankFailed(generation=generation, error=found))


def first_line(error: BaseException) -> str:
    """The error's class and the first line of its text, at most 300 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]
