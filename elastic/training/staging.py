"""Staging: copies of live tensors in host memory that the process keeps from save to save.

The copy is all that a save costs the training step, and fresh memory would cost more than the copy:
every page of it has to be made first. So the memory belongs to the process and outlives models
and process groups. Must not import ray.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from elastic.training.host_block import make_host_block
from elastic.training.shard_image import Place, image_bytes, lay_out, places_for
from elastic.training.share import Key, Piece, share_of
from elastic.training.side_copy import Pair, SideCopy

__all__ = ["HostStager", "Layout", "Staged"]

Block = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class Layout:
    """Which pieces this rank writes and where each lies; the same object while they stay so.

    `left_out` are those that it holds and another rank writes.
    """

    pieces: Sequence[Piece]
    places: Sequence[Place]
    left_out: frozenset[Key]

    @property
    def bytes(self) -> int:
        return image_bytes(self.places)


_NOTHING = Layout((), (), frozenset())


@dataclass(frozen=True, eq=False)
class Staged:
    """One rank's copies, as its file will hold them. `problem` tells why there are none."""

    layout: Layout
    image: memoryview
    problem: str = ""
    wait: Callable[[], None] = lambda: None
    """Returns when the copies are complete, which is later only for those off a CUDA device."""


class HostStager:
    """Copies into one block of host memory, which the next call overwrites.

    A problem does not raise where only one rank would see it: `problem` tells it, nothing is
    staged, and the save is to fail with it on every rank.
    """

    def __init__(self, make_block: Callable[[int], Block] = make_host_block) -> None:
        self._make_block = make_block
        self._block = np.empty(0, dtype=np.uint8)
        self._making: threading.Thread | None = None
        self._layout = _NOTHING
        self._views: list[torch.Tensor] = []
        self._side = SideCopy()

    def reserve(self, size_bytes: int) -> None:
        """Makes the memory beside the caller, for saves to come. The caller goes on at once."""
        self._wait()
        if self._block.nbytes < size_bytes:
            self._making = threading.Thread(
                target=self._grow, args=(size_bytes,), name="elastic-staging", daemon=True
            )
            self._making.start()

    @property
    def held_bytes(self) -> int:
        """Size of the memory that is there."""
        self._wait()
        return self._block.nbytes

    def follow(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """These are the ones that change what may be copied late. Raises `FusedIntoBackward`."""
        self._side.follow(optimizers)

    def stage(
        self,
        tensors: Mapping[str, torch.Tensor],
        rank: int,
        spares: Collection[Key] = (),
        late: Collection[str] = (),
    ) -> Staged:
        """Copies of what this rank writes of them, without the spares.

        Complete when it returns; of the tensors named in `late`, which change in a followed
        optimizer's step alone, those on a CUDA device are complete before the next such step.
        """
        try:
            pieces, sources, left_out = share_of(tensors, rank, spares)
            self._wait()
            if (pieces, left_out) != (self._layout.pieces, self._layout.left_out):
                self._arrange(sources, Layout(pieces, places_for(sources), left_out))
            names = [piece.name for piece in pieces]
            is_late = [
                source.is_cuda and name in late for name, source in zip(names, sources, strict=True)
            ]
            pairs = list(zip(self._views, sources, is_late, strict=True))
            _copy_to_host([pair[:2] for pair in pairs if not pair[2]])
            wait = self._side.begin([pair[:2] for pair in pairs if pair[2]])
        except Exception as error:  # noqa: BLE001 - every rank is to hear of it, see above
            return Staged(_NOTHING, memoryview(b""), f"{type(error).__name__}: {error}")
        return Staged(self._layout, self._block.data[: self._layout.bytes], wait=wait)

    def _arrange(self, sources: Sequence[torch.Tensor], layout: Layout) -> None:
        self._layout, self._views = _NOTHING, []
        if self._block.nbytes < layout.bytes:
            self._grow(layout.bytes)
        self._views = lay_out(self._block, layout.places, sources)
        self._layout = layout

    def _grow(self, size_bytes: int) -> None:
        self._layout, self._views = _NOTHING, []
        self._block = np.empty(0, dtype=np.uint8)  # freed first: two would not fit
        self._block = self._make_block(size_bytes)

    def _wait(self) -> None:
        if self._making is not None:
            self._making.join()
            self._making = None


@torch.no_grad()
def _copy_to_host(pairs: Sequence[Pair]) -> None:
    """Complete when it returns, also for sources on a CUDA device."""
    if pairs:
        copies, sources = zip(*pairs, strict=True)
        torch._foreach_copy_(list(copies), list(sources), non_blocking=True)
    for device in {source.device for _, source in pairs if source.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
