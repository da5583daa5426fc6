"""Ray Train's controller and worker group, narrowed to what the driver needs of them.

The one module that touches names under `ray.train.v2._internal` or other private names of Ray; a
contract test checks each of them against the installed Ray. Ray Train's own control loop is
replaced by ours; its placement groups, worker actors, callbacks and results are used as they are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastic.importing import collector_paused
from elastic.storage.filesystem import Filesystem

with collector_paused():
    import ray
    from pyarrow.fs import FSSpecHandler, PyFileSystem
    from ray._private.authentication.authentication_token_setup import (
        ensure_token_if_auth_enabled,
        maybe_enable_token_auth_if_token_available,
    )
    from ray.core.generated import autoscaler_pb2, gcs_pb2
    from ray.exceptions import GetTimeoutError, RayActorError
    from ray.train import Checkpoint, RunConfig
    from ray.train.v2._internal.callbacks import DatasetsCallback, WorkingDirectorySetupCallback
    from ray.train.v2._internal.callbacks.placement_group_callback import (
        PlacementGroupCleanerCallback,
    )
    from ray.train.v2._internal.exceptions import (
        InsufficientClusterResourcesError,
        WorkerGroupStartupFailedError,
        WorkerGroupStartupTimeoutError,
    )
    from ray.train.v2._internal.execution.checkpoint.report_handler import ReportCallbackHandler
    from ray.train.v2._internal.execution.context import DistributedContext, get_train_context
    from ray.train.v2._internal.execution.controller import TrainController
    from ray.train.v2._internal.execution.controller.state import (
        ErroredState,
        FinishedState,
        RunningState,
        ShuttingDownState,
    )
    from ray.train.v2._internal.execution.failure_handling import create_failure_policy
    from ray.train.v2._internal.execution.scaling_policy import ScalingPolicy, create_scaling_policy
    from ray.train.v2._internal.execution.storage import StorageContext
    from ray.train.v2._internal.execution.worker_group import (
        RayTrainWorker,
        Worker,
        WorkerGroup,
        WorkerGroupPollStatus,
    )
    from ray.train.v2._internal.execution.worker_group.execution_group import ReplicaGroup
    from ray.train.v2._internal.util import ObjectRefWrapper, bundle_to_remote_args
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
    from ray.util.placement_group import (
        PlacementGroup,
        placement_group,
        placement_group_table,
        remove_placement_group,
    )
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

__all__ = [
    "ClusterView",
    "Controller",
    "GroupMember",
    "GroupStartError",
    "find_cluster",
    "give_back",
    "launch",
    "read_draining_nodes",
    "read_nodes",
    "tell_rank",
]

_WATCH = "watch"
_REPORTS_PER_GENERATION = 1 << 32
_KILL_CONFIRM_S = 5.0
# The installation of a runtime environment counts in.
_START_S = 1800.0
_WARM_UP_S = 600.0
# Ray Train's own watcher of preemptions would be one more process for each group, to no effect:
# its control loop is not the one that runs. Its own `print` writes to a logger beside stdout, which
# would have every line twice in a rank's log.
_ENVIRONMENT = {
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
}
# For how long processes of a run go on without the cluster's head, in seconds. Ray's own 60 would
# leave some of them for longer than a minute. Whoever keeps a head that comes back has set it.
_WITHOUT_HEAD = "RAY_gcs_rpc_server_reconnect_timeout_s", "45"


class GroupStartError(RuntimeError):
    """The worker group could not be started, and nothing of it is left."""

    def __init__(self, reason: str, is_capacity: bool) -> None:
        super().__init__(reason)
        self.reason = reason
        self.is_capacity = is_capacity

    def __reduce__(self) -> tuple[type[GroupStartError], tuple[str, bool]]:
        return GroupStartError, (self.reason, self.is_capacity)


@dataclass(frozen=True, kw_only=True)
class GroupMember:
    """One worker of a started group, without Ray's types."""

    world_rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    node_id: str
    node_ip: str
    pid: int


