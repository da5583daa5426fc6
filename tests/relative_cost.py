"""What something costs, held against what the same takes when it is done plainly.

A bound in seconds fails on a machine that is slow just then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sized

__all__ = ["relative_cost"]


def relative_cost(work: Callable[[], Sized], plain: Callable[[], Sized], num: int) -> float:
    """Processor time of `work` over that of `plain`, the least of three; both give `num` items."""

    def spent_s(call: Callable[[], Sized]) -> float:
        begun_s = time.process_time()
        assert len(call()) == num
        return time.process_time() - begun_s

    return min(spent_s(work) / spent_s(plain) for _ in range(3))
