"""A computed interval is followed by the ranks, told in the ledger, and changes as they go."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

from elastic.policy.saves import SaveInterval
from elastic.storage.filesystem import Filesystem
from elastic.storage.ledger import LedgerEvent, read_ledger
from elastic.training.coordinator import Orders
from elastic.training.membership import TrainingConfig
from elastic.training.standalone import StoreCoordinator
from tests.dist import standalone_run
from tests.dist.processes import run_ranks
from tests.dist.standalone_run import Recipe

COMPUTED = SaveInterval(is_computed=True)
UNTIL = 120
OFTEN_UNTIL = 60
SELDOM_S = 1e6


def paced(rank: int, world_size: int, recipe: Recipe) -> Any:
    """The run of `recipe` with what `extra` sets of its configuration, each step slow enough."""
    config_of, orders_of = standalone_run.config_of, StoreCoordinator.orders
    extra = dict(recipe.extra)
    every_s = extra.pop("every_s", None)
    num_calls = 0

    def config(recipe: Recipe) -> TrainingConfig:
        return dataclasses.replace(config_of(recipe), **extra)

    def orders(self: StoreCoordinator) -> Orders:
        nonlocal num_calls
        num_calls += 1
        own = orders_of(self)
        if every_s is None:
            return own
        now_s = every_s if num_calls <= 2 * OFTEN_UNTIL else SELDOM_S
        return dataclasses.replace(own, save_every_s=now_s)

    write = standalone_run.Numbers.__getitem__

    def slow(self: Any, index: int) -> Any:
        time.sleep(0.003)
        return write(self, index)

    standalone_run.config_of = config
    StoreCoordinator.orders = orders
    standalone_run.Numbers.__getitem__ = slow
    return standalone_run._rank(rank, world_size, recipe)


def events_of(recipe: Recipe) -> list[LedgerEvent]:
    run_ranks(paced, 2, recipe)
    return read_ledger(Filesystem.at(recipe.root))


def committed(events: list[LedgerEvent]) -> list[int]:
    """Steps of checkpoints but the first and the last, which are saved in any case."""
    steps = [event.step for event in events if event.kind == "checkpoint_committed"]
    assert steps[0] == 0 and steps[-1] == UNTIL
    return steps[1:-1]


def test_ranks_follow_the_newest_interval(tmp_path: Path) -> None:
    extra = {"save": COMPUTED, "every_s": 0.1}
    recipe = Recipe(root=f"{tmp_path}/run", until=UNTIL, behind="skip", extra=extra)
    steps = committed(events_of(recipe))
    assert len(steps) >= 2, "saved often, as long as that was ordered"
    assert max(steps) <= OFTEN_UNTIL + 1, "and no more once it was to be seldom"


def test_the_books_own_interval_is_of_its_first_save_and_the_prior(tmp_path: Path) -> None:
    extra = {"save": COMPUTED, "mtbf_s": 0.01}
    recipe = Recipe(root=f"{tmp_path}/run", until=UNTIL, behind="skip", extra=extra)
    events = events_of(recipe)
    told = [event for event in events if event.kind == "save_interval"]
    assert told[0].reason.startswith("every ") and "(prior 10 ms, no failure in " in told[0].reason
    assert told[0].data["seconds"] >= told[0].data["stall_s"] + told[0].data["write_s"]
    assert len(committed(events)) >= 2
    first = next(event for event in events if event.kind == "checkpoint_committed")
    assert told[0].data["stall_s"] >= first.data["stall_s"]


def test_a_save_that_is_late_is_skipped_once_and_tells_the_bandwidth(tmp_path: Path) -> None:
    extra = {"save": SaveInterval(seconds=0.05)}
    recipe = Recipe(
        root=f"{tmp_path}/run", until=UNTIL, behind="skip", slow_write_s=0.3, extra=extra
    )
    events = events_of(recipe)
    skipped = [event for event in events if event.kind == "checkpoint_skipped"]
    num_saves = len(committed(events))
    assert 1 <= len(skipped) <= num_saves, "told once for each save that others had to wait for"
    for event in skipped:
        assert 0 < event.data["seen_bytes_per_s"] < event.data["needed_bytes_per_s"]
        assert "storage takes " in event.reason and " need " in event.reason
    (told,) = [event for event in events if event.kind == "save_interval"]
    assert told.reason == "every 0.05 s: as asked for"
