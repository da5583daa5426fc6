"""What verifying and pruning found, as a person reads it. Pure: text from values."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from elastic.dashboard.text import size, table
from elastic.storage.pruning import Fate
from elastic.storage.verification import Verdict

__all__ = ["fates_text", "steps_text", "verdicts_text"]


def verdicts_text(verdicts: Sequence[Verdict], pinned: Collection[int]) -> str:
    """One checkpoint a line, and the sum of it."""
    if not verdicts:
        return "no checkpoints"
    rows = [
        [
            str(one.step),
            one.result,
            str(one.num_files),
            size(one.bytes),
            "yes" if one.step in pinned else "no",
            "; ".join(one.problems),
        ]
        for one in verdicts
    ]
    lines = table(
        ["STEP", "RESULT", "FILES", "SIZE", "PINNED", "WHAT WAS FOUND"],
        rows,
        right="STEP FILES SIZE",
    )
    results = [one.result for one in verdicts]
    counts = ", ".join(f"{results.count(result)} {result}" for result in dict.fromkeys(results))
    return "\n".join([*lines, f"{counts}, {size(sum(one.bytes for one in verdicts))}"])


def fates_text(fates: Sequence[Fate]) -> str:
    """One complete checkpoint a line: whether it goes, and why it stays."""
    if not fates:
        return "no complete checkpoints"
    rows = [
        [
            str(fate.checkpoint.step),
            size(fate.checkpoint.bytes),
            "remove" if fate.remove else "keep",
            fate.why,
        ]
        for fate in fates
    ]
    return "\n".join(table(["STEP", "SIZE", "FATE", "WHY"], rows, right="STEP SIZE"))


def steps_text(steps: Sequence[int], most: int = 8) -> str:
    """`10, 20, 30`, the last ones when there are many."""
    shown = ", ".join(map(str, steps[-most:]))
    return f"{shown} and {len(steps) - most} older ones" if len(steps) > most else shown or "none"
