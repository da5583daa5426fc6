"""Saves in a row on storage that fails at random: what is called complete, and what is lost.

Two ranks save, this process commits and retains, as a driver does: the same code, over a store that
is slow, stuck, full, refuses, tears and loses, on a disk and on an object store in turn. Now and
then the driver ends in the middle of a commit, or the ranks are killed in the middle of a save.
After each save every complete checkpoint is loaded and compared to the bit, and none that was
acknowledged may be missing but for those that retention may remove.
"""

from __future__ import annotations

import contextlib
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from elastic.policy.retention import Retention
from elastic.storage.checkpoints import Catalog
from elastic.storage.filesystem import Filesystem
from elastic.storage.local_store import LocalStore
from elastic.training import failed_saves
from elastic.training.coordinator import Shard
from elastic.training.held_checkpoint import hold
from elastic.training.publishing import publish
from jobs.soak.failing_store import Crashed, ObjectsOnDisk
from jobs.soak.saving_ranks import RanksGone, SavingRanks, Task, filesystem, running, values

__all__ = ["soak"]

_KEEP = Retention(keep=3, keep_every=50)
_KILLED_ONCE_IN = 100
_TELL_EVERY = 20
_TO_BE_EXPECTED = (
    "faults are injected from here on: what is logged of refusals (Permission denied), stale file "
    "handles, full disks, calls without an answer, crashes and kills is of these"
)


class _Run:
    """One run directory, its driver, and what that has acknowledged."""

    def __init__(self, url: str, seed: int) -> None:
        self.url = url
        self.seed = seed
        self.fs, self.failing = filesystem(url, may_crash=True)
        store = ObjectsOnDisk() if self.fs.store.scheme else LocalStore()
        self.sound = Catalog(Filesystem(store, self.fs.root), "soak")
        """The same directory, through storage that does not fail."""
        self.catalog = Catalog(self.fs, "soak")
        self.acknowledged: set[int] = set()
        self.generation = self.attempt = 0

    def save(self, ranks: SavingRanks, step: int, kill_after_s: float | None) -> str:
        """Why the save failed, "" if it was committed."""
        self.attempt += 1
        task = Task(
            url=self.url,
            step=step,
            generation=self.generation,
            attempt=self.attempt,
            path=self.catalog.attempt_path(step, self.generation, self.attempt),
            seed=f"{self.seed}/{step}",
        )
        shards = ranks.save(task, kill_after_s)
        failures = [shard.failure for shard in shards if shard.failure]
        if failures:
            return self._failed(shards[0], failures[0])
        self.failing.strike(f"{task.seed}/driver")
        try:
            try:
                published = publish(self.catalog, shards, _KEEP, ())
            except Exception as error:  # noqa: BLE001 - a failed save is what this is about
                return self._failed(shards[0], f"{type(error).__name__}: {error}")
        except Crashed:  # in the commit, or while it is cleaned up after
            self.failing.rest()
            self.begin_anew()
            return "driver crashed"
        finally:
            self.failing.rest()
        self.acknowledged.add(published.step)
        self.acknowledged.difference_update(published.removed)
        return ""

    def begin_anew(self) -> None:
        """The next life of the driver: its generation fences off the one before."""
        self.generation += 1
        self.catalog.sweep(self.generation)

    def _failed(self, shard: Shard, reason: str) -> str:
        removed = failed_saves.clean_up(
            self.catalog, shard, reason, _KEEP, (), check_right=lambda: None
        )
        self.acknowledged.difference_update(removed)
        return reason

    def judge(self, step: int) -> tuple[int, list[str]]:
        """How many checkpoints were loaded, and what is wrong with any."""
        complete = self.sound.complete_steps()
        wrong = [problem for found in complete for problem in self._compared(found)]
        # A driver that crashed while it retained has told nobody what it had removed by then.
        may_go = set(_KEEP.to_remove([*self.acknowledged, *complete, step], ()))
        lost = self.acknowledged - set(complete) - may_go
        wrong += [f"lost: step {gone} was acknowledged, {self._why(gone)}" for gone in lost]
        self.acknowledged &= set(complete)
        return len(complete), wrong

    def _why(self, step: int) -> str:
        return self.sound.inspect(step).reason

    def _compared(self, step: int) -> list[str]:
        manifest = self.sound.manifest(step)
        expected = values(step, manifest.generation, manifest.attempt)
        try:
            with hold(self.sound, step) as held:
                held.verify(held.tensors, lambda done, all_: None)
                found = {name: held.read(stored) for name, stored in held.tensors.items()}
        except Exception as error:  # noqa: BLE001 - whatever it is, it does not load
            return [f"wrong: step {step} is complete and does not load: {error}"]
        if found.keys() != expected.keys():
            return [f"wrong: step {step} has the tensors {sorted(found)}"]
        differing = [name for name in found if not torch.equal(found[name], expected[name])]
        return [f"wrong: step {step} has other values in {name}" for name in differing]


