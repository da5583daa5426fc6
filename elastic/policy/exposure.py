"""Exposure: how long a run has trained, and how often a failure ended that. Pure.

From the words of the run's ledger, those of all lives of its driver. The time that counts is the
time in which a failure would lose work: not starts, not waiting, not the time between two lives.
"""

from __future__ import annotations

from collections.abc import Mapping

MOST_SILENCE_S = 60.0
"""Whoever drives a run speaks far more often: of a longer silence, this much is its own."""

_TRAINS = frozenset({"started", "resumed"})
_RESTS = frozenset({"waiting", "holding", "run_stopped", "run_finished"})
# A driver that vanished says nothing of it: the next one's first word does.
_FAILS = frozenset({"failure_decided", "left_unsaved", "run_failed", "run_started"})


class Exposure:
    """Hears the words of a ledger in their order, and counts."""

    def __init__(self) -> None:
        self.observed_s = 0.0
        """Seconds of training, all lives together."""
        self.num_failures = 0
        """Failures that ended training and lost work, a node that was left without a save among
        them. Those that were injected do not count; nor do growth, nodes that were left with a
        save, and stops that were asked for: they lose none."""
        self.is_training = False
        self._heard_s: float | None = None

    def hear(self, kind: str, data: Mapping[str, object], time_s: float) -> bool:
        """Take in one word, at a wall time; whether it tells of a failure, injected or not.

        An injected failure is a `failure_decided` with `injected` true in its data.
        """
        before_s, self._heard_s = self._heard_s, time_s
        if self.is_training and before_s is not None:
            self.observed_s += min(max(0.0, time_s - before_s), MOST_SILENCE_S)
        failed = self.is_training and kind in _FAILS
        if failed and not data.get("injected", False):
            self.num_failures += 1
        if kind in _TRAINS:
            self.is_training = True
        elif kind in _FAILS or kind in _RESTS:
            self.is_training = False
        return failed
