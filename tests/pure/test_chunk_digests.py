"""Digests by chunk: the same however the bytes arrive, and each bad chunk is named."""

from __future__ import annotations

import dataclasses
import json
import random

import pytest
import xxhash

from elastic.storage.chunk_digests import CHUNK_BYTES, ChunkCheck, ChunkDigester, difference
from elastic.storage.completeness import digest_problem
from elastic.storage.filesystem import Filesystem
from elastic.storage.manifest import FileDigest, Manifest

CHUNK = 100


def digested(data: bytes, piece_bytes: int = 1 << 20, chunk_bytes: int = CHUNK) -> FileDigest:
    digester = ChunkDigester(chunk_bytes)
    for start in range(0, len(data), piece_bytes):
        digester.update(data[start : start + piece_bytes])
    return digester.file("shard")


def chunk_problem(file: FileDigest, index: int, data: bytes) -> str:
    return difference(file, index, xxhash.xxh3_128(data).hexdigest())


def some_bytes(size: int) -> bytes:
    return random.Random(size).randbytes(size)


@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 200, 1234])
def test_the_pieces_in_which_bytes_arrive_do_not_matter(size: int) -> None:
    data = some_bytes(size)
    file = digested(data)
    assert [digested(data, piece) for piece in (1, 7, 100, 101, 250)] == [file] * 5
    assert (file.bytes, file.num_chunks) == (size, -(-size // CHUNK))
    for index in range(file.num_chunks):
        start, stop = file.chunk_range(index)
        assert file.chunk_digest(index) == xxhash.xxh3_128(data[start:stop]).hexdigest()
        assert chunk_problem(file, index, data[start:stop]) == ""
    assert digested(data + b"x").digest != file.digest


def test_every_flipped_byte_is_found_in_its_chunk() -> None:
    data = some_bytes(350)
    file = digested(data)
    for at in range(len(data)):
        bad = bytearray(data)
        bad[at] ^= 1
        start, stop = file.chunk_range(index := at // CHUNK)
        problem = chunk_problem(file, index, bad[start:stop])
        assert problem.startswith(f"shard: expected xxh3_128:{file.chunk_digest(index)} ")
        assert f"for its bytes {start} to {stop}, found xxh3_128:" in problem
        others = set(range(file.num_chunks)) - {index}
        assert not any(chunk_problem(file, i, bad[slice(*file.chunk_range(i))]) for i in others)
        check = ChunkCheck(file)
        assert (check.update(bad[:130]) or check.update(bad[130:]) or check.end()) == problem


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data[:200]])
def test_a_file_that_ends_early_is_found(change: object) -> None:
    data = some_bytes(350)
    check = ChunkCheck(digested(data))
    assert check.update(change(data)) == ""  # type: ignore[operator]
    assert check.end()


def test_a_file_is_read_to_its_first_bad_chunk() -> None:
    fs = Filesystem.at("memory://chunk-digests")
    data = some_bytes(5 << 20)
    file = digested(data, chunk_bytes=1 << 20)
    fs.write_bytes("a/shard", data)
    read: list[int] = []
    assert digest_problem(fs, "a", file, read.append) == ""
    assert sum(read) == file.bytes
    bad = bytearray(data)
    bad[(2 << 20) + 5] ^= 1
    bad[(4 << 20) + 5] ^= 1
    fs.write_bytes("a/shard", bytes(bad))
    read.clear()
    assert "for its bytes 2097152 to 3145728" in digest_problem(fs, "a", file, read.append)
    assert sum(read) < 4 << 20
    fs.write_bytes("a/shard", data[:-1])
    assert digest_problem(fs, "a", file) == "shard: expected 5242880 bytes, found 5242879"


@pytest.mark.parametrize(
    "change, message",
    [
        ({"digest": "sha256:00"}, "digest xxh3_128:<hex>"),
        ({"chunk_bytes": 0}, "digest sha256:<hex>"),
        ({"chunk_bytes": 50}, "needs 224 hex digits of digests, found 128"),
        ({"bytes": 401}, "needs 160 hex digits"),
        ({"chunk_bytes": -1}, "needs a size"),
    ],
)
def test_digests_that_cannot_be_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(digested(some_bytes(350)), **change)  # type: ignore[arg-type]


def test_a_manifest_keeps_them_and_one_of_version_1_has_none() -> None:
    manifest = Manifest(
        run_id="run",
        step=1,
        world_size=1,
        generation=0,
        attempt=0,
        created_s=0.0,
        counters={},
        tensors={},
        files=[digested(some_bytes(350))],
    )
    assert Manifest.from_json(manifest.to_json()) == manifest
    tree = json.loads(manifest.to_json()) | {"format_version": 1}
    tree["files"] = [{"path": "shard", "bytes": 3, "digest": "sha256:00"}]
    (file,) = Manifest.from_tree(tree).files
    assert (file.digest, file.num_chunks) == ("sha256:00", 0)


def test_the_chunks_of_a_save_are_of_16_mib() -> None:
    assert CHUNK_BYTES == 16 * 1024**2
