"""The soak of storage: nothing wrong with the commit, and what is wrong with a broken one."""

from __future__ import annotations

from typing import Any

import pytest

from elastic.storage import checkpoints, completeness
from jobs.soak import __main__ as command
from jobs.soak import storage

SEED = 2


def soaked(count: int) -> dict[str, Any]:
    return storage.soak(count, SEED, lambda line: None)


def test_nothing_is_lost_and_nothing_wrong() -> None:
    said: list[str] = []
    found = storage.soak(24, SEED, said.append)
    assert found["failures"] == []
    assert "injected" in said[0] and said[-2].startswith("24/24 saves")
    counted = (f"{found['committed']} committed", "0 wrong, 0 lost", f"{found['crashes']} crashes")
    assert all(words in said[-1] for words in counted) and f"{found['kills']} kills" in said[-1]
    assert found["committed"] + sum(found["failed"].values()) == found["saves"] == 24
    assert found["committed"] >= 12
    assert found["verified_loads"] > found["committed"]
    assert sum(found["faults"].values()) >= 24


def test_a_commit_that_does_not_look_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (checkpoints, completeness):
        monkeypatch.setattr(module, "size_problems", lambda manifest, sizes: [])
    found = soaked(24)
    assert found["wrong"] > 0
    assert "is complete and does not load" in found["failures"][0]


def test_what_must_not_be_is_the_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    for failures, status in (([], 0), (["lost: step 3 was acknowledged"], 1)):
        found = {"failures": failures}
        monkeypatch.setattr(storage, "soak", lambda saves, seed, say, found=found: found)
        assert command.main(["storage", "--saves", "5", "--seed", "1"]) == status
