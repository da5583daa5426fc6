"""Text for a run: found, checked, made into tokens once, and kept out of what Ray ships."""

from __future__ import annotations

import os
import sysconfig
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs import corpus, text
from jobs.corpus import END_OF_TEXT, find_corpus
from jobs.text import ensure_tokens, prepare

NUMBERS = pa.int64()


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def tokens_in(prepared: text.Text) -> list[int]:
    return pq.read_table(prepared.path).column("tokens").to_pylist()


def parquet(path: Path, **columns: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return path


# --- what becomes which tokens ---------------------------------------------------------------


def test_a_text_file(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("aé\n")
    prepared = prepare(path, cache)
    assert tokens_in(prepared) == [97, 0xC3, 0xA9, 10, END_OF_TEXT]
    assert (prepared.num_tokens, prepared.vocab_size) == (5, 257)
    assert prepared.data == str(path)


def test_a_folder_is_read_by_name_without_hidden_files(tmp_path: Path, cache: Path) -> None:
    data = tmp_path / "data"
    for name, content in {"b": "2", "a/z": "3", "a0": "1", ".git/x": "no", ".y": "no"}.items():
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        (data / name).write_text(content)
    (data / "empty").touch()
    found = [token for token in tokens_in(prepare(data, cache)) if token != END_OF_TEXT]
    assert bytes(found) == b"123"


def test_a_parquet_file_of_texts(tmp_path: Path, cache: Path) -> None:
    path = parquet(tmp_path / "x.parquet", text=["ab", None, "", "é"], url=["u"] * 4)
    assert tokens_in(prepare(path, cache)) == [97, 98, END_OF_TEXT, 0xC3, 0xA9, END_OF_TEXT]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int8(), "str")])
def test_every_kind_of_string(tmp_path: Path, cache: Path, kind: pa.DataType) -> None:
    path = parquet(tmp_path / "x.parquet", text=pa.array(["ab", "c"]).cast(kind))
    assert tokens_in(prepare(path, cache)) == [97, 98, END_OF_TEXT, 99, END_OF_TEXT]


@pytest.mark.parametrize(
    "column",
    [
        pa.array([7, 8, 70000, 1], NUMBERS),
        pa.array([[7, 8], [], None, [70000, 1]], pa.list_(NUMBERS)),
        pa.array([[7, 8], [70000, 1]], pa.list_(NUMBERS, 2)),
        pa.array([[7], [8, 70000, 1]], pa.large_list(pa.uint32())),
    ],
    ids=["flat", "list", "fixed", "large"],
)
def test_parquet_of_tokens(tmp_path: Path, cache: Path, column: pa.Array) -> None:
    prepared = prepare(parquet(tmp_path / "x.parquet", tokens=column), cache)
    assert tokens_in(prepared) == [7, 8, 70000, 1]
    assert prepared.vocab_size == 70001


def test_texts_that_are_a_part_of_an_array() -> None:
    texts = pa.array(["no", "ab", "c"], pa.large_string())[1:]
    assert corpus._joined(texts).tolist() == [97, 98, END_OF_TEXT, 99, END_OF_TEXT]


def test_a_folder_with_parquet_is_a_parquet_folder(tmp_path: Path, cache: Path) -> None:
    parquet(tmp_path / "data/b.parquet", text=["b"])
    parquet(tmp_path / "data/a/c.parquet", text=["c"])
    parquet(tmp_path / "data/_metadata.parquet", text=["no"])
    (tmp_path / "data/README.md").write_text("no")
    found = tokens_in(prepare(tmp_path / "data", cache))
    assert found == [98, END_OF_TEXT, 99, END_OF_TEXT]


def test_many_row_groups_join_without_a_gap(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "ROW_GROUP_TOKENS", 8)
    monkeypatch.setattr(corpus, "_READ_BYTES", 5)
    path = tmp_path / "long"
    path.write_text("0123456789é" * 3)
    prepared = prepare(path, cache)
    assert bytes(tokens_in(prepared)[:-1]) == path.read_bytes()
    footer = pq.read_metadata(prepared.path)
    assert [footer.row_group(i).num_rows for i in range(footer.num_row_groups)] == [8] * 4 + [5]


