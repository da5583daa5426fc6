"""Sources: any sample from anywhere, block by block, from files of any size, packed or not."""

from __future__ import annotations

import concurrent.futures
import json
import multiprocessing
import os
import pickle
import random
import threading
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.storage.format import UnsupportedFormat
from elastic.training.order_choice import choose
from elastic.training.parquet import ParquetTokens
from elastic.training.sources import lines, parquet_files
from elastic.training.sources.blockwise import merged
from elastic.training.sources.lines import JsonLines, TextLines
from elastic.training.sources.packing import PackedTokens
from elastic.training.sources.parquet_rows import ParquetRows

EOT = 50256


def write(path: Path, rows_per_group: int = 5, **columns: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=rows_per_group)
    return path


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that few tokens, rows and lines make many blocks."""
    monkeypatch.setattr("elastic.training.parquet.BLOCK_TOKENS", 1)
    monkeypatch.setattr("elastic.training.sources.parquet_rows.BLOCK_BYTES", 1)
    monkeypatch.setattr(lines, "BLOCK_BYTES", 16)
    monkeypatch.setattr("elastic.training.sources.packing._DOCUMENTS_AT_ONCE", 3)


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Rows decoded, of whole row groups and of beginnings."""
    found: Counter[str] = Counter()
    batches = parquet_files.ParquetFiles.batches

    def counted(self: Any, *arguments: Any, is_begun: bool = False) -> Iterator[Any]:
        for group, batch in batches(self, *arguments, is_begun=is_begun):
            found["beginnings" if is_begun else "whole"] += batch.num_rows
            yield group, batch

    monkeypatch.setattr(parquet_files.ParquetFiles, "batches", counted)
    return found


# --- windows of tokens -------------------------------------------------------------------------


def row_of(rows: dict[str, Any]) -> list[list[int]]:
    """Each item with its last label: the tokens that it was cut from."""
    assert (rows["input_ids"][:, 1:] == rows["labels"][:, :-1]).all()
    whole = np.concatenate([rows["input_ids"], rows["labels"][:, -1:]], axis=1)
    return [[int(token) for token in row] for row in whole]


@given(
    file_sizes=st.lists(st.integers(0, 40), min_size=1, max_size=4).filter(lambda x: sum(x) > 1),
    rows_per_group=st.integers(1, 9),
    length=st.integers(1, 12),
    cache_bytes=st.integers(0, 300),
    seed=st.integers(0, 99),
)
@settings(deadline=None, max_examples=40)
def test_items_of_files_of_any_size_in_any_order(
    tmp_path_factory: pytest.TempPathFactory,
    file_sizes: list[int],
    rows_per_group: int,
    length: int,
    cache_bytes: int,
    seed: int,
) -> None:
    folder = tmp_path_factory.mktemp("files")
    start = 0
    for number, size in enumerate(file_sizes):
        kind = [pa.uint16(), pa.int64(), pa.int32()][number % 3]
        tokens = pa.array(range(start, start + size), kind)
        write(folder / f"{number}.parquet", rows_per_group, tokens=tokens)
        start += size
    length = min(length, start - 1)
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr("elastic.training.parquet.BLOCK_TOKENS", 7)
        dataset = ParquetTokens(folder, length=length, cache_bytes=cache_bytes)
    assert len(dataset) == (start - 1) // length
    indices = random.Random(seed).sample(range(len(dataset)), len(dataset))
    for begin in range(0, len(indices), 3):
        batch = indices[begin : begin + 3]
        found = row_of(dataset.rows(batch))
        assert found == [list(range(i * length, (i + 1) * length + 1)) for i in batch]


