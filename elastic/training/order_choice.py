"""The order that a loader takes: the one it began with, else the best one for its dataset.

A position means a sample only in one order of one set of files, so a checkpoint holds which these
were, and a resume that would silently go on in another is refused. Must import neither torch nor
ray.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from elastic.training.block_order import DEFAULT_WINDOW_BLOCKS, Blocks
from elastic.training.order import SampleStream

BEFORE_BLOCKS: Mapping[str, Any] = {"window_blocks": None}
"""What a checkpoint that names no order was trained in: each epoch shuffled as a whole."""

_IN_WORDS = {
    "num_files": "files",
    "file_names": "digest of the names of the files below the path, in order",
    "file_sizes": "digest of how much each file holds, in order",
    "num_samples": "samples in the dataset",
    "shuffle": "shuffle",
    "window_blocks": "blocks in a window of the order",
    "blocks": "digest of the blocks that the samples lie in",
}


class OrderDiffers(ValueError):
    """The samples of a loader would come in another order than the one that it began with."""


class GlobalBatchDiffers(ValueError):
    """A loader would go on with other steps than those it began with, and nobody accepted that."""


def choose(
    dataset: Any,
    *,
    seed: int,
    shuffle: bool = True,
    window: int | None = None,
    began: Mapping[str, Any] | None = None,
    name: str = "data",
) -> SampleStream:
    """The stream of samples of a map-style dataset.

    A dataset that tells its `block_starts` is shuffled through a window of so many blocks, of
    `window` where that is given, else as it began, else of `DEFAULT_WINDOW_BLOCKS`; it is told, by
    `keep_blocks`, how many decoded blocks to keep for that. Any other is shuffled as a whole.

    began: what `facts` gave for the samples that were trained already; None when there are none
    name: of the loader, for messages

    Raises OrderDiffers where `began` and what is there now are not the same order, and ValueError
    for a `window` that would mean nothing.
    """
    num_samples = len(dataset)
    _check_window(dataset, window, shuffle)
    stream = SampleStream(
        num_samples=num_samples,
        seed=seed,
        shuffle=shuffle,
        blocks=_blocks(dataset, num_samples, window, began),
    )
    if began is not None:
        _check(name, began, facts(stream, dataset))
    keep_blocks = getattr(dataset, "keep_blocks", None)
    if keep_blocks is not None and stream.blocks is not None:
        of_all = min(stream.blocks.held_blocks, stream.blocks.num_blocks)
        keep_blocks(of_all if shuffle else 1)
    return stream


def facts(stream: SampleStream, dataset: Any = None) -> dict[str, Any]:
    """What a checkpoint holds of the order; the seed is the run's. Plain values.

    A dataset that tells its `file_facts` has them in it: see `data_files.file_facts`.
    """
    window = stream.window
    return {
        **getattr(dataset, "file_facts", {}),
        "num_samples": stream.num_samples,
        "shuffle": stream.shuffle,
        "window_blocks": None if window is None else window.window_blocks,
        "blocks": None if window is None else window.digest,
    }


def check_reading(name: str, state: Mapping[str, Any], *, by_count: bool) -> None:
    """Whether a loader that has been at `state` may be read by index, or by count.

    Raises OrderDiffers: a position among the items of a dataset is none in a source without random
    access, and the other way.
    """
    if ("order" if by_count else "passes") not in state:
        return
    kinds = ("a dataset that is read by index", "an iterable that is read by count")
    found, now = kinds if by_count else kinds[::-1]
    raise OrderDiffers(
        f"loader {name!r} began with {found}, and is given {now}: the {state['samples']} samples "
        f"that were trained are others there, so that some would be left out and some be repeated. "
        f"{_instead(found)}"
    )


def changed_batch(
    name: str, state: Mapping[str, Any], global_batch: int, accepted: Sequence[str]
) -> str:
    """How the global batch of a loader that has been at `state` has changed; "" if not.

    accepted: fields of the run's identity that may differ; one ends in `global_batch`, or this
        raises GlobalBatchDiffers
    """
    before = state.get("global_batch", global_batch)
    if before == global_batch:
        return ""
    change = f"global_batch of loader {name!r}: was {before}, now {global_batch}"
    if not any(field.split(".")[-1] == "global_batch" for field in accepted):
        raise GlobalBatchDiffers(
            f"{change}. From here on the loss curve, the learning rate for it and the steps of an "
            f"epoch would be others. Give global_batch={before}, or accept the change by name: "
            'ElasticConfig(accept_changes=["global_batch"]), run_standalone(accept_changes='
            '["global_batch"]), or --accept-change global_batch of jobs.pretrain'
        )
    return change


def _check_window(dataset: Any, window: int | None, shuffle: bool) -> None:
    if window is None:
        return
    if window < 1:
        raise ValueError(f"window must be 1 block or more, found {window}")
    if getattr(dataset, "block_starts", None) is None:
        raise ValueError(
            f"window={window} counts blocks, and a {type(dataset).__name__} has none (it tells no "
            "block_starts), so that it is shuffled as a whole: leave window= out"
        )
    if not shuffle:
        raise ValueError(
            f"window={window} says how far samples are shuffled, and shuffle=False that they are "
            "not: leave one of them out"
        )


def _blocks(
    dataset: Any, num_samples: int, window: int | None, began: Mapping[str, Any] | None
) -> Blocks | None:
    starts = getattr(dataset, "block_starts", None)
    if starts is None or len(starts) < 2:
        return None
    if window is None and began is not None:
        window = began["window_blocks"]
        if window is None and len(starts) - 1 > DEFAULT_WINDOW_BLOCKS:
            return None  # it began as a whole, which so many blocks do not by themselves
    return Blocks(starts=starts, window_blocks=window or DEFAULT_WINDOW_BLOCKS)


def _check(name: str, began: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    # In our own order, since what a checkpoint holds may come back in any.
    found = [
        f"{words}: {'none' if began[fact] is None else began[fact]} when it began, "
        f"{'none' if now[fact] is None else now[fact]} now"
        for fact, words in _IN_WORDS.items()
        if fact in began and fact in now and now[fact] != began[fact]
    ]
    if found:
        raise OrderDiffers(
            f"the samples of loader {name!r} would come in another order than the one it began "
            f"with, so that some would be left out and some be repeated ({'; '.join(found)}). "
            f"{_instead('the same data, by the same arguments (shuffle=, window=)')}"
        )


def _instead(as_before: str) -> str:
    return (
        f"Give run.loader {as_before}; for other data give the loader another name (name=), which "
        "begins at its first sample, or begin a new run from these weights "
        "(ElasticConfig(load_from=), --load-from)"
    )
