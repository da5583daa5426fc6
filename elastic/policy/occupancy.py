"""Occupancy: which slots a run held from moment to moment, and what they were held for. Pure.

Folds the words of a ledger into stretches of held time, each with its slots: a slot is the place of
one worker. Between two words nothing changes, so that the stretches tile each life of the driver.

Where the number of slots comes from. `generation_planned` holds as many as it plans, from then on,
for a ledger does not tell when each was placed; `generation_started` as many as there were.
`growth_planned` adds those of the joiners. A dead process leaves its slot held, a lost node takes
it away. `waiting`, `start_failed` and the end of the run hold none. Nobody's is the time between
two submissions; that between a driver's last word and its successor's first is the run's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


class Told(Protocol):
    """An event of the ledger."""

    @property
    def life(self) -> int: ...

    @property
    def time_s(self) -> float: ...

    @property
    def kind(self) -> str: ...

    @property
    def generation(self) -> int: ...

    @property
    def step(self) -> int: ...

    @property
    def data(self) -> Mapping[str, Any]: ...


@dataclass(kw_only=True)
class Held:
    """Time, and the slots that were held in it."""

    wall_s: float = 0.0
    slot_s: float = 0.0

    def take(self, other: Held) -> None:
        """All that `other` has; it has nothing afterwards."""
        self.wall_s, self.slot_s = self.wall_s + other.wall_s, self.slot_s + other.slot_s
        other.wall_s = other.slot_s = 0.0


@dataclass(kw_only=True)
class Reform:
    """From a failure, or a group that has left, to the next group that trains."""

    held: Held = field(default_factory=Held)
    phases_s: dict[str, float] = field(default_factory=dict)
    """As `recovered` tells them; empty before that."""
    after: int = -1
    """The generation that was before."""
    is_injected: bool = False


@dataclass(kw_only=True)
class Training:
    """One generation, from when all its ranks have loaded until it failed, left or ended."""

    trains: Held = field(default_factory=Held)
    detects: Held = field(default_factory=Held)
    """From the moment it was seen to stand still, or its driver's last word, to the decision."""
    phases_s: dict[str, float] = field(default_factory=dict)
    """Rank 0's phases, of which each `progress` shows one: it stands for the time since the last
    such word."""
    reform: Reform | None = None
    """What led to it; None for a first start."""
    first_step: int = 0
    last_step: int = -1
    """The highest that was told while it trained; -1 if none was."""
    lost_steps: int = 0
    """Finished by it and done again, as the next `recovered` tells."""
    save_stall_s: float = 0.0
    ended_s: float | None = None
    """When it ended in a failure, or stood still before one, in wall time."""
    is_leaving: bool = False
    is_injected: bool = False


