"""The reader: turns sample keys into a collated batch, in this process or in a loader process.

Whatever a dataset or a collate function draws at random is a function of (seed, epoch, index) of
the sample, so that neither the world size, nor the number of loader processes, nor a resume changes
it; the caller's random streams are left where they were. Must not import ray.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import multiprocessing
import os
import random
import signal
import socket
import stat
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import default_collate

Key = tuple[int, int]  # (epoch, index)
Collate = Callable[[list[Any]], Any]


class MapDataset(Protocol):
    """What a loader asks of a dataset: a length, and items by index, each time the same."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class Reader:
    """Batches of a dataset, read by lists of keys; picklable when dataset and collate are.

    Samples are read one by one, never through the dataset's own `__getitems__`: each has a random
    stream of its own. The collate function goes on with the stream of the last sample. Only a
    dataset that has `collated`, and so draws nothing at random, is asked for a whole batch, where
    the collate function is torch's own.
    """

    def __init__(self, dataset: MapDataset, collate: Collate, seed: int) -> None:
        self._dataset = dataset
        self._has_batches = collate is default_collate and hasattr(dataset, "collated")
        self._collate = collate
        self._seed = seed

    def __getitems__(self, keys: Sequence[Key]) -> Any:
        """The collated batch of these samples: torch's fetcher asks for a whole batch this way."""
        if self._has_batches:
            return self._dataset.collated([index for _, index in keys])  # type: ignore[attr-defined]
        with own_random_streams():
            samples = []
            for key in keys:
                self._seed_for(key)
                samples.append(self._dataset[key[1]])
            return self._collate(samples)

    def ahead(self, batches: Iterator[list[Key]], num_samples: int) -> Iterator[list[Key]]:
        """The same keys, of which the dataset is told so many samples before they are read.

        It is so if it has `block_starts` and `prefetch`, which begins to read what it is told.
        """
        if not hasattr(self._dataset, "block_starts") or not hasattr(self._dataset, "prefetch"):
            yield from batches
            return
        prefetch = self._dataset.prefetch
        waiting: deque[list[Key]] = deque()
        num_waiting = 0
        while True:
            if num_waiting <= num_samples // 2:
                told: list[Key] = []
                while num_waiting + len(told) < num_samples:
                    waiting.append(next(batches))
                    told += waiting[-1]
                num_waiting += len(told)
                prefetch([index for _, index in told])
            num_waiting -= len(waiting[0])
            yield waiting.popleft()

    def _seed_for(self, key: Key) -> None:
        text = f"sample/{self._seed}/{key[0]}/{key[1]}".encode()
        seed = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        torch.default_generator.manual_seed(seed)


@contextlib.contextmanager
def own_random_streams() -> Iterator[None]:
    """The random streams of the process are left where they were."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)


def as_read(batch: Any) -> Any:
    """The batch itself: the reader has collated already, and torch wants a picklable function."""
    return batch


def enter_loader_process(_number: int) -> None:
    """Prepares a forked loader process to leave no trace of its parent's connections.

    A forked child holds copies of all its parent's sockets. Peers of a killed rank would not see
    their connections end until torch's watchdog ends the children, up to 5 s later; nor would they
    when a living rank leaves its process group. So the child dies with its parent, at once, and
    lets go of the network sockets.
    """
    if sys.platform != "linux":
        return
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG in linux/prctl.h
    ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, signal.SIGKILL, 0, 0, 0)
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        os._exit(1)  # it died before the signal was armed
    if parent is not None and parent.pid != os.getppid():
        # A fork server has forked this process: it lives on, and no signal comes.
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    _let_go_of_network_sockets()


def _end_with(parent: Any) -> None:
    parent.join()
    os._exit(1)


# What was killed is gone at once, but for what the machine does beside.
_KILLED_S = 5.0


def end_loader_processes(batches: Iterator[Any], patience_s: float = 0.5) -> None:
    """Ends the processes of a torchdata iterator, killing those still reading after `patience_s`.

    torch by itself waits up to 5 s for each of them, with the whole group waiting for this rank.
    """
    shut_down = getattr(batches, "_shutdown_workers", None)
    if shut_down is None or sys.is_finalizing():
        return  # reads in this process; or no thread can start any more, and they end with it
    workers = list(batches._workers)  # type: ignore[attr-defined]

    def kill() -> None:
        for worker in workers:
            worker.kill()

    timer = threading.Timer(patience_s, kill)
    timer.daemon = True
    timer.start()
    try:
        with contextlib.suppress(RuntimeError):  # torch's: "a worker was killed by signal"
            shut_down()
    finally:
        timer.cancel()
    kill()  # those that an exception out of the signal handler kept torch from waiting for
    for worker in workers:
        worker.join(_KILLED_S)
        _note_the_end_of(worker)


def _note_the_end_of(worker: Any) -> None:
    """Of one that was waited for when torch's signal handler raised, before that was noted.

    It is no child any more, and `multiprocessing` would list it for good, and signal its number at
    exit, whoever has that by then.
    """
    if worker.exitcode is None:
        try:
            os.kill(worker.pid, 0)
        except ProcessLookupError:
            worker._popen.returncode = -signal.SIGKILL
            worker.join()


def _let_go_of_network_sockets() -> None:
    # A number that is closed would be given to the next file opened, and an object that still
    # thinks it owns a socket would write into that file. So the number stays, on /dev/null.
    null = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        if _is_network_socket(int(name)):
            os.dup2(null, int(name), inheritable=False)
    os.close(null)


def _is_network_socket(descriptor: int) -> bool:
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return False
        probe = socket.socket(fileno=os.dup(descriptor))
    except OSError:
        return False
    with probe:
        return probe.family in (socket.AF_INET, socket.AF_INET6)
