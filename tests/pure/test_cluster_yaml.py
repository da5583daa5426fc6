"""cluster.yaml is what the installed Ray accepts, and does what its comments say."""

from __future__ import annotations

import importlib.metadata
import json
import re
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from elastic.policy.situation import Rules

FILE = Path(__file__).resolve().parents[2] / "cluster.yaml"
TEXT = FILE.read_text(encoding="utf-8")


def ray_file(path: str) -> Path:
    """A file of the installed Ray, found without importing it."""
    return Path(str(importlib.metadata.distribution("ray").locate_file(path)))


@pytest.fixture
def config() -> dict[str, Any]:
    return yaml.safe_load(TEXT)


@pytest.fixture
def node_types(config: dict[str, Any]) -> dict[str, Any]:
    return config["available_node_types"]


def head_start(config: dict[str, Any]) -> list[str]:
    command = config["head_start_ray_commands"][-1]
    return shlex.split(command.split("; ", 1)[1])


def test_rays_own_schema_accepts_it(config: dict[str, Any]) -> None:
    schema = json.loads(ray_file("ray/autoscaler/ray-schema.json").read_text(encoding="utf-8"))
    jsonschema.validate(config, schema)


def test_rays_rules_beyond_the_schema_hold(
    config: dict[str, Any], node_types: dict[str, Any]
) -> None:
    assert config["head_node_type"] in node_types
    assert sum(kind["min_workers"] for kind in node_types.values()) <= config["max_workers"]
    assert sum(kind["max_workers"] for kind in node_types.values()) == config["max_workers"]


def test_the_head_is_stable_and_offers_no_room_to_workers(node_types: dict[str, Any]) -> None:
    head = node_types["head"]
    assert "InstanceMarketOptions" not in head["node_config"]
    assert head["resources"]["CPU"] == 0
    assert head["max_workers"] == 0


def test_the_workers_are_spot_nodes_of_two_instance_types(node_types: dict[str, Any]) -> None:
    workers = {name: kind for name, kind in node_types.items() if name != "head"}
    assert len({kind["node_config"]["InstanceType"] for kind in workers.values()}) == 2
    for kind in workers.values():
        assert kind["node_config"]["InstanceMarketOptions"]["MarketType"] == "spot"
        assert kind["min_workers"] == kind["max_workers"], "else a reclaimed node stays away"


def test_the_dashboard_listens_on_loopback_only(config: dict[str, Any]) -> None:
    assert "--dashboard-host=127.0.0.1" in head_start(config)


def test_the_health_checks_are_knobs_that_this_ray_has(config: dict[str, Any]) -> None:
    (option,) = [word for word in head_start(config) if word.startswith("--system-config=")]
    knobs = json.loads(option.split("=", 1)[1])
    known = ray_file("ray/core/src/ray/gcs/gcs_server").read_bytes()
    assert len(knobs) == 4
    for name, value in knobs.items():
        assert name.encode() in known, f"this Ray's head would refuse to start over {name}"
        assert isinstance(value, int)


def test_ray_job_stop_leaves_time_to_save(config: dict[str, Any]) -> None:
    setting = head_start(config)[0]
    name, seconds = setting.split("=")
    supervisor = ray_file("ray/dashboard/modules/job/job_supervisor.py").read_text(encoding="utf-8")
    assert f'"{name}"' in supervisor, f"this Ray does not read {name}"
    assert int(seconds) >= Rules(min_workers=1, max_workers=1).leave_s


def test_the_image_has_the_ray_and_the_python_that_the_project_needs(
    config: dict[str, Any],
) -> None:
    found = re.fullmatch(r"rayproject/ray:(\d+\.\d+)\.\d+-py3(\d+)-gpu", config["docker"]["image"])
    assert found is not None
    assert importlib.metadata.version("ray").startswith(found[1] + ".")
    assert int(found[2]) >= 11


def test_what_is_copied_to_the_nodes_exists_and_can_be_installed(config: dict[str, Any]) -> None:
    sources = list(config["file_mounts"].values())
    assert all((FILE.parent / source).exists() for source in sources)
    assert "./pyproject.toml" in sources


def test_five_lines_are_the_users_to_edit() -> None:
    assert re.findall(r"# EDIT (\d)", TEXT) == ["1", "2", "3", "4", "5"]
