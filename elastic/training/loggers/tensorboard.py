"""TensorBoard as a logger: event files that its own reader shows with one value for each step."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

_RESTARTS = "elastic/restarts"


class TensorBoardLogger:
    """Scalars by step and, as text under `elastic/restarts`, what happened to the run.

    `log_dir` is a directory that the head node can write to, or any URL that TensorBoard can; it
    is this run's alone. After a restart the files say from which step on older values no longer
    count, and TensorBoard leaves those out.
    """

    def __init__(self, log_dir: str) -> None:
        if importlib.util.find_spec("tensorboard") is None:
            raise ImportError(
                "TensorBoardLogger needs the package tensorboard: install elastic-ray[tensorboard]"
            )
        self._log_dir = log_dir
        self._writer: Any = None

    def rewind(self, step: int) -> None:
        """See `Logger`."""
        self.close()
        self._writer = _writer(self._log_dir, step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See `Logger`."""
        for name, value in values.items():
            self._opened().add_scalar(name, value, step)

    def annotate(self, step: int, text: str) -> None:
        """See `Logger`."""
        # It is shown as Markdown, and holds the words of exceptions.
        shown = "\n".join(f"    {line}" for line in text.splitlines())
        self._opened().add_text(_RESTARTS, shown, step)

    def flush(self) -> None:
        """See `Logger`."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """See `Logger`."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _opened(self) -> Any:
        if self._writer is None:
            self._writer = _writer(self._log_dir, None)
        return self._writer


def _writer(log_dir: str, purge_step: int | None) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(log_dir, purge_step=purge_step)
