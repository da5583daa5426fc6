"""Ranges of a checkpoint's file: the right bytes in the right place, or an error that says why."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any, BinaryIO, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.storage.chunk_digests import ChunkDigester
from elastic.storage.completeness import sha256
from elastic.storage.filesystem import Filesystem
from elastic.storage.manifest import FileDigest
from elastic.storage.verified_file import CheckpointCorrupt, VerifiedFile

CHUNK = 100
DATA = random.Random(0).randbytes(1050)


def digested(data: bytes = DATA) -> FileDigest:
    digester = ChunkDigester(CHUNK)
    digester.update(data)
    return digester.file("shard")


class Watched:
    """A store that notes which bytes of which file are read, and may change them on the way."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.read: list[tuple[int, int]] = []
        self.spoil: list[int] = []
        self.is_in_place = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def open_input(self, path: str) -> BinaryIO:
        stream = _InPlace if self.is_in_place else _Stream
        return cast(BinaryIO, stream(self, self.inner.open_input(path)))

    def read_range(self, path: str, start: int, num_bytes: int) -> bytes:
        return self.seen(start, self.inner.read_range(path, start, num_bytes))

    def seen(self, start: int, data: bytes) -> bytes:
        self.read.append((start, start + len(data)))
        changed = bytearray(data)
        for at in [at for at in set(self.spoil) if start <= at < start + len(data)]:
            changed[at - start] ^= 1
            self.spoil.remove(at)
        return bytes(changed)


class _Stream(io.RawIOBase):
    def __init__(self, store: Watched, inner: BinaryIO) -> None:
        self.store = store
        self.inner = inner

    def seek(self, offset: int, whence: int = 0, /) -> int:
        return self.inner.seek(offset, whence)

    def readinto(self, buffer: Any, /) -> int:
        start = self.inner.tell()
        data = self.store.seen(start, self.inner.read(len(buffer)))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self.inner.close()


class _InPlace(_Stream):
    """Memory, of which what is not wanted need not be copied."""

    def take(self, num_bytes: int) -> memoryview | None:
        data = self.store.seen(self.inner.tell(), self.inner.read(num_bytes))
        if len(data) == num_bytes:
            return memoryview(data)
        self.inner.seek(-len(data), io.SEEK_CUR)
        return None


@pytest.fixture(params=["disk", "object store", "memory"])
def fs(request: pytest.FixtureRequest, tmp_path: Path) -> Filesystem:
    is_remote = request.param == "object store"
    inner = Filesystem.at(f"memory://verified/{tmp_path.name}" if is_remote else str(tmp_path))
    inner.write_bytes("a/shard", DATA)
    store = Watched(inner.store)
    store.is_in_place = request.param == "memory"
    return Filesystem(cast(Any, store), inner.root)


def wanted(*ranges: tuple[int, int]) -> list[tuple[int, memoryview]]:
    return [(start, memoryview(bytearray(stop - start))) for start, stop in ranges]


def read(fs: Filesystem, file: FileDigest, *ranges: tuple[int, int]) -> list[bytes]:
    rooms = wanted(*ranges)
    with VerifiedFile(fs, "a", file) as opened:
        opened.read(rooms)
    return [bytes(view) for _, view in rooms]


def chunks_read(fs: Filesystem) -> set[int]:
    return {at // CHUNK for start, stop in fs.store.read for at in range(start, stop)}  # type: ignore[attr-defined]


MEMORY = Filesystem.at("memory://verified/all")
MEMORY.write_bytes("a/shard", DATA)


@given(st.lists(st.integers(0, len(DATA)), min_size=2, unique=True))
def test_any_ranges_get_their_bytes(cuts: list[int]) -> None:
    cuts = sorted(cuts)
    ranges = list(zip(cuts[::2], cuts[1::2], strict=False))
    for file in (digested(), FileDigest(path="shard", bytes=len(DATA), digest=sha256(DATA))):
        found = read(MEMORY, file, *ranges)
        assert found == [DATA[start:stop] for start, stop in ranges]


def test_chunks_that_hold_nothing_wanted_are_not_read(fs: Filesystem) -> None:
    ranges = [(10, 20), (350, 360), (360, 361), (399, 520), (1049, 1050)]
    assert read(fs, digested(), *ranges) == [DATA[start:stop] for start, stop in ranges]
    assert chunks_read(fs) == {0, 3, 4, 5, 10}
    pieces = sorted(fs.store.read)  # type: ignore[attr-defined]
    assert sum(stop - start for start, stop in pieces) == 450, "each once"


@pytest.mark.parametrize("at", [0, 15, 99, 399, 450, 1049])
def test_a_flipped_byte_is_found_by_who_reads_its_chunk_and_by_no_other(
    fs: Filesystem, at: int
) -> None:  # B14
    bad = bytearray(DATA)
    bad[at] ^= 1
    fs.store.inner.write_bytes(f"{fs.root}/a/shard", bytes(bad))  # type: ignore[attr-defined]
    ranges = [(10, 20), (350, 360), (399, 520), (1049, 1050)]
    index = at // CHUNK
    first, last = index * CHUNK, min((index + 1) * CHUNK, len(DATA))
    message = rf"shard: expected xxh3_128:\w+ for its bytes {first} to {last}, found"
    with pytest.raises(CheckpointCorrupt, match=message):
        read(fs, digested(), *ranges)
    elsewhere = [(start, stop) for start, stop in ranges if stop <= first or start >= last]
    assert read(fs, digested(), *elsewhere) == [DATA[start:stop] for start, stop in elsewhere]


def test_bytes_that_change_on_the_way_are_asked_for_again(fs: Filesystem) -> None:
    fs.store.spoil = [455]  # type: ignore[attr-defined]
    assert read(fs, digested(), (350, 520)) == [DATA[350:520]]
    assert fs.store.spoil == []  # type: ignore[attr-defined]
    fs.store.spoil = [455, 455]  # type: ignore[attr-defined]
    with pytest.raises(CheckpointCorrupt, match="for its bytes 400 to 500"):
        read(fs, digested(), (350, 520))


@pytest.mark.parametrize("size", [0, 525, 1049])
def test_a_short_file_is_damage(fs: Filesystem, size: int) -> None:  # B14
    fs.store.inner.write_bytes(f"{fs.root}/a/shard", DATA[:size])  # type: ignore[attr-defined]
    with pytest.raises(CheckpointCorrupt, match=f"shard: expected 1050 bytes, found {size}"):
        read(fs, digested(), (0, 1050))


def test_a_missing_file_is_damage(fs: Filesystem) -> None:  # B14
    fs.remove_tree("a/shard")
    with pytest.raises(CheckpointCorrupt, match="shard is missing"):
        read(fs, digested(), (0, 10))


def test_a_read_that_ends_early_says_nothing_about_the_bytes(
    fs: Filesystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fs.store, "seen", lambda start, data: data[: len(data) // 2] * 0)
    with pytest.raises(OSError, match="ended before its 1050 bytes"):
        read(fs, digested(), (0, 10))


def test_bytes_past_the_end_are_refused(fs: Filesystem) -> None:
    with pytest.raises(CheckpointCorrupt, match="shard: expected 1051 bytes, found 1050"):
        read(fs, digested(), (1000, 1051))
