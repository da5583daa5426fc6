"""jobs/kuberay.yaml uses the fields that KubeRay and Kubernetes have, and its numbers fit together.

The schema below is the part of RayJob's (ray.io/v1) and of the pod template's that the file uses,
with no other field allowed: a misspelt one would be dropped by the cluster without a word.
"""

from __future__ import annotations

import copy
import importlib.metadata
import re
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from elastic.policy.durations import parse_duration_s
from elastic.policy.situation import Rules
from elastic.verbs.node import node
from jobs.pretrain_arguments import parser
from tests.pure.test_cluster_yaml import TEXT as CLUSTER_TEXT
from tests.pure.test_cluster_yaml import commands_with, head_start, ray_file

FILE = Path(__file__).resolve().parents[2] / "jobs" / "kuberay.yaml"
TEXT = FILE.read_text(encoding="utf-8")
STRING, COUNT, FLAG = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "boolean"}
TEXTS = {"type": "object", "additionalProperties": STRING}


def record(required: str = "", **fields: dict[str, Any]) -> dict[str, Any]:
    """An object with these fields and no other."""
    return {
        "type": "object",
        "properties": fields,
        "required": required.split(),
        "additionalProperties": False,
    }


def several(of: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": of, "minItems": 1}


CONTAINER = record(
    "name image",
    name=STRING,
    image=STRING,
    env=several(record("name value", name=STRING, value=STRING)),
    ports=several(record("containerPort", name=STRING, containerPort=COUNT)),
    lifecycle=record(preStop=record(exec=record("command", command=several(STRING)))),
    resources=record(limits=TEXTS, requests=TEXTS),
    volumeMounts=several(record("name mountPath", name=STRING, mountPath=STRING)),
)
TOLERATION = record(key=STRING, operator=STRING, value=STRING, effect=STRING)
POD_TEMPLATE = record(
    "spec",
    spec=record(
        "containers",
        serviceAccountName=STRING,
        nodeSelector=TEXTS,
        tolerations=several(TOLERATION),
        terminationGracePeriodSeconds=COUNT,
        containers=several(CONTAINER),
        volumes=several(
            record("name", name=STRING, emptyDir=record(medium=STRING, sizeLimit=STRING))
        ),
    ),
)
WORKERS = record(
    "groupName minReplicas maxReplicas rayStartParams template",
    groupName=STRING,
    replicas=COUNT,
    minReplicas=COUNT,
    maxReplicas=COUNT,
    rayStartParams=TEXTS,
    template=POD_TEMPLATE,
)
RAY_CLUSTER = record(
    "headGroupSpec",
    rayVersion=STRING,
    headGroupSpec=record("rayStartParams template", rayStartParams=TEXTS, template=POD_TEMPLATE),
    workerGroupSpecs=several(WORKERS),
)
RAY_JOB = record(
    "apiVersion kind metadata spec",
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=record("name", name={"type": "string", "pattern": "^[a-z0-9-]{1,47}$"}),
    spec=record(
        "entrypoint rayClusterSpec",
        backoffLimit=COUNT,
        submissionMode={"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode"]},
        submitterConfig=record(backoffLimit=COUNT),
        shutdownAfterJobFinishes=FLAG,
        ttlSecondsAfterFinished=COUNT,
        entrypoint=STRING,
        rayClusterSpec=RAY_CLUSTER,
    ),
)


@pytest.fixture
def job() -> dict[str, Any]:
    return yaml.safe_load(TEXT)


@pytest.fixture
def cluster(job: dict[str, Any]) -> dict[str, Any]:
    return job["spec"]["rayClusterSpec"]


@pytest.fixture
def head(cluster: dict[str, Any]) -> dict[str, Any]:
    return cluster["headGroupSpec"]


@pytest.fixture
def workers(cluster: dict[str, Any]) -> dict[str, Any]:
    (group,) = cluster["workerGroupSpecs"]
    return group


def container(group: dict[str, Any]) -> dict[str, Any]:
    (found,) = group["template"]["spec"]["containers"]
    return found


def environment(group: dict[str, Any]) -> dict[str, str]:
    return {variable["name"]: variable["value"] for variable in container(group)["env"]}


def test_it_has_the_fields_of_a_ray_job_and_no_other(job: dict[str, Any]) -> None:
    jsonschema.validate(job, RAY_JOB)


