"""Too little room is told once, and again when it has come back and gone."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic.storage.filesystem import Filesystem
from elastic.storage.room import RoomWatch


def test_too_little_room_is_told_once(  # B59
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fs = Filesystem.at(str(tmp_path))
    free = [5_000_000_000]
    monkeypatch.setattr(fs.store, "free_bytes", lambda path: free[0])
    watch = RoomWatch(fs)
    assert watch.look(2_500_000_000) == ""
    words = watch.look(2_600_000_000)
    assert "5 GB are free" in words and "2 checkpoints of 2.6 GB" in words
    assert words in caplog.text
    assert watch.look(2_600_000_000) == ""
    free[0] = 6_000_000_000
    assert watch.look(2_600_000_000) == ""
    free[0] = 1
    assert watch.look(2_600_000_000) != ""


def test_where_it_cannot_be_known_nothing_is_told() -> None:
    assert RoomWatch(Filesystem.at("memory://bucket")).look(1 << 60) == ""
