"""Suspects: complete checkpoints that are not resumed, since what was trained from them went wrong.

A small file for each, beside the pins. With a suspect go all checkpoints that the same generations
saved after it. Nothing is deleted. Must not import ray or torch.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any

from elastic.policy import suspicion
from elastic.policy.suspicion import Doubt, Ruling, Suspicion, Then
from elastic.storage.checkpoints import Catalog, Checkpoint
from elastic.storage.completeness import DIR, STEP_NAME, read_if_there
from elastic.storage.filesystem import Filesystem

__all__ = ["highest_trusted", "lift", "rule_on", "suspect_steps", "trusted_steps", "why_suspect"]

_SUSPECTS = f"{DIR}/suspects"
FORMAT_VERSION = 1


def rule_on(catalog: Catalog, doubt: Doubt, past: Suspicion | None, *, time_s: float) -> Ruling:
    """What follows from a loss that is not finite; what it means for the checkpoints is done."""
    older = highest_trusted(catalog, below=doubt.loaded_step)
    ruling = suspicion.rule(doubt, past, older_step=None if older is None else older.step)
    if ruling.then is Then.STEP_BACK:
        tree = {
            "format_version": FORMAT_VERSION,
            "generation": doubt.generation,
            "reason": ruling.reason,
            "time_s": time_s,
        }
        text = json.dumps(tree) + "\n"
        catalog.fs.write_bytes(f"{_SUSPECTS}/step-{doubt.loaded_step}", text.encode())
    elif ruling.then is Then.FAIL:
        lift(catalog.fs)
    return ruling


def suspect_steps(catalog: Catalog) -> dict[int, str]:
    """The suspect checkpoints, and why each is one."""
    records = _records(catalog.fs)
    found: dict[int, str] = {}
    for step in catalog.complete_steps() if records else ():
        generation = catalog.manifest(step).generation
        for since, (last_generation, reason) in records.items():
            # One that a later generation has saved there has nothing to do with it.
            if since <= step and generation <= last_generation:
                found[step] = reason
    return found


def why_suspect(catalog: Catalog, step: int) -> str:
    """Why the checkpoint of that step is suspect; "" if it is not, or if storage does not say."""
    with contextlib.suppress(OSError):
        return suspect_steps(catalog).get(step, "")
    return ""


def trusted_steps(catalog: Catalog) -> list[int]:
    """The steps of all complete checkpoints but the suspect ones, ascending."""
    suspects = suspect_steps(catalog)
    return [step for step in catalog.complete_steps() if step not in suspects]


def highest_trusted(catalog: Catalog, below: int | None = None) -> Checkpoint | None:
    """As `Catalog.highest`, suspect ones passed by."""
    suspects = suspect_steps(catalog)
    while (found := catalog.highest(below)) is not None and found.step in suspects:
        below = found.step
    return found


def lift(fs: Filesystem) -> bool:
    """No checkpoint of the run at the root `fs` is suspect any more; False if none was."""
    steps = list(_records(fs))
    for step in steps:
        fs.remove_tree(f"{_SUSPECTS}/step-{step}")
    return bool(steps)


def _records(fs: Filesystem) -> dict[int, tuple[int, str]]:
    found = {}
    for entry in fs.list(_SUSPECTS):
        matched = STEP_NAME.fullmatch(entry.name)
        text = read_if_there(fs, f"{_SUSPECTS}/{entry.name}") if matched else None
        if matched and text is not None:
            found[int(matched[1])] = _told(text)
    return found


def _told(text: bytes) -> tuple[int, str]:
    """A file that tells nothing suspects no generation, rather than to stop a run."""
    try:
        tree: Any = json.loads(text)
        return int(tree["generation"]), str(tree["reason"])
    except (ValueError, KeyError, TypeError):
        return -1, ""
