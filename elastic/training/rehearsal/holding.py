"""A holding: one value that a training function keeps from step to step, outside what it tracks.

Plain data, for another process. Must not import torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

DATA, RNG, SCHEDULER, EMA, OPTIMIZER = "data position", "RNG", "scheduler", "EMA", "optimizer"
SCALER, COUNTER, MODEL, STATE = "gradient scaler", "counter", "model", "state"
TRACKED = "tracked state"
DIGEST = "digest "
"""Before a value that is told by its digest."""

# What a word in a name gives away, where the type does not: the first that is met.
_WORDS = {
    EMA: "ema average averaged avg shadow teacher polyak smooth smoothed",
    SCHEDULER: "scheduler schedule sched warmup annealing lr",
    DATA: "sampler loader iterator dataset cursor position offset order permutation perm batches",
    RNG: "rng generator random",
    STATE: "time clock start started began begun history log s",
}
_KINDS = [(kind, frozenset(words.split())) for kind, words in _WORDS.items()]
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")


@dataclass(frozen=True, kw_only=True)
class Holding:
    """One leaf: a number, a text, a tensor, the state of a generator."""

    where: str
    """Whose it is: `train()`, `module train_mine`, `run.once`."""
    root: str
    """The variable by which it is reached."""
    owner: str
    """The object that a person would name: `scheduler`, `state.ema`."""
    type_name: str
    kind: str
    path: str
    """From the variable to the value: `scheduler.last_epoch`."""
    value: str
    """The value itself if it is short, else its digest."""


def kind_by_name(*names: str) -> str | None:
    """What a thing with these names, its own and its class's, most likely is; None if unclear."""
    words = {word.lower() for name in names for word in _WORD.findall(name)}
    return next((kind for kind, known in _KINDS if known & words), None)
