"""Filesystem: literal paths that stay in their root, on a disk and on an object store alike."""

from __future__ import annotations

import errno
import io
import mmap
import os
import pickle
import uuid
from pathlib import Path
from typing import Any

import fsspec
import pytest

from elastic.storage import direct_file, local_store
from elastic.storage.filesystem import Entry, Filesystem

STRANGE_NAMES = ["a space", "[a]", "%20", "#1", "ü-猫", "a?b", "*", "~", "$HOME", "{b,c}", "a:b@c"]
STRANGE_IN_URLS = [name for name in STRANGE_NAMES if "?" not in name]
STRANGE_ON_DISK = [*STRANGE_NAMES, "a::b", "trailing/", "a//b", "a/./b", "s3:__x", "new\nline"]


@pytest.fixture(params=["local", "object"])
def fs(request: pytest.FixtureRequest, tmp_path: Path) -> Filesystem:
    url = (
        str(tmp_path / "root") if request.param == "local" else f"memory://{uuid.uuid4().hex}/root"
    )
    return Filesystem.at(url)


def test_what_is_written_is_read_back(fs: Filesystem) -> None:
    fs.write_bytes("a/b/one", b"first")
    fs.write_bytes("a/b/one", b"1")
    with fs.open_output("a/two") as file:
        file.write(b"22")
    with fs.open_input("a/two") as file:
        assert file.read() == b"22"
    assert fs.read_bytes("a/b/one") == b"1"
    assert (fs.size("a/b/one"), fs.size("a/two")) == (1, 2)
    assert fs.list("a") == [
        Entry(name="b", is_dir=True, bytes=0),
        Entry(name="two", is_dir=False, bytes=2),
    ]
    assert [entry.name for entry in fs.list()] == ["a"]
    assert fs.sub("a").sub("b").read_bytes("one") == b"1"


def test_what_is_missing(fs: Filesystem) -> None:
    fs.write_bytes("dir/file", b"x")
    assert fs.list("nowhere") == []
    assert fs.size("nowhere") is None
    assert fs.size("dir") is None
    assert fs.exists("dir")
    assert fs.exists("dir/file")
    assert not fs.exists("dir/other")
    with pytest.raises(FileNotFoundError):
        fs.read_bytes("dir/other")
    fs.remove_tree("nowhere/at/all")


def test_a_tree_is_removed_and_its_neighbours_stay(fs: Filesystem) -> None:
    for path in ("a/1", "a/deep/2", "ab/3", "b"):
        fs.write_bytes(path, b"x")
    fs.remove_tree("a")
    fs.remove_tree("b")
    assert [entry.name for entry in fs.list()] == ["ab"]
    assert fs.read_bytes("ab/3") == b"x"


@pytest.mark.parametrize("path", ["/abs", "../up", "a/../b", "a//b", "./a", "a/", "a\0b", ".."])
def test_no_path_leaves_the_root(fs: Filesystem, path: str) -> None:
    for act in (fs.read_bytes, fs.list, fs.size, fs.exists, fs.remove_tree, fs.make_dirs, fs.sub):
        with pytest.raises(ValueError, match="not allowed"):
            act(path)
    with pytest.raises(ValueError, match="not allowed"):
        fs.write_bytes(path, b"")


def test_the_root_itself_is_not_removed(fs: Filesystem) -> None:
    with pytest.raises(ValueError, match="name a path inside it"):
        fs.remove_tree("")


@pytest.mark.parametrize("name", STRANGE_NAMES)
def test_strange_names_are_literal(fs: Filesystem, name: str) -> None:  # B62
    decoys = ["a", " ", "b", "a1b", "x"]
    for decoy in decoys:
        fs.write_bytes(f"{decoy}/file", b"decoy")
    fs.write_bytes(f"{name}/file", b"mine")
    with fs.open_output(f"{name}/sub/{name}") as file:
        file.write(b"2")
    assert sorted(entry.name for entry in fs.list()) == sorted([*decoys, name])
    assert fs.read_bytes(f"{name}/file") == b"mine"
    assert fs.size(f"{name}/sub/{name}") == 1
    fs.remove_tree(name)
    assert sorted(entry.name for entry in fs.list()) == sorted(decoys)
    assert all(fs.read_bytes(f"{decoy}/file") == b"decoy" for decoy in decoys)


