"""A save that is asked for by hand is made, also while another one is still being written."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from elastic.storage.filesystem import Filesystem
from elastic.storage.ledger import read_ledger
from elastic.training.coordinator import Orders
from elastic.training.standalone import StoreCoordinator
from tests.dist import standalone_run
from tests.dist.processes import run_ranks
from tests.dist.standalone_run import Recipe

EVERY, UNTIL = 20, 75
# Right after step 20 the save of that step is in flight, which a slow writer makes last.
ASKED_AFTER = (5, 21)


def asked(rank: int, world_size: int, recipe: Recipe) -> Any:
    """The run of `recipe`, whose ranks hear of a wish for a save after each of these steps."""
    num_calls = 0

    def orders(self: StoreCoordinator) -> Orders:
        nonlocal num_calls
        num_calls += 1  # once a step
        time.sleep(0.02)
        return Orders(saves_asked=sum(num_calls > step for step in ASKED_AFTER))

    StoreCoordinator.orders = orders
    return standalone_run._rank(rank, world_size, recipe)


def test_a_save_that_is_asked_for_is_made_once(tmp_path: Path) -> None:
    recipe = Recipe(
        root=f"{tmp_path}/run", until=UNTIL, save_every=EVERY, behind="skip", slow_write_s=0.2
    )
    run_ranks(asked, 2, recipe)
    events = read_ledger(Filesystem.at(recipe.root))
    committed = [e.step for e in events if e.kind == "checkpoint_committed"]
    early, late = [step for step in committed if step % EVERY and step != UNTIL]
    assert ASKED_AFTER[0] < early <= ASKED_AFTER[1] < late
    assert sum(e.kind == "checkpoint_skipped" for e in events) <= 1, "asked again at each step"