def test_the_default_is_the_standard_library() -> None:
    found = find_corpus(None)
    root = Path(sysconfig.get_path("stdlib"))
    assert root / "json/decoder.py" in found.files
    assert not [path for path in found.files if {"site-packages", "__pycache__"} & {*path.parts}]
    assert sum(path.stat().st_size for path in found.files) > 10_000_000
    assert found == find_corpus(None)


# --- the cache -------------------------------------------------------------------------------


def test_the_same_content_is_made_into_tokens_once(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x"
    path.write_text("abc")
    first = prepare(path, cache)
    with monkeypatch.context() as patch:
        patch.setattr(text, "_write", lambda *_: pytest.fail("made again"))
        assert prepare(path, cache) == first
    before = path.stat()
    path.write_text("abd")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    changed = prepare(path, cache)
    assert changed.identity != first.identity
    assert tokens_in(changed) == [97, 98, 100, END_OF_TEXT]
    assert tokens_in(first) == [97, 98, 99, END_OF_TEXT]


def test_where_one_file_ends_is_part_of_the_content(tmp_path: Path, cache: Path) -> None:
    for folder, parts in {"one": ("ab", "c"), "two": ("a", "bc")}.items():
        (tmp_path / folder).mkdir()
        for number, part in enumerate(parts):
            (tmp_path / folder / str(number)).write_text(part)
    one, two = (prepare(tmp_path / name, cache) for name in ("one", "two"))
    assert one.identity != two.identity
    assert tokens_in(one) != tokens_in(two)


def test_several_at_once_make_one_whole_file(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "x"
    path.write_text("some text " * 1000)
    together = threading.Barrier(4)

    def run(_: int) -> text.Text:
        together.wait()
        return prepare(path, cache)

    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(run, range(4)))
    assert len(found) == 1
    assert bytes(tokens_in(found.pop())[:-1]) == path.read_bytes()
    assert len(list((cache / "tokens").iterdir())) == 1, "no temporary file is left"


def test_a_failure_while_writing_publishes_nothing(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x"
    path.write_text("abc")

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(ValueError, match=r"No space left.*XDG_CACHE_HOME"):
            prepare(path, cache)
    assert list((cache / "tokens").iterdir()) == []
    assert prepare(path, cache).num_tokens == 4


def test_a_torn_cache_file_is_made_anew(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "x"
    path.write_text("abc")
    prepared = prepare(path, cache)
    prepared.path.write_bytes(prepared.path.read_bytes()[:-20])
    assert tokens_in(prepare(path, cache)) == [97, 98, 99, END_OF_TEXT]


def test_the_cache_is_never_in_what_ray_ships(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "home/project"
    project.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.chdir(project)
    assert text.default_cache_dir() == tmp_path / "home/.cache/elastic"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "shared"))
    assert text.default_cache_dir() == tmp_path / "shared/elastic"
    monkeypatch.setenv("XDG_CACHE_HOME", str(project / ".cache"))
    assert text.default_cache_dir() == tmp_path / "home/.cache/elastic"
    with pytest.raises(ValueError, match="working directory"):
        prepare(None, project / "cache")
    monkeypatch.chdir(tmp_path / "home")  # now both would be shipped
    assert not text.default_cache_dir().is_relative_to(tmp_path / "home")


def test_another_node_makes_the_same_tokens_or_says_why_not(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "x"
    path.write_text("abc")
    here = prepare(path, cache)
    there = ensure_tokens(here.data, here.identity, tmp_path / "other")
    assert there.path.is_relative_to(tmp_path / "other")
    assert there.path.read_bytes() == here.path.read_bytes()
    path.unlink()
    assert ensure_tokens(here.data, here.identity, cache) == here, "the cache is enough"
    with pytest.raises(ValueError, match="does not exist"):
        ensure_tokens(here.data, here.identity, tmp_path / "third")
    path.write_text("other")
    with pytest.raises(ValueError, match=r"is not the data .* expected content .* found"):
        ensure_tokens(here.data, here.identity, tmp_path / "third")


# --- bad input -------------------------------------------------------------------------------


def refused(data: str | Path, cache: Path, **asked: int) -> str:
    with pytest.raises(ValueError) as caught:
        prepare(data, cache, **asked)
    return str(caught.value)


def test_missing(tmp_path: Path, cache: Path) -> None:
    assert f"{tmp_path / 'no'} does not exist" in refused(tmp_path / "no", cache)
    assert "is a URL" in refused("s3://bucket/x", cache)


def test_empty(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    parquet(tmp_path / "x.parquet", text=pa.array([None, ""], pa.string()))
    parquet(tmp_path / "y.parquet", tokens=pa.array([], NUMBERS))
    for name in ("file", "folder", "x.parquet", "y.parquet"):
        assert "is empty" in refused(tmp_path / name, cache)


def test_unreadable(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    path.write_text("abc")
    opened = Path.open

    def deny(self: Path, *rest: Any) -> Any:  # tests may run as root, whom chmod does not stop
        if self == path:
            raise PermissionError(13, "Permission denied", str(self))
        return opened(self, *rest)

    monkeypatch.setattr(Path, "open", deny)
    assert f"{path} cannot be read: Permission denied" in refused(path, cache)
    assert f"{path} cannot be read: Permission denied" in refused(tmp_path, cache)


def test_a_folder_that_cannot_be_listed(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data/below").mkdir(parents=True)
    (tmp_path / "data/x").write_text("abc")
    listed = os.scandir

    def deny(path: Any) -> Any:
        if str(path).endswith("below"):
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(os, "scandir", deny)
    assert "below cannot be read: Permission denied" in refused(tmp_path / "data", cache)


def test_not_a_file(tmp_path: Path, cache: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "neither a file nor a folder" in refused(tmp_path / "pipe", cache)


def test_no_parquet(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "x.parquet"
    path.write_text("this is not one")
    assert f"{path} is not a readable Parquet file" in refused(path, cache)


def test_without_the_column(tmp_path: Path, cache: Path) -> None:
    path = parquet(tmp_path / "data/x.parquet", body=["a"], url=["b"])
    message = refused(path, cache)
    assert f"{path} has columns body, url" in message
    assert "tokens (integers) or text (strings)" in message
    parquet(tmp_path / "data/a.parquet", text=["a"])
    message = refused(path.parent, cache)
    assert f"{path} has columns body, url" in message
    assert "expected a column text" in message


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"text": [1]}, "column text must hold strings, found int64"),
        ({"text": [["a"]]}, "column text must hold strings, found list"),
        ({"tokens": ["a"]}, "column tokens must hold integers or lists of integers, found string"),
        ({"tokens": [[0.5]]}, "column tokens must hold integers or lists of integers, found list"),
    ],
)
def test_a_column_of_another_type(
    tmp_path: Path, cache: Path, columns: dict[str, list[Any]], expected: str
) -> None:
    assert expected in refused(parquet(tmp_path / "x.parquet", **columns), cache)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [([1, None], "has nulls"), ([1, -1], "from -1 to 1"), ([2**31], "expected 0 .. 2")],
)
def test_tokens_that_are_none(
    tmp_path: Path, cache: Path, tokens: list[int | None], expected: str
) -> None:
    assert expected in refused(parquet(tmp_path / "x.parquet", tokens=tokens), cache)


@pytest.mark.parametrize("read_bytes", [3, 4, 1 << 20])
def test_not_utf8(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, read_bytes: int
) -> None:
    monkeypatch.setattr(corpus, "_READ_BYTES", read_bytes)
    path = tmp_path / "data/latin.txt"
    path.parent.mkdir()
    path.write_bytes("aéé".encode() + b"\xe9t\xe9")
    (path.parent / "a").write_text("fine")
    assert f"{path} is not UTF-8 text: byte 0xe9 at offset 5" in refused(path.parent, cache)
    path.write_bytes("aé".encode()[:-1])
    assert "byte 0xc3 at offset 1" in refused(path, cache), "the end of the file cuts a character"


def test_parquet_text_that_is_not_utf8(tmp_path: Path, cache: Path) -> None:
    offsets, data = pa.array([0, 2], pa.int32()).buffers()[1], pa.py_buffer(b"\xff\xfe")
    column = pa.StringArray.from_buffers(1, offsets, data)
    path = parquet(tmp_path / "x.parquet", text=column)
    assert f"{path}, batch 0: column text is not UTF-8" in refused(path, cache)


def test_too_few_samples(tmp_path: Path, cache: Path) -> None:  # B38
    path = tmp_path / "x"
    path.write_text("x" * 40)
    assert prepare(path, cache, sequence_length=10, min_samples=4).num_tokens == 41
    message = refused(path, cache, sequence_length=10, min_samples=5)
    assert "41 tokens, 4 samples of 10 tokens: expected 5 or more" in message
