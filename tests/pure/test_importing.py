"""The collector is off while modules load, and as it was afterwards."""

from __future__ import annotations

import gc

import pytest

from elastic.importing import collector_paused


@pytest.mark.parametrize("was_enabled", [True, False])
def test_the_collector_is_as_it_was(was_enabled: bool) -> None:
    before = gc.isenabled()
    (gc.enable if was_enabled else gc.disable)()
    try:
        with collector_paused():
            with pytest.raises(ImportError), collector_paused():
                raise ImportError
            assert not gc.isenabled()
        assert gc.isenabled() == was_enabled
    finally:
        (gc.enable if before else gc.disable)()
