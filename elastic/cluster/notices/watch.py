"""The watch for notices: asks every source at its own interval, each in a thread of its own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from elastic.cluster.notices.notice import Notice, Source

logger = logging.getLogger("elastic")


class Watch:
    """Calls `on_notice` once for each new notice, from the threads of its sources.

    A source that cannot be asked is told once, and asked again.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        on_notice: Callable[[Notice], None],
        on_trouble: Callable[[str], None] = logger.warning,
    ) -> None:
        self._on_notice = on_notice
        self._on_trouble = on_trouble
        self._ended = threading.Event()
        for source in sources:
            threading.Thread(
                target=self._follow, args=(source,), name=f"elastic-{source.name}", daemon=True
            ).start()

    def end(self) -> None:
        """Ask no more. Does not wait for a question that is held back just now."""
        self._ended.set()

    def _follow(self, source: Source) -> None:
        heard: Notice | None = None
        trouble = ""
        while not self._ended.is_set():
            try:
                notice = source.poll()
            except Exception as error:  # noqa: BLE001 - unknown is not a notice: ask again
                if trouble != (trouble := f"{type(error).__name__}: {error}"):
                    self._on_trouble(f"no notices from {source.name} for now: {trouble}")
            else:
                trouble = ""
                if notice is not None and notice != heard:
                    self._on_notice(notice)
                heard = notice
            self._ended.wait(source.interval_s)
