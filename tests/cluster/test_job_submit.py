"""`ray job submit`, as the README shows it: the same name resumes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from elastic.storage.filesystem import Filesystem
from elastic.storage.ledger import read_ledger
from tests.cluster.local_cluster import RAY, ROOT, LocalCluster


@pytest.mark.thorough
@pytest.mark.timeout(240)
def test_submit_and_submit_again(one_node: LocalCluster, tmp_path: Path):  # B23, first half
    def submit(steps: int) -> str:
        checkout = tmp_path / f"checkout-{steps}"
        for folder in ("elastic", "jobs"):
            shutil.copytree(ROOT / folder, checkout / folder)
        # Ray may delete a package with the job that is just ending (ray#46625): not twice the same.
        (checkout / "NOTES").write_text(str(checkout))
        done = subprocess.run(
            [
                *(RAY, "job", "submit", "--address", one_node.dashboard_url),
                *("--working-dir", ".", "--", sys.executable, "-m", "jobs.pretrain"),
                *("--name", "demo", "--num-workers", "2:4", "--storage", str(tmp_path)),
                *("--steps", str(steps), "--save-every", "10", "--global-batch", "8"),
                *("--model", "nano", "--sequence-length", "32"),
                *("--json", str(tmp_path / "found.json")),
            ],
            cwd=checkout,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    said = submit(15)
    assert "step 15" in said and "world size 3" in said
    submit(25)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["step"] == 25 and len(found["losses"]) == 25
    events = read_ledger(Filesystem.at(f"{tmp_path}/demo"))
    assert [e.step for e in events if e.kind == "resumed"] == [15]
    assert [e.step for e in events if e.kind == "run_finished"] == [15, 25]