@pytest.mark.parametrize("name", STRANGE_ON_DISK)
@pytest.mark.parametrize("prefix", ["", "file://"])
def test_strange_local_roots(tmp_path: Path, name: str, prefix: str) -> None:  # B62
    fs = Filesystem.at(f"{prefix}{tmp_path}/{name}")
    fs.write_bytes("step-1/file", b"x")
    normal = os.path.normpath(name)
    assert (tmp_path / normal / "step-1" / "file").read_bytes() == b"x"
    assert [found.name for found in tmp_path.iterdir()] == [normal.split("/")[0]]
    assert fs.url == fs.local_root == str(tmp_path / normal)
    assert Filesystem.at(fs.url).list() == fs.list() != []


@pytest.mark.parametrize("name", [*STRANGE_IN_URLS, "trailing/"])
def test_strange_object_roots(name: str) -> None:  # B62
    bucket = uuid.uuid4().hex
    fs = Filesystem.at(f"memory://{bucket}/{name}")
    fs.write_bytes("step-1/file", b"x")
    stored = fsspec.filesystem("memory").find(f"/{bucket}")
    assert stored == [f"/{bucket}/{name.rstrip('/')}/step-1/file"]
    assert Filesystem.at(fs.url).list() == fs.list() != []
    assert not fs.is_local
    assert fs.local_root is None


@pytest.mark.parametrize(
    "url",
    [
        "",
        "runs",
        "./runs",
        "~/runs",
        "file://host/runs",
        "/runs/../other",
        "file:///runs/..",
        "s3://",
        "s3:///key",
        "s3://s3://bucket/runs",
        "s3://bucket//runs",
        "s3://bucket/../other",
        "s3://bucket/runs?endpoint_override=localhost",
        "nosuchscheme://bucket/runs",
    ],
)
def test_a_root_that_is_not_clear_is_refused(url: str) -> None:  # B62
    with pytest.raises(ValueError, match=r"storage|no access"):
        Filesystem.at(url)


@pytest.mark.parametrize(
    "url", ["s3://KEY:hush@bucket/runs", "gs://hush@bucket", "abfs://a:hush@b/c"]
)
def test_credentials_in_a_url_are_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ValueError, match="credentials") as caught:
        Filesystem.at(url)
    assert "hush" not in str(caught.value)


def test_it_crosses_processes(fs: Filesystem) -> None:
    fs.write_bytes("a", b"x")
    assert pickle.loads(pickle.dumps(fs)).read_bytes("a") == b"x"


def test_another_writer_is_seen_at_once(fs: Filesystem) -> None:
    other = Filesystem.at(fs.url)
    assert fs.list("dir") == []
    other.write_bytes("dir/a", b"1")
    assert [entry.name for entry in fs.list("dir")] == ["a"]
    other.remove_tree("dir/a")
    assert fs.size("dir/a") is None


def test_append_and_rename_are_for_disks(fs: Filesystem) -> None:
    fs.write_bytes("from/a", b"1")
    if not fs.is_local:
        with pytest.raises(io.UnsupportedOperation, match="cannot be appended"):
            fs.open_append("log")
        with pytest.raises(io.UnsupportedOperation, match="cannot be renamed"):
            fs.rename("from", "to")
        return
    for _ in range(2):
        with fs.open_append("logs/log") as file:
            file.write(b"ab")
    assert fs.read_bytes("logs/log") == b"abab"
    fs.rename("from", "new/to")
    assert fs.read_bytes("new/to/a") == b"1"
    assert not fs.exists("from")
    fs.write_bytes("from/b", b"2")
    with pytest.raises(OSError, match="not empty"):
        fs.rename("from", "new/to")


