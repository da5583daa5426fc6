"""MTBF: the mean time between failures that stop a run, from rates and from a history. Pure.

Failures are independent of each other, and any one stops the whole run, as it does when all ranks
meet in each step: rates add up, and twice the machines fail twice as often.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

GPU_MTBF_S = 16_384 * 54 * 86_400 / 419
GPU_MTBF_SOURCE = (
    "419 unexpected interruptions in 54 days on 16,384 H100 GPUs, of all causes "
    "(Llama 3, arXiv 2407.21783)"
)

MERGE_WITHIN_S = 60.0
"""Failures this soon after another are one interruption: a rack that goes is many of them."""

DEFAULT_PRIOR_S = 8 * 3600.0

_DOUBT = 4.0
_LIKELY = 1 / 6
_MOST_DOUBTS = 4


def cluster_mtbf_s(
    *,
    num_gpus: int = 0,
    gpu_mtbf_s: float = GPU_MTBF_S,
    num_nodes: int = 0,
    node_mtbf_s: float = math.inf,
) -> float:
    """MTBF of that many GPUs and nodes together: 1 / (GPUs / MTBF of one + nodes / MTBF of one).

    The default for a GPU counts every cause that stopped a run, those of its node too: give a
    node's MTBF only beside one that is of the GPU alone. Spot capacity fails far more often.

    Raises:
        ValueError: nothing that could fail, or an MTBF that is not above 0.
    """
    if num_gpus < 0 or num_nodes < 0 or not (gpu_mtbf_s > 0 and node_mtbf_s > 0):
        raise ValueError(
            "counts must be 0 or more and each MTBF above 0; found "
            f"{num_gpus} GPUs of {gpu_mtbf_s} s and {num_nodes} nodes of {node_mtbf_s} s"
        )
    failures_per_s = num_gpus / gpu_mtbf_s + num_nodes / node_mtbf_s
    if failures_per_s == 0:
        raise ValueError("nothing can fail: give a number of GPUs, or of nodes and their MTBF")
    return 1 / failures_per_s


def mtbf_with_prior_s(*, num_failures: int, observed_s: float, prior_s: float) -> float:
    """MTBF after `num_failures` in `observed_s`: (prior + observed) / (1 + failures).

    The prior counts as one failure in `prior_s`: it decides alone while nothing has been seen, and
    weighs as much as any one failure later. That is the reciprocal of the posterior mean rate
    under a gamma prior with a = 1 and b = prior (NIST/SEMATECH e-Handbook of Statistical Methods,
    8.4.6, which calls it the more conservative of two estimates). Holds for a constant rate.

    Raises:
        ValueError: a negative count or time, or a prior that is not above 0.
    """
    if num_failures < 0 or not 0 <= observed_s < math.inf or not 0 < prior_s < math.inf:
        raise ValueError(
            "failures and observed time must be 0 or more and the prior above 0; found "
            f"{num_failures} failures in {observed_s} s with a prior of {prior_s} s"
        )
    return (prior_s + observed_s) / (1 + num_failures)


def prior_mtbf_s(num_workers: int) -> float:
    """What is believed of a group of that many workers before it has failed: 8 h, or less where
    `cluster_mtbf_s` says so, which it does from some 6,300 GPUs on.

    A well-kept GPU alone fails once in years; elastic capacity is taken away far more often, and
    to save too often costs little where the stall is short.
    """
    return min(DEFAULT_PRIOR_S, cluster_mtbf_s(num_gpus=max(1, num_workers)))


def learned_mtbf_s(*, num_failures: int, observed_s: float, prior_s: float) -> float:
    """MTBF after `num_failures` in `observed_s`, of a run whose prior may be wrong by far.

    The prior counts as one failure in `prior_s`, as in `mtbf_with_prior_s`, or in 4, 16, 64 or 256
    times as long, or as short, each factor of 4 taken to be a sixth as likely: a mixture of gamma
    priors of shape 1 for the rate of failures. The first failures decide between them, so that
    spot capacity is soon found out. The result is the reciprocal of the posterior mean rate: since
    lost time is linear in the rate, the interval that suits it loses least on average over all
    rates that are possible. So a prior of which nothing is known yet counts as half of itself:
    failures that come far sooner than was believed cost more than those that come later.

    Source: mixtures of conjugate priors, Bernardo and Smith 1994, "Bayesian Theory", 5.2. Holds
    for a constant rate. Raises `ValueError` as `mtbf_with_prior_s` does.
    """
    mtbf_with_prior_s(num_failures=num_failures, observed_s=observed_s, prior_s=prior_s)
    alternatives = [
        (_LIKELY ** abs(k), prior_s * _DOUBT**k) for k in range(-_MOST_DOUBTS, _MOST_DOUBTS + 1)
    ]
    # The likelihood of what was seen under rates of gamma(1, b): n! b / (b + t)^(n + 1).
    logs = [
        math.log(weight * b) - (num_failures + 1) * math.log(b + observed_s)
        for weight, b in alternatives
    ]
    most = max(logs)
    weights = [math.exp(log - most) for log in logs]
    rates = [(1 + num_failures) / (b + observed_s) for _, b in alternatives]
    return sum(weights) / sum(w * rate for w, rate in zip(weights, rates, strict=True))


@dataclass(frozen=True, kw_only=True)
class History:
    """What a list of failure times says about the MTBF of the cluster that it is of."""

    num_failures: int
    num_interruptions: int
    """Failures, those shortly after another one taken together."""
    observed_s: float
    """From the first to the last: the quiet before and after it is not known from the list."""
    prior_s: float
    mtbf_s: float


def history_mtbf(
    times_s: Sequence[float], *, prior_s: float, merge_within_s: float = MERGE_WITHIN_S
) -> History:
    """The MTBF that these failure times (seconds of any one clock, in any order) and a prior give.

    n interruptions are n - 1 times between them; a single one leaves the prior as it is. A failure
    within `merge_within_s` of the one before it belongs to the same interruption.

    Raises:
        ValueError: no times, or a prior that is not above 0.
    """
    if not times_s:
        raise ValueError("no failure times to estimate an MTBF from")
    starts = _interruptions(sorted(times_s), merge_within_s)
    observed_s = starts[-1] - starts[0]
    return History(
        num_failures=len(times_s),
        num_interruptions=len(starts),
        observed_s=observed_s,
        prior_s=prior_s,
        mtbf_s=mtbf_with_prior_s(
            num_failures=len(starts) - 1, observed_s=observed_s, prior_s=prior_s
        ),
    )


def _interruptions(times_s: Sequence[float], merge_within_s: float) -> list[float]:
    return [
        time_s
        for before_s, time_s in zip([-math.inf, *times_s], times_s, strict=False)
        if time_s - before_s > merge_within_s
    ]
