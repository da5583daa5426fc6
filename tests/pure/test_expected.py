"""A checkpoint that was committed and is not resumed is told of, once, with what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from elastic.storage.checkpoints import Catalog
from elastic.storage.expected import PASSED_BY, Expected
from elastic.storage.ledger import LedgerEvent
from tests.made_run import add_checkpoint, make_run


def told(*events: tuple[str, int]) -> list[LedgerEvent]:
    return [
        LedgerEvent(life=0, seq=seq, time_s=0.0, kind=kind, step=step)
        for seq, (kind, step) in enumerate(events)
    ]


STEPS = (10, 20, 30)
COMMITTED = tuple(("checkpoint_committed", step) for step in STEPS)


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    made = make_run(tmp_path)
    for step in STEPS:
        add_checkpoint(made, step)
    return made


def expected(catalog: Catalog, *more: tuple[str, int]) -> Expected:
    found = Expected(catalog)
    found.hear_past(told(*COMMITTED, *more))
    return found


def cut(catalog: Catalog) -> None:
    path = Path(catalog.fs.root, catalog.data_path(30), "__0_0.distcp")
    path.write_bytes(path.read_bytes()[:10])


def lost(name: str) -> Callable[[Catalog], None]:
    return lambda catalog: catalog.fs.remove_tree(f"checkpoints/step-30{name}")


def garbled(catalog: Catalog) -> None:
    catalog.fs.write_bytes("checkpoints/step-30/manifest.json", b"{")


DAMAGE: dict[str, tuple[Callable[[Catalog], None], str]] = {
    "a truncated file": (cut, "__0_0.distcp: expected 3000 bytes, found 10"),
    "a missing file": (lost("/state.json"), "state.json is missing"),
    "an unreadable manifest": (garbled, "manifest.json is unreadable"),
    "no marker": (lost("/_COMPLETE"), "checkpoints/step-30 has no _COMPLETE marker"),
    "nothing at all": (lost(""), "nothing lies at checkpoints/step-30"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_what_is_passed_by_is_told_with_the_reason_once(catalog: Catalog, kind: str) -> None:
    found = expected(catalog)
    assert found.passed_by(30) == [] == found.passed_by(20)  # it is complete: no flaw
    damage, problem = DAMAGE[kind]
    damage(catalog)
    (one,) = found.passed_by(20)
    assert (one.kind, one.step, one.data["resumed_step"]) == (PASSED_BY, 30, 20)
    assert problem in str(one.data["problem"])
    assert problem in one.reason and "resuming from step 20" in one.reason
    assert "elastic checkpoints list" in one.reason
    assert found.passed_by(20) == []
    assert found.newest() == 20  # nobody waits for it again
    found.committed(30)
    assert found.newest() == 30 and [again.step for again in found.passed_by(20)] == [30]


@pytest.mark.parametrize("kind", ["checkpoint_removed", "checkpoint_quarantined", "rolled_back"])
def test_what_was_taken_away_in_words_is_not_told_again(catalog: Catalog, kind: str) -> None:
    lost("")(catalog)
    assert expected(catalog, (kind, 20 if kind == "rolled_back" else 30)).passed_by(20) == []
    heard = expected(catalog)
    heard.gone([30])
    assert heard.passed_by(20) == [] and heard.newest() == 20


def test_what_lies_in_quarantine_has_been_told(catalog: Catalog) -> None:
    catalog.quarantine(30, "rolled back on submission, after the ledger was read")
    assert expected(catalog).passed_by(20) == []


def test_a_run_that_has_committed_does_not_begin_again(catalog: Catalog) -> None:
    assert Expected(catalog).refusal() == ""
    assert "(" not in expected(catalog).refusal()
    for step in STEPS:
        catalog.quarantine(step, "bad bytes")
    again = ("checkpoint_committed", 30)
    refusal = expected(catalog, again, ("checkpoint_quarantined", 30)).refusal()
    assert refusal.startswith("3 checkpoints were committed, the last at step 30, and none is")
    assert "(3 in its quarantine" in refusal and "restore their files" in refusal
