"""Format fixtures: committed run directories of each format version, and all that they tell.

They were made by `tests/dist/make_format_fixture.py` and never change. Needs neither torch nor Ray.
"""

from __future__ import annotations

import json
import tarfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from elastic.dashboard.status import read_status
from elastic.storage import lease, pins, requests
from elastic.storage.checkpoints import Catalog
from elastic.storage.filesystem import Filesystem
from elastic.storage.ledger import next_life, read_ledger
from elastic.storage.metrics import current_metrics, read_metrics
from elastic.storage.rank_logs import WrittenLog, logged_generations, logged_ranks
from elastic.storage.run_file import load_run_file

__all__ = ["DISK", "FIXTURES", "STORE", "expected_of", "holds", "told", "unpacked", "uploaded"]

DISK, STORE = "disk", "object-store"

FIXTURES = sorted((Path(__file__).parent / "fixtures").glob("format-*"))


def unpacked(fixture: Path, folder: Path, name: str = DISK) -> Path:
    """A copy of the run directory `name` of the fixture, in `folder`."""
    root = folder / name
    with tarfile.open(fixture / f"{name}.tar.xz") as archive:
        archive.extractall(root, filter="data")
    return root


def uploaded(root: Path, url: str) -> Filesystem:
    """The files below `root`, on the object store at `url`."""
    fs = Filesystem.at(url)
    for path in sorted(root.rglob("*")):
        if path.is_file():
            fs.write_bytes(path.relative_to(root).as_posix(), path.read_bytes())
    return fs


def expected_of(fixture: Path) -> dict[str, Any]:
    """What was recorded when the fixture was made."""
    found: dict[str, Any] = json.loads((fixture / "expected.json").read_text())
    return found


def told(fs: Filesystem, *, now_s: float) -> dict[str, Any]:
    """All that the run at `fs` has to tell, as JSON values."""
    run_file = load_run_file(fs)
    assert run_file is not None
    catalog = Catalog(fs, run_file.run_id)
    status = asdict(read_status(fs, run_file, now_s=now_s))
    del status["storage"]
    epoch, holder = lease.read(fs)
    logs = [WrittenLog(fs, g, r) for g in logged_generations(fs) for r in logged_ranks(fs, g)]
    found = {
        "run_file": asdict(run_file),
        "status": status,
        "events": [asdict(event) for event in read_ledger(fs)],
        "complete_steps": catalog.complete_steps(),
        "checkpoints": [asdict(one) for one in catalog.list()],
        "manifests": [asdict(catalog.manifest(step)) for step in catalog.complete_steps()],
        "pins": sorted(pins.pinned_steps(fs)),
        "metrics": current_metrics(fs),
        "all_metrics": read_metrics(fs).to_pylist(),
        "lease": {"epoch": epoch, "holder": asdict(holder) if holder else None},
        "requests": [asdict(request) for request in requests.pending(fs)],
        "logs": {f"{log.generation}/{log.world_rank}": log.last_lines() for log in logs},
        "next_life": next_life(fs),
    }
    as_json: dict[str, Any] = json.loads(json.dumps(found))
    return as_json


def holds(found: Any, expected: Any, where: str = "") -> str:
    """Where `found` differs from `expected`, "" if nowhere; it may have more keys, to any depth."""
    if isinstance(found, dict) and isinstance(expected, dict):
        lacking = [f"{where}.{key} is missing" for key in expected.keys() - found.keys()]
        inside = [holds(found[k], expected[k], f"{where}.{k}") for k in expected if k in found]
        return next((problem for problem in [*lacking, *inside] if problem), "")
    if isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        pairs = enumerate(zip(found, expected, strict=True))
        problems = (holds(one, other, f"{where}[{i}]") for i, (one, other) in pairs)
        return next((problem for problem in problems if problem), "")
    same = type(found) is type(expected) and found == expected
    return "" if same else f"{where}: expected {expected!r}, found {found!r}"
