"""The process of an engine: a driver script of its own, watched, and ended with the measurement.

Must not import torch or elastic.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

_CHECKOUT = Path(__file__).resolve().parents[2]
_TAIL_LINES = 40
T = TypeVar("T")


class MeasurementFailed(RuntimeError):
    """An engine did not get where it had to get; the message has the end of its output."""


class EngineProcess:
    """A running engine; its output goes to a file and is shown only when it fails."""

    def __init__(self, process: subprocess.Popen[bytes], output: Path) -> None:
        self._process = process
        self._output = output

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def tail(self) -> str:
        lines = self._output.read_text(errors="replace").splitlines()
        return "\n".join(lines[-_TAIL_LINES:])


@contextlib.contextmanager
def engine_process(
    module: str, argument: str, *, directory: Path, environment: Mapping[str, str] | None = None
) -> Iterator[EngineProcess]:
    """`module.main(argument)` at work in a process of its own; killed on the way out."""
    output = directory / "engine.out"
    with output.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, module, argument],
            env=_environment(environment or {}),
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            # Ctrl-C is for the benchmark alone, which ends this process when it cleans up.
            start_new_session=True,
        )
    try:
        yield EngineProcess(process, output)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _environment(changes: Mapping[str, str]) -> dict[str, str]:
    # What the caller's shell tells Ray Train would change what "defaults" means.
    kept = {name: text for name, text in os.environ.items() if not name.startswith("RAY_TRAIN_")}
    path = os.pathsep.join(filter(None, [str(_CHECKOUT), kept.get("PYTHONPATH")]))
    return kept | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"} | dict(changes)


def wait_for(
    poll: Callable[[], T | None],
    process: EngineProcess,
    deadline_s: float,
    what: str,
    *,
    interval_s: float = 0.05,
) -> T:
    """The first true answer of `poll`, which is asked each `interval_s`.

    Raises MeasurementFailed when the engine ends before, or does not get there by the deadline.
    """
    until_s = time.monotonic() + deadline_s
    while True:
        # Looked at first: what it wrote just before it ended counts.
        has_ended = process.exit_code is not None
        if answer := poll():
            return answer
        if has_ended:
            raise MeasurementFailed(
                f"the engine ended (exit code {process.exit_code}) before it could {what}; "
                f"its last output:\n{process.tail()}"
            )
        if time.monotonic() > until_s:
            raise MeasurementFailed(
                f"the engine did not {what} within {deadline_s:.0f} s; "
                f"its last output:\n{process.tail()}"
            )
        time.sleep(interval_s)


def connect(address: str) -> None:
    """Join the measurement's cluster, with this checkout importable in every worker."""
    import ray

    ray.init(
        address=address,
        runtime_env={"env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"], "OMP_NUM_THREADS": "1"}},
    )


if __name__ == "__main__":
    # Imported rather than run, so that workers are sent the training function by its name: sent by
    # value, one that names both torch.distributed and an attribute `config` cannot be pickled.
    importlib.import_module(sys.argv[1]).main(sys.argv[2])
