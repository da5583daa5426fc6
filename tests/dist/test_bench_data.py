"""`bench data`: the shape of its JSON, and that it reads what it says."""

from __future__ import annotations

import json
from statistics import median
from typing import Any

import pytest

from jobs.bench import loading
from jobs.bench.loading import Bench, table

SMALL = Bench(
    num_repeats=3,
    num_files=3,
    groups_per_file=2,
    tokens_per_group=1 << 13,
    length=16,
    batch=8,
    resume_at=100_000,
)


def test_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    handed_out: list[int] = []
    steps = loading._steps

    def watched(*arguments: Any, **named: Any) -> Any:
        for step in steps(*arguments, **named):
            handed_out.append(sum(micro.batch["input_ids"].numel() for micro in step))
            yield step

    monkeypatch.setattr(loading, "_steps", watched)
    said: list[str] = []
    result = json.loads(json.dumps(SMALL.run(said.append)))
    raw = result["raw"]
    for name in ("loader_tokens_per_s", "pyarrow_tokens_per_s", "resume_at_1e9_s"):
        assert len(raw[name]) == 3 and min(raw[name]) > 0
        assert result[name] == median(raw[name])
    assert result["ratio"] == result["loader_tokens_per_s"] / result["pyarrow_tokens_per_s"]
    num_items = (3 * 2 * (1 << 13) - 1) // 16
    assert sum(handed_out) == 3 * (num_items // 8 * 8 * 16) + 3 * 8
    assert "ratio" in table(result) and "sample 100,000" in table(result)