class _WatchedWorker(RayTrainWorker):
    """Ray Train's worker with one more call, that ends only when its process does."""

    @ray.method(concurrency_group=_WATCH)
    def watch(self) -> None:
        threading.Event().wait()


class _Group(WorkerGroup):
    """Ray Train's worker group: quick to give up on a placement, quick to end."""

    _worker_cls = _WatchedWorker
    _worker_group_state: Any
    place_timeout_s = 10.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._worker_group_start_timeout_s = self.place_timeout_s
        self.begun_s = time.monotonic()
        self.placed_s = self.begun_s
        self.joiners: list[Worker] = []
        self._watches: dict[int, Any] = {}
        self._place_of: dict[int, tuple[Any, int]] = {}
        self._extra_groups: list[Any] = []

    def _start(self) -> None:
        try:
            super()._start()
        except BaseException:
            # Ray leaves actors and placement group behind when a start fails late.
            if self.has_started():
                self.shutdown()
            raise

    def _create_workers(
        self,
        num_workers: int,
        placement_group: Any,
        resources_per_worker: dict[str, float],
        placement_group_bundle_indices: list[int] | None = None,
        starting_world_rank: int = 0,
        world_size: int | None = None,
        replica_group_size: int | None = None,
    ) -> list[Worker]:
        """As Ray's, with a second thread in each actor for the pending call that tells a death."""
        self.placed_s = time.monotonic()
        indices = placement_group_bundle_indices or list(range(num_workers))
        actor_class = ray.remote(
            runtime_env=self._get_worker_runtime_env(
                custom_runtime_env=self._train_run_context.run_config.worker_runtime_env
            ),
            concurrency_groups={_WATCH: 1},
            **bundle_to_remote_args(resources_per_worker),
        )(self._worker_cls)
        actors = [
            actor_class.options(
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=placement_group, placement_group_bundle_index=index
                )
            ).remote()
            for index in indices
        ]
        try:
            asked = [actor.get_metadata.remote() for actor in actors]
            found = ray.get(asked, timeout=_START_S)
        except (RayActorError, GetTimeoutError) as error:
            for actor in actors:
                ray.kill(actor)
            raise WorkerGroupStartupFailedError(f"a worker did not start: {error}") from error
        workers = [
            Worker(actor, metadata, resources_per_worker, placement_group_bundle_index=index)
            for index, actor, metadata in zip(indices, actors, found, strict=True)
        ]
        ranked: list[Worker] = WorkerGroup._assign_worker_ranks(
            workers, starting_world_rank, world_size, replica_group_size
        )
        return _local_ranks_by_node(ranked)

    def watch(self, worker: Worker) -> Any:
        """The pending call that fails when the worker's process or node is gone."""
        if id(worker) not in self._watches:
            self._watches[id(worker)] = worker.actor.watch.remote()
        return self._watches[id(worker)]

    def note_places(self, workers: Sequence[Worker], placement_group: Any) -> None:
        """Remember which bundle each of these workers is in."""
        for worker in workers:
            self._place_of[id(worker)] = (placement_group, worker.placement_group_bundle_index)

    def _bundles(self) -> list[tuple[Any, int, str]]:
        """Every bundle reserved for this group, and the node it lies on now.

        Ray moves a lost node's bundles to the next node that has room.
        """
        groups = [self._worker_group_state.placement_group_handle.placement_group]
        return [
            (group, int(index), node_id)
            for group in [*groups, *self._extra_groups]
            for index, node_id in placement_group_table(group)["bundles_to_node_id"].items()
            if node_id
        ]

    def slots(self) -> list[str]:
        """The node of every bundle that is reserved for this group, those of its dead too."""
        self._drop_lost_groups()
        return [node_id for _, _, node_id in self._bundles()]

    def _drop_lost_groups(self) -> None:
        """Ray's head is never idle while bundles of a lost node wait for another to lie on."""
        lost = [
            group
            for group in self._extra_groups
            if not any(placement_group_table(group)["bundles_to_node_id"].values())
        ]
        for group in lost:
            self._extra_groups.remove(group)
            remove_placement_group(group)

    def add(self, num: int, alive_nodes: Collection[str]) -> list[Worker]:
        """Start workers beside the others: in the dead's bundles on living nodes, then in new ones.

        They wait for `keep` to take them in. Blocks while processes start; raises when none could.
        """
        context = self._worker_group_context
        places = self._free_places(alive_nodes)[:num]
        missing = num - len(places)
        # Not the context's, which is that of the group's start.
        selector = self._train_run_context.scaling_config.label_selector
        # One for each, where Ray may lay them anywhere: it keeps or loses them one by one.
        sizes = [1] * missing if context.placement_strategy == "PACK" else [missing]
        asked = [
            placement_group(
                [context.resources_per_worker] * size,
                strategy=context.placement_strategy,
                bundle_label_selector=[dict(selector)] * size if selector else None,
            )
            for size in sizes
            if size > 0
        ]
        until_s = time.monotonic() + self.place_timeout_s
        for extra in asked:
            if extra.wait(max(0.1, until_s - time.monotonic())):
                self._extra_groups.append(extra)
                places += [(extra, index) for index in range(extra.bundle_count)]
            else:
                remove_placement_group(extra)
        if not places:
            raise WorkerGroupStartupTimeoutError(num_workers=num)
        new: list[Worker] = []
        for where in dict.fromkeys(group for group, _ in places):
            indices = [index for group, index in places if group is where]
            made = self._create_workers(len(indices), where, context.resources_per_worker, indices)
            self.note_places(made, where)
            new += made
        self._init_train_context(new, self._worker_group_state.sync_actor)
        for callback in self._callbacks:
            if isinstance(callback, WorkingDirectorySetupCallback):
                callback.after_execution_group_start(
                    ReplicaGroup(new, context.resources_per_worker)
                )
        ray.get([worker.actor.run_train_fn.remote(context.train_fn_ref) for worker in new])
        self.joiners += new
        return new

    def give_up(self, joiners: Sequence[Worker]) -> None:
        """End workers that were to join and cannot."""
        for worker in joiners:
            ray.kill(worker.actor)
        self.joiners = [one for one in self.joiners if one not in joiners]

    def _free_places(self, alive_nodes: Collection[str]) -> list[tuple[Any, int]]:
        members = [*self.get_workers(), *self.joiners]
        taken = [self._place_of[id(worker)] for worker in members if self._lives(worker)]
        return [
            (group, index)
            for group, index, node_id in self._bundles()
            if node_id in alive_nodes and (group, index) not in taken
        ]

    def _lives(self, worker: Worker) -> bool:
        return not ray.wait([self.watch(worker)], timeout=0)[0]

    def poll_workers(self, timeout_s: float) -> WorkerGroupPollStatus:
        """Ray's `poll_status` up to the callbacks, which need the event loop."""
        self._assert_active()
        return WorkerGroupPollStatus(
            worker_statuses=dict(enumerate(self._poll_workers_and_collect_errors(timeout_s))),
            worker_rank_to_replica_group_rank=self._worker_rank_to_replica_group_rank,
        )

    def tell_callbacks(self, status: WorkerGroupPollStatus) -> None:
        """The rest of it, unless the group has changed meanwhile."""
        if self.has_started() and len(status.worker_statuses) == len(self.get_workers()):
            for callback in self._callbacks:
                callback.after_worker_group_poll_status(status)

    def keep(self, to_end: Callable[[list[GroupMember]], Collection[int]]) -> None:
        """Go on with the workers and the living joiners, numbered anew, but for those `to_end`."""
        there = [*self.get_workers(), *(one for one in self.joiners if self._lives(one))]
        ended = to_end([_member(worker) for worker in there])
        for index in ended:
            ray.kill(there[index].actor)  # it may be alive, on a node that is about to go
        kept = [worker for index, worker in enumerate(there) if index not in ended]
        self.joiners = []
        kept = _local_ranks_by_node(WorkerGroup._assign_worker_ranks(kept))
        self._worker_group_state = dataclasses.replace(self._worker_group_state, workers=kept)
        self._world_rank_to_ongoing_poll.clear()
        self._worker_rank_to_replica_group_rank = {rank: rank for rank in range(len(kept))}
        for callback in self._callbacks:
            if isinstance(callback, ReportCallbackHandler):
                callback.after_worker_group_start(self)  # one queue for each rank
        self.free_reporters()

    def free_reporters(self) -> None:
        """End barriers of `ray.train.report` that wait for the dead, and queues that are full."""
        self._worker_group_state.sync_actor.reset.remote()
        for worker in self.get_workers():
            worker.execute_async(_forget_reports)

    def shutdown(self) -> None:
        """End the workers at once: Ray's own waits up to 5 s for hooks that hung workers miss."""
        self._assert_active()
        state = self._worker_group_state
        workers = [*state.workers, *self.joiners]
        watches = [self.watch(worker) for worker in workers]
        for worker in workers:
            ray.kill(worker.actor)
        ray.kill(state.sync_actor)
        state.placement_group_handle.shutdown()
        for extra in self._extra_groups:
            remove_placement_group(extra)
        with contextlib.ExitStack() as stack:
            for callback in self._callbacks:
                stack.enter_context(callback.on_worker_group_shutdown())
            self._clear_state()
            for callback in self._callbacks:
                callback.after_worker_group_shutdown(self._worker_group_context)
        # A pending call fails when its process is gone, so that no old rank is left to step.
        if watches:
            ray.wait(watches, num_returns=len(watches), timeout=_KILL_CONFIRM_S)


