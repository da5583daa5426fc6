"""The data report: what a step has used and whether two histories agree, for people and programs.

Pure. Must import neither ray nor torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from elastic.dashboard.data_history import DataHistory, Sample, StepUse, Stretch
from elastic.dashboard.text import plain, table

_AT_ONCE = 1 << 16
_MOST_LINES = 40


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Steps in which two histories used other samples, from the first such step on."""

    first_step: int
    last_step: int
    """The last that both read as they did in the first; not each in between need differ."""
    why: list[str]
    """The facts that differ: name, what A has, what B has."""
    samples_a: list[Sample]
    """Of the first step."""
    samples_b: list[Sample]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What two histories have in common; the steps that both have finished and recorded."""

    num_steps: int
    """How many these are."""
    last_step_a: int
    last_step_b: int
    loaders: list[str]
    """Whose steps these are."""
    other_loaders: list[str]
    """That a run has as well, and that were not compared."""
    differences: list[Difference]

    @property
    def agree(self) -> bool:
        return not self.differences


def compare(a: DataHistory, b: DataHistory, loader: str | None = None) -> Comparison:
    """Step by step: the same samples in the same order, whoever read them.

    With `loader` in its steps alone.
    """
    differences: list[Difference] = []
    num_steps = 0
    for first, last, left, right in _overlaps(a.stretches(loader), b.stretches(loader)):
        num_steps += last - first + 1
        parted = _parted(first, last, left, right)
        if parted is None:
            continue
        differences.append(
            Difference(
                first_step=parted,
                last_step=last,
                why=_why(left, right, parted),
                samples_a=left.samples(parted),
                samples_b=right.samples(parted),
            )
        )
    return Comparison(
        num_steps=num_steps,
        last_step_a=a.last_step,
        last_step_b=b.last_step,
        loaders=[loader] if loader else sorted({*a.loaders, *b.loaders}),
        other_loaders=sorted({*_unread(a, loader), *_unread(b, loader)}),
        differences=differences,
    )


def _unread(history: DataHistory, loader: str | None) -> list[str]:
    told = history.loaders if loader else []
    return [name for name in [*told, *history.untold_loaders] if name != loader]


def _overlaps(
    a: Sequence[tuple[int, int, Stretch]], b: Sequence[tuple[int, int, Stretch]]
) -> Iterator[tuple[int, int, Stretch, Stretch]]:
    for first_a, last_a, left in a:
        for first_b, last_b, right in b:
            first, last = max(first_a, first_b), min(last_a, last_b)
            if first <= last:
                yield first, last, left, right


def _parted(first: int, last: int, a: Stretch, b: Stretch) -> int | None:
    """The first of these steps in which the samples are not the same."""
    if a.way(first) == b.way(first):
        return None
    if a.global_batch != b.global_batch:
        return first
    size = a.global_batch
    at_once = max(1, _AT_ONCE // size)
    for step in range(first, last + 1, at_once):
        count = size * min(at_once, last + 1 - step)
        left, right = a.at(a.position(step), count), b.at(b.position(step), count)
        other = np.flatnonzero((left[0] != right[0]) | (left[1] != right[1]))
        if other.size:
            return step + int(other[0]) // size
    return None


def _why(a: Stretch, b: Stretch, step: int) -> list[str]:
    left, right = a.way(step), b.way(step)
    names = [name for name in {**left, **right} if left.get(name) != right.get(name)]
    return [f"{name}: {left.get(name)} and {right.get(name)}" for name in names]


def compared_text(found: Comparison, a: str, b: str) -> str:
    """Of `compare`, for people; `a` and `b` name the runs."""
    lines = [f"A: {plain(a)}, to step {found.last_step_a}"]
    lines.append(f"B: {plain(b)}, to step {found.last_step_b}")
    lines += _of_loaders(found.loaders, found.other_loaders)
    if found.agree:
        return "\n".join([*lines, f"the same samples in each of {found.num_steps} common steps"])
    for one in found.differences[:_MOST_LINES]:
        shared = len({*one.samples_a} & {*one.samples_b})
        sizes = f"{len(one.samples_a)} and {len(one.samples_b)} samples, {shared} of them in both"
        lines.append(f"other samples in step {one.first_step}, to step {one.last_step}: {sizes}")
        lines += [f"  {plain(why)}" for why in one.why]
    rest = len(found.differences) - _MOST_LINES
    return "\n".join([*lines, *([f"and {rest} more"] if rest > 0 else [])])


def _of_loaders(names: Sequence[str], others: Sequence[str]) -> list[str]:
    """A line where there is more than one loader to think of."""
    if len(names) + len(others) < 2:
        return []
    told = f"of the loader{'s' if len(names) > 1 else ''} {_quoted(names)}"
    if others:
        told += f"; {_quoted(others)} not among it"
    return [plain(told)]


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(repr(name) for name in names)


def use_json(use: StepUse, others: Sequence[StepUse]) -> dict[str, Any]:
    """What a step has used, for programs; `others` are what other generations had in it."""
    stretch, step = use.stretch, use.step
    samples = stretch.samples(step)
    return {
        "step": step,
        "is_done": use.is_done,
        "counts": use.counts,
        "generation": stretch.generation,
        "world_size": stretch.world_size,
        "tensor": stretch.tensor,
        "loader": stretch.loader,
        "other_loaders": stretch.other_loaders,
        "position": stretch.position(step),
        "samples": samples,
        "ranks": [
            {"rank": rank, "micro_batches": of_rank}
            for rank, of_rank in enumerate(stretch.split(step))
        ],
        "source": dict(stretch.facts),
        "other_generations": [
            {
                "generation": other.stretch.generation,
                "world_size": other.stretch.world_size,
                "is_done": other.is_done,
                "same_samples": other.stretch.samples(step) == samples,
            }
            for other in others
        ],
    }


def use_text(use: StepUse, others: Sequence[StepUse]) -> str:
    """The same for people."""
    told = use_json(use, others)
    facts = use.stretch.facts
    state = "" if use.is_done else ", not told to be finished"
    state += "" if use.counts else ", and a newer generation has begun before it"
    epochs = sorted({epoch for epoch, _ in told["samples"]})
    what = f"{len(told['samples'])} samples of {facts['dataset']}"
    where = f"epoch {' and '.join(map(str, epochs))}, from position {told['position']:,} of the run"
    lines = [
        f"step {use.step}{state}",
        plain(f"{what}: {where}"),
        f"generation {told['generation']}, world size {told['world_size']}{_groups(told)}",
        *_of_loaders([told["loader"]], told["other_loaders"]),
    ]
    rows = [
        [str(rank["rank"]), " | ".join(_ids(batch, epochs) for batch in rank["micro_batches"])]
        for rank in told["ranks"]
    ]
    lines += ["", *table(["RANK", "SAMPLES, BY MICRO-BATCH"], rows, right="RANK")]
    for other in told["other_generations"]:
        same = "the same samples" if other["same_samples"] else "OTHER SAMPLES"
        done = "" if other["is_done"] else ", not finished"
        where = f"generation {other['generation']}, world size {other['world_size']}"
        lines += ["", f"{where}{done}: {same}"]
    return "\n".join(lines)


def _groups(told: Mapping[str, Any]) -> str:
    if told["tensor"] == 1:
        return ""
    return f", in tensor-parallel groups of {told['tensor']} that read the same"


def _ids(samples: Sequence[Sample], epochs: Sequence[int]) -> str:
    """Indices, with the epoch before each where there are several."""
    if len(epochs) == 1:
        return " ".join(str(index) for _, index in samples)
    return " ".join(f"{epoch}:{index}" for epoch, index in samples)
