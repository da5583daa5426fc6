"""The distribution elastic-ray as pip sees it, and the commands by which a stranger gets there."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import elastic

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_nothing_installed_shadows_the_import() -> None:
    # Started elsewhere, for in this folder the checkout itself would win and hide a shadow.
    found = subprocess.run(
        [sys.executable, "-c", "import elastic; print(elastic.__file__)"],
        cwd="/",
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(found.stdout.strip()) == ROOT / "elastic" / "__init__.py"


def test_no_other_distribution_brings_a_package_of_that_name() -> None:
    owners = importlib.metadata.packages_distributions().get("elastic", ["elastic-ray"])
    assert set(owners) == {"elastic-ray"}, "another project owns `elastic` on the package index"


def test_the_installed_distribution_is_elastic_ray_of_this_version() -> None:
    assert PROJECT["name"] == "elastic-ray"
    assert importlib.metadata.version("elastic-ray") == elastic.__version__


def test_the_command_is_elastic() -> None:
    scripts = importlib.metadata.distribution("elastic-ray").entry_points.select(
        group="console_scripts"
    )
    assert [(script.name, script.value) for script in scripts] == [("elastic", "elastic.cli:main")]
    assert Path(sys.executable).with_name("elastic").exists()


@pytest.mark.parametrize("name", ["jobs", "tests"])
def test_only_elastic_is_installed_of_this_checkout(name: str) -> None:
    code = (
        f"from importlib.util import find_spec; print(getattr(find_spec({name!r}), 'origin', ''))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], cwd="/", capture_output=True, text=True, check=True
    )
    assert str(ROOT) not in found.stdout


def test_the_extras_are_those_the_readme_names() -> None:
    assert set(PROJECT["optional-dependencies"]) == {"s3", "gcs", "tensorboard", "test"}


def test_every_file_that_is_no_module_is_installed_with_its_package() -> None:
    told = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = [
        (ROOT if package == "*" else ROOT / package.replace(".", "/"), pattern)
        for package, globs in told["tool"]["setuptools"]["package-data"].items()
        for pattern in globs
    ]
    shipped = {
        path
        for folder, pattern in patterns
        for path in (folder.rglob(pattern) if folder == ROOT else folder.glob(pattern))
    }
    tracked = subprocess.run(
        ["git", "ls-files", "-z", "elastic"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split("\0")
    others = {ROOT / name for name in tracked if name and not name.endswith(".py")}
    assert {ROOT / "elastic/dashboard/alerts/elastic.yaml"} <= others
    assert not others - shipped


def test_ray_and_torch_are_pinned_to_the_minor_whose_private_names_are_contract_tested() -> None:
    pins = {re.split(r"[\[><=]", text)[0]: text for text in PROJECT["dependencies"]}
    for name in ("ray", "torch"):
        major, minor = importlib.metadata.version(name).split(".")[:2]
        assert f">={major}.{minor},<{major}.{int(minor) + 1}" in pins[name]


def test_importing_elastic_costs_neither_ray_nor_torch() -> None:
    code = (
        "import sys, elastic, elastic.cli; print([m for m in ('ray', 'torch') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_every_lazy_export_names_a_module_that_exists() -> None:
    for name, home in elastic._HOMES.items():
        assert name in elastic.__all__
        assert importlib.util.find_spec(home) is not None


def test_a_name_that_elastic_lacks_is_told_with_those_it_has() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Trainer'; it has ElasticConfig"):
        elastic.Trainer  # noqa: B018 - the look-up is the test


def test_ci_types_what_the_readme_tells_a_person_to_type() -> None:
    """First screen: set-up, test command. CI differs only in where its environment lies."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    first_screen = "\n".join(readme.splitlines()[:40])
    install, test = "pip install -e '.[test]'", "pytest"
    assert install in first_screen
    assert re.search(r"^ *pytest( +#.*)?$", first_screen, re.MULTILINE)
    assert install.replace("install", "install --quiet") in ci
    assert ci[-1] == test
    assert "set -euo pipefail" in ci


def test_what_the_browser_loads_is_in_the_package() -> None:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    patterns = tool["setuptools"]["package-data"]["elastic.dashboard"]
    room = ROOT / "elastic" / "dashboard"
    packed = {path for pattern in patterns for path in room.glob(pattern) if path.is_file()}
    there = {path for path in (room / "static").rglob("*") if path.is_file()}
    assert there and there <= packed