def _local_ranks_by_node(workers: list[Worker]) -> list[Worker]:
    """The workers with local ranks counted per node, as devices are given out.

    Ray Train counts them per address, which is wrong where several nodes share one.
    """
    node_ids = list(dict.fromkeys(worker.metadata.node_id for worker in workers))
    for worker in workers:
        peers = [one for one in workers if one.metadata.node_id == worker.metadata.node_id]
        worker.distributed_context = dataclasses.replace(
            worker.distributed_context,
            local_rank=peers.index(worker),
            local_world_size=len(peers),
            node_rank=node_ids.index(worker.metadata.node_id),
        )
    return workers


class Controller(TrainController):
    """The driver actor's body: Ray Train's controller, with the loop taken out.

    A subclass implements `run`. Methods that talk to workers block: call them off the event loop.
    """

    worker_group_cls = _Group

    def __init__(self, *, train_run_context: Any, **arguments: Any) -> None:
        _give_storage(train_run_context.run_config)
        super().__init__(train_run_context=train_run_context, **arguments)

    def place_on(self, selector: Mapping[str, str]) -> None:
        """Groups that start from now on go to nodes with these labels."""
        # What the autoscaler is asked for: a node that is kept out must not pass for one of these.
        asked = self._scaling_policy.scaling_config
        keys = {ray._raylet.RAY_NODE_ID_KEY, *(asked.label_selector or {})}
        asked.label_selector = {k: v for k, v in selector.items() if k in keys} or None
        self._train_run_context.scaling_config.label_selector = dict(selector) or None

    def start_group(self, num_workers: int) -> list[GroupMember]:
        """Place and start a group and launch the training function in it.

        Returns the members by world rank. Raises:
            GroupStartError: it could not be started; says whether for want of resources.
        """
        scaling = self._scaling_policy.scaling_config
        self._generate_run_attempt_id()
        try:
            self._start_worker_group(num_workers, scaling._resources_per_worker_not_none)
        except (WorkerGroupStartupTimeoutError, InsufficientClusterResourcesError) as error:
            raise GroupStartError(f"no room for {num_workers} workers: {error}", True) from error
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            raise GroupStartError(
                f"starting {num_workers} workers failed: {text}", False
            ) from error
        group = self._worker_group
        handle = group.get_worker_group_state().placement_group_handle
        group.note_places(group.get_workers(), handle.placement_group)
        self._set_state(RunningState())
        return [_member(worker) for worker in group.get_workers()]

    def keep_group(
        self, to_end: Callable[[list[GroupMember]], Collection[int]]
    ) -> list[GroupMember]:
        """Go on with the group and its joiners, numbered anew; returns them by their new rank.

        `to_end` is given all of them, dead ones too, and gives the indices of those that end.
        """
        self._worker_group.keep(to_end)
        return [_member(worker) for worker in self._worker_group.get_workers()]

    def free_reporters(self) -> None:
        """Free survivors that wait in `ray.train.report` for a rank which is no more."""
        self._worker_group.free_reporters()

    def start_times_s(self) -> dict[str, float]:
        """How long the last start took: `place` (placement group) and `start` (processes)."""
        group = self._worker_group
        return {
            "place": group.placed_s - group.begun_s,
            "start": time.monotonic() - group.placed_s,
        }

    def watches(self) -> list[Any]:
        """By world rank, a reference that fails when that worker's process or node is gone."""
        group = self._worker_group
        return [group.watch(worker) for worker in group.get_workers()]

    def start_joiners(
        self, num: int, alive_nodes: Collection[str], warm_up: Callable[[], None]
    ) -> list[tuple[GroupMember, Any]]:
        """Start up to `num` workers beside the group and run `warm_up` in each.

        Returns each with its watch. Raises:
            GroupStartError: none could be started.
        """
        group = self._worker_group
        new: list[Worker] = []
        try:
            new = group.add(num, alive_nodes)
            ray.get([worker.execute_async(warm_up) for worker in new], timeout=_WARM_UP_S)
        except WorkerGroupStartupTimeoutError as error:
            raise GroupStartError(f"no room for {num} more workers", True) from error
        except Exception as error:
            group.give_up(new)
            text = f"{type(error).__name__}: {error}"
            raise GroupStartError(f"{num} more workers failed: {text}", False) from error
        return [(_member(worker), group.watch(worker)) for worker in new]

    def slots(self) -> list[str]:
        """The node of every bundle reserved for the group; none when there is no group."""
        group = self._worker_group
        slots: list[str] = [] if group is None else group.slots()
        return slots

    def call(self, world_rank: int, function: Callable[..., Any], *args: Any) -> Any:
        """A reference to the result of a function run in one worker's process."""
        return self._worker_group.get_workers()[world_rank].execute_async(function, *args)

    def call_all(
        self, function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]
    ) -> list[Any]:
        """References to the results of a function run in every worker, with its own arguments."""
        workers = self._worker_group.get_workers()
        return [
            worker.execute_async(function, *args)
            for worker, args in zip(workers, arguments, strict=True)
        ]

    def kill(self, world_rank: int) -> None:
        """End one worker's process by force."""
        ray.kill(self._worker_group.get_workers()[world_rank].actor)

    def has_group(self) -> bool:
        """Whether a group was started and not stopped."""
        return self._worker_group is not None

    def stop_group(self) -> None:
        """End every worker of the group and give its resources back."""
        if self._worker_group is not None:
            self._shutdown_worker_group()

    def poll_reports(self, timeout_s: float) -> WorkerGroupPollStatus:
        """Collect what ranks gave to `ray.train.report` since the last time. Blocks."""
        return self._worker_group.poll_workers(timeout_s)

    def hand_on(self, status: WorkerGroupPollStatus) -> dict[int, BaseException]:
        """Give it to Ray's checkpoint manager and to the user's callbacks; call on the event loop.

        Returns the errors of ranks whose training thread has ended.
        """
        if self._worker_group is not None:
            self._worker_group.tell_callbacks(status)
        return {rank: found.error for rank, found in status.worker_statuses.items() if found.error}

    def ask_for_resources(self) -> None:
        """Keep Ray's autoscaler told of the largest size this run would use."""
        self._scaling_policy._maybe_send_resource_request()

    async def end(self, error: Exception | None) -> None:
        """Bring Ray's own view of the run to its final state and run its closing callbacks."""
        final = FinishedState() if error is None else ErroredState(training_failed_error=error)
        self._set_state(ShuttingDownState(next_state=final))
        result = await self._shutdown()
        self._set_state(result.next_state)
        self._run_controller_hook(
            "after_controller_finish",
            self._build_result(),
            invoke_failure_decision_callbacks=False,
        )

    async def run(self) -> None:
        """The control loop: a subclass's."""
        raise NotImplementedError


