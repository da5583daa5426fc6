"""The metrics of finished steps on their way to the reporter, one step behind the training."""

from __future__ import annotations

import time

from elastic.training.agreement import Agreement
from elastic.training.coordinator import Coordinator
from elastic.training.first_losses import FirstLosses
from elastic.training.membership import Membership
from elastic.training.process_group import Groups
from elastic.training.reporter import Reporter
from elastic.training.step import PendingMetrics, Step


class StepMetrics:
    """Sums each step's metrics over the ranks while the next one runs."""

    def __init__(
        self, reporter: Reporter, groups: Groups, member: Membership, coordinator: Coordinator
    ) -> None:
        """Every rank takes part in the sums, and rank 0 hands them on."""
        self._first_losses = FirstLosses(member, coordinator, groups.control)
        self._reporter = reporter
        self._group = groups.control
        self._is_counted = groups.shape.is_counted(member.world_rank)
        self._is_told = member.world_rank == 0
        self._pending: tuple[int, dict[str, float], PendingMetrics] | None = None

    def push(self, step: Step, agreement: Agreement, begun_s: float) -> None:
        """Take in the metrics of a step that has just ended."""
        self.flush()
        extra = {
            "tokens": float(agreement.num_valid_tokens()),
            "step_s": time.monotonic() - begun_s,
        }
        self._pending = (step.number, extra, step.metrics(self._group, is_counted=self._is_counted))

    def flush(self) -> None:
        """Hand on the metrics of the step before. Raises what `FirstLosses.look` raises."""
        if self._pending is None:
            return
        number, extra, pending = self._pending
        self._pending = None
        values = {**extra, **pending.read()}
        if self._is_told:
            self._reporter.add_row(number, values)
        self._first_losses.look(number, values)
