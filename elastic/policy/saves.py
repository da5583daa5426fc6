"""When a checkpoint is due. Pure: the time is an argument."""

from __future__ import annotations

import re
from dataclasses import dataclass

AUTO = "auto"
"""For an interval that is computed while the run goes on."""

_TEXT = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*(s|sec|seconds|steps?)?\s*$")


@dataclass(frozen=True, kw_only=True)
class SaveInterval:
    """How often to save: after so many optimizer steps, or so many seconds, or only at both ends.

    The state of step 0 and that of the last step are saved in any case.
    """

    steps: int | None = None
    seconds: float | None = None
    is_computed: bool = False
    """In seconds that are computed while the run goes on: see `elastic.policy.cadence`."""

    def __post_init__(self) -> None:
        if sum((self.steps is not None, self.seconds is not None, self.is_computed)) > 1:
            raise ValueError("a save interval is in steps or in seconds or computed: one of them")
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"a save interval must be at least 1 step; found {self.steps}")
        if self.seconds is not None and not self.seconds > 0:
            raise ValueError(f"a save interval must be above 0 seconds; found {self.seconds}")

    @classmethod
    def parse(cls, text: str | int | float | SaveInterval | None) -> SaveInterval:
        """The interval meant by `100`, `"100steps"`, `"60s"`, `"auto"`, or None for both ends only.

        Raises:
            ValueError: the text is none of these.
        """
        if isinstance(text, SaveInterval):
            return text
        if text is None:
            return cls()
        if text == AUTO:
            return cls(is_computed=True)
        found = _TEXT.match(str(text))
        if found is None:
            raise ValueError(
                f"cannot read a save interval from {text!r}; "
                f"expected {AUTO}, steps (100 or 100steps) or seconds (60s)"
            )
        number, unit = found.groups()
        if unit in ("s", "sec", "seconds"):
            return cls(seconds=float(number))
        if "." in number:
            raise ValueError(f"a save interval in steps must be a whole number; found {text!r}")
        return cls(steps=int(number))

    def is_due(self, *, step: int, last_step: int, now_s: float, last_s: float) -> bool:
        """Whether the state after `step` should be saved; never for one that is computed.

        `last_step` and `last_s` are step and time of the previous save (or of the start);
        `now_s` and `last_s` are read from one monotonic clock.
        """
        if step <= last_step:
            return False
        if self.steps is not None:
            return step % self.steps == 0
        return self.seconds is not None and now_s - last_s >= self.seconds

    def __str__(self) -> str:
        if self.is_computed:
            return "as computed"
        if self.steps is not None:
            return "every step" if self.steps == 1 else f"every {self.steps} steps"
        return f"every {self.seconds:g} s" if self.seconds is not None else "at both ends only"
