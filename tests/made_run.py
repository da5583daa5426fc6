"""A small run directory as a driver leaves it, made through the storage room alone."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from elastic.storage.checkpoints import Catalog, FileDigest, Manifest, TensorInfo
from elastic.storage.completeness import sha256
from elastic.storage.filesystem import Filesystem
from elastic.storage.ledger import LedgerWriter
from elastic.storage.metrics import MetricsWriter
from elastic.storage.run_file import create_run_file

__all__ = ["add_checkpoint", "fingerprint", "make_run"]

BORN_S = 1_800_000_000.0
FILES = {".metadata": b"meta", "__0_0.distcp": b"a" * 3000, "__1_0.distcp": b"b" * 2000}


def make_run(root: Path | str, name: str = "demo", **operational: object) -> Catalog:
    """A new run in `root`, still without checkpoints; `operational` are settings of it."""
    fs = Filesystem.at(str(root))
    made = create_run_file(
        fs,
        name=name,
        created_s=BORN_S,
        seed=0,
        config={"width": 8},
        identity={},
        operational={"until": 60, **operational},
        versions={},
    )
    return Catalog(fs, made.run_id)


def add_checkpoint(
    catalog: Catalog,
    step: int,
    generation: int = 0,
    *,
    replace: bool = False,
    doubts: Callable[[int], str] | None = None,
) -> None:
    path = catalog.begin(step, generation, 0)
    content = {**FILES, "state.json": f'{{"step": {step}}}'.encode()}
    for name, data in content.items():
        catalog.fs.write_bytes(f"{path}/{name}", data)
    manifest = Manifest(
        run_id=catalog.run_id,
        step=step,
        world_size=2,
        generation=generation,
        attempt=0,
        created_s=BORN_S,
        counters={"step": step},
        tensors={"model.w": TensorInfo(shape=[7, 5], dtype="float32")},
        files=[
            FileDigest(path=name, bytes=len(data), digest=sha256(data))
            for name, data in content.items()
        ],
    )
    catalog.commit(manifest, path, replace=replace, doubts=doubts)


def add_history(catalog: Catalog, life: int) -> None:
    """One life of the driver in the ledger, and its metrics."""
    ledger = LedgerWriter(catalog.fs, life, f"life{life}")
    metrics = MetricsWriter(catalog.fs)
    ledger.append("run_started", time_s=BORN_S, data={"name": "demo"})
    ranks = [{"world_rank": rank, "node_ip": "127.0.0.1", "pid": 90 + rank} for rank in range(2)]
    group = {"world_size": 2, "ranks": ranks}
    ledger.append("generation_started", time_s=BORN_S + 1, generation=life, data=group)
    for step in range(1, 8):
        facts = {"loss": 1 / step, "tokens_per_s": 10.0, "state": "RUNNING"}
        ledger.append("progress", time_s=BORN_S + step, generation=life, step=step, data=facts)
        metrics.add(life, step, BORN_S + step, {"loss": 1 / step})
    ledger.append("worker_died", time_s=BORN_S + 9, generation=life, world_rank=1, reason="killed")
    ledger.append("failure_decided", time_s=BORN_S + 9, data={"cause": "worker_died"})
    ledger.close()
    metrics.flush()


def fingerprint(root: Path) -> str:
    """Changes with every name, kind, content and time of change below `root`."""
    digest = hashlib.sha256()
    for path in sorted([root, *root.rglob("*")]):
        kind = "link" if path.is_symlink() else "dir" if path.is_dir() else "file"
        changed_ns = path.lstat().st_mtime_ns
        digest.update(f"{path.relative_to(root)}\0{kind}\0{changed_ns}\0".encode())
        if kind == "file":
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
