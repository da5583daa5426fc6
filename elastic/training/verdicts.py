"""Verdicts: what all ranks together made of a save, which each of them hears.

Two small exchanges when the files are written, none before: what a rank writes
follows from its tensors. What is written where is told once, and again when it has changed. Must
not import ray.
"""

from __future__ import annotations

import pickle
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import (
    _validate_global_plan,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan

from elastic.training.share import Key
from elastic.training.staging import Layout

__all__ = ["FailedTogether", "Verdicts", "metadata_of", "shard_file", "spares_of"]


class FailedTogether(Exception):
    """The save failed, on every rank; says which rank caused it."""


class _DoesNotFit(ValueError):
    """The ranks' layouts do not make up the tensors."""


@dataclass(frozen=True)
class _Word:
    """One rank's word on a save. `layout` is None when it is the one it told last."""

    failure: str
    layout: Layout | None


@dataclass(frozen=True)
class _Verdict:
    """`spares` by rank is what others write as well, None when nobody may leave anything out."""

    failure: str = ""
    spares: Mapping[int, frozenset[Key]] | None = field(default_factory=dict)


def shard_file(world_rank: int) -> str:
    """The file of one rank's shards."""
    return f"__{world_rank}_0.distcp"


class Verdicts:
    """The verdicts on the saves of one process group, or of a process by itself."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._rank = 0 if group is None else group.rank()
        self._told: Layout | None = None
        self._known: dict[int, Layout] = {}
        self._metadata = b""
        self.spares: frozenset[Key] = frozenset()
        """Pieces that this rank need not write, since another one does."""

    def reach(self, failure: str, layout: Layout, write_metadata: Callable[[bytes], None]) -> None:
        """Returns when all ranks have written their files and rank 0 also the metadata.

        `failure` tells what went wrong on this rank, if anything did. Raises `FailedTogether` on
        all ranks alike, and whatever the group raises when a rank is gone.
        """
        is_known = bool(failure) or layout is self._told
        words = self._gather(_Word(failure, None if is_known else layout))
        verdict = self._broadcast(self._judge(words, write_metadata) if words else _Verdict())
        if verdict.spares is None:
            self.spares = frozenset()
        if verdict.failure:
            raise FailedTogether(verdict.failure)
        self._told = layout
        self.spares |= (verdict.spares or {}).get(self._rank, frozenset())

    def _judge(self, words: Sequence[_Word], write_metadata: Callable[[bytes], None]) -> _Verdict:
        """On rank 0 alone."""
        failures = [f"rank {r}: {word.failure}" for r, word in enumerate(words) if word.failure]
        if failures:
            return _Verdict("; ".join(failures))
        spares: dict[int, frozenset[Key]] = {}
        try:
            news = {rank: word.layout for rank, word in enumerate(words) if word.layout is not None}
            if news:
                known = {**self._known, **news}
                spares = spares_of(known)
                self._metadata = metadata_of(known, spares)
                self._known = known
            write_metadata(self._metadata)
        except _DoesNotFit as error:
            # A rank may have left out what another one holds no longer.
            return _Verdict(f"rank 0: {error}", None)
        except Exception as error:  # noqa: BLE001 - the other ranks wait for the verdict
            return _Verdict(f"rank 0: {type(error).__name__}: {error}")
        return _Verdict(spares=spares)

    def _gather(self, word: _Word) -> list[_Word]:
        if self._group is None:
            return [word]
        is_first = self._group.rank() == 0
        words: list[Any] | None = [None] * self._group.size() if is_first else None
        dist.gather_object(word, words, group=self._group, group_dst=0)
        return words or []

    def _broadcast(self, verdict: _Verdict) -> _Verdict:
        if self._group is None:
            return verdict
        said = [verdict]
        dist.broadcast_object_list(said, group=self._group, group_src=0)
        return said[0]


def spares_of(layouts: Mapping[int, Layout]) -> dict[int, frozenset[Key]]:
    """By rank, the pieces that it has written and another one is to write from now on.

    Ranks may hold the same without sharing a mesh. Whoever has the least to write has it.
    """
    holders: dict[Key, list[int]] = defaultdict(list)
    sizes: dict[Key, int] = {}
    for rank, layout in sorted(layouts.items()):
        for piece, place in zip(layout.pieces, layout.places, strict=True):
            holders[piece.key].append(rank)
            sizes[piece.key] = place.length
    bytes_of: Counter[int] = Counter()
    for key, ranks in holders.items():
        if len(ranks) == 1:
            bytes_of[ranks[0]] += sizes[key]
    spares: dict[int, set[Key]] = defaultdict(set)
    for key, ranks in holders.items():
        if len(ranks) > 1:
            chosen = min(ranks, key=lambda rank: bytes_of[rank])
            bytes_of[chosen] += sizes[key]
            for rank in ranks:
                if rank != chosen:
                    spares[rank].add(key)
    return {rank: frozenset(keys) for rank, keys in spares.items()}


def metadata_of(layouts: Mapping[int, Layout], spares: Mapping[int, Collection[Key]]) -> bytes:
    """DCP's `.metadata` of the files that the ranks have written, without regard to the spares.

    Raises `ValueError` when they do not make up every tensor.
    """
    plans, storage_data = [], []
    for rank, layout in sorted(layouts.items()):
        left_out = spares.get(rank, ())
        items = []
        for piece, place in zip(layout.pieces, layout.places, strict=True):
            if piece.key not in left_out:
                items.append(piece.write_item())
                storage_data.append(_StorageInfo(shard_file(rank), place.start, place.length))
        plans.append(SavePlan(items))
    plans, metadata = create_default_global_save_plan(plans)
    _check(plans, metadata, layouts)
    indices = [item.index for plan in plans for item in plan.items]
    metadata.storage_data = dict(zip(indices, storage_data, strict=True))
    metadata.planner_data = {name: _path(name) for name in metadata.state_dict_metadata}
    metadata.version = CURRENT_DCP_VERSION
    metadata.storage_meta = StorageMeta()
    return pickle.dumps(metadata)


def _check(plans: list[SavePlan], metadata: Metadata, layouts: Mapping[int, Layout]) -> None:
    written = {(item.index.fqn, item.index.offset) for plan in plans for item in plan.items}
    left_out = {key for layout in layouts.values() for key in layout.left_out}
    problems = [f"{name} from {tuple(at)} on is missing" for name, at in left_out - written]
    problems += _validate_global_plan(plans, metadata)
    if problems:
        raise _DoesNotFit(
            f"the ranks' parts do not make up the tensors: {'; '.join(problems[:3])}. "
            "Every rank has to track the same objects"
        )


def _path(name: str) -> tuple[str, ...]:
    """By tracked object and by the name below it, as stock DCP would have nested them."""
    owner, _, rest = name.partition(".")
    return (owner, rest) if rest else (owner,)
