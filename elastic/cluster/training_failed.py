"""The error of a run that has failed, as its owner's code meets it."""

from __future__ import annotations

from ray.train import TrainingFailedError


class TrainingFailed(TrainingFailedError):
    """The run is over and has failed; the message leads with the first cause and its rank."""
