"""Checkpoint: the one door to saving and loading the tracked state. Must not import ray."""

from __future__ import annotations

from elastic.training.loading import LoadFailed, Restored, load, unchecked, verify_share
from elastic.training.part import StateMismatch, describe
from elastic.training.saving import AsyncSaver, SaveHandle, WriteFailed
from elastic.training.shard_reader import CheckpointCorrupt

__all__ = [
    "AsyncSaver",
    "CheckpointCorrupt",
    "LoadFailed",
    "Restored",
    "SaveHandle",
    "StateMismatch",
    "WriteFailed",
    "describe",
    "load",
    "unchecked",
    "verify_share",
]
