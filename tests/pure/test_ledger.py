"""The ledger: nothing acknowledged is ever lost, and nothing half-written is ever read."""

from __future__ import annotations

import errno
import json
import os
import uuid
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic.storage import ledger
from elastic.storage.filesystem import Filesystem
from elastic.storage.format import UnsupportedFormat
from elastic.storage.ledger import (
    LedgerBroken,
    LedgerEvent,
    LedgerWriter,
    next_life,
    read_ledger,
)
from tests.relative_cost import relative_cost

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
EVENTS = st.fixed_dictionaries(
    {
        "kind": st.text(min_size=1, max_size=10).filter(lambda text: text.isprintable()),
        "time_s": st.floats(0, 2e9),
        "generation": st.integers(-1, 2**31 - 1),
        "step": st.integers(-1, 2**63 - 1),
        "world_rank": st.integers(-1, 2**31 - 1),
        "reason": st.text(max_size=40).map(lambda text: text.encode(errors="ignore").decode()),
        "data": st.dictionaries(st.text(), JSON, max_size=3),
    }
)


@pytest.fixture(params=["local", "object"])
def fs(request: pytest.FixtureRequest, tmp_path: Path) -> Filesystem:
    return Filesystem.at(
        str(tmp_path) if request.param == "local" else f"memory://{uuid.uuid4().hex}"
    )


@pytest.fixture
def disk(tmp_path: Path) -> Filesystem:
    return Filesystem.at(str(tmp_path))


def append(writer: LedgerWriter, facts: dict[str, Any]) -> LedgerEvent:
    facts = dict(facts)
    return writer.append(facts.pop("kind"), **facts)


def test_an_event_comes_back_as_it_was_written(fs: Filesystem) -> None:
    writer = LedgerWriter(fs, 0, "a")
    full = writer.append(
        "worker_died",
        generation=2,
        step=33,
        world_rank=1,
        reason="killed by SIGKILL",
        data={"pids": (1, 2), "node": "ü"},
        time_s=1.5,
    )
    bare = writer.append("driver_heartbeat", time_s=2.5)
    writer.close()
    assert read_ledger(fs) == [full, bare]
    assert full == LedgerEvent(
        life=0,
        seq=0,
        time_s=1.5,
        kind="worker_died",
        generation=2,
        step=33,
        world_rank=1,
        reason="killed by SIGKILL",
        data={"pids": [1, 2], "node": "ü"},
    )
    assert (bare.generation, bare.step, bare.world_rank, bare.reason, bare.data) == (
        -1,
        -1,
        -1,
        "",
        {},
    )


