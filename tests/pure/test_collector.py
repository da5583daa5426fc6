"""Full collections do not look at what was there before training began."""

from __future__ import annotations

import gc

from elastic.training.collector import settle


def test_what_exists_is_out_of_later_collections() -> None:
    before = gc.get_freeze_count()
    try:
        settle()
        assert gc.get_freeze_count() > before + 1000
        assert len(gc.get_objects()) < 1000
    finally:
        gc.unfreeze()
