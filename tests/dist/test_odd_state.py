"""Odd state over ranks: whatever a model and its optimizers hold comes back, at any size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elastic.storage.checkpoints import Manifest
from tests.dist.odd_run import OddRun, check_alive
from tests.dist.processes import run_ranks
from tests.dist.small_run import content, restore, save, whole

SIZES = (1, 2, 3, 4)


def odd_life(
    rank: int, world_size: int, folder: Path, arrivals: dict[str, Manifest], leave: str
) -> dict[str, Any]:
    """Train five steps, or arrive from each of these checkpoints; save, and train two more."""
    found: dict[str, Any] = {"contents": {}}
    for name, manifest in list(arrivals.items()) or [("", None)]:
        run = OddRun(seed=world_size)
        groups = list(run.adamw.param_groups)
        counters, seen = run.counters, run.counters["seen"]
        tracked = run.tracked()
        tracked.capture()  # before the first step: it changes nothing
        if manifest is None:
            run.train(range(5))
        else:
            restore(folder, name, manifest, tracked)
        check_alive(run)
        assert all(a is b for a, b in zip(run.adamw.param_groups, groups, strict=False))
        assert run.counters is counters and counters["seen"] is seen and len(seen) == 5
        found["contents"][name] = content(tracked)
        found["statistics"] = [whole(buffer) for buffer in run.model.statistics.buffers()]
    found["manifest"] = save(folder, leave, tracked)
    found["losses"] = run.train(range(5, 7))
    found["after"] = run.counters
    return found


@pytest.mark.timeout(300)  # several groups, one after the other
def test_all_odd_state_goes_from_any_size_to_any_size(tmp_path: Path) -> None:
    """B40 B41 B42 B44 B48 B49 B50 B51 B52 B54 B55, all at once."""
    first = run_ranks(odd_life, 2, tmp_path, {}, "from-2", timeout_s=120)[0]
    expected = first["contents"][""]
    manifests = {"from-2": first["manifest"]}
    for size in (1, 3, 4):
        arrivals = {"from-2": first["manifest"]}
        found = run_ranks(odd_life, size, tmp_path, arrivals, f"from-{size}", timeout_s=120)
        manifests[f"from-{size}"] = found[0]["manifest"]
    for size in SIZES:
        found = run_ranks(odd_life, size, tmp_path, manifests, f"again-{size}", timeout_s=120)
        for name in manifests:
            assert found[0]["contents"][name] == expected, f"{name} at {size}"
        for rank in found:
            assert rank["statistics"] == found[0]["statistics"], "one of them for all ranks"
            assert rank["after"] == first["after"]
        assert found[0]["losses"] == pytest.approx(first["losses"], rel=1e-4)