def test_a_failed_write_leaves_the_old_content_and_no_litter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fs = Filesystem.at(str(tmp_path))
    fs.write_bytes("a", b"old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(local_store.os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        fs.write_bytes("a", b"new")
    with pytest.raises(OSError, match="no space left"), fs.open_output("b") as file:
        file.write(b"torn")
    monkeypatch.undo()
    assert fs.read_bytes("a") == b"old"
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_data_reaches_the_disk_before_a_name_points_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for name in ("fsync", "replace", "rename", "mkdir"):
        monkeypatch.setattr(local_store.os, name, noting(calls, name, getattr(os, name)))
    fs = Filesystem.at(str(tmp_path))
    fs.write_bytes("a", b"x")
    assert calls == ["fsync", "replace", "fsync"]
    calls.clear()
    with fs.open_output("d/b") as file:
        file.write(b"x")
        assert calls == ["mkdir", "fsync"]
    assert calls == ["mkdir", "fsync", "fsync"]
    calls.clear()
    fs.rename("d", "e")
    assert calls == ["rename", "fsync", "fsync"]


def noting(calls: list[str], name: str, act: Any) -> Any:
    def noted(*args: Any) -> Any:
        calls.append(name)
        return act(*args)

    return noted


def test_a_file_in_the_way_of_a_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(b"")
    fs = Filesystem.at(str(tmp_path))
    with pytest.raises(NotADirectoryError, match="plain"):
        fs.write_bytes("plain/file", b"x")
    assert fs.size("plain/file") is None
    with pytest.raises(NotADirectoryError):
        fs.list("plain")


def test_trouble_is_not_absence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fs = Filesystem.at(str(tmp_path))

    def denied(*args: Any, **kwargs: Any) -> None:
        raise PermissionError(errno.EACCES, "denied")

    for name in ("stat", "scandir"):
        monkeypatch.setattr(local_store.os, name, denied)
    for look in (fs.size, fs.exists, fs.list):
        with pytest.raises(PermissionError):
            look("a")
    monkeypatch.undo()
    objects = Filesystem.at(f"memory://{uuid.uuid4().hex}")
    monkeypatch.setattr(fsspec.implementations.memory.MemoryFileSystem, "info", denied)
    monkeypatch.setattr(fsspec.implementations.memory.MemoryFileSystem, "ls", denied)
    for look in (objects.size, objects.exists, objects.list):
        with pytest.raises(PermissionError):
            look("a")


@pytest.mark.parametrize("refuses", [False, True])
def test_large_pieces_go_past_the_cache_and_the_rest_through_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuses: bool
) -> None:
    """Whatever a medium, a size or a place in memory allows, the bytes are the same."""
    monkeypatch.setattr(direct_file, "_LEAST_BYTES", 8192)
    modes: list[bool] = []

    def set_direct(self: direct_file.DirectFile, is_direct: bool) -> None:
        modes.append(is_direct)
        if refuses and is_direct:
            raise OSError(errno.EINVAL, "not here")
        real(self, is_direct)

    real = direct_file.DirectFile._set_direct
    monkeypatch.setattr(direct_file.DirectFile, "_set_direct", set_direct)
    memory = mmap.mmap(-1, 40_000)
    memory[:] = bytes(range(250)) * 160
    view = memoryview(memory)
    fs = Filesystem.at(str(tmp_path))
    with fs.open_output("file") as file:
        for piece in (view[:16384], view[16384:24576], view[24576:], view[1:9000], view[:16384]):
            file.write(piece)
    assert modes.count(True) == (1 if refuses else 2)
    assert fs.read_bytes("file") == bytes(view) + bytes(view[1:9000]) + bytes(view[:16384])
