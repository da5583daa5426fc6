"""A file as a notice: while it is there, this node is to be left. For sites with a signal of their
own.

Its first line may say when: a time such as 2026-01-31T12:00:00Z, or 90s after it was written. All
the rest is text.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from elastic.cluster.notices.notice import Notice
from elastic.policy.durations import parse_duration_s

_MOST_CHARACTERS = 4096


class NoticeFile:
    """A file on this node."""

    interval_s = 1.0

    def __init__(self, path: str) -> None:
        self.name = f"file:{path}"
        self._path = Path(path)

    def poll(self) -> Notice | None:
        """See `Source.poll`."""
        try:
            content = self._path.read_text(encoding="utf-8", errors="replace")[:_MOST_CHARACTERS]
            written_s = self._path.stat().st_mtime
        except FileNotFoundError:
            return None
        first, _, rest = content.strip().partition("\n")
        deadline_s = _deadline_s(first, written_s)
        said = content if deadline_s is None else rest
        told = " ".join([f"{self._path} is there", *said.split()])
        return Notice(kind="file", deadline_s=deadline_s, text=told)


def _deadline_s(text: str, written_s: float) -> float | None:
    try:
        return written_s + parse_duration_s(text)
    except ValueError:
        pass
    try:
        found = datetime.fromisoformat(text.strip())
    except ValueError:
        return None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
