"""`python -m elastic.training.rehearsal PLAN [JSON-PATH]`: rehearse, say what came of it.

Exit code 0 equal, 1 differs, 2 nothing to rehearse. Must not import ray.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from elastic.training.rehearsal.comparison import compare, is_constant, tolerance_of
from elastic.training.rehearsal.diagnosis import suspects, unequal
from elastic.training.rehearsal.phase import Observed, Phase, PhaseFailed, Values, run
from elastic.training.rehearsal.plan import Plan
from elastic.training.rehearsal.report import report
from elastic.training.rehearsal.target import NoTarget, load
from elastic.training.rehearsal.verdict import (
    AFTER,
    BEFORE,
    OTHER,
    Rehearsal,
    curve_of,
    draws_random_numbers,
    ranks,
    why_not_reproducible,
    why_other_size,
)

Tell = Callable[[str], None]


class NothingToRehearse(Exception):
    """The training function does not run, or logs nothing; says nothing about resuming."""


def rehearse(plan: Plan, tell: Tell = lambda line: None) -> Rehearsal:
    """Run, kill and resume the target as planned, and compare. `tell` hears how it gets on.

    Raises:
        NothingToRehearse: the function failed or ended before anything was killed.
    """
    begun_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as folder:
        found = _Stage(plan, Path(folder), begun_s + plan.limit_s, tell).play()
    found.took_s = time.monotonic() - begun_s
    return found


class _Stage:
    """The phases, one after the other, in one folder."""

    def __init__(self, plan: Plan, folder: Path, until_s: float, tell: Tell) -> None:
        self._plan = plan
        self._folder = folder
        self._until_s = until_s
        self._tell = tell

    def play(self) -> Rehearsal:
        plan, folder = self._plan, self._folder
        try:
            whole = self._run("uninterrupted", folder / "whole")
            metric = self._metric(whole)
            killed = self._run("killed", folder / "broken", is_killed=True)
        except PhaseFailed as error:
            raise NothingToRehearse(str(error)) from error
        found = Rehearsal(
            plan=plan,
            metric=metric,
            dtype=whole.traces[0].dtype,
            tracked=whole.traces[0].tracked_names,
            draws=draws_random_numbers(whole.traces),
        )
        found.curves["uninterrupted"] = curve_of(whole.values, metric)
        if is_constant(found.curves["uninterrupted"].values()):
            found.notes.append(f"{metric} never changes: comparing it shows nothing")
        if not self._is_reproducible(found, whole, killed):
            return found
        shutil.copytree(folder / "broken", folder / "other")
        try:
            self._resume(found, whole)
            if found.exit_code == 0 and plan.other_workers:
                self._resume_at_another_size(found, whole)
        except PhaseFailed as error:
            found.failure = f"the run could not go on after the kill: {error}"
        return found

    def _run(
        self, name: str, folder: Path, workers: int | None = None, *, is_killed: bool = False
    ) -> Observed:
        begun_s, size = time.monotonic(), workers or self._plan.workers
        label = f"{name}, {ranks(size)}"
        phase = Phase(
            name=name, plan=self._plan, folder=folder, world_size=size, is_killed=is_killed
        )
        seen = run(phase, self._until_s, lambda step: self._tell(f"\r{label}: step {step}"))
        took_s = time.monotonic() - begun_s
        self._tell(f"\r{label}: to step {seen.last_step} in {took_s:.1f} s\n")
        return seen

    def _metric(self, whole: Observed) -> str:
        plan = self._plan
        if whole.last_step < plan.steps:
            raise NothingToRehearse(
                f"the training function ended at step {whole.last_step} of {plan.steps}: "
                f"take --steps {whole.last_step}, or have it train longer"
            )
        logged = sorted({name for row in whole.values.values() for name in row})
        for metric in (plan.metric, "parameter_norm"):
            if len(curve_of(whole.values, metric)) == plan.steps:
                return metric
        raise NothingToRehearse(
            f"nothing called {plan.metric!r} was logged at each step; logged were "
            f"{', '.join(logged)}. Log it with step.log({plan.metric}=...), or name another with "
            "--metric"
        )

    def _is_reproducible(self, found: Rehearsal, whole: Observed, killed: Observed) -> bool:
        before = compare(
            BEFORE,
            curve_of(whole.values, found.metric),
            curve_of(killed.values, found.metric),
            range(1, self._plan.half + 1),
            num_workers=self._plan.workers,
            tolerance=0.0,
        )
        found.comparisons.append(before)
        if before.parted_at is not None:
            found.notes += why_not_reproducible(whole.traces, killed.traces, before.parted_at)
        return before.is_equal

    def _resume(self, found: Rehearsal, whole: Observed) -> None:
        plan = self._plan
        seen = self._run("resumed", self._folder / "broken")
        found.resumed_from = min(seen.traces[0].steps, default=plan.half + 1) - 1
        self._compare(found, AFTER, whole.values, seen, 0.0, plan.workers)
        parted_at = found.comparisons[-1].parted_at
        if parted_at is None:
            found.suspects = unequal(whole.traces, seen.traces, first_step=found.resumed_from + 1)
        else:
            found.suspects = suspects(
                whole.traces,
                seen.traces,
                first_step=found.resumed_from + 1,
                parted_at=parted_at,
            )

    def _resume_at_another_size(self, found: Rehearsal, whole: Observed) -> None:
        plan = self._plan
        seen = self._run("another size", self._folder / "other", plan.other_workers)
        tolerance = plan.tolerance or tolerance_of(found.dtype)
        self._compare(found, OTHER, whole.values, seen, tolerance, plan.other_workers)
        last = found.comparisons[-1]
        if found.counts(last) and last.parted_at is not None:
            found.suspects = []
            found.notes += why_other_size(last, whole.traces, seen.traces)
        elif not found.counts(last):
            found.notes.append(
                "training draws random numbers, each rank its own, so that another size is another "
                "draw: to compare it too, rehearse without (such as dropout 0)"
            )

    def _compare(
        self,
        found: Rehearsal,
        name: str,
        expected: Values,
        seen: Observed,
        tolerance: float,
        workers: int,
    ) -> None:
        curve = curve_of(seen.values, found.metric)
        after = {step: value for step, value in curve.items() if step > self._plan.half}
        found.curves[f"{name}, {workers}"] = after
        if len(after) < self._plan.steps - self._plan.half:
            raise PhaseFailed(
                f"{found.metric} was logged at {len(after)} of the "
                f"{self._plan.steps - self._plan.half} steps after the kill"
            )
        found.comparisons.append(
            compare(
                name,
                curve_of(expected, found.metric),
                curve,
                range(self._plan.half + 1, self._plan.steps + 1),
                num_workers=workers,
                tolerance=tolerance,
            )
        )


def _show(line: str) -> None:
    # Without a terminal only whole lines are of use.
    if sys.stderr.isatty() or line.endswith("\n"):
        sys.stderr.write(line if sys.stderr.isatty() else line.lstrip("\r"))
        sys.stderr.flush()


def _refuse(message: str) -> int:
    sys.stderr.write(f"Error: {message}\n")
    return 2


def main(argv: list[str]) -> int:
    """Rehearse; the exit code."""
    plan, json_path = Plan.from_json(argv[0]), argv[1] if len(argv) > 1 else ""
    sys.argv = [plan.target.partition(":")[0], *plan.arguments]
    try:
        load(plan.target, plan.arguments)
    except NoTarget as error:
        return _refuse(str(error))
    except SystemExit as error:
        # The module's own parser has said what is wrong with the arguments.
        return 2 if error.code else 0
    except Exception as error:  # noqa: BLE001 - the user's module may raise anything
        if isinstance(error, ValueError):
            return _refuse(str(error))
        traceback.print_exc()
        return _refuse(f"{plan.target} cannot be loaded")
    try:
        found = rehearse(plan, _show)
    except NothingToRehearse as error:
        return _refuse(str(error))
    sys.stdout.write(report(found) + "\n")
    if json_path:
        Path(json_path).write_text(json.dumps(found.to_json(), indent=1) + "\n", encoding="utf-8")
    return found.exit_code


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main(sys.argv[1:]))
    sys.exit(130)