class Occupancy:
    """Hears the words of a ledger in their order. See the module's docstring."""

    def __init__(self) -> None:
        self.whole = Held()
        """All of it: the time of all lives, and its slots."""
        self.without_slots_s = 0.0
        """How much of that time the run held no slot at all."""
        self.start_up = Held()
        self.waiting = Held()
        """Slots that were held by workers that waited for others to take the places of the lost."""
        self.closing = Held()
        """From the end of the last group to the run's last word."""
        self.trainings: dict[int, Training] = {}
        self.reforms: list[Reform] = []
        self._away = Held()
        self._stands_still = Held()
        self._ending = Held()
        self._into = self._away
        self._slots = 0
        self._joiners = 0
        self._now_s: float | None = None
        self._life: int | None = None
        self._reform: Reform | None = None
        self._training: Training | None = None
        self._phase_since_s = 0.0
        self._step = -1
        self._last_save: tuple[int, float] = (-1, 0.0)

    def hear(self, event: Told) -> None:
        """Take in one word."""
        if event.kind == "driver_lost" and self._now_s is not None:
            self._lose_driver(event)
        elif event.life != self._life:
            self._begin_life(event)
        self._life = event.life
        self._pass(event.time_s)
        self._reached(event)
        handler = _HANDLERS.get(event.kind)
        if handler is not None:
            handler(self, event)

    def end(self) -> None:
        """There are no more words: what was undecided is what it looked like."""
        if self._training is not None:
            self._training.trains.take(self._stands_still)
        self.closing.take(self._ending)

    def _pass(self, time_s: float) -> None:
        before_s = time_s if self._now_s is None else self._now_s
        self._now_s = max(before_s, time_s)  # a clock that was set back
        took_s = self._now_s - before_s
        self.whole.wall_s += took_s
        self.whole.slot_s += took_s * (self._slots + self._joiners)
        self._into.wall_s += took_s
        self._into.slot_s += took_s * self._slots
        self.start_up.slot_s += took_s * self._joiners
        if self._slots + self._joiners == 0:
            self.without_slots_s += took_s

    def _is_training(self) -> bool:
        return self._training is not None and self._into is self._training.trains

    def _reached(self, event: Told) -> None:
        if event.generation < 0 or event.step < 0:
            return
        # A group that has not stepped yet is told of with the step of the one before.
        if self._is_training() and event.step != self._step:
            assert self._training is not None
            self._training.last_step = max(self._training.last_step, event.step)
        self._step = event.step

    def _begin_life(self, event: Told) -> None:
        """Submitted again, or for the first time: whatever was held before was given back."""
        self._now_s = event.time_s if self._now_s is None else max(self._now_s, event.time_s)
        self._give_back(self.closing)
        self._reform = self._training = None

    def _lose_driver(self, event: Told) -> None:
        if self._is_training() or self._into is self._stands_still:
            assert self._training is not None
            self._end_training()
            self._into = self._training.detects
        self._pass(event.time_s)
        self._open_reform()

    def _end_training(self) -> None:
        assert self._training is not None and self._now_s is not None
        self._training.ended_s = self._now_s - self._stands_still.wall_s
        self._training.detects.take(self._stands_still)

    def _open_reform(self) -> Reform:
        if self._reform is None:
            after = max(self.trainings, default=-1)
            self._reform = Reform(after=after)
            self.reforms.append(self._reform)
        self._reform.held.take(self._ending)
        self._into = self._reform.held
        return self._reform

    def _give_back(self, ending: Held) -> None:
        self._slots = self._joiners = 0
        if self._training is not None:
            self._training.trains.take(self._stands_still)
        ending.take(self._ending)
        self._into = self._away

    # --- one method for each kind of word --------------------------------------------------------

    def _planned(self, event: Told) -> None:
        if self._training is not None or self._reform is not None:
            if self._training is not None:
                self._training.trains.take(self._stands_still)
            self._open_reform()
        else:
            self._into = self.start_up
        self._slots, self._joiners = _count(event, "world_size", self._slots), 0

    def _started(self, event: Told) -> None:
        if self._into is self._away or self._is_training():
            self._planned(event)  # a ledger of torchrun has no plans
        self._slots = _count(event, "world_size", self._slots)

    def _trains(self, event: Told) -> None:
        training = self.trainings.setdefault(event.generation, Training())
        training.first_step = event.step + 1
        training.reform = self._reform
        self._reform, self._training = None, training
        self._into = training.trains
        self._last_save = (-1, 0.0)
        self._phase_since_s = event.time_s

    def _recovered(self, event: Told) -> None:
        training = self.trainings.get(event.generation)
        if training is None or training.reform is None:
            return
        phases = event.data.get("phases_s")
        if isinstance(phases, dict):
            training.reform.phases_s = {str(name): seconds(took) for name, took in phases.items()}
        failed = self.trainings.get(training.reform.after)
        if failed is not None:
            failed.lost_steps += _count(event, "lost_steps", 0)

    def _stall_seen(self, event: Told) -> None:
        if self._is_training():
            self._into = self._stands_still

    def _stall_passed(self, event: Told) -> None:
        if self._training is not None and self._into is self._stands_still:
            self._into = self._training.trains
            self._into.take(self._stands_still)

    def _failed(self, event: Told) -> None:
        is_injected = event.data.get("injected") is True
        if self._is_training() or self._into is self._stands_still:
            assert self._training is not None
            self._end_training()
            self._training.is_injected |= is_injected
        if event.data.get("then", "restart") == "restart":
            self._open_reform().is_injected |= is_injected
        else:
            self._into = self._ending

    def _ended(self, event: Told) -> None:
        self._into = self._ending

    def _holding(self, event: Told) -> None:
        self._open_reform()
        self._into = self.waiting

    def _holds_none(self, event: Told) -> None:
        self._give_back(self._reform.held if self._reform is not None else self.closing)

    def _over(self, event: Told) -> None:
        step, whole_s = self._last_save
        if self._training is not None and step == event.step:
            self._training.save_stall_s += whole_s  # nothing went on beside the last save
        self._give_back(self.closing)
        self._reform = self._training = None

    def _node_lost(self, event: Told) -> None:
        self._slots = max(0, self._slots - 1)

    def _grows(self, event: Told) -> None:
        wanted = _count(event, "new_world_size", 0) - _count(event, "old_world_size", 0)
        self._joiners = max(0, wanted)

    def _grows_not(self, event: Told) -> None:
        self._joiners = 0

    def _leaves(self, event: Told) -> None:
        if self._training is not None:
            self._training.is_leaving = True

    def _saved(self, event: Told) -> None:
        training = self.trainings.get(event.generation)
        if training is None:
            return
        stall_s = seconds(event.data.get("stall_s"))
        whole_s = max(stall_s, seconds(event.data.get("duration_s")))
        # The first save and the one before leaving are waited for.
        waits = event.step == 0 or training.is_leaving
        training.save_stall_s += whole_s if waits else stall_s
        self._last_save = (event.step, 0.0 if waits else whole_s - stall_s)

    def _progressed(self, event: Told) -> None:
        phase = event.data.get("phase")
        if self._is_training() and isinstance(phase, str):
            assert self._training is not None
            took_s = max(0.0, event.time_s - self._phase_since_s)
            self._training.phases_s[phase] = self._training.phases_s.get(phase, 0.0) + took_s
        self._phase_since_s = event.time_s


