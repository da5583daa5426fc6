"""Advice: what an operator is told to look at after a restart. Pure."""

from __future__ import annotations

from elastic.dashboard.restarts import Restart
from elastic.policy.budgets import ADVICE
from elastic.storage.store_errors import is_full

__all__ = ["advice"]

_BY_CAUSE = {str(cause): text for cause, text in ADVICE.items()} | {
    "capacity": "Look at the cluster: fewer workers could run than the run needs at least.",
}
_NOT_FINITE = (
    "A loss was not finite right after a load, so that the checkpoint is suspect and passed by: "
    "look at the data of that step and at the learning rate."
)
_DATA_OR_RATE = (
    "A loss was not finite from two checkpoints alike: look at the data of that step and at the "
    "learning rate."
)
_NO_ROOM = "Storage is full: free room in it, and run the job again; or keep fewer checkpoints."
_BY_ERROR = {"CheckpointSuspect: ": _NOT_FINITE, "LossNotFinite: ": _DATA_OR_RATE}
_ANSWERED = ("storage", "user_exception")
"""The causes of what has advice of its own."""


def advice(one: Restart) -> list[str]:
    """A sentence for each of its causes, what was said of them considered."""
    said = [event.reason for event in one.events]
    own = [text for sign, text in _BY_ERROR.items() if any(sign in words for words in said)]
    if any(map(is_full, said)):
        own.append(_NO_ROOM)
    causes = dict.fromkeys(one.causes)
    left = [cause for cause in causes if cause in _BY_CAUSE and not (own and cause in _ANSWERED)]
    return own + [_BY_CAUSE[cause] for cause in left]