class _Bucket(FSSpecHandler):
    """An object store for Ray Train, where a directory is nothing to be made.

    Arrow puts an object in its place, of which some stores make a file that nothing can be below.
    """

    def create_dir(self, path: str, recursive: bool) -> None:
        pass


def _give_storage(run_config: RunConfig) -> None:
    """Where Ray Train puts checkpoints that are given to `ray.train.report`, and its list of them.

    On an object store it is led there by our client. Arrow's own are led by other variables, and
    ask the cloud for a bucket's region.
    """
    place = Filesystem.at(str(run_config.storage_path))
    if not place.is_local:
        from elastic.storage.object_store import client_of  # which brings fsspec

        run_config.storage_context = StorageContext(
            storage_path=place.root,
            experiment_dir_name=run_config.name,
            storage_filesystem=PyFileSystem(_Bucket(client_of(place.store.scheme))),
        )


def _member(worker: Worker) -> GroupMember:
    context, metadata = worker.distributed_context, worker.metadata
    return GroupMember(
        world_rank=context.world_rank,
        world_size=context.world_size,
        local_rank=context.local_rank,
        local_world_size=context.local_world_size,
        node_rank=context.node_rank,
        node_id=metadata.node_id,
        node_ip=metadata.node_ip,
        pid=metadata.pid,
    )