def soak(count: int, seed: int, say: Callable[[str], None]) -> dict[str, Any]:
    """What became of so many saves. `failures` says what must not be, [] if all is well."""
    begun_s, chance = time.monotonic(), random.Random(seed)
    failed: Counter[str] = Counter()
    injected: Counter[str] = Counter()
    found: dict[str, Any] = {"saves": count, "committed": 0, "kills": 0, "verified_loads": 0}
    failures: list[str] = []
    say(_TO_BE_EXPECTED)
    with (
        tempfile.TemporaryDirectory(prefix="soak-storage-") as folder,
        contextlib.ExitStack() as up,
    ):
        runs = [_Run(f"{folder}/disk", seed), _Run(f"objects://{folder}/objects", seed + 1)]
        group = up.enter_context(contextlib.ExitStack())
        ranks = group.enter_context(running())
        for step in range(1, count + 1):
            run = runs[step % len(runs)]
            is_killed = chance.random() < 1 / _KILLED_ONCE_IN
            kill_after_s = chance.random() * 0.05 if is_killed else None
            try:
                reason = run.save(ranks, step, kill_after_s)
            except RanksGone as error:
                reason = str(error) if kill_after_s is None else "ranks killed"
                found["kills"] += 1
                injected += ranks.injected
                group.close()
                ranks = group.enter_context(running())
                run.begin_anew()
            found["committed"] += not reason
            if reason:
                failed[_in_short(reason)] += 1
            num_loaded, wrong = run.judge(step)
            found["verified_loads"] += num_loaded
            failures += [f"after save {step}: {problem}" for problem in wrong]
            if step % _TELL_EVERY == 0 or wrong or step == count:
                say(f"{step}/{count} saves, {found['committed']} committed, {len(failures)} wrong")
        injected += ranks.injected
        left = [each for run in runs for each in _leftovers(run)]
    for run in runs:
        injected += run.failing.injected
    found |= {
        "failed": dict(failed.most_common()),
        "left_behind": left,
        "faults": dict(injected.most_common()),
        "lost": sum("lost: " in failure for failure in failures),
        "wrong": sum("wrong: " in failure for failure in failures),
        "crashes": injected["crash"],
        "seconds": round(time.monotonic() - begun_s, 1),
        "seed": seed,
        "failures": failures,
    }
    say(_sum(found))
    return found


def _sum(found: dict[str, Any]) -> str:
    faults = ", ".join(f"{kind} {num}" for kind, num in found["faults"].items() if kind != "crash")
    return (
        f"{found['saves']} saves, {found['committed']} committed, {found['verified_loads']} "
        f"verified loads, {found['wrong']} wrong, {found['lost']} lost; injected: "
        f"{faults or 'no faults'}; {found['crashes']} crashes of the driver, "
        f"{found['kills']} kills of the ranks"
    )


def _leftovers(run: _Run) -> list[str]:
    """Attempts that the next driver does not clear away, such as those whose marker came late."""
    run.begin_anew()
    return [
        str(Path(run.url) / each.path)
        for each in run.sound.list()
        if not each.complete and ".tmp-" in each.path
    ]


def _in_short(reason: str) -> str:
    signs = {
        "No space left": "full disk",
        "Stale file": "error",
        "Permission denied": "refusal",
        "no answer within": "hang",
        "earlier call": "hang",
        "storage does not hold": "lost or torn write",
        "Connection reset": "lost answer",
        "driver crashed": "driver crashed",
        "ranks killed": "ranks killed",
    }
    return next((short for sign, short in signs.items() if sign in reason), reason[:120])
