"""The global loader: this rank's micro-batches of each step, from a global position.

Position, order and global batch belong to the run; how a global batch splits over ranks and
micro-batches is derived here, also when it does not divide. Nothing in a loader need be saved: one
made with the same position goes on with the same samples at any world size. Must not import ray.
"""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate
from torchdata.stateful_dataloader import StatefulDataLoader

from elastic.training.order import micro_batches
from elastic.training.order_choice import BEFORE_BLOCKS, changed_batch, check_reading
from elastic.training.padding import IGNORED_LABEL, describe, ignore_labels, labels_of
from elastic.training.reader import (
    Collate,
    MapDataset,
    as_read,
    end_loader_processes,
    enter_loader_process,
)
from elastic.training.reading import ByCount, ByIndex, Reading
from elastic.training.stream_reader import is_stream

# torchdata 0.11 calls a function that torch 2.13 deprecates; no user can do anything about it.
warnings.filterwarnings("ignore", message="'set_vital' is deprecated")

# torchdata collects a state from every loader process at this interval. Ours is the position.
_NO_SNAPSHOTS = 2**62


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """One forward and backward of this rank.

    `num_samples` and `num_valid_tokens` are those of this micro-batch; a padding one has none.
    """

    batch: Any
    is_padding: bool
    num_samples: int
    num_valid_tokens: int