def tell_rank(generation: int, checkpoint: str | None, **ranks: int) -> None:
    """Called in a worker's training thread: what `ray.train` says from now on.

    `checkpoint` is the directory of the one resumed from. `ranks` are world_rank, world_size,
    local_rank, local_world_size and node_rank.
    """
    context = get_train_context()
    context.distributed_context = DistributedContext(**ranks)
    context.checkpoint = None if checkpoint is None else Checkpoint(checkpoint)
    # Ranks that were there before have reported more often than new ones: all count alike again.
    context.collective_seq = generation * _REPORTS_PER_GENERATION
    _forget_reports()  # which must not be paired with those of a new rank


def _forget_reports() -> None:
    with contextlib.suppress(queue.Empty):
        while True:
            get_train_context().get_result_queue().get_nowait()


def launch(
    trainer: DataParallelTrainer,
    controller_class: type[Controller],
    train_function: Callable[[], None],
    env_vars: Mapping[str, str],
    **arguments: Any,
) -> Any:
    """The handle of a controller actor for this trainer, on the node of the calling script.

    It dies with the calling process, like Ray Train's own.
    """
    name, value = _WITHOUT_HEAD
    actor_class = ray.remote(
        num_cpus=0,
        label_selector={
            ray._raylet.RAY_NODE_ID_KEY: ray.get_runtime_context().get_node_id(),
        },
        runtime_env={"env_vars": {**_ENVIRONMENT, name: os.environ.get(name, value), **env_vars}},
    )(controller_class)
    scaling: ScalingPolicy = create_scaling_policy(trainer.scaling_config)
    # The cleaner was seen to take a living controller for dead when a node had just been lost, and
    # to remove the placement group under the survivors; `give_back` does what it is for. The other
    # starts a process for each group, also when there is no dataset to split.
    unwanted: tuple[type, ...] = (PlacementGroupCleanerCallback,)
    if not trainer.datasets:
        unwanted += (DatasetsCallback,)
    callbacks = [
        callback
        for callback in trainer._create_default_callbacks()
        if not isinstance(callback, unwanted)
    ]
    return actor_class.remote(
        train_fn_ref=ObjectRefWrapper(train_function),
        scaling_policy=scaling,
        failure_policy=create_failure_policy(trainer.run_config.failure_config),
        train_run_context=trainer.train_run_context,
        callbacks=callbacks,
        validation_config=trainer.validation_config,
        **arguments,
    )


