"""Bad input to the main job: a clear error, exit status 2, before Ray is even started."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs import pretrain


def refused(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert pretrain.main(["--storage", "/tmp/nowhere", *flags]) == 2
    assert "ray" not in sys.modules or not sys.modules["ray"].is_initialized()
    said = capsys.readouterr().err
    assert said.startswith("pretrain: ") and "Traceback" not in said
    return said


@pytest.mark.parametrize("workers", ["0", "3:2", "x", "2:", "-1", "0:2"])
def test_impossible_numbers_of_workers(capsys, workers: str):
    said = refused(capsys, "--num-workers=" + workers)
    assert "--num-workers" in said and repr(workers) in said


def test_global_batch_below_one_sample_per_rank_at_the_minimum(capsys):
    said = refused(capsys, "--num-workers", "4:8", "--global-batch", "3")
    assert "--global-batch 3" in said and "at least 4" in said


@pytest.mark.parametrize("flag", ["--steps", "--global-batch", "--micro-batch"])
def test_numbers_that_make_no_step(capsys, flag: str):
    assert flag in refused(capsys, flag, "0")


def test_weights_of_others_that_are_not_said_to_be_trusted(capsys):  # B90
    said = refused(capsys, "--load-from", "/mnt/theirs")
    assert "/mnt/theirs" in said and "--trust-foreign" in said


def test_save_interval_that_is_none(capsys):
    assert "'soon'" in refused(capsys, "--save-every", "soon")
    assert "'soon'" in refused(capsys, "--notices", "soon")


def test_hang_limit_that_is_none(capsys):
    said = refused(capsys, "--hang-limit", "soon")
    assert "--hang-limit" in said and "'soon'" in said


def test_replicas_of_no_worker(capsys):
    assert "--shard" in refused(capsys, "--shard", "0")


def test_storage_that_would_be_shipped_or_is_relative(capsys):
    assert "absolute" in refused(capsys, "--storage", "runs")
    assert "ships" in refused(capsys, "--storage", str(Path.cwd() / "runs"))


class TestData:
    def test_missing(self, capsys, tmp_path: Path):
        assert f"{tmp_path}/none" in refused(capsys, "--data", f"{tmp_path}/none")

    def test_empty(self, capsys, tmp_path: Path):
        (tmp_path / "a.txt").touch()
        assert "a.txt" in refused(capsys, "--data", str(tmp_path / "a.txt"))

    def test_unreadable(self, capsys, tmp_path: Path):
        # A link to itself: permission bits mean nothing to root.
        os.symlink("a.txt", tmp_path / "a.txt")
        assert "a.txt" in refused(capsys, "--data", str(tmp_path / "a.txt"))

    def test_without_the_column(self, capsys, tmp_path: Path):
        pq.write_table(pa.table({"words": ["a", "b"]}), tmp_path / "a.parquet")
        said = refused(capsys, "--data", str(tmp_path / "a.parquet"))
        assert "words" in said and "tokens" in said

    def test_not_utf8(self, capsys, tmp_path: Path):
        (tmp_path / "a.txt").write_bytes(b"fine until \xff\xfe here")
        said = refused(capsys, "--data", str(tmp_path / "a.txt"))
        assert "UTF-8" in said and "11" in said

    def test_fewer_samples_than_one_global_batch(self, capsys, tmp_path: Path):
        (tmp_path / "a.txt").write_text("too short " * 20)
        said = refused(capsys, "--data", str(tmp_path / "a.txt"), "--global-batch", "64")
        assert "64" in said
