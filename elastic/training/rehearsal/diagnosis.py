"""The diagnosis: which forgotten state is likely to be why a resumed run parts from the other.

Two kinds of evidence meet. What the function holds and does not track, looked at in both runs when
they should be equal, tells what was not restored. What each step began with (data, random streams,
rates) tells by which way it reaches the loss. Pure; must not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from elastic.training.rehearsal.holding import (
    COUNTER,
    DATA,
    DIGEST,
    EMA,
    MODEL,
    OPTIMIZER,
    RNG,
    SCALER,
    SCHEDULER,
    STATE,
    TRACKED,
    Holding,
)
from elastic.training.rehearsal.notes import StepSeen, Trace

ABSENT = "(absent)"
_MOST_SHOWN = 3

ADVICE = {
    DATA: "read through run.loader, whose position belongs to the run, or give the object that "
    "knows the position state_dict and load_state_dict and name it in run.track",
    RNG: "draw from the global streams of torch, numpy or random, which are kept without asking, "
    "or name the generator in run.track, which keeps it for each rank",
    SCHEDULER: "name it in run.track(scheduler={name})",
    EMA: "name it in run.track(ema={name})",
    OPTIMIZER: "name it in run.track(optimizer={name})",
    SCALER: "name it in run.track(scaler={name})",
    MODEL: "name it in run.track, beside the model",
    COUNTER: "keep it in a dict that is named in run.track(counters=...), or take run.step",
    STATE: "if the loss depends on it, name it in run.track",
    TRACKED: "run.track restores in place: make nothing anew and overwrite nothing after it",
}


@dataclass(frozen=True, kw_only=True)
class Suspect:
    """One thing that may have been forgotten."""

    kind: str
    name: str
    """As the training function calls it; empty where nothing that is held stands for it."""
    type_name: str
    where: str
    evidence: Sequence[str]
    advice: str


@dataclass(frozen=True, kw_only=True)
class Signals:
    """The first step of each way in which the two runs differ, up to where the losses part."""

    inputs_at: int | None = None
    same_inputs_as: int | None = None
    """Another step of the uninterrupted run that saw the very same inputs."""
    batches_at: int | None = None
    random_at: int | None = None
    streams: Sequence[str] = ()
    rates_at: int | None = None
    rates: Mapping[str, tuple[float, float]] | None = None


def suspects(
    expected: Sequence[Trace], found: Sequence[Trace], *, first_step: int, parted_at: int
) -> list[Suspect]:
    """Likeliest first. The traces are of the ranks of both runs, at the same size.

    `first_step` is the first after the resume, `parted_at` the first with another loss.
    """
    signals = read_signals(expected, found, range(first_step, parted_at + 1))
    differing = unequal(expected, found, first_step=first_step)
    plausible = _plausible(signals, is_late=parted_at > first_step)
    order = list(dict.fromkeys([TRACKED, *plausible, *ADVICE]))
    ranked = sorted(differing, key=lambda one: order.index(one.kind))
    if _is_seen(signals) and not {TRACKED, *plausible} & {one.kind for one in ranked}:
        kind = plausible[0]
        nameless = Suspect(
            kind=kind, name="", type_name="", where="", evidence=[], advice=_advice(kind)
        )
        ranked.insert(0, nameless)
    if ranked:
        ranked[0] = replace(ranked[0], evidence=[*ranked[0].evidence, *_told(signals)])
    return ranked


def unequal(expected: Sequence[Trace], found: Sequence[Trace], *, first_step: int) -> list[Suspect]:
    """What is held and not tracked, or tracked and overwritten, and was not equal in both runs."""
    by_owner: dict[tuple[str, str], list[str]] = {}
    owners: dict[tuple[str, str], Holding] = {}
    changed: list[str] = []
    for one, other in zip(expected, found, strict=True):
        step = min(one.holdings.keys() & other.holdings.keys(), default=None)
        if step is None:
            continue
        for leaf, before, after in _unequal_leaves(one.holdings[step], other.holdings[step]):
            key = (leaf.where, leaf.owner)
            line = _line(leaf.path, step, before, after)
            owners.setdefault(key, leaf)
            lines = by_owner.setdefault(key, [])
            if line not in lines:
                lines.append(line)
        if step == first_step:
            # Later it is an effect: the model itself has parted.
            before_digests, after_digests = one.tracked[step], other.tracked[step]
            changed += [
                name for name, text in after_digests.items() if before_digests.get(name) != text
            ]
    held = [_suspect(owners[key], lines) for key, lines in by_owner.items()]
    return held + _overwritten(changed)


def _suspect(owner: Holding, lines: Sequence[str]) -> Suspect:
    return Suspect(
        kind=owner.kind,
        name=owner.owner,
        type_name=owner.type_name,
        where=owner.where,
        evidence=_shortened(lines),
        advice=_advice(owner.kind, owner.owner),
    )


def _line(path: str, step: int, before: str, after: str) -> str:
    if DIGEST in before and DIGEST in after:
        return f"{path} at the start of step {step} is not what it was in the uninterrupted run"
    return f"{path} at the start of step {step}: {before} uninterrupted, {after} here"


def _advice(kind: str, name: str = "") -> str:
    return ADVICE[kind].format(name=name if name.isidentifier() else "...")


def _overwritten(changed: Sequence[str]) -> list[Suspect]:
    """A suspect for each tracked object that was restored, and is not what was restored."""
    objects: dict[str, list[str]] = {}
    for name in dict.fromkeys(changed):
        objects.setdefault(name.partition(".")[0], []).append(name)
    return [
        Suspect(
            kind=TRACKED,
            name=name,
            type_name="",
            where="run.track",
            evidence=_shortened(
                [f"{one} is tracked, and is not what was restored" for one in names]
            ),
            advice=_advice(TRACKED),
        )
        for name, names in objects.items()
    ]


def _unequal_leaves(
    expected: Sequence[Holding], found: Sequence[Holding]
) -> Iterator[tuple[Holding, str, str]]:
    before = {(leaf.where, leaf.path): leaf for leaf in expected}
    after = {(leaf.where, leaf.path): leaf for leaf in found}
    # A variable that only one of them has yet is a passing one, such as the last step's batch.
    roots = {(leaf.where, leaf.root) for leaf in expected} & {
        (leaf.where, leaf.root) for leaf in found
    }
    for key in dict.fromkeys([*before, *after]):
        leaf = after.get(key) or before[key]
        values = [leaves[key].value if key in leaves else ABSENT for leaves in (before, after)]
        if values[0] != values[1] and (leaf.where, leaf.root) in roots:
            yield leaf, values[0], values[1]


# --- signals --------------------------------------------------------------------------------------


def read_signals(
    expected: Sequence[Trace], found: Sequence[Trace], steps: Sequence[int]
) -> Signals:
    """What differs first, on any rank, over these steps."""
    signals = Signals()
    for step in steps:
        for one, other in zip(expected, found, strict=True):
            if step in one.steps and step in other.steps:
                signals = _noted(signals, step, one, other)
    return signals


def _noted(signals: Signals, step: int, expected: Trace, found: Trace) -> Signals:
    one, other = expected.steps[step], found.steps[step]
    if signals.inputs_at is None and one.inputs and other.inputs and one.inputs != other.inputs:
        same = _with_inputs(expected.steps, other.inputs)
        signals = replace(signals, inputs_at=step, same_inputs_as=same)
    if signals.batches_at is None and one.batches != other.batches:
        signals = replace(signals, batches_at=step)
    if signals.random_at is None and one.random_streams != other.random_streams:
        streams = [
            name
            for name, text in one.random_streams.items()
            if other.random_streams.get(name) != text
        ]
        signals = replace(signals, random_at=step, streams=streams)
    if signals.rates_at is None and one.rates != other.rates:
        rates = {
            name: (value, other.rates[name])
            for name, value in one.rates.items()
            if name in other.rates and other.rates[name] != value
        }
        if rates:
            signals = replace(signals, rates_at=step, rates=rates)
    return signals


def _with_inputs(steps: Mapping[int, StepSeen], inputs: Sequence[str]) -> int | None:
    return next((step for step, seen in steps.items() if list(seen.inputs) == list(inputs)), None)


def _is_seen(signals: Signals) -> bool:
    return any(
        step is not None
        for step in (signals.inputs_at, signals.batches_at, signals.random_at, signals.rates_at)
    )


def _plausible(signals: Signals, *, is_late: bool) -> list[str]:
    """Kinds of state, the likeliest first, by the way in which the difference reached the loss."""
    if signals.same_inputs_as is not None or signals.batches_at is not None:
        return [DATA, RNG, COUNTER]
    if signals.inputs_at is not None or signals.random_at is not None:
        # Noise on the data, or other data: no step of the other run saw the same.
        return [RNG, DATA, COUNTER]
    if signals.rates_at is not None:
        return [SCHEDULER, OPTIMIZER, COUNTER]
    if is_late:
        # The first loss was right and a later one was not: what only an update uses.
        return [OPTIMIZER, SCALER, SCHEDULER, RNG, EMA, COUNTER]
    return [RNG, EMA, COUNTER]


def _told(signals: Signals) -> Iterator[str]:
    if signals.inputs_at is not None:
        yield f"the model saw other inputs at step {signals.inputs_at}" + (
            ""
            if signals.same_inputs_as is None
            else f": those that the uninterrupted run saw at step {signals.same_inputs_as}"
        )
    if signals.batches_at is not None:
        yield f"run.loader gave other batches at step {signals.batches_at}"
    if signals.random_at is not None:
        streams = ", ".join(signals.streams)
        yield f"the random streams differ at the start of step {signals.random_at}: {streams}"
    for name, (before, after) in list((signals.rates or {}).items())[:_MOST_SHOWN]:
        yield (f"{name} at step {signals.rates_at}: {before:.6g} uninterrupted, {after:.6g} here")


def _shortened(lines: Sequence[str]) -> list[str]:
    rest = len(lines) - _MOST_SHOWN
    return [*lines[:_MOST_SHOWN], *([f"and {rest} more"] if rest > 0 else [])]
