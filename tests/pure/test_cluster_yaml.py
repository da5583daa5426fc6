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
ADDRESS = "$RAY_HEAD_IP:6379"


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
    return shlex.split(commands_with(config, "head_start", "ray start")[0].split("; ", 1)[1])


def commands_with(config: dict[str, Any], when: str, words: str) -> list[str]:
    return [command for command in config[f"{when}_ray_commands"] if words in command]


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


def test_each_worker_has_a_node_agent_that_outlives_the_command_that_starts_it(
    config: dict[str, Any],
) -> None:
    (command,) = commands_with(config, "worker_start", "elastic node agent")
    words = shlex.split(command)
    # The launcher's shell waits for all that holds its output, and takes along its own session.
    assert words[:2] == ["setsid", "-f"]
    assert words[-3:] == ["</dev/null", ">>/tmp/elastic-node-agent.log", "2>&1"]
    agent = words[words.index("elastic") : words.index("</dev/null")]
    assert agent == ["elastic", "node", "agent", "--source", "aws", "--address", ADDRESS]
    (join,) = commands_with(config, "worker_start", "ray start")
    assert f"--address={ADDRESS} " in join, "the agent is to drain a node of the same cluster"


def test_the_containers_reach_the_metadata_service_without_a_higher_hop_limit() -> None:
    launcher = ray_file("ray/autoscaler/_private/docker.py").read_text(encoding="utf-8")
    assert '"--net=host"' in launcher


def test_prometheus_collects_what_ray_lists_and_listens_on_loopback_only(
    config: dict[str, Any],
) -> None:
    (command,) = commands_with(config, "head_start", "prometheus")
    words = shlex.split(command)
    assert words[:3] == ["setsid", "-f", "prometheus"]
    assert "--web.listen-address=127.0.0.1:9090" in words
    assert words[-3:] == ["</dev/null", ">/tmp/prometheus.log", "2>&1"]
    consts = ray_file("ray/dashboard/consts.py").read_text(encoding="utf-8")
    assert "PROMETHEUS_CONFIG_INPUT_PATH" in command
    assert "PROMETHEUS_CONFIG_INPUT_PATH =" in consts, "its name in this Ray is another one"
    export = "ray/dashboard/modules/metrics/export/prometheus/prometheus.yml"
    scraped = yaml.safe_load(ray_file(export).read_text(encoding="utf-8"))["scrape_configs"]
    assert scraped[0]["file_sd_configs"][0]["files"] == [
        "/tmp/ray/prom_metrics_service_discovery.json"
    ]


@pytest.fixture
def on_gcp(config: dict[str, Any]) -> dict[str, Any]:
    """cluster.yaml with the parts that the README gives for GCP."""
    readme = (FILE.parent / "README.md").read_text(encoding="utf-8")
    (changes,) = re.findall(r"```yaml\n(provider:.*?)```", readme, re.DOTALL)
    return config | yaml.safe_load(changes)


def test_the_gcp_variant_of_the_readme_is_accepted_by_rays_schema(on_gcp: dict[str, Any]) -> None:
    schema = json.loads(ray_file("ray/autoscaler/ray-schema.json").read_text(encoding="utf-8"))
    jsonschema.validate(on_gcp, schema)
    assert on_gcp["provider"].keys() >= {"region", "availability_zone", "project_id"}
    assert "aws" not in json.dumps(on_gcp), "something is still of the other cloud"


def test_the_gcp_variant_has_the_shape_of_cluster_yaml(
    on_gcp: dict[str, Any], node_types: dict[str, Any]
) -> None:
    kinds = on_gcp["available_node_types"]
    assert kinds.keys() == node_types.keys()
    assert "scheduling" not in kinds["head"]["node_config"]
    assert kinds["head"]["resources"]["CPU"] == kinds["head"]["max_workers"] == 0
    for name in ("spot-a", "spot-b"):
        assert kinds[name]["max_workers"] == node_types[name]["max_workers"]
        assert kinds[name]["resources"]["GPU"] == kinds["spot-a"]["resources"]["GPU"]
        assert kinds[name]["node_config"]["scheduling"]["provisioningModel"] == "SPOT"
    (ours,) = commands_with(on_gcp, "worker_start", "elastic node agent")
    (aws,) = commands_with(yaml.safe_load(TEXT), "worker_start", "elastic node agent")
    assert ours == aws.replace("--source aws", "--source gcp")


def test_the_readme_needs_six_commands_to_a_run_on_spot_nodes() -> None:
    readme = (FILE.parent / "README.md").read_text(encoding="utf-8")
    section = readme.split("in six commands\n", 1)[1].split("**On GCP**", 1)[0]
    commands = re.findall(r"^    (\S.*)$", section, re.MULTILINE)
    assert [shlex.split(command)[0] for command in commands] == [
        "pip",
        "${EDITOR:-vi}",
        "ray",
        "ray",
        "elastic",
        "elastic",
    ]
