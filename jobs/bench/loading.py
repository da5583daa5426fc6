"""`bench data`: tokens a second out of a loader, against a plain scan of the same Parquet files.

Both end with every token in an int64 tensor, without loader processes: the scan reads the files
from front to back through pyarrow, the loader an epoch in shuffled order, split off for its labels
as well. The loader decodes on a second thread, so it needs a second core. They take turns. Then:
how long it takes to open a dataset of more than a billion samples and to be handed the batch at
position 1,000,000,000.
"""

from __future__ import annotations

import gc
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from elastic.training.data import GlobalLoader
from elastic.training.parquet import ParquetTokens

RESUME_AT = 10**9
_SEED = 1


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A corpus of `num_files` equal files, and how it is read.

    The files are links to one, so that little is written and all of it lies in the page cache,
    for the scan and for the loader.
    """

    num_repeats: int = 5
    num_files: int = 15
    groups_per_file: int = 64
    tokens_per_group: int = 1 << 20
    vocab_size: int = 32_000
    length: int = 2048
    batch: int = 32
    resume_at: int = RESUME_AT

    @property
    def tokens_per_file(self) -> int:
        return self.groups_per_file * self.tokens_per_group

    def run(self, say: Callable[[str], None]) -> dict[str, Any]:
        """The report, ready for JSON."""
        with _corpus(self, say) as (folder, many), _one_thread():
            say(f"reading {self.num_files * self.tokens_per_file:,} tokens, in turns ...")
            scanned, loaded = [], []
            _scan(folder, self)  # into the page cache
            for _ in range(self.num_repeats):
                scanned.append(_scan(folder, self))
                loaded.append(_load(folder, self))
                say(f"    {scanned[-1] / 1e6:.0f} and {loaded[-1] / 1e6:.0f} million tokens/s")
            resumed_s = [_resume(many, self) for _ in range(self.num_repeats)]
        return {
            "loader_tokens_per_s": median(loaded),
            "pyarrow_tokens_per_s": median(scanned),
            "ratio": median(loaded) / median(scanned),
            "resume_at_1e9_s": median(resumed_s),
            "raw": {
                "loader_tokens_per_s": loaded,
                "pyarrow_tokens_per_s": scanned,
                "resume_at_1e9_s": resumed_s,
            },
            "conditions": {**asdict(self), "pyarrow": pa.__version__, "torch": torch.__version__},
        }


@contextmanager
def _corpus(bench: Bench, say: Callable[[str], None]) -> Iterator[tuple[Path, Path]]:
    """A folder with `num_files` files, and one with enough of them for `resume_at` samples."""
    with tempfile.TemporaryDirectory(prefix="elastic-bench-") as directory:
        first = Path(directory, "tokens.parquet")
        say(f"writing {bench.tokens_per_file:,} tokens ...")
        random = np.random.default_rng(_SEED)
        schema = pa.schema([pa.field("tokens", pa.uint16(), nullable=False)])
        with pq.ParquetWriter(first, schema) as writer:
            for _ in range(bench.groups_per_file):
                ids = random.integers(0, bench.vocab_size, bench.tokens_per_group, dtype=np.uint16)
                writer.write_table(pa.table([ids], schema=schema), bench.tokens_per_group)
        folders = Path(directory, "some"), Path(directory, "many")
        num_many = bench.resume_at // bench.tokens_per_file + 1
        for folder, count in zip(folders, (bench.num_files, num_many), strict=True):
            folder.mkdir()
            for number in range(count):
                os.link(first, folder / f"{number:05}.parquet")
        yield folders


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _scan(folder: Path, bench: Bench) -> float:
    """Tokens a second of reading the files from front to back."""
    gc.collect()
    num_tokens = 0
    begun_s = time.perf_counter()
    for path in sorted(folder.iterdir()):
        with pq.ParquetFile(path, memory_map=True) as parquet:
            for batch in parquet.iter_batches(bench.batch * bench.length, columns=["tokens"]):
                ids = torch.from_numpy(batch.column(0).to_numpy().astype(np.int64))
                num_tokens += ids.numel()
    return num_tokens / (time.perf_counter() - begun_s)


def _load(folder: Path, bench: Bench) -> float:
    """Tokens a second of one epoch out of a loader, from the opening of the files on."""
    gc.collect()
    num_tokens = 0
    begun_s = time.perf_counter()
    dataset = ParquetTokens(folder, length=bench.length)
    steps = _steps(dataset, bench, samples_done=0)
    for _ in range(len(dataset) // bench.batch):
        for micro_batch in next(steps):
            num_tokens += micro_batch.batch["input_ids"].numel()
    return num_tokens / (time.perf_counter() - begun_s)


def _resume(folder: Path, bench: Bench) -> float:
    """Seconds from nothing to the batch at `resume_at`, of samples of one token each."""
    gc.collect()
    begun_s = time.perf_counter()
    dataset = ParquetTokens(folder, length=1)
    assert len(dataset) > bench.resume_at - 1, len(dataset)
    next(_steps(dataset, bench, samples_done=bench.resume_at))
    return time.perf_counter() - begun_s


def _steps(dataset: ParquetTokens, bench: Bench, samples_done: int) -> Iterator[Any]:
    return iter(
        GlobalLoader(
            dataset,
            global_batch=bench.batch,
            micro_batch=bench.batch,
            seed=_SEED,
            world_rank=0,
            world_size=1,
            samples_done=samples_done,
        )
    )


def table(result: dict[str, Any]) -> str:
    """The report for a reader."""
    return (
        f"loader {result['loader_tokens_per_s'] / 1e6:.0f} million tokens/s, "
        f"scan {result['pyarrow_tokens_per_s'] / 1e6:.0f}: ratio {result['ratio']:.2f}\n"
        f"opened at sample {result['conditions']['resume_at']:,} "
        f"in {result['resume_at_1e9_s']:.2f} s"
    )
