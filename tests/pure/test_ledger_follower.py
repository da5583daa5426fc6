"""A ledger that is read on: the same events as a whole reading, each read from storage once."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic.storage.filesystem import Filesystem
from elastic.storage.ledger import LedgerWriter, read_ledger
from elastic.storage.ledger_follower import LedgerFollower


@pytest.fixture
def fs(tmp_path: Path) -> Filesystem:
    return Filesystem.at(str(tmp_path))


def test_it_reads_on_and_agrees_with_a_whole_reading(fs: Filesystem) -> None:
    follower = LedgerFollower(fs)
    assert follower.read() == []
    for life in range(2):
        writer = LedgerWriter(fs, life, f"life{life}")
        for step in range(3):
            writer.append("progress", time_s=float(step), step=step, data={"loss": 1.0})
            assert follower.read() == read_ledger(fs)
        writer.close()
    assert len(follower.read()) == 6
    assert follower.read() is follower.read(), "nothing has come"


def test_half_an_event_is_read_once_it_is_whole(fs: Filesystem, tmp_path: Path) -> None:
    writer = LedgerWriter(fs, 0, "one")
    writer.append("run_started", time_s=1.0)
    follower = LedgerFollower(fs)
    follower.read()
    writer.append("waiting", time_s=2.0)
    (path,) = (tmp_path / "ledger").iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    assert [event.kind for event in follower.read()] == ["run_started"]
    path.write_bytes(whole)
    assert [event.kind for event in follower.read()] == ["run_started", "waiting"]


def test_what_was_read_is_not_read_again(fs: Filesystem, tmp_path: Path) -> None:
    writer = LedgerWriter(fs, 0, "one")
    writer.append("run_started", time_s=1.0)
    follower = LedgerFollower(fs)
    follower.read()
    (path,) = (tmp_path / "ledger").iterdir()
    data = path.read_bytes()
    path.write_bytes(bytes(len(data)))  # had it been read again, nothing would be left
    writer.append("waiting", time_s=2.0)
    assert [event.kind for event in follower.read()] == ["run_started", "waiting"]


def test_a_ledger_that_is_cut_or_gone_is_read_anew(fs: Filesystem, tmp_path: Path) -> None:
    writer = LedgerWriter(fs, 0, "one")
    writer.append("run_started", time_s=1.0)
    (path,) = (tmp_path / "ledger").iterdir()
    short = path.read_bytes()
    writer.append("waiting", time_s=2.0)
    follower = LedgerFollower(fs)
    assert len(follower.read()) == 2
    path.write_bytes(short)
    assert len(follower.read()) == 1
    path.unlink()
    assert follower.read() == []
