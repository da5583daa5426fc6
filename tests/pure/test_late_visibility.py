"""A checkpoint that was committed and is shown late is waited for, and never passed over."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from elastic.policy.events import Record
from elastic.storage.checkpoints import Catalog
from elastic.storage.filesystem import Entry, Filesystem
from elastic.storage.late_visibility import committed_steps, wait_for
from elastic.storage.ledger import LedgerEvent, LedgerWriter, read_ledger
from elastic.storage.rollback import roll_back
from tests.made_run import add_checkpoint, make_run


def told(*events: tuple[str, int]) -> list[LedgerEvent]:
    return [
        LedgerEvent(life=0, seq=seq, time_s=0.0, kind=kind, step=step)
        for seq, (kind, step) in enumerate(events)
    ]


def committed(*steps: int) -> list[LedgerEvent]:
    return told(*(("checkpoint_committed", step) for step in steps))


def newest_committed(past: Iterable[LedgerEvent]) -> int | None:
    return max(committed_steps(past), default=None)


def wait_until_visible(catalog: Catalog, past: Iterable[LedgerEvent], **options: Any) -> bool:
    """As a driver does that has read this."""
    return wait_for(catalog, newest_committed(past), **options)


def test_what_was_taken_away_is_not_expected() -> None:
    assert newest_committed(told(("progress", 7))) is None
    assert newest_committed(committed(10, 20)) == 20
    events = told(*(("checkpoint_committed", step) for step in (10, 20, 30, 40)))
    assert newest_committed([*events, *told(("checkpoint_quarantined", 40))]) == 30
    assert newest_committed([*events, *told(("rolled_back", 20))]) == 20
    assert newest_committed([*events, *told(("rolled_back", 20)), *committed(30)]) == 30


class LateStore:
    """A store that shows a step's directory from the n-th listing on."""

    def __init__(self, store: Any, name: str, after: int) -> None:
        self.store, self.name, self.left = store, name, after

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def list(self, path: str) -> list[Entry]:
        if path.endswith("/checkpoints"):
            self.left -= 1
        return [e for e in self.store.list(path) if self.left < 0 or e.name != self.name]

    def open_input(self, path: str) -> Any:
        if self.left >= 0 and f"/{self.name}/" in path:
            raise FileNotFoundError(path)
        return self.store.open_input(path)


@pytest.mark.parametrize("steps", [(10, 20), (20,)], ids=["an older one is there", "alone"])
def test_the_newest_is_waited_for(tmp_path: Path, steps: tuple[int, ...]) -> None:  # B60
    made = make_run(tmp_path)
    for step in steps:
        add_checkpoint(made, step)
    late: Any = LateStore(made.fs.store, "step-20", 5)
    catalog = Catalog(Filesystem(late, made.fs.root), made.run_id)
    slept: list[float] = []
    assert wait_until_visible(catalog, committed(*steps), sleep=slept.append)
    assert slept
    found = catalog.highest()
    assert found is not None
    assert found.step == 20


def test_the_wait_has_an_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:  # B60
    catalog = make_run(tmp_path)
    add_checkpoint(catalog, 10)
    assert not wait_until_visible(catalog, committed(10, 20), visible_s=0.0)
    assert "step-20" in caplog.text


def test_the_wait_is_told_once_when_it_begins(tmp_path: Path) -> None:
    catalog = make_run(tmp_path)
    add_checkpoint(catalog, 10)
    words: list[Record] = []
    slept: list[float] = []
    assert not wait_for(catalog, 20, tell=words.append, visible_s=0.05, sleep=slept.append)
    assert len(slept) > 1
    assert [(one.kind, one.step) for one in words] == [("checkpoint_awaited", 20)]
    assert "looking again for 0.05 s" in words[0].reason
    assert wait_for(catalog, None) and wait_for(catalog, 10, tell=words.append)
    assert len(words) == 1


def test_nobody_waits_for_what_is_there_or_was_put_aside(tmp_path: Path) -> None:
    def sleep(seconds: float) -> None:
        raise AssertionError("waited")

    catalog = make_run(tmp_path)
    for step in (10, 20, 30):
        add_checkpoint(catalog, step)
    events = committed(10, 20, 30)
    assert wait_until_visible(catalog, [], sleep=sleep)
    assert wait_until_visible(catalog, events, sleep=sleep)
    # A damaged one is stepped back from, with its reason.
    catalog.fs.remove_tree(f"{catalog.data_path(30)}/state.json")
    assert wait_until_visible(catalog, events, sleep=sleep)
    ledger = LedgerWriter(catalog.fs, 0, "a")
    roll_back(catalog, ledger, 10, "a spike", time_s=0.0)
    ledger.close()
    assert wait_until_visible(catalog, committed(10, 20), sleep=sleep)
    assert newest_committed([*committed(10, 20), *read_ledger(catalog.fs)]) == 10
