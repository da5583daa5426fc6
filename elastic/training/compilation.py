"""Whether torch.compile is at work in this process: a phase that no limit of a step fits.

Listens to Dynamo's own callbacks, once something else has imported it: that takes a second.
Must not import ray.
"""

from __future__ import annotations

import sys
import time
from typing import Any

_MODULE = "torch._dynamo.callback"


class Compilation:
    """Since when a compilation runs. One per generation; `close` when it ends."""

    def __init__(self) -> None:
        self.since_s: float | None = None
        """Monotonic; None while nothing compiles."""
        self._handler: Any = None

    def listen(self) -> None:
        """Begin to listen, if torch.compile is in use. Cheap when it is not."""
        module = sys.modules.get(_MODULE)
        handler = getattr(module, "callback_handler", None)
        if self._handler is None and handler is not None:
            self._handler = handler
            handler.register_start_callback(self._begun)
            handler.register_end_callback(self._ended)

    def close(self) -> None:
        """Stop listening."""
        if self._handler is not None:
            self._handler.remove_start_callback(self._begun)
            self._handler.remove_end_callback(self._ended)
            self._handler, self.since_s = None, None

    def _begun(self, _: object) -> None:
        self.since_s = time.monotonic()

    def _ended(self, _: object) -> None:
        self.since_s = None
