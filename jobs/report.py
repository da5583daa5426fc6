"""How a job tells people of its run: progress lines while it lives, a summary at its end.

Must import neither ray nor torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elastic.storage.checkpoints import Catalog
from elastic.storage.filesystem import Filesystem
from elastic.storage.ledger import read_ledger
from elastic.storage.metrics import current_metrics
from elastic.storage.run_file import load_run_file


def progress_line(status: Mapping[str, Any], steps: int) -> str:
    """One line that says how the run is getting on."""
    loss = "-" if status["loss"] is None else f"{status['loss']:.4f}"
    speed = "-" if status["tokens_per_s"] is None else f"{status['tokens_per_s']:,.0f}"
    saved = "-" if status["checkpoint_step"] < 0 else status["checkpoint_step"]
    return (
        f"{status['state']:<9} step {max(0, status['step'])}/{steps}  loss {loss}  "
        f"{speed} tokens/s  world size {status['world_size']}  checkpoint {saved}  "
        f"restarts {status['restarts']}"
    )


class Progress:
    """Prints a line when something has changed, and the reason when that has."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._line = self._reason = ""

    def __call__(self, status: Mapping[str, Any]) -> None:
        if status["reason"] != self._reason:
            self._reason = status["reason"]
            print(f"          {self._reason}", flush=True)
        line = progress_line(status, self._steps)
        if line != self._line:
            self._line = line
            print(line, flush=True)


def summary(url: str) -> dict[str, Any]:
    """What the run has done, read from its directory."""
    filesystem = Filesystem.at(url)
    steps = current_metrics(filesystem)
    events = read_ledger(filesystem)
    return {
        "step": max(steps, default=0),
        "losses": {str(step): values["loss"] for step, values in steps.items()},
        "grad_norms": {str(step): values["grad_norm"] for step, values in steps.items()},
        "world_sizes": [
            event.data["world_size"] for event in events if event.kind == "generation_started"
        ],
        "restarts": sum(event.kind == "recovered" for event in events),
        "lost_steps": sum(
            event.data["lost_steps"] for event in events if event.kind == "recovered"
        ),
        "run": url,
    }


def stopped_line(url: str, name: str, *, is_same: bool) -> str:
    """Told at the end of a run that was asked to stop. `is_same`: its command would resume it."""
    filesystem = Filesystem.at(url)
    run_file = load_run_file(filesystem)
    highest = Catalog(filesystem, run_file.run_id).highest() if run_file else None
    where = "before its first checkpoint" if highest is None else f"at step {highest.step}"
    how = "" if is_same else f" with --name {name}, without --fresh and --from-step,"
    return f"stopped {where}; the same command{how} resumes"


def report(found: dict[str, Any], path: str | None, url: str) -> None:
    losses = list(found["losses"].values())
    if losses:
        print(f"step {found['step']}: loss {losses[0]:.4f} at first, {losses[-1]:.4f} at last")
    sizes = " to ".join(str(size) for size in found["world_sizes"])
    print(f"world size {sizes}; restarts {found['restarts']}; lost steps {found['lost_steps']}")
    print(f"checkpoints, metrics and ledger in {url}")
    print(f"look at it with: elastic status {url}")
    print(f"or in a browser: elastic dashboard --storage {url.rpartition('/')[0]}")
    if path:
        Path(path).write_text(json.dumps(found, indent=1) + "\n")