class GlobalLoader:
    """Iterating yields, for each optimizer step, the list of this rank's micro-batches.

    The stream has no end. Every sample comes once per epoch, a global batch is always full (it may
    straddle epochs), and all ranks get lists of the same length: a rank with fewer samples gets
    padding micro-batches, made by `pad` from the first one of that step. Iterating again, after a
    break or an exception too, goes on at `position`: what was prefetched and not handed out is
    neither lost nor repeated. The process's global random streams are not touched; what a dataset
    draws is a function of (seed, epoch, index).

    dataset: map-style, or an iterable source without random access; items in any form that
        `collate` (default: torch's) takes
    global_batch: samples per step, over all ranks
    micro_batch: samples per micro-batch at most
    samples_done: samples of the whole run that steps before the next one have used up
    state: what `state` was then; without it an iterable is read from its beginning to find the
        position, and it is not known in which order a dataset was read
    num_workers: loader processes of this rank; 0 reads in this process
    window: of a dataset that tells its `block_starts`, such as `ParquetTokens`, so many blocks are
        shuffled together; without it as `state` says, else 64: see `BlockOrder`
    pad: takes a batch of its own and returns it with nothing valid. Default: integer labels (a
        dict's "labels" or the second of a pair) become -100
    count_tokens: valid tokens of a batch. Default: labels other than -100; with `pad` given and no
        labels, the number of samples
    device: where batches are put; on CUDA from pinned memory, without waiting
    name: for messages
    accepted: fields that may differ from those of `state`, of which `global_batch` counts here

    An iterable gives the same samples in the same order each time that it is iterated, on every
    rank; `shuffle` does not apply. When it ends its next pass begins, after
    `dataset.set_epoch(number)` if it has that. A position is found by counting: a resume reads and
    drops what the pass has given already, or calls `dataset.skip(count)` if there is such a
    method. Each rank and each loader process reads all of it and keeps its own part, so what is
    slow belongs into `collate`, which sees that part only.

    Raises ValueError for numbers that make no step, a dataset without length or with fewer samples
    than one global batch, another order or global batch than `state` says, an iterable that can be
    read once only or gives nothing, and a padding batch that is not empty or cannot be made.
    """

    def __init__(
        self,
        dataset: MapDataset | Iterable[Any],
        *,
        global_batch: int,
        micro_batch: int,
        seed: int,
        world_rank: int,
        world_size: int,
        samples_done: int = 0,
        state: Mapping[str, Any] | None = None,
        num_workers: int = 0,
        shuffle: bool = True,
        window: int | None = None,
        collate: Collate | None = None,
        pad: Callable[[Any], Any] | None = None,
        count_tokens: Callable[[Any], int] | None = None,
        device: torch.device | str | None = None,
        name: str = "data",
        accepted: Sequence[str] = (),
    ) -> None:
        _check_numbers(global_batch, micro_batch, world_size, samples_done, num_workers)
        self.global_batch = global_batch
        self._spans = micro_batches(global_batch, micro_batch, world_size, world_rank)
        self._split = {"micro_batch": micro_batch, "world_size": world_size}
        self._position = samples_done
        self._num_workers = num_workers
        collate = collate or default_collate
        source: Any = dataset
        been = (state or {}) if samples_done else {}
        check_reading(name, been, by_count=is_stream(source))
        self.change = changed_batch(name, been, global_batch, accepted)
        """What has changed since `state`, and was accepted, in words; "" for nothing."""
        self._reading: Reading
        if is_stream(source):
            _check_no_window(window)
            told = been if samples_done else {"passes": ()}
            self._reading = ByCount(source, collate, seed, told)
        else:
            _check_length(source, global_batch)
            began = _began(samples_done, state)
            self._reading = ByIndex(source, collate, seed, shuffle, window, began, name)
        self._dataset_name = type(dataset).__qualname__
        self._pad = pad or ignore_labels
        self._count_tokens = count_tokens
        self._device = None if device is None else torch.device(device)
        # Weak, or the iterator would live in a cycle with its loader and its processes with it.
        self._steps: weakref.ref[Generator[list[MicroBatch], None, None]] | None = None
        self._check_padding()

    @property
    def position(self) -> int:
        """Samples of the run handed out so far, in whole steps, over all ranks."""
        return self._position

    @property
    def epoch(self) -> int:
        """The epoch of the next sample; of an iterable, the pass that is not known to be over."""
        return self._reading.epoch(self._position)

    @property
    def state(self) -> dict[str, Any]:
        """Where a loader is to begin that goes on from `position`: plain values."""
        told = {"samples": self._position, "global_batch": self.global_batch}
        return {**told, **self._reading.state()}

    @property
    def place(self) -> int:
        """A number that is the same on all ranks, if their sources give the same samples."""
        return self._reading.place

    def facts(self, position: int) -> dict[str, Any]:
        """What tells which samples come from a position on, and which rank gets which."""
        told = {"dataset": self._dataset_name, "global_batch": self.global_batch, **self._split}
        return {**told, "samples_done": position, **self._reading.facts(self._position)}

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        self.close()
        steps = self._iterate()
        self._steps = weakref.ref(steps)
        return steps

    def close(self) -> None:
        """Ends the running iterator and its loader processes, if there are any.

        An iterator that nobody holds is closed by itself, but the traceback of an exception does
        hold it.
        """
        steps = self._steps() if self._steps is not None else None
        if steps is not None:
            steps.close()

    def _iterate(self) -> Generator[list[MicroBatch], None, None]:
        self._reading.begin(self._position)
        batches = iter(self._fetcher())
        try:
            while True:
                step = self._next_step(batches)
                # Only now: a fetch that failed must not count as handed out.
                self._position += self.global_batch
                yield step
        finally:
            # By name: the traceback of an exception holds the iterator, which would keep them.
            end_loader_processes(batches)

    def _fetcher(self) -> Iterable[Any]:
        keys = self._keys(self._position)
        pin_memory = self._device is not None and self._device.type == "cuda"
        if not self._num_workers and not pin_memory:
            share = (self._spans[-1][1] - self._spans[0][0]) / self.global_batch
            return map(self._reading.reader.__getitems__, self._reading.ahead(keys, share))
        loader: Iterable[Any] = StatefulDataLoader(
            self._reading.reader,
            batch_sampler=keys,
            num_workers=self._num_workers,
            collate_fn=as_read,
            pin_memory=pin_memory,
            worker_init_fn=enter_loader_process,
            generator=torch.Generator().manual_seed(0),  # or the global one would be drawn from
            snapshot_every_n_steps=_NO_SNAPSHOTS,
        )
        return loader

    def _keys(self, position: int) -> Iterator[Any]:
        """What this rank's micro-batches are read by, step after step; none for padding ones."""
        while True:
            until = position + self.global_batch
            yield from self._reading.keys(position, self._spans, until)
            position = until

    def _next_step(self, batches: Iterator[Any]) -> list[MicroBatch]:
        step: list[MicroBatch] = []
        empty: Any = None
        for begin, end in self._spans:
            if begin < end:
                batch = self._reading.taken(next(batches))
                if not step and self._has_padding:
                    empty = self._pad(copy.deepcopy(batch))
                step.append(self._micro_batch(batch, end - begin))
            else:
                step.append(self._micro_batch(copy.deepcopy(empty), 0))
        return step

    @property
    def _has_padding(self) -> bool:
        begin, end = self._spans[-1]
        return begin == end

    def _micro_batch(self, batch: Any, num_samples: int) -> MicroBatch:
        return MicroBatch(
            batch=batch if self._device is None else _moved(batch, self._device),
            is_padding=num_samples == 0,
            num_samples=num_samples,
            num_valid_tokens=self._count(batch, num_samples) if num_samples else 0,
        )

    def _count(self, batch: Any, num_samples: int) -> int:
        if self._count_tokens is not None:
            return int(self._count_tokens(batch))
        labels = labels_of(batch)
        if labels is None:
            return num_samples
        # Through numpy, which takes a fraction of torch's time for it.
        found = labels.numpy()
        if found.size and found.min() > IGNORED_LABEL:
            return int(found.size)
        return int(np.count_nonzero(found != IGNORED_LABEL))

    def _check_padding(self) -> None:
        """Tries padding on the first sample, since another world size may need it at any time."""
        padding = self._pad(self._reading.first())
        found = self._count(padding, 0)
        if found:
            raise ValueError(
                f"a padding micro-batch must hold nothing valid, but {found} tokens count in what "
                f"pad= made of the first sample, a {describe(padding)}. Let pad= set every label "
                "to the value your loss ignores, and count_tokens= leave that value out"
            )