def test_a_misspelt_field_would_be_found(job: dict[str, Any]) -> None:
    broken = copy.deepcopy(job)
    (group,) = broken["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    group["template"]["spec"]["terminationGracePeriod"] = 60
    with pytest.raises(jsonschema.ValidationError, match="terminationGracePeriod"):
        jsonschema.validate(broken, RAY_JOB)


def test_the_hook_drains_the_node_and_ends_before_its_pod_is_killed(
    workers: dict[str, Any],
) -> None:
    """SIGTERM comes when the hook has ended, and SIGKILL when the time of both is over."""
    command = container(workers)["lifecycle"]["preStop"]["exec"]["command"]
    assert command[:4] == ["elastic", "node", "drain", "--grace"]
    grace_s = parse_duration_s(command[4], bare_unit="s")
    assert grace_s + 10 <= workers["template"]["spec"]["terminationGracePeriodSeconds"]


def test_the_workers_are_kept_at_their_number_on_spot_nodes(workers: dict[str, Any]) -> None:
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"]
    spec = workers["template"]["spec"]
    assert spec["nodeSelector"]["cloud.google.com/gke-spot"] == "true"
    tolerated = {toleration["key"] for toleration in spec["tolerations"]}
    assert tolerated == {"cloud.google.com/gke-spot", "nvidia.com/gpu"}
    (mount,), (volume,) = container(workers)["volumeMounts"], spec["volumes"]
    assert mount["name"] == volume["name"]


def test_the_head_is_no_spot_node_and_offers_no_room_to_workers(head: dict[str, Any]) -> None:
    assert head["rayStartParams"]["num-cpus"] == "0"
    assert "cloud.google.com/gke-spot" not in head["template"]["spec"]["nodeSelector"]
    assert "nvidia.com/gpu" not in container(head)["resources"]["limits"]


def test_head_and_workers_have_one_image(head: dict[str, Any], workers: dict[str, Any]) -> None:
    assert container(head)["image"] == container(workers)["image"]


def test_it_is_for_the_ray_that_the_project_is_pinned_to(cluster: dict[str, Any]) -> None:
    assert cluster["rayVersion"] == importlib.metadata.version("ray")
    (base,) = re.findall(r"^#   FROM rayproject/ray:(\S+)-py3\d+-gpu$", TEXT, re.MULTILINE)
    assert base == cluster["rayVersion"]


def test_the_head_has_the_health_checks_of_cluster_yaml(head: dict[str, Any]) -> None:
    (option,) = [
        word
        for word in head_start(yaml.safe_load(CLUSTER_TEXT))
        if word.startswith("--system-config=")
    ]
    knobs = {f"RAY_{name}": str(value) for name, value in yaml.safe_load(option[16:]).items()}
    assert environment(head).items() >= knobs.items()


def test_ray_job_stop_leaves_time_to_save(head: dict[str, Any]) -> None:
    name = "RAY_JOB_STOP_WAIT_TIME_S"
    supervisor = ray_file("ray/dashboard/modules/job/job_supervisor.py").read_text(encoding="utf-8")
    assert f'"{name}"' in supervisor, f"this Ray does not read {name}"
    assert int(environment(head)[name]) >= Rules(min_workers=1, max_workers=1).leave_s


def test_the_job_is_one_that_can_be_submitted_again(
    job: dict[str, Any], workers: dict[str, Any]
) -> None:
    words = shlex.split(job["spec"]["entrypoint"])
    assert words[:3] == ["python", "-m", "jobs.pretrain"]
    arguments = parser(None).parse_args(words[3:])
    assert arguments.name, "without a name nothing is resumed on the next cluster"
    assert "://" in arguments.storage
    least, most = arguments.num_workers.split(":")
    assert int(least) < int(most) == workers["replicas"]
    assert job["spec"]["backoffLimit"] > 0
    assert job["spec"]["shutdownAfterJobFinishes"], "GPUs that nobody uses any more cost money"


def test_the_commands_about_nodes_are_those_that_there_are(workers: dict[str, Any]) -> None:
    hook = container(workers)["lifecycle"]["preStop"]["exec"]["command"]
    agent = shlex.split(commands_with(yaml.safe_load(CLUSTER_TEXT), "worker_start", "agent")[0])
    for words in (hook, agent[agent.index("elastic") : agent.index("</dev/null")]):
        assert words[:2] == ["elastic", "node"]
        command = node.commands[words[2]]
        arguments = [word.replace("$RAY_HEAD_IP", "192.0.2.1") for word in words[3:]]
        assert command.make_context(words[2], arguments).params["as_json"] is False
