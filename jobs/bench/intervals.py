"""Intervals: what the computed save interval loses, against the best fixed one in hindsight.

A simulation, without a cluster or a clock: simulated failures, and the service's own `Cadence`,
which is told what a driver would be told and starts from a prior. Imports neither ray nor torch.

Lost is all time that does not become steps which count at the end of a trace: stalls, work done
again, recoveries. It is summed over all traces, and compared with the same sum for the one fixed
interval, the same for all traces, that a search over many finds best for just these traces. That
each trace were given the fixed interval that is best for it alone is told beside it (`own_best_s`):
nobody who does not know when the next failure comes can reach that, since with few failures in a
trace it fits its saves to their very moments.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from elastic.policy.cadence import BEFORE_MEASURED_S, Cadence
from elastic.policy.durations import told
from elastic.policy.mtbf import prior_mtbf_s
from elastic.policy.saves import SaveInterval

WEIBULL = 0.7
"""Shape of failures that come in bursts: after one, the next is likelier than later on."""
COMPUTED = SaveInterval(is_computed=True)
_WORD_S = 30.0
_STEP = 1.05
_WIDEST = 8.0

Trace = Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What saves and failures cost in a simulated run, in seconds."""

    stall_s: float = 2.0
    write_s: float = 8.0
    """Beside training, after the stall."""
    down_s: float = 10.0
    """From a failure to the first new step."""
    mtbf_s: float = 35 * 60.0
    shape: float = 1.0
    """Of a Weibull distribution: 1 for failures that come independently of each other."""
    num_failures: float = 20.0
    """In a trace, on average."""

    def horizon_s(self) -> float:
        """How long a trace lasts."""
        return self.num_failures * self.mtbf_s


@dataclass(frozen=True, kw_only=True)
class Row:
    """One comparison over all traces; times are sums over them."""

    what: str
    prior_s: float
    lost_s: float
    """With the computed interval."""
    best_interval_s: float
    best_lost_s: float
    """With the fixed interval that was best for all traces together."""
    own_best_s: float
    """With the best fixed interval of each trace."""

    @property
    def excess(self) -> float:
        """How much more is lost than with the best fixed interval: 0.05 is 5 %."""
        return self.lost_s / self.best_lost_s - 1


@dataclass(frozen=True, kw_only=True)
class Bench:
    """So many traces of each kind."""

    num_traces: int = 200
    seed: int = 1
    conditions: Conditions = Conditions()

    def run(self, say: Callable[[str], None]) -> dict[str, Any]:
        """All comparisons, as plain data; tells each when it is there."""
        rows = []
        for what, conditions, prior_s in self._cases():
            rows.append(compare(what, conditions, prior_s, self.num_traces, self.seed))
            say(f"{what}: {rows[-1].excess:+.1%}")
        return {
            "num_traces": self.num_traces,
            "seed": self.seed,
            "conditions": asdict(self.conditions),
            "rows": [{**asdict(row), "excess": row.excess} for row in rows],
        }

    def _cases(self) -> Iterator[tuple[str, Conditions, float]]:
        of = self.conditions
        bursts = replace(of, shape=WEIBULL)
        yield "prior right", of, of.mtbf_s
        yield "prior 4 times too long", of, 4 * of.mtbf_s
        yield "prior 4 times too short", of, of.mtbf_s / 4
        yield f"default prior ({told(prior_mtbf_s(1))})", of, prior_mtbf_s(1)
        yield f"bursts (Weibull {WEIBULL}), prior right", bursts, bursts.mtbf_s
        yield f"bursts (Weibull {WEIBULL}), prior 4 times too long", bursts, 4 * bursts.mtbf_s


def table(result: dict[str, Any]) -> str:
    """The result for a terminal."""
    lines = [f"{'':<42}{'COMPUTED':>12}{'BEST FIXED':>12}{'EXCESS':>8}{'OWN BEST':>12}"]
    for row in result["rows"]:
        fixed = f"{row['best_lost_s'] / 3600:.1f} h"
        lines.append(
            f"{row['what']:<42}{row['lost_s'] / 3600:>10.1f} h{fixed:>12}"
            f"{row['excess']:>8.1%}{row['own_best_s'] / 3600:>10.1f} h"
        )
    lines.append(
        "Lost time of all traces. OWN BEST: each trace with the interval best for it alone."
    )
    return "\n".join(lines)


def compare(what: str, conditions: Conditions, prior_s: float, num_traces: int, seed: int) -> Row:
    """The computed interval, from this prior on, against fixed ones on the same traces."""
    traces = failure_traces(conditions, num_traces, seed)
    lost_s = {
        interval_s: [lost_with_fixed(trace, conditions, interval_s) for trace in traces]
        for interval_s in fixed_intervals(conditions)
    }
    best_s = min(lost_s, key=lambda interval_s: sum(lost_s[interval_s]))
    return Row(
        what=what,
        prior_s=prior_s,
        lost_s=sum(
            lost_with_cadence(trace, conditions, Cadence(COMPUTED, prior_s)) for trace in traces
        ),
        best_interval_s=best_s,
        best_lost_s=sum(lost_s[best_s]),
        own_best_s=sum(min(one) for one in zip(*lost_s.values(), strict=True)),
    )


