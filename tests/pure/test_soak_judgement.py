"""What the soaks make of what they have seen."""

from __future__ import annotations

from typing import Any

import pytest

from elastic.storage.ledger import LedgerEvent
from jobs.soak import drains
from jobs.soak.reforms import Usage, _drift, judge
from jobs.soak.submits import _judge_ledger

STRUCK: dict[str, Any] = {"restarts": 50, "step": 900, "lost_steps": 40}


def used(mib: float, threads: int = 9, descriptors: int = 30, sockets: int = 8) -> Usage:
    return Usage(int(mib * (1 << 20)), threads, descriptors, sockets)


def test_what_the_first_reforms_cost_does_not_count() -> None:
    usages = [used(100 + 10 * min(n, 5), threads=9 + min(n, 5)) for n in range(26)]
    found = judge(usages, STRUCK, 0.0, 1)
    assert found["failures"] == []
    assert set(found["gained_per_reform"].values()) == {0.0}


@pytest.mark.parametrize(
    ("usages", "what"),
    [
        ([used(100 + 2.2 * n) for n in range(26)], "memory_bytes"),
        ([used(100, threads=9 + n // 20) for n in range(26)], "threads"),
        ([used(100, descriptors=30 + n) for n in range(26)], "descriptors"),
        ([used(100, sockets=8 + n) for n in range(26)], "sockets"),
    ],
)
def test_a_gain_by_each_is_told(usages: list[Usage], what: str) -> None:
    (failure,) = judge(usages, STRUCK, 0.0, 1)["failures"]
    assert what in failure


def test_a_curve_that_parts_is_told() -> None:
    assert _drift({"1": 2.0}, {"1": 2.0, "2": 1.0}) == float("inf")
    assert _drift({"1": 2.0, "2": 1.1}, {"1": 2.0, "2": 1.0}) == pytest.approx(0.1)
    (failure,) = judge([used(100)] * 26, STRUCK, float("inf"), 1)["failures"]
    assert "undisturbed" in failure


def test_a_second_writer_is_told() -> None:
    def event(kind: str, life: int) -> LedgerEvent:
        return LedgerEvent(life=life, seq=0, time_s=0.0, kind=kind, generation=0)

    one = [event("run_started", 1), event("run_stopped", 1)]
    assert _judge_ledger(one) == []
    assert "2 drivers have written" in _judge_ledger([*one, event("progress", 2)])[0]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({}, ""),
        ({"lost_steps": 1}, "lost_steps is 1, at most 0"),
        ({"standstill_s": 2.5}, "standstill_s is 2.5, at most 2"),
        ({"free_after_s": 31.0}, "free_after_s is 31, at most 30"),
    ],
)
def test_a_drain_that_costs_too_much_is_told(wrong: dict[str, float], words: str) -> None:
    good = {"world_rank": 0, "lost_steps": 0, "standstill_s": 0.4, "free_after_s": 2.0}
    found = drains._judge([good, {**good, **wrong}], drains._limits(30, 0.0))
    assert [words in failure and "drain 1" in failure for failure in found] == [True] * bool(wrong)
