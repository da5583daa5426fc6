"""Every private name of Ray that `elastic.cluster.ray_internals` uses, against the installed Ray.

A new Ray minor that moves or changes one of them fails here, by name, and not in somebody's run.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path

import pytest

import elastic.cluster.ray_internals as internals
from tests.cluster.local_cluster import LocalCluster

SOURCE = Path(internals.__file__).read_text()

# owner -> {method: parameters that our calls or overrides rely on}
METHODS = {
    "ray.train.v2._internal.execution.worker_group:WorkerGroup": {
        "create": ["train_run_context", "worker_group_context", "callbacks"],
        "__init__": ["self", "train_run_context", "worker_group_context", "callbacks"],
        "_start": ["self"],
        "_create_workers": [
            "self",
            "num_workers",
            "placement_group",
            "resources_per_worker",
            "placement_group_bundle_indices",
            "starting_world_rank",
            "world_size",
            "replica_group_size",
        ],
        "_assign_worker_ranks": [
            "workers",
            "starting_world_rank",
            "world_size",
            "replica_group_size",
        ],
        "_get_worker_runtime_env": ["custom_runtime_env"],
        "_assert_active": ["self"],
        "_clear_state": ["self"],
        "has_started": ["self"],
        "get_workers": ["self"],
        "_poll_workers_and_collect_errors": ["self", "timeout"],
        "_init_train_context": ["self", "workers", "sync_actor"],
        "get_worker_group_state": ["self"],
        "shutdown": ["self"],
    },
    "ray.train.v2._internal.execution.worker_group:RayTrainWorker": {
        "execute": ["self", "fn", "fn_args", "fn_kwargs"],
        "get_metadata": ["self"],
        "run_train_fn": ["self", "train_fn_ref"],
    },
    "ray.train.v2._internal.execution.worker_group:Worker": {
        "execute_async": ["self", "fn", "fn_args", "fn_kwargs"],
    },
    "ray.train.v2._internal.execution.controller:TrainController": {
        "__init__": [
            "self",
            "train_fn_ref",
            "train_run_context",
            "scaling_policy",
            "failure_policy",
            "callbacks",
            "validation_config",
        ],
        "_start_worker_group": ["self", "num_workers", "resources_per_worker"],
        "_shutdown_worker_group": ["self"],
        "_generate_run_attempt_id": ["self"],
        "_set_state": ["self", "state"],
        "_shutdown": ["self"],
        "_build_result": ["self"],
        "_run_controller_hook": [
            "self",
            "hook_name",
            "args",
            "invoke_failure_decision_callbacks",
            "context",
        ],
        "run": ["self"],
    },
    "ray.train.v2._internal.execution.storage:StorageContext": {
        "__init__": ["self", "storage_path", "experiment_dir_name", "storage_filesystem"],
    },
    "ray.train.v2._internal.execution.scaling_policy:ScalingPolicy": {
        "_maybe_send_resource_request": ["self"],
    },
    "ray.train.v2.api.data_parallel_trainer:DataParallelTrainer": {
        "_create_default_callbacks": ["self"],
    },
    "ray.train.v2._internal.util": {"bundle_to_remote_args": ["bundle"]},
    "ray._private.state": {"available_resources_per_node": []},
    "ray._private.state:GlobalState": {
        "_initialize_global_state": ["self", "gcs_options"],
        "_connect_and_get_accessor": ["self"],
        "node_table": ["self"],
        "get_draining_nodes": ["self"],
    },
    "ray._private.authentication.authentication_token_setup": {
        "ensure_token_if_auth_enabled": ["system_config", "create_token_if_missing"],
        "maybe_enable_token_auth_if_token_available": ["warn_if_disabled"],
    },
    "ray._private.services": {"canonicalize_bootstrap_address_or_die": ["addr"]},
    "ray.actor:ActorHandle": {"_actor_id": []},
}

# class -> attributes that its own code sets and ours reads or writes
ATTRIBUTES = {
    "ray.train.v2._internal.execution.worker_group:WorkerGroup": [
        "_worker_group_start_timeout_s",
        "_worker_group_state",
        "_worker_group_context",
        "_train_run_context",
        "_callbacks",
        "_world_rank_to_ongoing_poll",
        "_worker_rank_to_replica_group_rank",
    ],
    "ray.train.v2._internal.execution.context:TrainContext": [],
    "ray.train.v2._internal.execution.controller:TrainController": [
        "_worker_group",
        "_scaling_policy",
        "worker_group_cls",
    ],
    "ray.train.v2.api.config:RunConfig": ["storage_context"],
    "ray._private.worker": ["_global_node"],
    "ray.train.v2.api.config:ScalingConfig": ["_resources_per_worker_not_none"],
}


def _find(path: str):
    module, _, name = path.partition(":")
    found = importlib.import_module(module)
    return getattr(found, name) if name else found


@pytest.mark.parametrize("owner", METHODS)
def test_methods_have_the_parameters_we_rely_on(owner: str):
    for name, expected in METHODS[owner].items():
        function = inspect.getattr_static(_find(owner), name)
        function = getattr(function, "__func__", function)
        if isinstance(function, property):
            continue
        # Ray adds the last of these to the methods of a class that was made an actor.
        own = ("cls", "_ray_trace_ctx")
        parameters = [p for p in inspect.signature(function).parameters if p not in own]
        assert parameters[: len(expected)] == expected, f"{owner}.{name}"


@pytest.mark.parametrize("owner", ATTRIBUTES)
def test_attributes_are_there(owner: str):
    kind = _find(owner)
    missing = [name for name in ATTRIBUTES[owner] if not hasattr(kind, name)]
    if missing:
        source = "".join(inspect.getsource(base) for base in kind.__mro__[:-1])
        missing = [name for name in missing if f"self.{name}" not in source]
    assert missing == []


def test_members_of_ray_state_and_worker_metadata():
    import ray
    from ray.train.v2._internal.execution.checkpoint.sync_actor import SynchronizationActor
    from ray.train.v2._internal.execution.context import (
        DistributedContext,
        TrainContext,
        get_train_context,
    )
    from ray.train.v2._internal.execution.worker_group.worker import ActorMetadata

    assert {"world_rank", "world_size", "local_rank", "local_world_size", "node_rank"} <= set(
        DistributedContext.__dataclass_fields__
    )
    assert {"node_id", "node_ip", "pid"} <= set(ActorMetadata.__dataclass_fields__)
    assert isinstance(ray._raylet.RAY_NODE_ID_KEY, str)
    assert "distributed_context" in TrainContext.__dataclass_fields__
    assert not TrainContext.__dataclass_params__.frozen  # a warm re-form changes it in place
    assert callable(get_train_context)
    fields = TrainContext.__dataclass_fields__
    assert {"checkpoint", "collective_seq"} <= set(fields)
    assert list(inspect.signature(TrainContext.next_collective_seq).parameters) == ["self"]
    assert callable(TrainContext.get_result_queue)
    from ray.train.v2._internal.execution.checkpoint.report_handler import ReportCallbackHandler

    started = inspect.signature(ReportCallbackHandler.after_worker_group_start)
    assert list(started.parameters) == ["self", "worker_group"]
    from ray.train.v2._internal.callbacks import WorkingDirectorySetupCallback
    from ray.train.v2._internal.execution.worker_group.execution_group import ReplicaGroup

    assert callable(WorkingDirectorySetupCallback.after_execution_group_start)
    assert list(inspect.signature(ReplicaGroup).parameters)[:2] == [
        "workers",
        "resources_per_worker",
    ]
    assert callable(SynchronizationActor.__ray_metadata__.modified_class.reset)
    assert callable(ray._private.state.state.get_draining_nodes)
    assert callable(ray._raylet.GcsClientOptions.create)
    assert hasattr(ray._private.ray_constants, "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S")
    from ray.core.generated import autoscaler_pb2, gcs_pb2

    assert autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION") > 0
    fields = gcs_pb2.ActorTableData.DESCRIPTOR.fields_by_name
    assert {"class_name", "pid", "address", "required_resources"} <= set(fields)


def test_calls_of_compiled_code_that_only_a_cluster_can_show(three_nodes: LocalCluster):
    """The node to drain is none of the cluster's, which stays as it is; Ray agrees to that."""
    view = internals.ClusterView(three_nodes.address)
    no_node = "ab" * 28
    assert view.drain(no_node, "a test", deadline_ms=0, timeout_s=5.0) is None
    assert no_node not in view.draining_nodes()
    living = view.living_nodes()
    assert {node.node_id for node in three_nodes.nodes} < set(living)
    assert [view.holders(node_id) for node_id in living] == [[]] * len(living)