def connection() -> object:
    """What tells one connection of this process to a cluster from the next; None without one.

    Asks no compiled code, so that it may be called while another thread shuts Ray down.
    """
    return ray._private.worker._global_node if ray.is_initialized() else None


def give_back(controller: Any) -> int:
    """Remove the placement groups of a controller that has died; how many there were.

    Ray ends a dead actor's own actors by itself, but keeps its placement groups while its job
    lives.
    """
    accessor = ray._private.state.state._connect_and_get_accessor()
    found = map(gcs_pb2.PlacementGroupTableData.FromString, accessor.get_placement_group_table())
    left = [
        group
        for group in found
        if group.creator_actor_id == controller._actor_id.binary()
        and group.state != gcs_pb2.PlacementGroupTableData.REMOVED
    ]
    for group in left:
        group_id = ray.PlacementGroupID(group.placement_group_id)
        remove_placement_group(PlacementGroup(group_id))
    return len(left)


def read_draining_nodes() -> dict[str, int]:
    """Ids of the nodes that are about to go, and until when they have, in ms since 1970; 0: none.

    Asks Ray.
    """
    found: dict[str, int] = ray._private.state.state.get_draining_nodes()
    return found


def read_nodes() -> list[dict[str, Any]]:
    """The nodes that Ray holds for alive and not draining, each with what is free on it now.

    Keys: node_id, address, port (of its raylet), available, total, labels. May be stale by as long
    as Ray's health checks take.
    """
    available = ray._private.state.available_resources_per_node()
    draining = read_draining_nodes()
    return [
        {
            "node_id": node["NodeID"],
            "address": node["NodeManagerAddress"],
            "port": node["NodeManagerPort"],
            "available": available.get(node["NodeID"], {}),
            "total": node["Resources"],
            "labels": node.get("Labels", {}),
        }
        for node in ray.nodes()
        if node["Alive"] and node["NodeID"] not in draining
    ]