_HANDLERS: dict[str, Callable[[Occupancy, Told], None]] = {
    "generation_planned": Occupancy._planned,
    "generation_started": Occupancy._started,
    "started": Occupancy._trains,
    "resumed": Occupancy._trains,
    "recovered": Occupancy._recovered,
    "stall_seen": Occupancy._stall_seen,
    "stall_passed": Occupancy._stall_passed,
    "failure_decided": Occupancy._failed,
    "generation_ended": Occupancy._ended,
    "holding": Occupancy._holding,
    "waiting": Occupancy._holds_none,
    "start_failed": Occupancy._holds_none,
    "run_finished": Occupancy._over,
    "run_stopped": Occupancy._over,
    "run_failed": Occupancy._over,
    "node_lost": Occupancy._node_lost,
    "growth_planned": Occupancy._grows,
    "growth_failed": Occupancy._grows_not,
    "leave_ordered": Occupancy._leaves,
    "checkpoint_committed": Occupancy._saved,
    "progress": Occupancy._progressed,
}


def occupancy(events: Iterable[Told]) -> Occupancy:
    """Of a whole ledger; what was written while nobody was at the run does not count."""
    events = list(events)
    lives = {event.life for event in events if event.kind == "run_started"}
    found = Occupancy()
    for event in events:
        if event.life in lives:
            found.hear(event)
    found.end()
    return found


def seconds(value: object) -> float:
    """A duration as told, 0 for whatever is none."""
    # A damaged word may hold anything, and a NaN would spoil every sum.
    return float(value) if isinstance(value, int | float) and 0 < value < 1e12 else 0.0


def _count(event: Told, name: str, otherwise: int) -> int:
    value = event.data.get(name)
    return value if isinstance(value, int) and 0 <= value < 10**9 else otherwise
