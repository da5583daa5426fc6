"""Series for the charts of a run's page: bounded, so that a browser draws them at once. Pure.

Must import neither ray nor torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from elastic.dashboard.restarts import Restart
from elastic.storage.ledger import LedgerEvent

MOST_POINTS = 1000

Points = dict[str, list[float | None]]


def by_step(metrics: Mapping[int, Mapping[str, float]]) -> Points:
    """`step`, `loss` and `tokens_per_s` of the history that counts: a replayed step once.

    Of more than `MOST_POINTS` steps, the lowest and the highest loss of each stretch.
    """
    steps = [step for step, values in metrics.items() if "loss" in values or "step_s" in values]
    kept = thinned(steps, [_finite(metrics[step].get("loss")) for step in steps])
    return {
        "step": [float(steps[i]) for i in kept],
        "loss": [_finite(metrics[steps[i]].get("loss")) for i in kept],
        "tokens_per_s": [_tokens_per_s(metrics[steps[i]]) for i in kept],
    }


def world_size(events: Sequence[LedgerEvent]) -> Points:
    """`time_s` and `world_size`: a point at each change, and 0 from the end of a group on.

    Of more than `MOST_POINTS` changes the lowest and highest of each stretch.
    """
    times: list[float] = []
    sizes: list[float | None] = []
    for event in events:
        size = _size_after(event)
        if size is not None and (not sizes or size != sizes[-1]):
            times.append(event.time_s)
            sizes.append(size)
    if times:
        times.append(events[-1].time_s)
        sizes.append(sizes[-1])
    kept = thinned(times, sizes)
    return {"time_s": [times[i] for i in kept], "world_size": [sizes[i] for i in kept]}


def marks(restarts: Sequence[Restart], most: int = 200) -> list[dict[str, object]]:
    """Where the charts are marked: the newest `most` re-forms, by step and by time."""
    return [
        {
            "number": one.number,
            "step": one.step,
            "time_s": one.time_s,
            "causes": one.causes,
            "is_failure": one.is_failure,
        }
        for one in restarts[-most:]
    ]


def thinned(
    places: Sequence[float], values: Sequence[float | None], most: int = MOST_POINTS
) -> list[int]:
    """Indices to keep: all, or the first, the last, and the extremes of each stretch between."""
    num = len(places)
    if num <= most:
        return list(range(num))
    stretch = num / (most // 2 - 1)
    kept = {0, num - 1}
    for n in range(most // 2 - 1):
        inside = range(int(n * stretch), min(num, int((n + 1) * stretch)))
        told = [i for i in inside if values[i] is not None] or list(inside[:1])
        if told:
            kept.add(min(told, key=lambda i: values[i] or 0.0))
            kept.add(max(told, key=lambda i: values[i] or 0.0))
    return sorted(kept)


def _size_after(event: LedgerEvent) -> float | None:
    if event.kind == "generation_started":
        size = event.data.get("world_size")
        return float(size) if isinstance(size, int) else None
    ends = ("generation_ended", "run_finished", "run_failed", "run_stopped", "driver_lost")
    return 0.0 if event.kind in ends else None


def _tokens_per_s(values: Mapping[str, float]) -> float | None:
    tokens, step_s = _finite(values.get("tokens")), _finite(values.get("step_s"))
    return tokens / step_s if tokens is not None and step_s else None


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
