"""The order that a loader takes: the one it began with, else the best one for its dataset.

A position means a sample only in one order, so a checkpoint holds which one it was, and a resume
that would silently go on in another is refused. Must import neither torch nor ray.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elastic.training.block_order import DEFAULT_WINDOW_BLOCKS, Blocks
from elastic.training.order import SampleStream

BEFORE_BLOCKS: Mapping[str, Any] = {"window_blocks": None}
"""What a checkpoint that names no order was trained in: each epoch shuffled as a whole."""

_IN_WORDS = {
    "num_samples": "samples in the dataset",
    "shuffle": "shuffle",
    "window_blocks": "blocks in a window of the order",
    "blocks": "digest of the blocks that the samples lie in",
}


class OrderDiffers(ValueError):
    """The samples of a loader would come in another order than the one that it began with."""


def choose(
    dataset: Any,
    *,
    seed: int,
    shuffle: bool = True,
    window: int | None = None,
    began: Mapping[str, Any] | None = None,
) -> SampleStream:
    """The stream of samples of a map-style dataset.

    A dataset that tells its `block_starts` is shuffled through a window of so many blocks, of
    `window` where that is given, else as it began, else of `DEFAULT_WINDOW_BLOCKS`; it is told, by
    `keep_blocks`, how many decoded blocks to keep for that. Any other is shuffled as a whole.

    began: what `facts` gave for the samples that were trained already; None when there are none

    Raises OrderDiffers where `began` and what is there now are not the same order.
    """
    num_samples = len(dataset)
    stream = SampleStream(
        num_samples=num_samples,
        seed=seed,
        shuffle=shuffle,
        blocks=_blocks(dataset, num_samples, window, began),
    )
    if began is not None:
        _check(began, facts(stream))
    keep_blocks = getattr(dataset, "keep_blocks", None)
    if keep_blocks is not None and stream.blocks is not None:
        of_all = min(stream.blocks.held_blocks, stream.blocks.num_blocks)
        keep_blocks(of_all if shuffle else 1)
    return stream


def facts(stream: SampleStream) -> dict[str, Any]:
    """What a checkpoint holds of the order; the seed is the run's. Plain values."""
    window = stream.window
    return {
        "num_samples": stream.num_samples,
        "shuffle": stream.shuffle,
        "window_blocks": None if window is None else window.window_blocks,
        "blocks": None if window is None else window.digest,
    }


def _blocks(
    dataset: Any, num_samples: int, window: int | None, began: Mapping[str, Any] | None
) -> Blocks | None:
    if window is not None and window < 1:
        raise ValueError(f"window must be 1 block or more, found {window}")
    starts = getattr(dataset, "block_starts", None)
    if starts is None or len(starts) < 2:
        return None
    if window is None and began is not None:
        window = began["window_blocks"]
        if window is None and len(starts) - 1 > DEFAULT_WINDOW_BLOCKS:
            return None  # it began as a whole, which so many blocks do not by themselves
    return Blocks(starts=starts, window_blocks=window or DEFAULT_WINDOW_BLOCKS)


def _check(began: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    found = [
        f"{_IN_WORDS[name]}: {'none' if value is None else value} when it began, "
        f"{'none' if now[name] is None else now[name]} now"
        for name, value in began.items()
        if name in now and now[name] != value
    ]
    if found:
        raise OrderDiffers(
            "the samples of this loader would come in another order than the one it began with, so "
            f"that some would be left out and some be repeated ({'; '.join(found)}). Give it the "
            "same data and the same arguments; for other data give the loader another name, which "
            "begins at its first sample, or begin a new run from these weights"
        )
