"""Ray and torch of another version than the supported ones are refused before they are used."""

from __future__ import annotations

import importlib.metadata
import pickle
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from elastic.versions import SUPPORTED, UnsupportedVersion, check

ROOT = Path(__file__).resolve().parents[2]
GOOD = {"ray": "2.60.0", "torch": "2.13.0"}


def test_the_ranges_are_those_that_pip_installs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(SUPPORTED.values()) <= set(project["dependencies"])


def test_what_is_installed_here_is_supported() -> None:
    check("ray", "torch")


@pytest.mark.parametrize("found", ["2.13.0", "2.13", "2.13.7+cu130", "2.13.0a0+git1", "2.13.1rc2"])
def test_any_release_of_the_supported_minor_will_do(found: str) -> None:
    check("ray", "torch", version={**GOOD, "torch": found}.__getitem__)


@pytest.mark.parametrize(
    "package, found",
    [
        ("torch", "2.12.9"),
        ("torch", "2.14.0"),
        ("torch", "2.14.0.dev20261101+cpu"),
        ("torch", "2.130.0"),
        ("torch", "3"),
        ("torch", "unknown"),
        ("ray", "2.59.1"),
        ("ray", "2.61.0rc0"),
        ("ray", "3.0.0.dev0"),
    ],
)
def test_another_version_is_refused_with_what_to_do(package: str, found: str) -> None:
    with pytest.raises(UnsupportedVersion) as caught:
        check("ray", "torch", version={**GOOD, package: found}.__getitem__)
    text = str(caught.value)
    assert f"{package} {found} is installed" in text
    assert f"supports {package} >={SUPPORTED[package].partition('>=')[2]}: " in text
    assert f"pip install '{SUPPORTED[package]}'" in text


def test_what_has_no_metadata_is_left_to_its_import() -> None:
    def version(package: str) -> str:
        raise importlib.metadata.PackageNotFoundError(package)

    check("ray", "torch", version=version)


def test_the_refusal_survives_pickling() -> None:
    error = UnsupportedVersion("ray", "2.59.1")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


# What an unsupported version lacks must not be what the user reads about.
EDGES = {
    "elastic.ElasticTrainer": "ray",
    "elastic.run_standalone": "torch",
}


@pytest.mark.parametrize("edge", EDGES)
def test_the_edges_refuse_before_they_import_it(edge: str) -> None:
    package = EDGES[edge]
    code = f"""
import importlib.metadata, sys
import elastic
real = importlib.metadata.version
importlib.metadata.version = lambda name: "1.0" if name == {package!r} else real(name)
import elastic.versions
try:
    {edge}
except elastic.versions.UnsupportedVersion as error:
    print(error)
print([name for name in ("ray", "torch") if name in sys.modules])
"""
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    refusal, imported = found.stdout.splitlines()
    assert refusal.startswith(f"{package} 1.0 is installed")
    assert imported == "[]"


def test_the_job_says_it_in_one_line() -> None:
    code = """
import importlib.metadata, sys
importlib.metadata.version = lambda name: "1.0"
from jobs.pretrain import main
sys.exit(main(["--steps", "1"]))
"""
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert found.returncode == 2
    (line,) = found.stderr.splitlines()
    assert line.startswith("pretrain: torch 1.0 is installed")
