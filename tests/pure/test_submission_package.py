"""What a submission ships: code, and never what runs, environments and git have left behind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from elastic.cli import main
from elastic.cluster.job_request import CannotSubmit, JobRequest, entrypoint
from elastic.cluster.packing import MARK, git_ignored, lister, staged
from elastic.cluster.shipment import (
    LIMIT_BYTES,
    Shipment,
    TooLarge,
    biggest,
    check_size,
    plan,
)
from elastic.storage.store import Entry

MIB = 1 << 20


def fake(files: Mapping[str, int]) -> Callable[[str], Sequence[Entry]]:
    """A tree of files by path, with their bytes."""

    def list_directory(directory: str) -> Sequence[Entry]:
        prefix = f"{directory}/" if directory else ""
        found: dict[str, Entry] = {}
        for path, num_bytes in files.items():
            if path.startswith(prefix):
                name, slash, _ = path[len(prefix) :].partition("/")
                found[name] = Entry(name=name, is_dir=bool(slash), bytes=0 if slash else num_bytes)
        return list(found.values())

    return list_directory


CODE = {"train.py": 10, "pkg/__init__.py": 1, "pkg/model.py": 20, "data/small.txt": 5}


# --- what goes and what stays --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "left_out", "why"),
    [
        (".git/objects/pack/a.pack", ".git", "version control"),
        ("sub/.git", "sub/.git", "version control"),  # a submodule's is a file
        (".hg/store", ".hg", "version control"),
        ("env/pyvenv.cfg", "env", "a virtual environment"),
        ("tools/py/pyvenv.cfg", "tools/py", "a virtual environment"),
        ("conda/conda-meta/history", "conda", "a conda environment"),
        ("pkg/__pycache__/model.cpython-311.pyc", "pkg/__pycache__", "a cache"),
        ("pkg/old.pyc", "pkg/old.pyc", "compiled by Python"),
        (".mypy_cache/x", ".mypy_cache", "a cache"),
        ("old/step-100/_COMPLETE", "old/step-100", "a checkpoint"),
        ("old/any/__0_0.distcp", "old/any", "a checkpoint"),
    ],
)
def test_what_never_goes(path: str, left_out: str, why: str) -> None:
    found = plan(fake({**CODE, path: 5, f"{os.path.dirname(path) or 'x'}/more.bin": 1}))
    assert found.left_out[left_out] == why
    assert set(CODE) <= set(found.files)
    assert not [name for name in found.files if name.startswith(f"{left_out}/")]


def test_run_output_stays_wherever_it_lies(tmp_path: Path) -> None:  # B76
    old = {
        "out/demo/run.json": 1,
        "out/demo/ledger/000000-a.arrows": 5,
        "out/demo/checkpoints/step-40/__0_0.distcp": 150 * MIB,
        "run.json/readme.md": 1,  # a name alone makes no run
        "conf/run.json": 1,
    }
    found = plan(fake({**CODE, **old}))
    assert found.left_out == {"out/demo": "the output of a run"}
    assert set(found.files) == {*CODE, "run.json/readme.md", "conf/run.json"}
    check_size(found, "/project")


@pytest.mark.parametrize(
    "name", ["a b.py", "[a].py", "%20.py", "#1.py", "é数.py", "trailing ", "kv_cache/x.py", "*?.py"]
)
def test_names_are_just_names(name: str) -> None:  # B62
    found = plan(fake({**CODE, name: 7, f"[a] #/{name}": 7}))
    assert found.files[name] == 7 and found.files[f"[a] #/{name}"] == 7
    assert not found.left_out


def test_what_git_ignores_stays_with_all_in_it() -> None:
    found = plan(fake({**CODE, "secret.env": 3, "data/raw/big.bin": 9}), {"secret.env", "data/raw"})
    assert found.left_out == {"secret.env": "ignored by git", "data/raw": "ignored by git"}
    assert set(found.files) == set(CODE)


def test_the_directory_itself_may_look_like_anything() -> None:
    found = plan(fake({"run.json": 1, "checkpoints/notes.md": 1, "pyvenv.cfg": 1}))
    assert set(found.files) == {"run.json", "checkpoints/notes.md", "pyvenv.cfg"}


# --- the size ------------------------------------------------------------------------------------


def test_too_much_is_refused_and_the_biggest_entries_are_named() -> None:  # B76
    files = {
        **CODE,
        "old/weights/epoch-1.pt": 90 * MIB,
        "old/weights/epoch-2.pt": 60 * MIB,
        "corpus.txt": 30 * MIB,
        "a/b/c/deep.bin": 20 * MIB,
        "a/b/c/x.txt": 1,
    }
    with pytest.raises(TooLarge) as refused:
        check_size(plan(fake(files)), "/home/ann/project")
    said = str(refused.value)
    assert "/home/ann/project is too large to be shipped" in said
    assert "200.0 MiB in 9 files, at most 100.0 MiB" in said
    assert "old/weights/ 150.0 MiB, corpus.txt 30.0 MiB, a/b/c/deep.bin 20.0 MiB" in said
    assert ".gitignore" in said and "--working-dir" in said


def test_the_limit_itself_goes() -> None:
    check_size(Shipment(files={"x": LIMIT_BYTES}), "/p")
    with pytest.raises(TooLarge):
        check_size(Shipment(files={"x": LIMIT_BYTES, "y": 1}), "/p")


def test_the_biggest_entries_are_few_and_account_for_the_size() -> None:
    files = {f"part-{number}/x": number for number in range(1, 9)}
    assert biggest(files) == [(f"part-{n}/x", n) for n in (8, 7, 6, 5, 4)]
    assert biggest({"d/a": 5, "d/b": 5}) == [("d/", 10)]
    assert biggest({}) == [] and biggest({"empty/x": 0}) == [("empty/x", 0)]


# --- the directory on this disk ------------------------------------------------------------------


def write(root: Path, files: Mapping[str, str]) -> None:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)


def test_what_is_staged_is_what_was_planned_to_the_byte(tmp_path: Path) -> None:  # B62
    root = tmp_path / "a [b] %20 #é"
    write(root, {"train.py": "x = 1", "run.sh": "#!", "[a]/b c.txt": "é", ".git/HEAD": "ref"})
    (root / "run.sh").chmod(0o755)
    with staged(str(root), plan(lister(str(root)))) as folder:
        shipped = Path(folder)
        found = {str(p.relative_to(shipped)) for p in shipped.rglob("*") if p.is_file()}
        assert found == {"train.py", "run.sh", "[a]/b c.txt", MARK}
        mark = (shipped / MARK).read_text()
        assert (shipped / "[a]/b c.txt").read_text() == "é"
        assert os.access(shipped / "run.sh", os.X_OK)
    assert not shipped.exists()
    with staged(str(root), plan(lister(str(root)))) as folder:
        # Ray would delete the package that two jobs share when the first one ends.
        assert Path(folder, MARK).read_text() != mark


def test_links_are_followed_and_loops_end(tmp_path: Path) -> None:
    root = tmp_path / "project"
    write(root, {"train.py": "", "lib/a.py": ""})
    write(tmp_path, {"shared/b.py": "b"})
    (root / "lib" / "up").symlink_to(root)
    (root / "shared").symlink_to(tmp_path / "shared")
    (root / "gone").symlink_to(tmp_path / "nowhere")
    assert set(plan(lister(str(root))).files) == {"train.py", "lib/a.py", "shared/b.py"}


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_git_says_what_it_ignores(tmp_path: Path) -> None:
    root = tmp_path / "repository" / "part"
    write(root, {".gitignore": "*.log\n/data/\n", "a.log": "", "data/x": "", "kept.log": ""})
    assert git_ignored(str(root)) is None
    subprocess.run(["git", "init", "-q", str(tmp_path / "repository")], check=True)
    subprocess.run(["git", "-C", str(root), "add", "-f", "kept.log"], check=True)
    assert git_ignored(str(root)) == {"a.log", "data"}


# --- the command ---------------------------------------------------------------------------------


def command(target: str, *arguments: str, files: Mapping[str, int] = CODE) -> str:
    return entrypoint(target, arguments, "python", "/project", Shipment(files=dict(files)))


def test_the_command_runs_a_file_or_a_module() -> None:
    assert command("train.py", "--name", "a b") == "python train.py --name 'a b'"
    assert command("./train.py") == "python train.py"
    assert command("pkg/model.py", "--x") == "python -m pkg.model --x"  # its imports work
    assert command("pkg.model") == "python -m pkg.model"
    assert command("json.tool") == "python -m json.tool"  # installed
    assert command("-x.py", files={"-x.py": 1}) == "python ./-x.py"
    assert command("$(rm -rf).py", files={"$(rm -rf).py": 1}) == "python '$(rm -rf).py'"


@pytest.mark.parametrize("target", ["nope.py", "no.such.module", "", "pkg", "a b"])
def test_a_target_that_is_not_there_is_told(target: str) -> None:
    with pytest.raises(CannotSubmit, match=r"no such file or module.*train\.py"):
        command(target)


def test_a_target_that_does_not_go_is_told_why(tmp_path: Path) -> None:
    write(tmp_path, {"out/run.json": "{}", "out/ledger/x": "", "out/t.py": "", "notes.md": ""})
    write(tmp_path.parent, {"other.py": ""})
    shipment = plan(lister(str(tmp_path)))

    def refusal(target: str) -> str:
        with pytest.raises(CannotSubmit) as refused:
            entrypoint(target, (), "python", str(tmp_path), shipment)
        return str(refused.value)

    assert "since out is the output of a run" in refusal("out/t.py")
    assert "not a Python file" in refusal("notes.md")
    assert "outside the working directory" in refusal("../other.py")
    assert "outside the working directory" in refusal(str(tmp_path.parent / "other.py"))


# --- the verb ------------------------------------------------------------------------------------


@pytest.fixture
def handed_over(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that the verb would have become."""
    seen: list[list[str]] = []
    monkeypatch.setattr("elastic.verbs.submit.os.execv", lambda _, words: seen.append(words))
    for name in ("RAY_ADDRESS", "RAY_JOB_STOP_WAIT_TIME_S"):
        monkeypatch.delenv(name, raising=False)
    return seen