def test_a_placement_group_tells_who_made_it():
    """`give_back` finds those of a dead controller by it; and Ray's setting for a lost head."""
    from ray._raylet import GlobalStateAccessor
    from ray.core.generated import gcs_pb2

    assert callable(GlobalStateAccessor.get_placement_group_table)
    fields = gcs_pb2.PlacementGroupTableData.DESCRIPTOR.fields_by_name
    assert {"placement_group_id", "creator_actor_id", "state"} <= set(fields)
    assert gcs_pb2.PlacementGroupTableData.REMOVED
    ray_itself = Path(importlib.import_module("ray").__file__).parent / "_raylet.so"
    name, _ = internals._WITHOUT_HEAD
    assert name.removeprefix("RAY_").encode() in ray_itself.read_bytes()


def test_every_private_name_in_the_module_is_listed_above():
    """A new use of a private name must be added to the contract."""
    listed = {name for names in METHODS.values() for name in names}
    listed |= {name for names in ATTRIBUTES.values() for name in names}
    own = {"_Group", "_WatchedWorker", "_member", "_worker_cls", "_address", "_state"}
    own |= {
        "_watches",
        "_forget_reports",
        "_place_of",
        "_bundles",
        "_drop_lost_groups",
        "_extra_groups",
        "_free_places",
        "_lives",
    }
    ours = {node.attr for node in ast.walk(ast.parse(SOURCE)) if isinstance(node, ast.Attribute)}
    private = {name for name in ours if name.startswith("_") and not name.startswith("__")}
    assert private - listed - own - {"_private", "_raylet"} == set()
