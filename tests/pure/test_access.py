"""Whether storage can be written, and what is said when it cannot."""

from __future__ import annotations

import os
import pickle
import resource
import socket
from pathlib import Path

import pytest

from elastic.storage.access import StorageRefused, check_access, surroundings
from elastic.storage.filesystem import Filesystem
from elastic.storage.local_store import LocalStore

KEYS = {"AWS_ACCESS_KEY_ID": "AKIAhush", "AWS_SECRET_ACCESS_KEY": "hush"}


class Refusing(LocalStore):
    """A bucket, with an error for whoever writes to it."""

    scheme = "s3"

    def __init__(self, error: Exception) -> None:
        self._error = error

    def make_dirs(self, path: str) -> None:
        pass

    def write_bytes(self, path: str, data: bytes) -> None:
        raise self._error


def refusal(error: Exception) -> str:
    with pytest.raises(StorageRefused) as caught:
        check_access(Filesystem(Refusing(error), "bucket/runs/one"), "rank 0")
    assert caught.value.__cause__ is None and caught.value.__suppress_context__
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    return str(caught.value)


def test_nothing_is_left_where_it_can_be_written(tmp_path: Path) -> None:
    check_access(Filesystem.at(f"{tmp_path}/runs/one"), "rank 0")
    assert [path.name for path in tmp_path.rglob("*")] == ["runs", "one"]


def test_storage_without_room_is_refused_with_its_path_and_what_is_free(tmp_path: Path) -> None:
    fs = Filesystem.at(f"{tmp_path}/run")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))  # as a quota would have it
    try:
        with pytest.raises(StorageRefused, match=r"/run from a test .* full, .* bytes are free"):
            check_access(fs, "a test")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list((tmp_path / "run").iterdir()) == []


def test_a_path_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageRefused, match=r"NotADirectoryError.*choose a storage path"):
        check_access(Filesystem.at(f"{tmp_path}/file/runs"), "rank 0")


@pytest.mark.parametrize(
    "endpoint, told",
    [
        (None, "AWS_ENDPOINT_URL is not set (AWS, or a profile)"),
        ("http://me:hush@store:9000", "AWS_ENDPOINT_URL is http://me:(redacted)@store:9000"),
    ],
)
def test_a_bucket_that_cannot_be_reached(
    monkeypatch: pytest.MonkeyPatch, endpoint: str | None, told: str
) -> None:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    if endpoint is not None:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    said = refusal(OSError("no way to it"))
    assert said.startswith(
        "cannot write to the run directory s3://bucket/runs/one from rank 0 on "
        f"{socket.gethostname()}: OSError: no way to it; here {told}, AWS_ACCESS_KEY_ID is set; "
    )
    assert "set them on every node before `ray start`" in said
    assert "hush" not in said and "\n" not in said


def test_a_bucket_that_there_is_not() -> None:
    said = refusal(FileNotFoundError("The specified bucket does not exist"))
    assert "does not exist" in said and said.endswith(
        "make the bucket, or correct its name: a run makes none"
    )


def test_what_an_environment_tells(tmp_path: Path) -> None:
    place = Filesystem(Refusing(OSError()), "bucket/run")
    assert surroundings(place, {}) == (
        "AWS_ENDPOINT_URL is not set (AWS, or a profile), "
        "AWS_ACCESS_KEY_ID is not set (a profile, or a role)"
    )
    assert surroundings(Filesystem.at(str(tmp_path)), dict(os.environ)) == ""
