"""The shape of the project: rooms, purity, sizes, names, and what the README says of them."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic.policy.situation import FINAL, Phase
from elastic.policy.transitions import EVENTS, TABLE

ROOT = Path(__file__).resolve().parents[2]
ELASTIC = ROOT / "elastic"
README = (ROOT / "README.md").read_text(encoding="utf-8")
RAY_INTERNALS = "ray.train.v2._internal"

MOST_MODULE_LINES = 400
MOST_FUNCTION_LINES = 60
LARGER_ON_PURPOSE = {
    "elastic/policy/transitions.py": "the whole state machine is one file",
    "elastic/cluster/ray_internals.py": "all private names of Ray are in one file",
}
NAMES_THAT_SAY_NOTHING = {"utils", "util", "common", "helpers", "manager", "types", "constants"}


def sources(*rooms: str) -> list[Path]:
    return sorted(path for room in rooms for path in (ROOT / room).rglob("*.py"))


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


# --- rooms ---------------------------------------------------------------------------------------


def test_imports_go_one_way() -> None:
    """The contracts stand in pyproject.toml."""
    found = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache", "--no-logo"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if found.returncode != 0:
        pytest.fail(f"lint-imports\n{found.stdout}{found.stderr}", pytrace=False)


def test_one_module_alone_touches_the_internals_of_ray_train() -> None:
    touching = [
        named(path)
        for path in sources("elastic", "jobs")
        if RAY_INTERNALS in path.read_text(encoding="utf-8")
    ]
    assert set(touching) <= {"elastic/cluster/ray_internals.py"}


@pytest.mark.parametrize("path", sources("elastic/policy"), ids=named)
def test_policy_calls_nothing_that_reads_or_writes(path: Path) -> None:
    called = {
        node.func.id
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert not called & {"open", "print", "input", "exec", "eval", "__import__"}


@pytest.mark.parametrize("path", sources("tests/pure"), ids=named)
def test_pure_tests_import_neither_ray_nor_torch(path: Path) -> None:
    assert not imported(parsed(path)) & {"ray", "torch", "torchdata"}


def imported(tree: ast.Module) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    return names


# --- sizes and names -----------------------------------------------------------------------------


@pytest.mark.parametrize("path", sources("elastic", "jobs"), ids=named)
def test_modules_and_functions_stay_small_enough_to_read(path: Path) -> None:
    num_lines = len(path.read_text(encoding="utf-8").splitlines())
    assert num_lines <= MOST_MODULE_LINES or named(path) in LARGER_ON_PURPOSE, "split it"
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            num_lines = node.end_lineno - node.lineno + 1
            assert num_lines <= MOST_FUNCTION_LINES, f"{node.name} has {num_lines} lines: split it"


@pytest.mark.parametrize("path", sources("elastic", "jobs", "tests"), ids=named)
def test_a_module_is_named_after_its_noun(path: Path) -> None:
    assert path.stem not in NAMES_THAT_SAY_NOTHING


# --- the README ----------------------------------------------------------------------------------


def tree_lines() -> Iterator[tuple[str, str]]:
    """(path, what it is) of each line of the README's file tree; directories end with a slash."""
    (block,) = re.findall(r"^## Files\n.*?^```\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    parents: list[str] = []
    for line in block.splitlines():
        match = re.fullmatch(r"((?:  )*)(\S+)(?:  +(\S.*))?", line)
        assert match is not None, f"cannot read this line of the README's file tree: {line!r}"
        depth = len(match[1]) // 2
        assert depth <= len(parents), f"indented too far: {line!r}"
        parents[depth:] = [match[2]]
        yield "".join(parents), match[3] or ""


def test_the_readme_says_in_one_line_what_each_file_is() -> None:
    listed = dict(tree_lines())
    undescribed = [path for path, what in listed.items() if not what]
    assert not undescribed
    missing = [path for path in tracked_files() if path not in listed]
    assert not missing, "add to the README's file tree:\n" + "\n".join(map(suggested, missing))


def test_the_readme_lists_only_what_exists() -> None:
    listed = [path for path, _ in tree_lines()]
    assert not [path for path in listed if not (ROOT / path).exists()]
    assert len(listed) == len(set(listed))


def tracked_files() -> list[str]:
    """What git tracks, less the empty files that only make a folder a package."""
    found = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if found.returncode != 0:
        pytest.skip("not a git checkout")
    paths = [path for path in found.stdout.split("\0") if (ROOT / path).is_file()]
    return [path for path in paths if (ROOT / path).stat().st_size or not path.endswith(".py")]


def suggested(path: str) -> str:
    text = ast.get_docstring(parsed(ROOT / path)) if path.endswith(".py") else None
    return f"{path}  {text.splitlines()[0] if text else '(what it is)'}"


def decision_table() -> str:
    """The driver's state machine as a Markdown table: what each event does in each phase."""
    phases = [phase for phase in Phase if phase not in FINAL]
    lines = ["| event | " + " | ".join(phases) + " |", "|---" * (len(phases) + 1) + "|"]
    for event in EVENTS:
        cells = [TABLE[phase, event].__name__.strip("_").replace("_", " ") for phase in phases]
        shown = [{"ignore": "", "illegal": "-"}.get(cell, cell) for cell in cells]
        lines.append(f"| {event.__name__} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def test_the_readmes_decision_table_is_the_one_the_driver_uses() -> None:
    assert decision_table() in README, f"put this table into the README:\n{decision_table()}"


def test_every_test_directory_is_collected(pytestconfig: pytest.Config) -> None:
    """By default pytest skips directories called `dist`: half of the tests would not run."""
    skipped = pytestconfig.getini("norecursedirs")
    for folder in sorted((ROOT / "tests").iterdir()):
        assert not any(folder.match(pattern) for pattern in skipped if folder.name[0] not in "._")