def find_cluster(address: str | None) -> str:
    """`host:port` of a cluster's control store; None: the one that this machine runs or is told of.

    Makes ready for a cluster that wants a token, as `ray.init` does for the same address.

    Raises:
        ConnectionError: none is found, or several.
        ValueError: it is no such address.
    """
    found: str = ray._private.services.canonicalize_bootstrap_address_or_die(address)
    if address is None:
        maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    ensure_token_if_auth_enabled(create_token_if_missing=False)
    return found


class ClusterView:
    """A cluster as seen from a process that need be no part of it, and is no job of it.

    While nobody answers at its address a call waits, and in the end Ray ends this whole process.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        options = ray._raylet.GcsClientOptions.create(
            address, None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=True
        )
        self._state = ray._private.state.GlobalState()
        self._state._initialize_global_state(options)

    def living_nodes(self) -> dict[str, tuple[str, str]]:
        """Address and host name by node id of all nodes held for alive, draining or not."""
        return {
            node["NodeID"]: (node["NodeManagerAddress"], node["NodeManagerHostname"])
            for node in self._state.node_table()
            if node["Alive"]
        }

    def draining_nodes(self) -> dict[str, int]:
        """See `read_draining_nodes`."""
        found: dict[str, int] = self._state.get_draining_nodes()
        return found

    def holders(self, node_id: str) -> list[str]:
        """The actors on a node that hold resources of it, as workers do: class names and pids."""
        table = self._state._connect_and_get_accessor().get_actor_table(None, "ALIVE")
        actors = [gcs_pb2.ActorTableData.FromString(raw) for raw in table]
        return [
            f"{actor.class_name} (pid {actor.pid})"
            for actor in actors
            if actor.address.node_id.hex() == node_id and any(actor.required_resources.values())
        ]

    def drain(self, node_id: str, message: str, deadline_ms: int, timeout_s: float) -> str | None:
        """Have Ray drain a node, as one that is taken; None when it agrees, else why not.

        Nothing is put on the node from then on, and it goes by itself once nothing runs there. Ray
        ends nothing at the deadline, in ms since 1970; 0 is none. A later drain puts its own in
        place of the earlier one. A node that there is not is drained already, for Ray.
        """
        is_accepted, why = ray._raylet.GcsClient(address=self._address).drain_node(
            node_id,
            autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION"),
            message,
            deadline_ms,
            timeout=timeout_s,
        )
        return None if is_accepted else str(why)
