"""Verdicts: what all ranks together made of a save, which each of them hears.

Two small exchanges when the files are written, none before: each rank's share of the tensors
follows from the tensors. What is written where is told once, and again when it has changed. Must
not import ray.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import (
    _validate_global_plan,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import SavePlan

from elastic.training.shard_image import Place
from elastic.training.share import Piece
from elastic.training.staging import Layout

__all__ = ["FailedTogether", "Verdicts", "metadata_of", "shard_file"]


class FailedTogether(Exception):
    """The save failed, on every rank; says which rank caused it."""


@dataclass(frozen=True)
class _Word:
    """One rank's word on a save. `told` is None when its layout is the one it told last."""

    failure: str
    told: tuple[Sequence[Piece], Sequence[Place]] | None


def shard_file(world_rank: int) -> str:
    """The file of one rank's shards."""
    return f"__{world_rank}_0.distcp"


class Verdicts:
    """The verdicts on the saves of one process group, or of a process by itself."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._told: Layout | None = None
        self._known: dict[int, tuple[Sequence[Piece], Sequence[Place]]] = {}
        self._metadata = b""

    def reach(self, failure: str, layout: Layout, write_metadata: Callable[[bytes], None]) -> None:
        """Returns when all ranks have written their files and rank 0 also the metadata.

        `failure` tells what went wrong on this rank, if anything did. Raises `FailedTogether` on
        all ranks alike, and whatever the group raises when a rank is gone.
        """
        told = None if layout is self._told else (layout.pieces, layout.places)
        words = self._gather(_Word(failure, None if failure else told))
        verdict = self._broadcast(self._judge(words, write_metadata) if words else None)
        if verdict:
            raise FailedTogether(verdict)
        self._told = layout

    def _judge(self, words: Sequence[_Word], write_metadata: Callable[[bytes], None]) -> str:
        """Empty when all is well. On rank 0 alone."""
        failures = [f"rank {r}: {word.failure}" for r, word in enumerate(words) if word.failure]
        if failures:
            return "; ".join(failures)
        try:
            news = {rank: word.told for rank, word in enumerate(words) if word.told is not None}
            if news:
                known = {**self._known, **news}
                self._metadata = metadata_of(known)
                self._known = known
            write_metadata(self._metadata)
        except Exception as error:  # noqa: BLE001 - the other ranks wait for the verdict
            return f"rank 0: {type(error).__name__}: {error}"
        return ""

    def _gather(self, word: _Word) -> list[_Word]:
        if self._group is None:
            return [word]
        is_first = self._group.rank() == 0
        words: list[Any] | None = [None] * self._group.size() if is_first else None
        dist.gather_object(word, words, group=self._group, group_dst=0)
        return words or []

    def _broadcast(self, verdict: str | None) -> str:
        if self._group is None:
            return verdict or ""
        said = [verdict]
        dist.broadcast_object_list(said, group=self._group, group_src=0)
        return said[0] or ""


def metadata_of(shares: dict[int, tuple[Sequence[Piece], Sequence[Place]]]) -> bytes:
    """DCP's `.metadata` of files that hold these shares, by rank.

    Raises `ValueError` when the shares do not make up every tensor.
    """
    plans = [
        SavePlan([piece.write_item() for piece in pieces])
        for _, (pieces, _) in sorted(shares.items())
    ]
    plans, metadata = create_default_global_save_plan(plans)
    problems = _validate_global_plan(plans, metadata)
    if problems:
        raise ValueError(
            f"the ranks' shares do not make up the tensors: {'; '.join(problems[:3])}. "
            "Every rank has to track the same objects"
        )
    storage: dict[Any, Any] = {}
    for plan, (rank, (_, places)) in zip(plans, sorted(shares.items()), strict=True):
        for item, place in zip(plan.items, places, strict=True):
            storage[item.index] = _StorageInfo(shard_file(rank), place.start, place.length)
    metadata.storage_data = storage
    metadata.planner_data = {name: _path(name) for name in metadata.state_dict_metadata}
    metadata.version = CURRENT_DCP_VERSION
    metadata.storage_meta = StorageMeta()
    return pickle.dumps(metadata)


def _path(name: str) -> tuple[str, ...]:
    """By tracked object and by the name below it, as stock DCP would have nested them."""
    owner, _, rest = name.partition(".")
    return (owner, rest) if rest else (owner,)