def test_blocks_say_in_which_an_item_begins(tmp_path: Path, small_blocks: None) -> None:
    dataset = ParquetTokens(write(tmp_path / "x.parquet", 5, tokens=list(range(23))), length=3)
    # Row groups begin at tokens 0, 5, 10, 15, 20, items at 0, 3, ... 18.
    assert dataset.block_starts.tolist() == [0, 2, 4, 5, 7, 7]
    dataset = ParquetTokens(tmp_path, length=11)
    assert dataset.block_starts.tolist() == [0, 1, 1, 2, 2, 2]


@given(sizes=st.lists(st.integers(0, 30), max_size=50), block_size=st.integers(1, 40))
def test_small_parts_are_put_together(sizes: list[int], block_size: int) -> None:
    first = merged(sizes, block_size).tolist()
    assert first[-1] == len(sizes) and first == sorted({*first} | {first[-1]})
    assert not sizes or first[0] == 0
    for begin, end in pairwise(first):
        assert end - begin == 1 or sum(sizes[begin : end - 1]) < block_size
    starts = np.cumsum([0, *sizes])[first]
    assert all(later - start > 0 for start, later in zip(starts, starts[2:], strict=False))


def test_an_item_over_the_end_of_its_block_decodes_only_the_beginning_of_the_next(
    tmp_path: Path, decoded: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastic.training.parquet.BLOCK_TOKENS", 10_000)
    path = write(tmp_path / "x.parquet", 10_000, tokens=pa.array(range(100_000), pa.int32()))
    dataset = ParquetTokens(path, length=64)
    last_of_third = int(dataset.block_starts[3]) - 1
    found = row_of(dataset.rows([last_of_third]))
    assert found == [list(range(last_of_third * 64, last_of_third * 64 + 65))]
    assert decoded["whole"] == 10_000
    assert 0 < decoded["beginnings"] < 65


def test_a_block_order_decodes_each_row_group_about_once(
    tmp_path: Path, decoded: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from elastic.training.block_order import BlockOrder, Blocks

    monkeypatch.setattr("elastic.training.parquet.BLOCK_TOKENS", 1000)
    path = write(tmp_path / "x.parquet", 1000, tokens=pa.array(range(100_000), pa.int32()))
    dataset = ParquetTokens(path, length=8, cache_bytes=0)
    blocks = Blocks(starts=dataset.block_starts, window_blocks=8)
    dataset.keep_blocks(blocks.held_blocks)
    order = BlockOrder(blocks=blocks, seed=1, epoch=0)
    batches = np.array_split(order.slice(0, len(order)), 2500)
    found = [row[0] for batch in batches for row in row_of(dataset.rows(batch.tolist()))]
    assert sorted(found) == list(range(0, 99_992, 8))
    assert decoded["whole"] <= 108_000, "only those of the first window a second time"


def test_a_window_of_the_order_stays_in_memory_whatever_the_cache(
    tmp_path: Path, small_blocks: None
) -> None:
    dataset = ParquetTokens(
        write(tmp_path / "x.parquet", 10, tokens=list(range(200))), length=5, cache_bytes=100
    )
    for kept in (1, 3):
        dataset.keep_blocks(kept)
        dataset.rows(range(len(dataset)))
        assert len(dataset._cache) == kept
        assert dataset._used_bytes <= kept * (10 + 5) * 8, "a row group, and an item behind it"


# --- decoding ahead ----------------------------------------------------------------------------


@given(
    indices=st.lists(st.lists(st.integers(0, 38), max_size=6), min_size=1, max_size=12),
    kept=st.integers(1, 6),
    num_threads=st.integers(0, 3),
)
@settings(deadline=None, max_examples=40)
def test_what_is_decoded_ahead_is_what_would_be_decoded(
    tmp_path_factory: pytest.TempPathFactory,
    indices: list[list[int]],
    kept: int,
    num_threads: int,
) -> None:
    """Also what was decoded in vain, or is dropped before it was asked for."""
    path = write(tmp_path_factory.mktemp("ahead") / "x.parquet", 10, tokens=list(range(200)))
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr("elastic.training.parquet.BLOCK_TOKENS", 1)
        dataset = ParquetTokens(path, length=5, cache_bytes=0)
    dataset.num_threads = num_threads
    dataset.keep_blocks(kept)
    for batch, after in pairwise([*indices, []]):
        dataset.prefetch(after)
        dataset.prefetch(batch)
        assert row_of(dataset.rows(batch)) == [[*range(i * 5, i * 5 + 6)] for i in batch]
        num_decoded = sum(isinstance(block, np.ndarray) for block in dataset._cache.values())
        assert num_decoded <= kept


def test_blocks_are_decoded_beside_the_caller(tmp_path: Path, small_blocks: None) -> None:
    path = write(tmp_path / "x.parquet", 10, tokens=list(range(200)))
    dataset = ParquetTokens(path, length=5)
    dataset.keep_blocks(3)
    threads: list[str] = []
    decode = dataset._decode

    def watched(block: int, tokens: Any) -> None:
        threads.append(threading.current_thread().name)
        decode(block, tokens)

    dataset._decode = watched  # type: ignore[method-assign]
    dataset.prefetch([30, 31, 0, 8, 16])
    ahead = list(dataset._cache)
    assert ahead == [15, 0, 4], "in order of first use, as many as are kept"
    for number in ahead:
        concurrent.futures.wait([dataset._cache[number]])  # type: ignore[list-item]
    dataset.rows([30, 31, 0])
    assert len(threads) == 3 and all(name.startswith("elastic-blocks") for name in threads)
    dataset.rows([20])
    assert threads[3] == threading.main_thread().name


def test_what_fails_ahead_fails_where_it_is_asked_for(tmp_path: Path, small_blocks: None) -> None:
    path = write(tmp_path / "x.parquet", 10, tokens=[1] * 16 + [None] * 2 + [1] * 22)
    dataset = ParquetTokens(path, length=5)
    dataset.keep_blocks(4)
    dataset.prefetch([0, 2, 4])
    assert len(dataset.rows([0, 4])["labels"]) == 2
    for _ in range(2):
        with pytest.raises(ValueError, match="row group 1: column 'tokens' has 2 nulls"):
            dataset.rows([2])


def test_documents_are_not_tokenised_beside_the_caller() -> None:
    dataset = PackedTokens([[1, 2]] * 9, list, length=2, end_of_text=0)
    dataset.prefetch([0, 1, 2])
    assert not dataset._cache


def test_a_forked_process_opens_files_of_its_own(tmp_path: Path, small_blocks: None) -> None:
    path = write(tmp_path / "x.parquet", 10, tokens=list(range(2000)))
    dataset = ParquetTokens(path, length=5)
    dataset.keep_blocks(200)
    dataset.prefetch(range(0, 399, 3))
    expected = dataset.rows(range(50))["labels"].tolist()
    ours, theirs = multiprocessing.Pipe()

    def child() -> None:
        found = dataset.rows(range(50))["labels"].tolist()
        theirs.send((found == expected, len(dataset._cache)))

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    assert ours.poll(20)
    assert ours.recv() == (True, 25)
    process.join()


def test_a_billion_samples_open_in_little_memory(tmp_path: Path) -> None:
    first, folder = tmp_path / "x.parquet", tmp_path / "many"
    row_group = pa.table({"tokens": pa.array(np.full(1 << 20, 7, np.uint8))})
    with pq.ParquetWriter(first, row_group.schema) as writer:
        for _ in range(16):
            writer.write_table(row_group)
    folder.mkdir()
    for number in range(60):
        os.link(first, folder / f"{number}.parquet")
    arrow_bytes = pa.total_allocated_bytes()
    tracemalloc.start()
    dataset = ParquetTokens(folder, length=1)
    stream = choose(dataset, seed=1)
    found = dataset.rows([index for _, index in stream.indices(10**9, 8)])
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(dataset) > 10**9 and stream.window is not None
    assert found["labels"].tolist() == [[7]] * 8
    assert peak_bytes + pa.total_allocated_bytes() - arrow_bytes < 50 << 20


def test_no_more_than_so_many_files_are_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet_files, "_MOST_OPEN", 4)
    for number in range(30):
        write(tmp_path / f"{number:02}.parquet", tokens=[number] * 6)
    before = len(os.listdir("/proc/self/fd"))
    dataset = ParquetTokens(tmp_path, length=6)
    assert dataset.rows(range(29))["input_ids"][:, 0].tolist() == list(range(29))
    assert len(dataset._files._of_thread.files) == 4
    monkeypatch.setattr("elastic.training.parquet.BLOCK_TOKENS", 1)
    dataset = ParquetTokens(tmp_path, length=6, cache_bytes=0)
    assert dataset.rows(range(29))["labels"][:, -1].tolist() == list(range(1, 30))
    assert len(os.listdir("/proc/self/fd")) <= before + 10


def test_a_file_written_anew_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", tokens=list(range(40)))
    dataset = ParquetTokens(path, length=4)
    write(path, tokens=list(range(38)))
    with pytest.raises(ValueError, match=r"0 and the 7 after it hold 38 tokens .* expected 40"):
        dataset.rows([0])


# --- documents ---------------------------------------------------------------------------------

DOCUMENTS = st.lists(st.lists(st.integers(0, 999), max_size=9), min_size=1, max_size=25)


def packed(documents: Sequence[Sequence[int]]) -> list[int]:
    return [token for ids in documents if ids for token in [*ids, EOT]]


@given(documents=DOCUMENTS, rows_per_group=st.integers(1, 7), length=st.integers(1, 9))
@settings(deadline=None, max_examples=40)
@pytest.mark.parametrize("is_counted", [True, False])
def test_documents_in_parquet_are_packed_with_an_end_after_each(
    tmp_path_factory: pytest.TempPathFactory,
    documents: list[list[int]],
    rows_per_group: int,
    length: int,
    is_counted: bool,
) -> None:
    expected = packed(documents)
    path = tmp_path_factory.mktemp("documents") / "x.parquet"
    column = pa.array([ids or None for ids in documents], pa.list_(pa.uint16()))
    table = pa.table({"tokens": column})
    pq.write_table(table, path, row_group_size=rows_per_group, write_statistics=is_counted)
    arguments: dict[str, Any] = {"length": length, "end_of_text": EOT}
    if len(expected) <= length:
        with pytest.raises(ValueError, match=f"holds {len(expected)} tokens in column 'tokens'"):
            ParquetTokens(path, **arguments)
        return
    dataset = ParquetTokens(path, **arguments)
    assert dataset.tokens(0, dataset.num_tokens).tolist() == expected


def test_a_footer_that_counts_tokens_spares_reading_them(
    tmp_path: Path, decoded: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "x.parquet", tokens=[[1, 2], [], None, [3]])
    monkeypatch.setattr(pq.ParquetFile, "read_row_group", None)
    assert ParquetTokens(path, length=1).num_tokens == 3
    assert ParquetTokens(path, length=1, end_of_text=9).num_tokens == 5
    assert not decoded


def test_an_end_that_the_column_cannot_hold(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", tokens=pa.array([[1], [2]], pa.list_(pa.uint8())))
    dataset = ParquetTokens(path, length=3, end_of_text=70_000)
    assert row_of(dataset.rows([0])) == [[1, 70_000, 2, 70_000]]


def test_tokens_in_one_long_column_have_no_documents_to_end(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", tokens=[1, 2, 3])
    with pytest.raises(ValueError, match="without ends of documents"):
        ParquetTokens(path, length=1, end_of_text=0)


@given(
    documents=DOCUMENTS,
    length=st.integers(1, 9),
    seed=st.integers(0, 99),
    batch=st.integers(1, 4),
)
@settings(deadline=None, max_examples=60)
def test_packing_resumes_at_any_item(
    documents: list[list[int]], length: int, seed: int, batch: int
) -> None:
    """Whatever was read before, and in whatever order: an item is a function of its index."""
    expected = packed(documents)
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr("elastic.training.sources.packing._DOCUMENTS_AT_ONCE", 3)
        if len(expected) <= length:
            with pytest.raises(ValueError, match="one item of length"):
                PackedTokens(documents, list, length=length, end_of_text=EOT)
            return
        dataset = PackedTokens(documents, list, length=length, end_of_text=EOT, cache_bytes=99)
    assert dataset.num_tokens == len(expected)
    indices = random.Random(seed).sample(range(len(dataset)), len(dataset))
    for begin in range(0, len(indices), batch):
        dataset = pickle.loads(pickle.dumps(dataset)) if begin % 2 else dataset
        some = indices[begin : begin + batch]
        found = row_of(dataset.rows(some))
        assert found == [expected[i * length : (i + 1) * length + 1] for i in some]


def tokenize(document: dict[str, Any]) -> list[int]:
    return [*document["text"].encode()]


def test_packing_json_lines_with_an_index(tmp_path: Path, small_blocks: None) -> None:
    texts = ["one", "", "two and three", "four", "five", "six", "seven"]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    calls: list[str] = []

    def watched(document: dict[str, Any]) -> list[int]:
        calls.append(document["text"])
        return tokenize(document)

    documents = JsonLines(tmp_path)
    index = tmp_path / "kept/index.json"
    arguments: dict[str, Any] = {"end_of_text": 0, "index": index}
    dataset = PackedTokens(documents, watched, length=4, **arguments)
    assert calls == texts
    expected = "\0".join(text for text in texts if text) + "\0"
    assert bytes(dataset.tokens(0, dataset.num_tokens).tolist()).decode() == expected
    calls.clear()
    dataset = PackedTokens(documents, watched, length=6, **arguments)
    assert not calls, "the counts are kept, for any length"
    assert bytes(dataset.rows([2])["input_ids"][0].tolist()).decode() == expected[12:18]
    other = PackedTokens(documents, lambda document: [1], length=4, **arguments)
    with pytest.raises(ValueError, match=r"give 2 tokens: expected .* an index of their own"):
        other.rows([0])
    with pytest.raises(ValueError, match=r"index of other documents: expected 2 .* found 7"):
        PackedTokens([{"text": "a"}] * 2, tokenize, length=1, **arguments)
    index.write_text(index.read_text().replace('"format_version": 1', '"format_version": 2'))
    with pytest.raises(UnsupportedFormat, match="version 2"):
        PackedTokens(documents, tokenize, length=4, **arguments)
    index.write_text("nothing")
    with pytest.raises(ValueError, match=r"index\.json is no index of packed documents"):
        PackedTokens(documents, tokenize, length=4, **arguments)


# --- lines -------------------------------------------------------------------------------------


@given(
    files=st.lists(
        st.lists(st.text(st.characters(exclude_characters="\n\r", codec="utf-8"), max_size=40)),
        min_size=1,
        max_size=3,
    ),
    block_bytes=st.integers(1, 60),
    end=st.sampled_from(["\n", "\r\n"]),
    is_ended=st.booleans(),
)
@settings(deadline=None, max_examples=60)
def test_lines_of_files_of_any_size(
    tmp_path_factory: pytest.TempPathFactory,
    files: list[list[str]],
    block_bytes: int,
    end: str,
    is_ended: bool,
) -> None:
    folder = tmp_path_factory.mktemp("lines")
    for number, text in enumerate(files):
        written = end.join(text) + end * is_ended
        (folder / f"{number}.txt").write_bytes(written.encode())
    expected = [line for text in files for line in text if line.encode().strip()]
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(lines, "BLOCK_BYTES", block_bytes)
        if not expected:
            with pytest.raises(ValueError, match="holds no line of text"):
                TextLines(folder)
            return
        dataset = TextLines(folder, cache_bytes=200)
    assert [dataset[index] for index in range(len(dataset))] == expected
    dataset = pickle.loads(pickle.dumps(dataset))
    assert [dataset[~index] for index in range(len(dataset))] == expected[::-1]


def test_json_lines(tmp_path: Path) -> None:
    rows = [{"text": "ü\u2028"}, [1, None], 3]
    text = "\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    (tmp_path / "a.jsonl").write_text(text)
    (tmp_path / "b.ndjson").write_text('{"n": 1}\n\n  \n{"n": \n')
    (tmp_path / "c.txt").write_text("no")
    dataset = JsonLines(tmp_path)
    assert len(dataset) == 5
    assert [dataset[index] for index in range(4)] == [*rows, {"n": 1}]
    with pytest.raises(ValueError, match=r"b\.ndjson: line 4 is not JSON: .* at column 7"):
        dataset[4]
    with pytest.raises(IndexError):
        dataset[5]


def test_lines_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes(b"one\n\xff\xfe\n")
    with pytest.raises(ValueError, match=r"x\.txt: line 2 is not UTF-8 text"):
        TextLines(tmp_path / "x.txt")[1]
    dataset = TextLines(tmp_path)
    (tmp_path / "x.txt").write_bytes(b"one\n\n\n\n\n")
    with pytest.raises(ValueError, match=r"holds 1 lines .* expected 2"):
        dataset[0]
    (tmp_path / "y.txt.gz").write_bytes(b"")
    with pytest.raises(ValueError, match=r"y\.txt\.gz is compressed"):
        TextLines(tmp_path)


@given(
    text=st.lists(st.sampled_from(["1", "", " ", "22", "x"]), min_size=1, max_size=30),
    block_bytes=st.integers(1, 20),
    end=st.sampled_from(["\n", "\r\n"]),
)
@settings(deadline=None, max_examples=60)
def test_a_bad_line_is_named_as_an_editor_counts(
    tmp_path_factory: pytest.TempPathFactory, text: list[str], block_bytes: int, end: str
) -> None:
    path = tmp_path_factory.mktemp("lines") / "x.jsonl"
    path.write_bytes(end.join(text).encode())
    samples = [number for number, line in enumerate(text, 1) if line.strip()]
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(lines, "BLOCK_BYTES", block_bytes)
        if not samples:
            return
        dataset = JsonLines(path, cache_bytes=0)
        for index, number in enumerate(samples):
            if text[number - 1] != "x":
                continue
            with pytest.raises(ValueError, match=rf"x\.jsonl: line {number} is not JSON"):
                dataset[index]


# --- files -------------------------------------------------------------------------------------

SOURCES: dict[str, Callable[[Path], Any]] = {
    ".txt": TextLines,
    ".jsonl": JsonLines,
    ".rows": ParquetRows,
    ".parquet": lambda path: ParquetTokens(path, "n", length=1),
}


def of_kind(kind: str, path: Path, num_samples: int) -> None:
    if kind in (".txt", ".jsonl"):
        path.with_suffix(kind).write_text("1\n" * num_samples)
    else:
        write(path.with_suffix(".parquet"), n=range(num_samples + (kind == ".parquet")))


@pytest.mark.parametrize("kind", SOURCES)
def test_files_tell_themselves_from_others_of_the_same_totals(kind: str, tmp_path: Path) -> None:
    for folder, sizes in {"a": {"x": 3, "y": 5}, "moved/a": {"x": 3, "y": 5}}.items():
        (tmp_path / folder).mkdir(parents=True)
        for name, num_samples in sizes.items():
            of_kind(kind, tmp_path / folder / name, num_samples)
    opened = SOURCES[kind]
    began = opened(tmp_path / "a").file_facts
    assert began == opened(tmp_path / "moved/a").file_facts
    assert began["num_files"] == 2 and len(json.dumps(began)) < 120, "a digest, not a list"
    renamed = tmp_path / "moved/a"
    ending = next(renamed.iterdir()).suffix
    (renamed / f"x{ending}").rename(renamed / f"z{ending}")
    now = opened(renamed).file_facts
    assert now["file_names"] != began["file_names"]
    of_kind(kind, renamed / "x", 4)
    of_kind(kind, renamed / "y", 4)
    (renamed / f"z{ending}").unlink()
    now = opened(renamed).file_facts
    assert (now["num_files"], now["file_names"]) == (2, began["file_names"])
    assert now["file_sizes"] != began["file_sizes"]


def test_packed_documents_are_told_by_their_files(tmp_path: Path) -> None:
    of_kind(".jsonl", tmp_path / "x", 9)
    documents = JsonLines(tmp_path)
    packed = PackedTokens(documents, lambda _: [1], length=1, end_of_text=0)
    assert packed.file_facts == documents.file_facts
    assert PackedTokens([1] * 9, lambda _: [1], length=1, end_of_text=0).file_facts == {}


@pytest.mark.parametrize("kind", SOURCES)
def test_a_missing_path_is_told_from_a_folder_without_such_files(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = SOURCES[kind]
    with pytest.raises(ValueError, match=r"no such file or folder: /.*/missing$"):
        opened(tmp_path / "missing")
    with pytest.raises(ValueError, match=r"is a folder that holds no \.\w+ "):
        opened(tmp_path)
    monkeypatch.chdir(tmp_path)
    told = f"'data/x' is looked for below the working directory .* here {tmp_path}, .* absolute"
    with pytest.raises(ValueError, match=told):
        opened(Path("data/x"))


# --- rows --------------------------------------------------------------------------------------


def test_rows_are_dicts_of_their_columns(tmp_path: Path, small_blocks: None) -> None:
    columns = {
        "n": pa.array(range(10), pa.int16()),
        "text": pa.array([f"t{i}" if i else None for i in range(10)]),
        "ids": pa.array([[i, 2] for i in range(10)], pa.list_(pa.int32())),
        "names": pa.array([["a"]] * 10),
    }
    write(tmp_path / "a.parquet", 3, **columns)
    write(tmp_path / "b.parquet", 3, **{**columns, "n": pa.array(range(10), pa.int64())})
    dataset = ParquetRows(tmp_path)
    assert dataset.block_starts.tolist() == [0, 3, 6, 9, 10, 13, 16, 19, 20]
    item = dataset[14]
    assert {**item, "ids": item["ids"].tolist()} == {
        "n": 4,
        "text": "t4",
        "ids": [4, 2],
        "names": ["a"],
    }
    item["ids"][0] = 99
    assert dataset[14]["ids"].tolist() == [4, 2], "what is done to an item stays with it"
    assert dataset[0]["text"] is None
    dataset = pickle.loads(pickle.dumps(ParquetRows(tmp_path, ["n"])))
    assert [dataset[index] for index in range(20)] == [{"n": i % 10} for i in range(20)]


def test_small_row_groups_of_several_files_are_one_block(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", n=pa.array([1, 2], pa.int8()))
    write(tmp_path / "b.parquet", n=pa.array([3], pa.int64()))
    dataset = ParquetRows(tmp_path)
    assert dataset.block_starts.tolist() == [0, 3]
    assert [dataset[index]["n"] for index in range(3)] == [1, 2, 3]


def test_rows_that_cannot_be_read(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", n=[1])
    with pytest.raises(ValueError, match="no column 'text', found n"):
        ParquetRows(tmp_path, ["text"])
    write(tmp_path / "a.parquet", n=pa.array([], pa.int8()))
    with pytest.raises(ValueError, match="holds no row"):
        ParquetRows(tmp_path)
