"""A thousand generated histories of failures, through the policy alone, on a toy cluster.

The cluster has no processes and no clock: it answers the policy's commands with events, and strikes
at random. What the policy then owes is counted a second time here, from the plain list of failures.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest

from elastic.policy import budgets, fitting
from elastic.policy import events as e
from elastic.policy.budgets import EXCEPTIONS, FREE, MOST_BACKOFF_S, MOST_IN_A_ROW
from elastic.policy.cause import is_victim
from elastic.policy.causes import Cause
from elastic.policy.situation import FINAL, Phase, Rules, Situation
from elastic.policy.transitions import decide

UNTIL, SAVE_EVERY = 24, 4
_FAILURES = ("failure_decided", "start_failed")
LOW_MEMORY = "Task was killed due to the node running low on memory.\nMemory on the node was 61 GB"
OUT_OF_CUDA = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79 GiB"
# Class -> how it looks to the driver: an error (type, text), or a death (Ray's text, its node too).
ERRORS = {
    Cause.USER_EXCEPTION: ("ValueError", "loss is nan in batch {}"),
    Cause.DATA: ("RuntimeError", "Caught KeyError in DataLoader worker process 0.\nitem {}"),
    Cause.CUDA_ERROR: ("AcceleratorError", "CUDA error: unspecified launch failure {}"),
    Cause.ECC_ERROR: ("RuntimeError", "CUDA error: uncorrectable ECC error encountered {}"),
    Cause.NCCL_ERROR: ("DistBackendError", "ncclInvalidUsage: Duplicate GPU detected {}"),
    Cause.STORAGE: ("OSError", "[Errno 28] No space left on device {}"),
    Cause.CUDA_MEMORY: ("OutOfMemoryError", OUT_OF_CUDA),
}
DEATHS = {
    Cause.WORKER_KILLED: ("Worker unexpectedly exits with a connection error code 2.", False),
    Cause.HOST_MEMORY: (LOW_MEMORY, False),
    Cause.NODE_LOST: ("", True),
    Cause.PREEMPTION: ("the actor's node was preempted: spot notice", True),
    Cause.HANG: ("", False),
}
STARTS = {
    Cause.START_UP: "RuntimeEnvSetupError: Failed to set up runtime environment. mirror {}",
    Cause.NODE_LOST: "a worker did not start: The actor died because its node has died. {}",
}


@dataclass
class Struck:
    """A failure as the cluster made it."""

    cause: Cause
    step: int
    words: str
    committed: int
    is_counted: bool = True
    has_stepped: bool = True


@dataclass
class Toy:
    """A cluster and a run on it. `bug` is a class of failure that comes at one step, each time."""

    rng: random.Random
    rules: Rules
    causes: tuple[Cause, ...] = ()
    num_strikes: int = 0
    chance: float = 0.25
    bug: tuple[Cause, int] | None = None
    fits_from: int = 1
    """Smaller groups run out of CUDA memory before their first step."""
    now: Situation = field(default_factory=Situation)
    time_s: float = 0.0
    step: int = 0
    committed: int = -1
    records: list[e.Record] = field(default_factory=list)
    struck: list[Struck] = field(default_factory=list)
    ran_out: list[int] = field(default_factory=list)
    """Sizes that were found too small, each time."""
    todo: list[e.Event] = field(default_factory=list)
    failed_s: float = 0.0

    def run(self) -> Toy:
        self.todo.append(e.CapacitySeen(num_workers=self.room()))
        for _ in range(20_000):
            if self.now.phase in FINAL and not self.todo:
                return self
            self.tell(self.todo.pop(0) if self.todo else self.next_event())
        raise AssertionError(f"it never ends: {self.now}")

    def room(self) -> int:
        return self.rng.randint(self.rules.min_workers, self.rules.max_workers)

    def tell(self, event: e.Event) -> None:
        self.time_s += 0.5
        decision = decide(self.rules, self.now, event, self.time_s)
        self.now = decision.situation
        if any(getattr(command, "kind", "") in _FAILURES for command in decision.commands):
            self.failed_s = self.time_s
        for command in decision.commands:
            self.perform(command)

    def perform(self, command: e.Command) -> None:
        if isinstance(command, e.Record):
            self.records.append(command)
        elif isinstance(command, e.StartGroup | e.Reform):
            assert command.world_size not in self.now.fitting.infeasible
            if isinstance(command, e.StartGroup):
                assert self.time_s >= self.failed_s + self.backoff_s
            self.todo.append(self.start(command))
            if isinstance(self.todo[-1], e.GroupStarted):
                self.todo.append(e.Progressed(generation=command.generation, step=self.step))
        elif isinstance(command, e.StopGroup):
            self.todo.append(e.GroupStopped(generation=command.generation))
        elif isinstance(command, e.LookForCapacity):
            self.todo.append(e.CapacitySeen(num_workers=self.room()))
        elif isinstance(command, e.StartJoiners):
            self.todo.append(e.JoinersReady(num=command.num))
        elif isinstance(command, e.OrderLeave):
            self.commit(self.step)
            ranks = range(self.now.world_size)
            generation = command.generation
            self.todo += [
                e.RankLeft(generation=generation, world_rank=rank, step=self.step) for rank in ranks
            ]

    def start(self, command: e.StartGroup | e.Reform) -> e.Event:
        starts = [cause for cause in STARTS if cause in self.causes]
        if isinstance(command, e.StartGroup) and starts and self.is_struck():
            cause = self.rng.choice(starts)
            self.note(cause, -1, STARTS[cause])
            reason = STARTS[cause].format(self.rng.random())
            return e.GroupStartFailed(
                generation=command.generation, reason=reason, is_capacity=False
            )
        self.step = max(0, self.committed)
        return e.GroupStarted(generation=command.generation, world_size=command.world_size)

    def next_event(self) -> e.Event:
        """What happens when nothing is owed: a step, a checkpoint, a fault, the end."""
        generation = self.now.generation
        if self.now.phase in (Phase.WAITING, Phase.HOLDING):
            return e.CapacitySeen(num_workers=self.room())
        if self.now.phase is not Phase.RUNNING:
            self.time_s += 1.0
            return e.Tick()
        if self.now.world_size < self.fits_from:
            self.ran_out.append(self.now.world_size)
            return self.strike(Cause.CUDA_MEMORY, is_counted=False)
        if self.bug and self.step == self.bug[1]:
            return self.strike(self.bug[0])
        if self.is_struck():
            cause = self.rng.choice([cause for cause in self.causes if cause is not Cause.START_UP])
            return self.strike(cause)
        if self.step >= UNTIL:
            self.todo += [
                e.RankFinished(generation=generation, world_rank=rank, step=self.step)
                for rank in range(1, self.now.world_size)
            ]
            return e.RankFinished(generation=generation, world_rank=0, step=self.step)
        if self.rng.random() < 0.1:
            return e.CapacitySeen(num_workers=self.room())
        self.step += 1
        if self.step % SAVE_EVERY == 0:
            self.commit(self.step)
        return e.Progressed(generation=generation, step=self.step)

    @property
    def has_stepped(self) -> bool:
        return self.now.stepped_generation == self.now.generation

    def is_struck(self) -> bool:
        if not self.causes or self.num_strikes <= 0 or self.rng.random() > self.chance:
            return False
        self.num_strikes -= 1
        return True

    def commit(self, step: int) -> None:
        if step > self.committed:
            self.committed = step
            self.todo.append(e.Committed(step=step))

    def note(self, cause: Cause, step: int, words: str, is_counted: bool = True) -> None:
        # The checkpoints that the policy has heard of by now.
        heard = [one for one in self.todo if isinstance(one, e.Committed)]
        for one in heard:
            self.todo.remove(one)
            self.tell(one)
        is_counted = is_counted and cause not in FREE
        committed, has_stepped = self.now.committed_step, self.has_stepped
        self.struck.append(Struck(cause, step, words, committed, is_counted, has_stepped))

    def strike(self, cause: Cause, *, is_counted: bool = True) -> e.Event:
        generation = self.now.generation
        words = "" if cause is Cause.WORKER_KILLED else str(cause)
        # A rank that raises knows its step; for others it is the last that was heard of.
        is_heard = cause in ERRORS or self.now.heard_first[0] == generation
        step = self.step if is_heard else self.now.committed_step
        self.note(cause, step, words, is_counted)
        rank = self.rng.randrange(self.now.world_size)
        if cause in ERRORS:
            name, text = ERRORS[cause]
            text = text.format(self.rng.randrange(10**6))
            error = e.RankError(
                world_rank=rank,
                type_name=name,
                message=text,
                is_victim=is_victim(name, text),
                step=step,
            )
            return e.RankFailed(generation=generation, error=error)
        if cause is Cause.COMMUNICATION:
            lost = e.RankError(
                world_rank=0,
                type_name="RuntimeError",
                message="Connection closed by peer",
                is_victim=True,
            )
            self.todo.append(e.Tick())
            self.time_s += self.rules.gather_s
            return e.RankFailed(generation=generation, error=lost)
        told, node_lost = DEATHS[cause]
        hang = "it runs on at train.py:4" if cause is Cause.HANG else ""
        return e.WorkerDied(
            generation=generation,
            world_rank=rank,
            node_lost=node_lost,
            detail="gone",
            told=told,
            hang=hang,
        )

    # --- what is owed, counted from the list of failures -----------------------------------------

    def since_checkpoint(self) -> list[Struck]:
        """Counted failures since the newest checkpoint that the last of them knew of."""
        newest = max((one.committed for one in self.struck), default=-1)
        return [one for one in self.struck if one.is_counted and one.committed == newest]

    @property
    def backoff_s(self) -> float:
        num = len(self.since_checkpoint())
        is_counted = bool(self.struck) and self.struck[-1].is_counted
        return min(MOST_BACKOFF_S, 2.0 ** (num - 2)) if is_counted and num > 1 else 0.0

    def is_spent(self) -> bool:
        """Whether the last failure must end the run."""
        last, rules = self.struck[-1], self.rules
        if not last.is_counted:
            return False
        alone = rules.max_failures_by_cause
        recent = self.since_checkpoint()
        total = Counter(one.cause for one in self.struck if one.is_counted)
        in_a_row = Counter(one.cause for one in recent)
        if last.cause in alone:
            used = total if last.cause in EXCEPTIONS else in_a_row
            spent = 0 <= alone[last.cause] < used[last.cause]
        else:
            exceptions = sum(total[cause] for cause in EXCEPTIONS if cause not in alone)
            together = sum(num for cause, num in in_a_row.items() if cause not in alone)
            spent = together > rules.max_failures_without_progress
            spent |= last.cause in EXCEPTIONS and 0 <= rules.max_failures < exceptions
            spent |= in_a_row[last.cause] > MOST_IN_A_ROW.get(last.cause, 10**6)
        return spent or self.is_same_again(recent)

    def is_same_again(self, recent: list[Struck]) -> bool:
        last = self.struck[-1]
        if last.cause in (Cause.STORAGE, Cause.START_UP, Cause.DRIVER):
            return False
        is_wordless = last.cause is Cause.COMMUNICATION or not last.words
        if is_wordless and not last.has_stepped:
            return False
        owed = 3 if is_wordless else 2
        run = 0
        for one in reversed(self.struck):
            if one.cause is Cause.CUDA_MEMORY and not one.is_counted:
                continue  # a size was ruled out
            if (one.cause, one.step, one.words) != (last.cause, last.step, last.words):
                break
            if one not in recent:
                break
            run += 1
        return run >= owed


def some_rules(rng: random.Random, **others: object) -> Rules:
    low = rng.randint(1, 2)
    rules = Rules(
        min_workers=low,
        max_workers=low + rng.randint(1, 4),
        max_failures=rng.choice([-1, 0, 1, 3]),
        max_failures_without_progress=rng.choice([2, 5]),
        max_failures_by_cause=rng.choice([{}, {}, {"nccl_error": 1, "data": 2}, {"storage": -1}]),
        wait_for_capacity_s=1e9,
        grow_interval_s=5.0,
        warm=rng.random() < 0.5,
    )
    return replace(rules, **others)  # type: ignore[arg-type]


ALL = tuple(cause for cause in Cause if cause not in (Cause.DRIVER, Cause.CUDA_MEMORY))


def check(toy: Toy) -> None:
    """What holds for every history."""
    assert toy.now.phase in (Phase.FINISHED, Phase.FAILED)
    for end in range(1, len(toy.struck)):
        before = replace_struck(toy, end)
        assert not before.is_spent(), f"failure {end} should have ended it: {before.struck[-1]}"
    assert (toy.now.phase is Phase.FAILED) == bool(toy.struck and toy.is_spent())
    # A driver that takes the run up now counts on where this one stopped.
    assert budgets.fold(toy.records) == toy.now.budgets
    assert fitting.fold(toy.records).infeasible == toy.now.fitting.infeasible


def replace_struck(toy: Toy, end: int) -> Toy:
    return replace(toy, struck=toy.struck[:end])


@pytest.mark.parametrize("seed", range(400))
def test_any_failures_in_any_order(seed: int):  # B85
    print(f"seed {seed}")
    rng = random.Random(seed)
    causes = tuple(rng.sample(ALL, rng.randint(1, 5)))
    if causes == (Cause.START_UP,):
        causes = (Cause.START_UP, Cause.STORAGE)
    check(Toy(rng, some_rules(rng), causes=causes, num_strikes=rng.randint(1, 12)).run())


@pytest.mark.parametrize("seed", range(200))
def test_no_run_is_failed_by_preemptions(seed: int):  # B85, B87
    print(f"seed {seed}")
    rng = random.Random(seed)
    rules = some_rules(rng, max_failures=0, max_failures_without_progress=0)
    causes = (Cause.PREEMPTION, Cause.NODE_LOST)
    toy = Toy(rng, rules, causes=causes, num_strikes=rng.randint(20, 60), chance=0.8).run()
    check(toy)
    assert toy.now.phase is Phase.FINISHED and len(toy.struck) >= 20
    assert toy.now.budgets.in_total == {}


@pytest.mark.parametrize("seed", range(200))
def test_no_deterministic_bug_is_retried_more_than_stated(seed: int):  # B78
    print(f"seed {seed}")
    rng = random.Random(seed)
    kinds = [Cause.USER_EXCEPTION, Cause.DATA, Cause.CUDA_ERROR, Cause.HANG, Cause.HOST_MEMORY]
    cause = rng.choice([*kinds, Cause.WORKER_KILLED])
    step = rng.randrange(UNTIL)
    if cause is Cause.WORKER_KILLED and step % SAVE_EVERY == 0:
        step += 1  # the next try must come to a step of its own
    rules = some_rules(rng, max_failures=-1, max_failures_without_progress=100, warm=False)
    toy = Toy(rng, replace(rules, max_failures_by_cause={}), bug=(cause, step)).run()
    check(toy)
    assert toy.now.phase is Phase.FAILED
    # A checkpoint may have come after the first try.
    most = 3 if cause is Cause.WORKER_KILLED else 2
    assert len(toy.struck) in (most, most + 1)
    assert len(toy.records) and toy.records[-1].kind == "run_failed"
    reason = toy.records[-1].reason
    assert str(cause) in reason
    assert f"after step {step}" in reason or (step == 0 and "before its first step" in reason)


@pytest.mark.parametrize("seed", range(200))
def test_sizes_that_do_not_fit_are_left_out(seed: int):
    print(f"seed {seed}")
    rng = random.Random(seed)
    rules = some_rules(rng, max_failures=0, max_failures_without_progress=0)
    fits_from = rng.randint(rules.min_workers, rules.max_workers + 1)
    toy = Toy(rng, rules, fits_from=fits_from, causes=(Cause.NODE_LOST,), num_strikes=9).run()
    fits = fits_from <= rules.max_workers
    assert toy.now.phase is (Phase.FINISHED if fits else Phase.FAILED)
    assert budgets.fold(toy.records) == toy.now.budgets
    assert len(toy.ran_out) == len(set(toy.ran_out))  # each of them once
    if not fits:
        assert "no size from" in toy.now.reason
