"""First losses: whether what was loaded trains on, seen by the losses of the first steps after.

The losses are those that the ranks have summed for the metrics, so that nothing waits for a device
and all ranks come to the same answer. Must not import ray.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from elastic.policy.suspicion import Then
from elastic.training.coordinator import Coordinator
from elastic.training.membership import Membership

__all__ = ["CheckpointSuspect", "FirstLosses", "LossNotFinite"]

logger = logging.getLogger("elastic")


class CheckpointSuspect(BaseException):
    """The loaded checkpoint is not to be trained from: the group begins again from an older one.

    No `Exception`, so that none of the training function's own handlers takes it for its own.
    """


class LossNotFinite(BaseException):
    """The loss is not finite, and no checkpoint is the cause: the run ends."""


class FirstLosses:
    """Every rank looks at every step; rank 0 asks the driver at the first loss that is not finite.

    Once in a generation: a loss that was let pass once is the run's own.
    """

    def __init__(
        self, member: Membership, coordinator: Coordinator, control: dist.ProcessGroup
    ) -> None:
        self._coordinator = coordinator
        self._control = control
        self._is_asking = member.world_rank == 0
        # Without anything that was loaded there is nothing to ask.
        self._has_asked = member.resume_step is None and member.snapshot is None
        self._loaded_step: int | None = None

    def look(self, step: int, values: Mapping[str, float]) -> None:
        """What all ranks logged in that step. Raises `CheckpointSuspect`, `LossNotFinite`."""
        if self._loaded_step is None:
            self._loaded_step = step - 1
        loss = values.get("loss", 0.0)
        if self._has_asked or math.isfinite(loss):
            return
        self._has_asked = True
        answer: list[Any] = [(str(Then.GO_ON), "")]
        if self._is_asking:
            try:
                answer = [self._coordinator.doubt(self._loaded_step, step, str(loss))]
            except Exception as error:  # noqa: BLE001 - without an answer the run goes on
                logger.warning("the loss of step %d is %s, nobody answers: %s", step, loss, error)
        dist.broadcast_object_list(answer, group_src=0, group=self._control)
        then, reason = answer[0]
        if then == Then.STEP_BACK:
            raise CheckpointSuspect(reason)
        if then == Then.FAIL:
            raise LossNotFinite(reason)
