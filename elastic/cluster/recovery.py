"""The time and the steps that one re-form cost, put together from what driver and ranks measure."""

from __future__ import annotations

import time


class Recovery:
    """The re-form under way, if one is. Times in seconds; of several ranks the slowest counts."""

    def __init__(self) -> None:
        self.count = 0
        """Re-forms so far, planned ones included, the first start not."""
        self.reason = ""
        self.old_world_size = 0
        self._step = -1
        self._phases_s: dict[str, float] = {}
        self._decided_s: float | None = None
        self._suspected_s: float | None = None
        self._has_begun_anew = False

    def reached(self, step: int) -> None:
        """A rank has finished this step."""
        if self._decided_s is None or not self._has_begun_anew:
            self._step = max(self._step, step)  # else it is one of those that are done again

    def suspected(self) -> None:
        """The group stands still, and is looked at: if it has failed, the clock runs from here."""
        self._suspected_s = time.monotonic()

    def not_suspected(self) -> None:
        """It went on by itself."""
        self._suspected_s = None

    def failed(self, reason: str, world_size: int) -> None:
        """A failure was decided on: the clock runs from here."""
        self._open(reason, world_size)

    def planned(self, reason: str, world_size: int) -> None:
        """The group was asked to leave; before its own first step that is no other re-form."""
        if self._decided_s is None or not self._has_begun_anew:
            self._open(reason, world_size)

    def inherit(
        self, reason: str, took_s: float, *, world_size: int, step: int, count: int
    ) -> None:
        """The driver before this one has died, `took_s` ago: the clock runs from there.

        `step` is the last one that it has told of, `count` that of its own re-forms.
        """
        self.count = count
        self._open(reason, world_size)
        assert self._decided_s is not None
        self._decided_s -= took_s
        self._step = step
        self._phases_s["take_over"] = took_s

    def _open(self, reason: str, world_size: int) -> None:
        if self._decided_s is None:
            now_s = time.monotonic()
            self._has_begun_anew = False
            self._decided_s = now_s if self._suspected_s is None else self._suspected_s
            self.old_world_size = world_size
            self._phases_s = {"diagnose": now_s - self._decided_s}
            self.count += 1
        self._suspected_s = None
        self.reason = reason

    def begin_start(self) -> None:
        """A new group starts: what an earlier, failed start took no longer counts as its phases."""
        self._has_begun_anew = True
        for phase in ("place", "start", "connect", "build", "load"):
            self._phases_s.pop(phase, None)

    def started(self, took_s: dict[str, float]) -> None:
        """The group is up."""
        self._phases_s.update(took_s)

    def took(self, phase: str, duration_s: float) -> None:
        """One rank, or the driver, has gone through a phase."""
        self._phases_s[phase] = max(self._phases_s.get(phase, 0.0), duration_s)

    def lost_steps(self, resumed_step: int) -> int:
        """Finished steps that have to be done again."""
        return max(0, self._step - resumed_step)

    def finish(self, first_step_s: float) -> dict[str, float] | None:
        """The phases of the re-form that the first new step ends; None if none was under way.

        `wait` is what no other phase accounts for, so that the phases add up to the whole.
        """
        if self._decided_s is None or not self._has_begun_anew:
            return None  # a group that was asked to leave before its own first step
        whole_s = time.monotonic() - self._decided_s
        names = ("diagnose", "join", "stop", "place", "start", "connect", "build", "load")
        phases = {name: self._phases_s.get(name, 0.0) for name in names}
        if "take_over" in self._phases_s:
            phases["take_over"] = self._phases_s["take_over"]
        phases["first_step"] = first_step_s
        phases["wait"] = max(0.0, whole_s - sum(phases.values()))
        self._decided_s = None
        self._step = -1
        return phases
