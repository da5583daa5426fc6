"""The handle that a training function receives: tracking, data, the step loop and its boundaries.

Saves, orders of the driver and re-forms happen at step boundaries, here and nowhere else. Works
with any `Coordinator`; must not import ray.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh

from elastic.storage.checkpoints import Catalog
from elastic.storage.filesystem import Filesystem
from elastic.training import rng
from elastic.training.agreement import Agreement
from elastic.training.checkpoint import AsyncSaver
from elastic.training.coordinator import Coordinator, Reform
from elastic.training.data import GlobalLoader, MicroBatch
from elastic.training.gradients import prepare_fsdp
from elastic.training.loaders import Loaders
from elastic.training.local_files import open_tier
from elastic.training.membership import Membership, TrainingConfig
from elastic.training.meshes import check_sharding
from elastic.training.node_memory import NodeMemory
from elastic.training.process_group import Groups
from elastic.training.reporter import Reporter
from elastic.training.restore import begin
from elastic.training.saves import Saves
from elastic.training.shortcuts import LONG_STEP_S, Evaluation, Mark, Poll, evaluate, way_out
from elastic.training.snapshots import Snapshots
from elastic.training.state import TrackedState
from elastic.training.step import Step
from elastic.training.step_metrics import StepMetrics
from elastic.training.until import Until

T = TypeVar("T")
_COUNTERS = ("step", "samples", "tokens", "epoch")


class Run:
    """What a training function knows of its run. Made by the service, once per generation."""

    def __init__(
        self,
        *,
        member: Membership,
        config: TrainingConfig,
        coordinator: Coordinator,
        groups: Groups,
        device: torch.device,
        kept: dict[str, Any],
        memory: NodeMemory | None = None,
    ) -> None:
        """`memory` outlives this process; without it there are no snapshots."""
        self.config: dict[str, Any] = config.config
        """The user's own configuration (`train_loop_config`)."""
        self.seed = config.seed
        self.device = device
        self.generation = member.generation
        self.world_rank = member.world_rank
        self.world_size = member.world_size
        self.local_rank = member.local_rank
        self.mesh: DeviceMesh = groups.mesh
        """All ranks, by the dimensions of the run's `Mesh`: `replicate`, `shard`, `tensor`."""
        self.data_mesh: DeviceMesh = groups.mesh[groups.shape.data_names]
        """The part of it for `fully_shard`: the dimensions over which the samples are split."""
        self.data_rank = groups.shape.data_rank(member.world_rank)
        """Whose samples this rank has: ranks of one tensor-parallel group have the same."""
        self.data_size = groups.shape.data_size
        self.step = 0
        """Finished optimizer steps over the whole run; likewise below."""
        self.samples = self.tokens = self.epoch = 0
        self._member = member
        self._settings = config
        self._coordinator = coordinator
        self._groups = groups
        self._kept = kept
        self._loaders = Loaders(coordinator, member, groups.shape, config.accept_changes)
        self._state: TrackedState | None = None
        self._rng: Callable[[], None] | None = None
        self._last_step_s = 0.0
        self._long_step_s: float | None = None
        self._is_dropped = False
        self._reporter = Reporter(coordinator, world_size=member.world_size)
        self._metrics = StepMetrics(self._reporter, groups, member, coordinator)
        self._begun_s = time.monotonic()
        self._loaded_s: float | None = None
        both: dict[str, Any] = {"member": member, "groups": groups, "reporter": self._reporter}
        both |= {"config": config, "positions": self._loaders.states}
        self._snapshots = Snapshots(memory=memory, tell=coordinator.notify, **both)
        saver = self.once("elastic.saver", AsyncSaver)
        saver.attach(groups.saves)
        self._local = open_tier(config, member, coordinator, groups.control)
        both |= {"filesystem": Filesystem.at(config.run_url), "local": self._local}
        self._saves = Saves(coordinator=coordinator, saver=saver, **both)

    # --- set-up -----------------------------------------------------------------------------

    def once(self, key: str, make: Callable[[], T]) -> T:
        """What `make` returned the first time in this process, kept over generations."""
        if key not in self._kept:
            self._kept[key] = make()
        kept: T = self._kept[key]
        return kept

    def track(self, **objects: Any) -> None:
        """Name everything a checkpoint holds, and restore it in place if there is one to resume.

        `model` and `optimizer` by those names; a scheduler, a GradScaler, an EMA, counters or
        anything with `state_dict` and `load_state_dict` by any name. FSDP2 modules are set to sum
        gradients rather than to average them, since the loss is divided already.

        Raises:
            StateMismatch: the checkpoint does not fit these objects; names the parameter.
            ValueError: a model is sharded over other dimensions than those of `data_mesh`.
            NoSoundCheckpoint: there are checkpoints, and the bytes of every one are bad.
            SnapshotsDoNotFit, HostMemoryShort: a node has too little memory for snapshots or saves.
        """
        if self._state is not None:
            raise RuntimeError(
                "run.track was called twice; expected one call that names everything a checkpoint "
                "should hold, such as run.track(model=model, optimizer=optimizer)"
            )
        for value in objects.values():
            if isinstance(value, torch.nn.Module):
                prepare_fsdp(value)
                check_sharding(value, self.mesh, self._groups.shape)
            elif isinstance(value, torch.optim.Optimizer):
                self._reporter.follow(value)
        self._state = self._snapshots.checked(TrackedState(**objects), self._saves.missing_bytes)
        self._rng = lambda: rng.derive(self.seed, 0, self.data_rank)
        built_s = time.monotonic()
        self._reporter.phase = "load"
        source = self._restore(self._saves.prepared(self._state))
        self._loaded_s = time.monotonic()
        self._rng()
        self._reporter.step = self.step
        self._reporter.phase = "build"
        took = {"build_s": built_s - self._begun_s, "load_s": self._loaded_s - built_s}
        told = {"step": self.step, "resumed": source != "", "source": source, **took}
        self._coordinator.notify("restored_state", told)

    def _restore(self, state: TrackedState) -> str:
        """Where the state came from: memory, storage, or "" where nothing was there."""
        restored = begin(
            state,
            self._member,
            load_from=self._settings.load_from,
            catalog=Catalog(Filesystem.at(self._settings.run_url), self._member.run_id),
            coordinator=self._coordinator,
            control=self._groups.control,
            memory=self._snapshots.memory,
            on_size=self._reporter.moves,
            local=self._local,
        )
        if restored is None:
            return ""
        for name in _COUNTERS:
            setattr(self, name, restored.plain["counters"][name])
        self._saves.restored(self.step, is_snapshot=restored.is_snapshot)
        self._loaders.restored(restored.plain)
        saved = rng.streams_for(restored.rank_plain, self._groups.shape)
        at, tell = (self.seed, self.step, self.data_rank), self._coordinator.notify
        self._rng = lambda: rng.restore_or_derive(
            saved, *at, lambda names: tell("rng_left_out", {"streams": names})
        )
        return "memory" if restored.is_snapshot else "storage"

    def loader(
        self,
        dataset: Any,
        *,
        global_batch: int,
        micro_batch: int,
        count_tokens: Callable[[Any], int] | None = None,
        pad: Callable[[Any], Any] | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        shuffle: bool = True,
        window: int | None = None,
        name: str = "data",
    ) -> GlobalLoader:
        """This rank's part of each global batch, from where the loader of this name stands.

        `global_batch` and `micro_batch` are in samples. The order is a function of seed and epoch,
        in a `window` of so many blocks where the dataset tells them. `count_tokens(batch)` gives
        the valid tokens of a micro-batch, `pad(batch)` one without. Checkpoints know it by `name`.

        Raises:
            ValueError: see `GlobalLoader`.
            RuntimeError: called before `run.track`, which tells where the run stands.
        """
        self._tracked("run.loader")
        loader = GlobalLoader(
            dataset,
            **self._loaders.start(name, self.samples),
            global_batch=global_batch,
            micro_batch=micro_batch,
            seed=self.seed,
            world_rank=self.data_rank,
            world_size=self.data_size,
            num_workers=num_workers,
            shuffle=shuffle,
            window=window,
            collate=collate,
            pad=pad,
            count_tokens=count_tokens,
            device=self.device,
        )
        return self._loaders.add(name, loader)

    def _tracked(self, caller: str) -> TrackedState:
        if self._state is None:
            raise RuntimeError(
                f"{caller} needs to know where the run stands; "
                "call run.track(model=..., optimizer=...) before it"
            )
        return self._state

    # --- the loop ---------------------------------------------------------------------------

    def steps(
        self,
        loader: GlobalLoader,
        until: int | None = None,
        *,
        until_samples: int | None = None,
        until_tokens: int | None = None,
    ) -> Iterator[Step]:
        """The optimizer steps still to do, until a total of steps, samples or tokens.

        The state of step 0 is committed before step 1, and that of the last step before this ends.

        Raises:
            SaveFailed: a checkpoint that must be there could not be committed.
        """
        state = self._tracked("run.steps")
        end = Until(until, until_samples, until_tokens)
        if self._rng is not None:
            self._rng()  # last of all: nothing the user did while building draws from these streams
            self._rng = None
        self._commit_start(state)

        def is_over() -> bool:
            return end.is_reached(self.step, self.samples, self.tokens)

        if not is_over():
            self._loaders.begin(loader, self.step)
        batches = iter(loader)
        phases = ("first batch", "first step")
        while not is_over():
            self._reporter.phase = phases[0]
            micro_batches: list[MicroBatch] = next(batches)
            num_tokens = sum(batch.num_valid_tokens for batch in micro_batches)
            agreement = self._agree(num_tokens, place=loader.place)
            step = Step(
                number=self.step + 1,
                batches=micro_batches,
                num_valid_tokens=agreement.num_valid_tokens,
                device=self.device,
                between=self._way_out(state, len(micro_batches)),
            )
            self._reporter.phase = phases[1]
            begun_s = time.monotonic()
            try:
                yield step
            except GeneratorExit:
                # Left by `break`, the step counts as done; left by an error, peers may be gone.
                with contextlib.suppress(RuntimeError):
                    if not self._is_dropped:
                        self._finished(loader, agreement)
                raise
            self._last_step_s = time.monotonic() - begun_s
            self._finished(loader, agreement)
            self._metrics.push(step, agreement, begun_s)
            phases = ("data", "forward-backward")
            if not is_over():
                self._boundary(state, agreement)
        self._save_now(state, "end")

    def end_step(self, *, samples: int, tokens: int = 0) -> None:
        """Finish one optimizer step of a loop that the user owns outright.

        `samples` and `tokens` are what this rank used in the step; they are summed over the ranks,
        once for each tensor-parallel group. Saves, notices and re-forms happen in here.
        """
        state = self._tracked("run.end_step")
        self._rng = None
        self._loaders.own(self.step)
        self._commit_start(state)
        agreement = self._agree(tokens, samples)
        self._loaders.counted(agreement.num_samples())
        self._advance(agreement.num_samples(), agreement, self.epoch)
        self._boundary(state, agreement)
        self._reporter.phase = "forward-backward"

    def evaluation(self) -> AbstractContextManager[Evaluation]:
        """A phase of its own, with its own limits; the random streams are restored after it.

        What it gives has `batches(items)`: the same items, but when the group has to leave within
        a given time they end early, on all ranks alike, so that the step can be finished and
        saved; `is_cut` tells it. All ranks have to go through equally many.
        """
        return evaluate(self._reporter, self._coordinator, self._groups.control)

    # --- boundaries -------------------------------------------------------------------------

    def _commit_start(self, state: TrackedState) -> None:
        if self.step == 0 and self._saves.committed_step < 0:
            self._save_now(state)

    def _agree(self, num_valid_tokens: int, num_samples: int = 0, place: int = 0) -> Agreement:
        orders = self._coordinator.orders()
        is_counted = self._groups.shape.is_counted(self.world_rank)
        return Agreement(
            num_valid_tokens=num_valid_tokens * is_counted,
            num_samples=num_samples * is_counted,
            save=self.world_rank == 0 and self._saves.is_wanted(self.step + 1, orders.saves_asked),
            leave=orders.leave,
            last_step_s=self._last_step_s,
            group=self._groups.control,
            place=place,
            saves_ended=not self._saves.is_in_flight,
            snapshot=(self._snapshots.is_ended, self._snapshots.is_kept),
        )

    def _way_out(self, state: TrackedState, num_batches: int) -> Callable[[], None] | None:
        """What is asked between the micro-batches of a long step; None for a short one."""
        if self._long_step_s is None:
            return None
        return way_out(
            state,
            Poll(self._groups.control, batch_s=self._long_step_s / num_batches),
            is_asked=lambda: self._coordinator.orders().drop_step,
            leave=lambda mark: self._save_and_leave(state, mark),
        )

    def _finished(self, loader: GlobalLoader, agreement: Agreement) -> None:
        self._loaders.finished(loader, self.step + 1, agreement)
        self._advance(loader.global_batch, agreement, loader.epoch)

    def _advance(self, num_samples: int, agreement: Agreement, epoch: int) -> None:
        self.step += 1
        self.samples += num_samples
        self.tokens += agreement.num_valid_tokens()
        self.epoch = epoch
        self._reporter.step = self.step
        self._reporter.counters = self._counters()
        if self._loaded_s is not None:
            took_s, self._loaded_s = time.monotonic() - self._loaded_s, None
            self._coordinator.notify("first_step", {"step": self.step, "first_step_s": took_s})

    def _counters(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in _COUNTERS}

    def _boundary(self, state: TrackedState, agreement: Agreement) -> None:
        self._saves.settle()
        took_s = agreement.last_step_s()
        self._long_step_s = took_s if took_s >= LONG_STEP_S else None
        if agreement.leave():
            self._save_and_leave(state)
        counters = self._counters()
        self._snapshots.at_boundary(state, counters, agreement, self._metrics.flush)
        if agreement.save():
            self._reporter.phase = "save"
            self._metrics.flush()
            self._saves.save_or_skip(state, counters, is_free=agreement.saves_ended())

    def _save_and_leave(self, state: TrackedState, mark: Mark | None = None) -> None:
        self._is_dropped = mark is not None
        self._save_now(state, mark=mark)
        raise Reform(f"left at step {self.step}")

    def _save_now(self, state: TrackedState, phase: str = "save", mark: Mark | None = None) -> None:
        self._reporter.phase = phase
        self._metrics.flush()
        self._saves.save_and_wait(state, self._counters(), mark)

    def finish(self) -> None:
        """Called by the service when the training function has returned.

        Raises:
            SaveFailed: the last step could not be committed.
        """
        if self._state is not None:
            self._save_now(self._state, "end")
        self.close(is_over=True)

    def close(self, *, is_over: bool = False) -> None:
        """End this run's threads. The process groups are the caller's to end."""
        self._loaders.close()
        self._reporter.close()
        if self._local is not None:
            self._local.close(is_over=is_over)