def submit(*arguments: str) -> Any:
    return CliRunner().invoke(main, ["submit", *arguments])


def test_the_verb_hands_over_everything(handed_over: list[list[str]]) -> None:
    assert submit("train.py", "--name", "demo", "--json", "-h").exit_code == 0
    (words,) = handed_over
    assert words[1:3] == ["-m", "elastic.cluster.submission"]
    request = JobRequest.from_json(words[3])
    assert request == JobRequest(
        target="train.py",
        arguments=["--name", "demo", "--json", "-h"],
        address="http://127.0.0.1:8265",
        working_dir=".",
        python="python",
        stop_wait_s=600,
        wait=True,
        as_json=False,
    )


def test_options_before_the_target_are_the_verbs_own(
    handed_over: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "http://head:8265")
    monkeypatch.setenv("RAY_JOB_STOP_WAIT_TIME_S", "90")
    assert submit("--json", "--no-wait", "--working-dir", str(tmp_path), "m").exit_code == 0
    tree = json.loads(handed_over[0][3])
    assert (tree["address"], tree["stop_wait_s"]) == ("http://head:8265", 90)
    assert (tree["as_json"], tree["wait"], tree["working_dir"]) == (True, False, str(tmp_path))


@pytest.mark.parametrize(
    "arguments", [[], ["--stop-wait", "1", "x.py"], ["--working-dir", "/nowhere", "x.py"]]
)
def test_wrong_usage(handed_over: list[list[str]], arguments: list[str]) -> None:
    result = submit(*arguments)
    assert result.exit_code == 2 and "Usage" in result.stderr and not handed_over
