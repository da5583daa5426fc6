"""Quiet: what torch tells of itself in the ranks of `bench checkpoint`, kept off the terminal.

Warnings and errors stay. Must not import elastic: DCP's process imports this module.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

from torch.distributed.checkpoint._async_process_executor import _AsyncCheckpointProcess

__all__ = ["hush"]

_serve = _AsyncCheckpointProcess._checkpointing_subprocess


def hush() -> None:
    """In this process, and in the one that DCP starts from it."""
    # The model's output is a view, and nobody changes it in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    _AsyncCheckpointProcess._checkpointing_subprocess = staticmethod(_serve_quietly)


def _serve_quietly(*arguments: Any) -> None:
    # DCP sets the level of its process's root logger itself: two lines for each save and rank.
    logging.disable(logging.INFO)
    _serve(*arguments)
