"""Shortcuts: leaving a long step or an evaluation before its end, when the time does not suffice.

All ranks take them at the same place, whoever was told first. Must not import ray.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch
import torch.distributed as dist

from elastic.training import rng
from elastic.training.coordinator import Coordinator
from elastic.training.reporter import Reporter
from elastic.training.state import TrackedState

LONG_STEP_S = 1.0
"""From here on a step can be left between two of its micro-batches."""
_LONG_BATCH_S = 0.2

T = TypeVar("T")


class Poll:
    """A wish of any rank, made known to all. Every rank has to call it equally often."""

    def __init__(self, group: dist.ProcessGroup, *, batch_s: float = 0.0) -> None:
        """`batch_s`, the same on all ranks, is the time from call to call.

        Where it is short nobody waits for the answer: it is that to the call before.
        """
        self._group = group
        self._waits = batch_s >= _LONG_BATCH_S
        self._asked: tuple[torch.Tensor, dist.Work] | None = None

    def is_agreed(self, wish: bool) -> bool:
        """Whether any rank has the wish, or had it at the call before."""
        before = self._asked
        mine = torch.tensor([int(wish)])
        self._asked = mine, dist.all_reduce(mine, group=self._group, async_op=True)
        answer = self._asked if self._waits else before
        if answer is None:
            return False
        told, work = answer
        work.wait()
        return bool(told.item() > 0)


class Mark:
    """What a step may change before its optimizer does: as it was when the step began."""

    def __init__(self, state: TrackedState) -> None:
        self.plain = copy.deepcopy(state.capture().plain)
        self.rng = rng.capture()
        self._tensors = [(tensor, tensor.clone()) for tensor in state.changeable()]

    @torch.no_grad()
    def go_back(self) -> None:
        """Undo it in the tensors; the rest is for the save to take from here."""
        for tensor, copied in self._tensors:
            tensor.copy_(copied)


def way_out(
    state: TrackedState,
    poll: Poll,
    *,
    is_asked: Callable[[], bool],
    leave: Callable[[Mark], None],
) -> Callable[[], None]:
    """To be called between a step's micro-batches: leaves as soon as any rank was asked to."""
    mark = Mark(state)

    def between() -> None:
        if poll.is_agreed(is_asked()):
            mark.go_back()
            leave(mark)

    return between


class Evaluation:
    """An evaluation under way: see `Run.evaluation`."""

    def __init__(self, poll: Poll, is_asked: Callable[[], bool]) -> None:
        self._poll = poll
        self._is_asked = is_asked
        self.is_cut = False
        """`batches` has ended early: what was measured is of a part only."""

    def batches(self, items: Iterable[T]) -> Iterator[T]:
        """The same items, fewer when the group has to leave soon; as many on every rank."""
        for item in items:
            if self._poll.is_agreed(self._is_asked()):
                self.is_cut = True
                return
            yield item


@contextlib.contextmanager
def evaluate(
    reporter: Reporter, coordinator: Coordinator, group: dist.ProcessGroup
) -> Iterator[Evaluation]:
    """The phase of an evaluation. See `Run.evaluation`."""
    before, phase = rng.capture(), reporter.phase
    reporter.phase = "evaluation"
    try:
        yield Evaluation(Poll(group), lambda: coordinator.orders().cut_evaluation)
    finally:
        rng.restore(before)
        reporter.phase = phase