@settings(
    max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(facts=st.lists(EVENTS, min_size=1, max_size=3))
def test_torn_at_any_byte_the_last_event_alone_is_missing(
    disk: Filesystem, facts: list[dict[str, Any]]
) -> None:  # B10 kind
    root = disk.sub(uuid.uuid4().hex)
    writer = LedgerWriter(root, 0, "a")
    path = Path(root.root) / "ledger" / "000000-a.arrows"
    sizes = [path.stat().st_size]
    written = []
    for each in facts:
        written.append(append(writer, each))
        sizes.append(path.stat().st_size)
    writer.close()
    whole = path.read_bytes()
    assert read_ledger(root) == written
    with open(path, "r+b") as file:
        for length in range(sizes[-1] - 1, sizes[-2] - 1, -1):
            file.truncate(length)
            assert read_ledger(root) == written[:-1], f"torn at byte {length}"
    for zeros in range(1, sizes[-1] - sizes[-2], 5):
        path.write_bytes(whole[:-zeros] + bytes(zeros))
        assert read_ledger(root) in (written, written[:-1])


@pytest.mark.parametrize("rot", [b"\xf0\x90\x80\x00", b"\xff\xff\xff\xff", b"{{{{"])
@pytest.mark.parametrize("where", ["reason", "data"])
def test_an_event_that_rotted_is_left_out_and_the_others_are_read(
    disk: Filesystem, rot: bytes, where: str
) -> None:
    writer = LedgerWriter(disk, 0, "a")
    events = [
        writer.append("step", reason=f"<R{seq}>", data={f"<D{seq}>": 1}, time_s=0.0)
        for seq in range(3)
    ]
    writer.close()
    path = Path(disk.root) / "ledger" / "000000-a.arrows"
    whole = path.read_bytes()
    at = whole.index(b"<R1>" if where == "reason" else b'{"<D1>')
    path.write_bytes(whole[:at] + rot + whole[at + len(rot) :])
    found = read_ledger(disk)
    assert [event for event in found if event.seq != 1] == [events[0], events[2]]
    assert len(found) == 2 or (where, rot) == ("reason", b"{{{{")


def test_torn_in_its_schema_a_life_is_empty(disk: Filesystem) -> None:
    LedgerWriter(disk, 0, "a").close()
    path = Path(disk.root) / "ledger" / "000000-a.arrows"
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert read_ledger(disk) == []
    assert next_life(disk) == 1


def test_it_is_read_while_it_is_written(fs: Filesystem) -> None:
    writer = LedgerWriter(fs, 0, "a")
    assert read_ledger(fs) == []
    written = []
    for step in range(5):
        written.append(writer.append("step", step=step, time_s=float(step)))
        assert read_ledger(fs) == written
    writer.close()


def test_an_event_is_on_the_disk_before_append_returns(
    disk: Filesystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = LedgerWriter(disk, 0, "a")
    synced: list[int] = []

    def fsync(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_size)

    monkeypatch.setattr(ledger.os, "fsync", fsync)
    writer.append("step", time_s=0.0)
    assert synced == [disk.size("ledger/000000-a.arrows")]
    writer.close()


def test_lives_follow_one_another_as_numbers(fs: Filesystem) -> None:  # B16, B75
    assert next_life(fs) == 0
    for life in (1_000_000, 0, 999_999, 7):
        writer = LedgerWriter(fs, life, "x")
        for _ in range(11):
            writer.append("step", time_s=0.0)
        writer.close()
    assert next_life(fs) == 1_000_001
    found = [(event.life, event.seq) for event in read_ledger(fs)]
    assert found == sorted(found)
    assert len(found) == 44


def test_a_later_life_reads_past_the_torn_end_of_an_earlier_one(disk: Filesystem) -> None:  # B75
    first = LedgerWriter(disk, 0, "a")
    kept = first.append("kept", time_s=0.0)
    first.append("torn", time_s=0.0)
    first.close()
    path = Path(disk.root) / "ledger" / "000000-a.arrows"
    os.truncate(path, path.stat().st_size - 3)
    second = LedgerWriter(disk, next_life(disk), "b")
    later = second.append("later", time_s=0.0)
    second.close()
    assert read_ledger(disk) == [kept, later]


def test_a_life_is_written_by_one_writer(fs: Filesystem) -> None:
    writer = LedgerWriter(fs, 3, "a")
    writer.append("step", time_s=0.0)
    with pytest.raises(FileExistsError, match="takes a new life"):
        LedgerWriter(fs, 3, "a")
    LedgerWriter(fs, 3, "b").close()
    writer.close()


@pytest.mark.parametrize(
    ("life", "life_id"), [(-1, "a"), (0, ""), (0, "a/b"), (0, "a.b"), (0, "ü")]
)
def test_a_life_has_a_plain_name(disk: Filesystem, life: int, life_id: str) -> None:
    with pytest.raises(ValueError, match="a life is a number"):
        LedgerWriter(disk, life, life_id)


def test_strange_names_are_ignored(fs: Filesystem) -> None:  # B16
    writer = LedgerWriter(fs, 0, "a")
    event = writer.append("step", time_s=0.0)
    writer.close()
    for name in ("notes", "1-a.arrows", "000009.arrows", "000009-a.arrows.tmp", "000009-b/x/y"):
        fs.write_bytes(f"ledger/{name}", b"x")
    fs.write_bytes("ledger/000000-a/zzz.arrows" if not fs.is_local else "ledger/000008-a/zzz", b"x")
    assert read_ledger(fs) == [event]
    assert next_life(fs) <= 10


def test_data_that_is_no_json_leaves_the_ledger_as_it_was(fs: Filesystem) -> None:
    writer = LedgerWriter(fs, 0, "a")
    with pytest.raises(TypeError):
        writer.append("bad", data={"x": object()}, time_s=0.0)
    event = writer.append("good", time_s=0.0)
    writer.close()
    assert event.seq == 0
    assert read_ledger(fs) == [event]


def test_an_odd_byte_in_a_reason_does_not_keep_the_event_out(fs: Filesystem) -> None:
    writer = LedgerWriter(fs, 0, "a")
    event = writer.append(
        "failed", reason=b"disk \xff".decode(errors="surrogateescape"), time_s=0.0
    )
    writer.close()
    assert read_ledger(fs) == [event]
    assert event.reason == r"disk \udcff"


class HalfWritten:
    """A file on a disk that fills up in the middle of a write while `full` is set."""

    def __init__(self, file: Any) -> None:
        self.file = file
        self.full = False
        self.can_cut = True

    def write(self, data: memoryview) -> int:
        if not self.full:
            return int(self.file.write(data[:100]))
        self.file.write(data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "no space left")

    def truncate(self, length: int) -> None:
        if not self.can_cut:
            raise OSError(errno.EIO, "cannot cut")
        self.file.truncate(length)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


@pytest.fixture
def filling(disk: Filesystem, monkeypatch: pytest.MonkeyPatch) -> tuple[HalfWritten, LedgerWriter]:
    file = HalfWritten(disk.open_append("ledger/000000-a.arrows.new"))
    monkeypatch.setattr(disk, "open_append", lambda path: file)
    writer = LedgerWriter(disk, 0, "a")
    os.rename(f"{disk.root}/ledger/000000-a.arrows.new", f"{disk.root}/ledger/000000-a.arrows")
    return file, writer


def test_a_full_disk_costs_one_event_and_not_those_after_it(
    disk: Filesystem, filling: tuple[HalfWritten, LedgerWriter]
) -> None:  # B14 kind
    file, writer = filling
    written = [writer.append("before", time_s=0.0)]
    file.full = True
    with pytest.raises(OSError, match="no space left"):
        writer.append("lost", time_s=0.0)
    assert read_ledger(disk) == written
    file.full = False
    written.append(writer.append("after", time_s=0.0))
    assert read_ledger(disk) == written
    writer.close()


def test_nothing_is_hidden_behind_half_an_event_that_cannot_be_cut_off(
    disk: Filesystem, filling: tuple[HalfWritten, LedgerWriter]
) -> None:
    file, writer = filling
    before = writer.append("before", time_s=0.0)
    file.full, file.can_cut = True, False
    with pytest.raises(OSError, match="cannot cut"):
        writer.append("lost", time_s=0.0)
    file.full = False
    with pytest.raises(LedgerBroken, match="start a new life"):
        writer.append("after", time_s=0.0)
    assert read_ledger(disk) == [before]
    writer.close()


def test_a_newer_format_is_refused_by_name(fs: Filesystem) -> None:
    schema = pa.schema([("seq", pa.int64())], metadata={"format_version": "2"})
    path = "ledger/000000-a.arrows" if fs.is_local else "ledger/000000-a/000000000.arrows"
    fs.write_bytes(path, schema.serialize().to_pybytes())
    with pytest.raises(UnsupportedFormat, match=r"000000-a.*version 2.*up to 1"):
        read_ledger(fs)


def test_events_are_read_many_at_a_time(disk: Filesystem) -> None:
    num = 20_000
    columns = {
        "seq": range(num),
        "time_s": [1.0] * num,
        "kind": ["progress"] * num,
        "generation": [0] * num,
        "step": range(num),
        "world_rank": [-1] * num,
        "reason": [""] * num,
        "data": ['{"loss": 1.0}'] * num,
    }
    table = pa.table(columns, schema=ledger._SCHEMA)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table, max_chunksize=1)
    written = sink.getvalue().to_pybytes()
    disk.write_bytes("ledger/000000-a.arrows", written)

    def one_by_one() -> list[Any]:
        batches = pa.ipc.open_stream(written)
        return [json.loads(row["data"]) for batch in batches for row in batch.to_pylist()]

    # 0.32 to 0.34 where it was measured.
    assert relative_cost(lambda: read_ledger(disk), one_by_one, num) < 0.7