def _moved(batch: Any, device: torch.device) -> Any:
    """The batch with all its tensors on `device`; containers keep their type."""
    if hasattr(batch, "to"):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        moved = copy.copy(batch)
        for key, value in batch.items():
            moved[key] = _moved(value, device)  # type: ignore[index]
        return moved
    if isinstance(batch, (tuple, list)):
        items = [_moved(value, device) for value in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    return batch


def _began(samples_done: int, state: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The order in which samples were trained already; None if none were, or nobody knows."""
    if samples_done == 0 or state is None:
        return None
    order: Mapping[str, Any] = state.get("order", BEFORE_BLOCKS)
    return order


def _check_numbers(
    global_batch: int, micro_batch: int, world_size: int, samples_done: int, num_workers: int
) -> None:
    for name, number in (("micro_batch", micro_batch), ("global_batch", global_batch)):
        if number < 1:
            raise ValueError(f"{name} must be 1 or more, found {number}")
    if global_batch < world_size:
        raise ValueError(
            f"a global batch of {global_batch} samples leaves some of {world_size} ranks without a "
            f"sample: expected {world_size} or more. Raise global_batch or train on fewer ranks"
        )
    if samples_done < 0 or num_workers < 0:
        raise ValueError(
            "samples_done and num_workers must be 0 or more, "
            f"found {samples_done} and {num_workers}"
        )


def _check_no_window(window: int | None) -> None:
    if window is not None:
        raise ValueError(
            f"window={window} says how far samples are shuffled, and an iterable comes in its own "
            "order: leave window= out"
        )


def _check_length(dataset: Any, global_batch: int) -> None:
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise ValueError(
            "expected a map-style dataset, with __len__ and __getitem__, or an iterable, found "
            f"{type(dataset).__name__}"
        )
    length = len(dataset)
    if length < global_batch:
        raise ValueError(
            f"the dataset holds {length} samples, fewer than one global batch of {global_batch}: "
            "lower global_batch or give more data"
        )