def failure_traces(conditions: Conditions, num_traces: int, seed: int) -> list[Trace]:
    """The times at which each trace fails, from 0 to its horizon."""
    rng = random.Random(seed)
    scale_s = conditions.mtbf_s / math.gamma(1 + 1 / conditions.shape)
    traces = []
    for _ in range(num_traces):
        times: list[float] = []
        time_s = rng.weibullvariate(scale_s, conditions.shape)
        while time_s < conditions.horizon_s():
            times.append(time_s)
            time_s += rng.weibullvariate(scale_s, conditions.shape)
        traces.append(times)
    return traces


def fixed_intervals(conditions: Conditions) -> list[float]:
    """From the shortest that there may be to far beyond any good one, 5 % apart."""
    shortest_s = conditions.stall_s + conditions.write_s
    young_s = math.sqrt(2 * conditions.mtbf_s * conditions.stall_s)
    found = [max(shortest_s, young_s / _WIDEST)]
    while found[-1] < max(shortest_s, young_s) * _WIDEST:
        found.append(found[-1] * _STEP)
    return found


def uptimes(trace: Trace, conditions: Conditions) -> Iterator[tuple[float, float, bool]]:
    """Begin and end of each time of training, and whether a failure ends it.

    A failure while the run recovers from another one makes it recover anew.
    """
    begin_s = 0.0
    for failed_s in trace:
        if failed_s > begin_s:
            yield begin_s, failed_s, True
        begin_s = failed_s + conditions.down_s
    if begin_s < conditions.horizon_s():
        yield begin_s, conditions.horizon_s(), False


def lost_with_fixed(trace: Trace, conditions: Conditions, interval_s: float) -> float:
    """Seconds lost when saves begin `interval_s` apart.

    The k-th save after a start begins at k T; it holds the work of k T less the k - 1 stalls before
    it, and counts from k T + C + W on.
    """
    stall_s, done_s = conditions.stall_s, 0.0
    for begin_s, end_s, fails in uptimes(trace, conditions):
        up_s = end_s - begin_s
        if fails:
            num_saves = int((up_s - stall_s - conditions.write_s) / interval_s)
            if num_saves > 0:
                done_s += num_saves * interval_s - (num_saves - 1) * stall_s
            continue
        num_begun = int(up_s / interval_s)
        done_s += up_s
        if num_begun > 0:
            last_s = min(stall_s, up_s - num_begun * interval_s)
            done_s -= (num_begun - 1) * stall_s + last_s
    return conditions.horizon_s() - done_s


def lost_with_cadence(trace: Trace, conditions: Conditions, cadence: Cadence) -> float:
    """Seconds lost when a cadence says how often, and hears what a driver's ledger would say."""
    saved = {
        "stall_s": conditions.stall_s,
        "duration_s": conditions.stall_s + conditions.write_s,
        "bytes": 0,
    }
    cadence.hear("checkpoint_committed", 0, saved, 0.0)
    done_s = 0.0
    for begin_s, end_s, fails in uptimes(trace, conditions):
        cadence.hear("resumed", 0, {}, begin_s)
        written_s = done_s
        for save_s, work_s in _saves(cadence, begin_s, end_s, conditions.stall_s):
            counts_s = save_s + conditions.stall_s + conditions.write_s
            done_s += work_s
            if counts_s <= end_s:
                written_s = done_s
                cadence.hear("checkpoint_committed", 0, saved, counts_s)
        if fails:
            done_s = written_s
            cadence.hear("failure_decided", 0, {}, end_s)
            phases_s = {"phases_s": {"wait": conditions.down_s}}
            cadence.hear("recovered", 0, phases_s, end_s + conditions.down_s)
    return conditions.horizon_s() - done_s


def _saves(
    cadence: Cadence, begin_s: float, end_s: float, stall_s: float
) -> Iterator[tuple[float, float]]:
    """When each save begins, and the work done since the one before; last of all the end."""
    last_s, works_from_s, heard_s = begin_s, begin_s, begin_s
    while True:
        cadence.look()
        next_s = last_s + (cadence.every_s or BEFORE_MEASURED_S)
        while heard_s + _WORD_S < min(next_s, end_s):
            heard_s += _WORD_S
            cadence.hear("progress", 0, {}, heard_s)
        if next_s >= end_s:
            yield math.inf, max(0.0, end_s - works_from_s)
            return
        yield next_s, next_s - works_from_s
        last_s, works_from_s, heard_s = next_s, next_s + stall_s, max(heard_s, next_s + stall_s)
