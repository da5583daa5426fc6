"""The linters, as part of the one command that tests the project; the README's example too."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str) -> None:
    found = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if found.returncode != 0:
        pytest.fail(f"{' '.join(arguments)}\n{found.stdout}{found.stderr}", pytrace=False)


def test_ruff_finds_nothing() -> None:
    run("ruff", "check", "--quiet", "--output-format=concise")


def test_everything_is_formatted() -> None:
    run("ruff", "format", "--check", "--quiet")


@pytest.mark.timeout(400)  # without a cache it reads all of torch's types first
def test_mypy_finds_nothing() -> None:
    run("mypy", "--no-error-summary")


def test_the_readmes_training_function_fits_the_types(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```python\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    file = tmp_path / "train_mine.py"
    file.write_text(example)
    run("mypy", "--no-error-summary", str(file))
    run("ruff", "check", "--quiet", "--output-format=concise", "--ignore=D100,I002", str(file))
