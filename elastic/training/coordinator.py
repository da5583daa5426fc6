"""What a rank needs of whoever drives the run: the driver actor under Ray.

The interface belongs to the rank, its consumer. Nothing here knows how the words travel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from elastic.storage.checkpoints import FileDigest, TensorInfo


class Reform(BaseException):
    """The group re-forms: leaves the training function, which is called again later.

    Not an `Exception`, so that a training function's own `except Exception` does not swallow it.
    """


class SaveFailed(RuntimeError):
    """A checkpoint that had to be committed was not."""


class StorageFull(SaveFailed):
    """As `SaveFailed`, for want of room: to train the same steps once more makes none."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One rank's part of one save, durable, for the driver to commit when all ranks have theirs."""

    generation: int
    attempt: int
    step: int
    world_rank: int
    world_size: int
    path: str
    """Of the attempt, relative to the run directory."""
    files: Sequence[FileDigest] = ()
    failure: str = ""
    """Why this rank's part could not be written; empty when it was."""
    counters: Mapping[str, int] = field(default_factory=dict)
    tensors: Mapping[str, TensorInfo] = field(default_factory=dict)
    stall_s: float = 0.0
    write_s: float = 0.0
    replace: bool = False
    """The step was trained again: an older checkpoint of that number gives way to this one."""


@dataclass(frozen=True, kw_only=True)
class CommitResult:
    """What became of a save, the same for every rank."""

    committed: bool
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Orders:
    """What the driver wants of the group, as this rank has heard it so far."""

    leave: bool = False
    cut_evaluation: bool = False
    """The time to leave is short: an evaluation ends at its next batch."""
    drop_step: bool = False
    """The time does not suffice for a long step: it is dropped at its next micro-batch."""
    saves_asked: int = 0
    """How often a save was asked for by hand since the generation began."""
    save_every_s: float | None = None
    """How often to save where that is computed, from start to start; None: not known yet."""


class Coordinator(Protocol):
    """How a rank speaks with the driver."""

    def notify(self, kind: str, data: Mapping[str, Any]) -> None:
        """Tell the driver a fact. In order, and never blocking the training thread."""

    def orders(self) -> Orders:
        """What the driver wants now. Local, no waiting."""

    def is_over(self) -> bool:
        """Whether the driver has gone on to a newer generation. Local, no waiting."""

    def commit(self, shard: Shard, timeout_s: float) -> CommitResult:
        """Hand in a shard and wait until the save is committed or has failed.

        Called off the training thread. Never raises: a driver that does not answer is a failure.
        """

    def next_checkpoint(self, rejected_step: int, reason: str) -> int | None:
        """Quarantine a checkpoint whose bytes are bad; the step of the next older complete one.

        Raises:
            NoSoundCheckpoint: none is left.
        """

    def doubt(self, loaded_step: int, loss_step: int, loss: str) -> tuple[str, str]:
        """The loss of `loss_step` is not finite, the first one since the checkpoint of
        `loaded_step` was loaded: what follows, a `suspicion.Then`, and why. Rank 0 alone asks.
        """


class NoSoundCheckpoint(RuntimeError):
    """Checkpoints exist, and none of them has sound bytes."""
