"""The helper itself: a fault in a rank must never look like a pass."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.dist.processes import RankFailed, run_ranks


def summed(rank: int, world_size: int, base: int) -> float:
    total = torch.tensor(float(base + rank))
    dist.all_reduce(total)
    return total.item()


def failing(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ZeroDivisionError("on purpose")
    dist.barrier()


def dying(rank: int, world_size: int) -> str:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def hanging(rank: int, world_size: int) -> None:
    if rank == 1:
        time.sleep(60)


def test_results_come_by_rank() -> None:
    assert run_ranks(summed, 2, 10) == [21.0, 21.0]


def test_a_failing_rank_shows_its_traceback_and_does_not_wait_for_the_others() -> None:
    with pytest.raises(RankFailed, match=r"rank 1 raised(.|\n)*ZeroDivisionError: on purpose"):
        run_ranks(failing, 2)


def test_a_dead_rank_is_named_unless_it_may_die() -> None:
    with pytest.raises(RankFailed, match="rank 1 died with exit code -9"):
        run_ranks(dying, 2)
    assert run_ranks(dying, 2, may_die=[1]) == ["alive", None]


def test_a_hanging_rank_shows_where_it_hangs() -> None:
    with pytest.raises(RankFailed, match=r"rank 1 was still running(.|\n)*in hanging"):
        run_ranks(hanging, 2, timeout_s=4)
