"""Verification: the bytes of checkpoints against the digests they were saved with, in parallel.

Reads every byte and changes nothing. Must not import ray or torch.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from elastic.storage.checkpoints import Catalog
from elastic.storage.completeness import Look, digest_problem, look_at
from elastic.storage.filesystem import Filesystem
from elastic.storage.manifest import FileDigest

GOOD, BAD, UNREADABLE, GONE, ABSENT = "good", "bad", "unreadable", "gone", "absent"

Tell = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What became of one checkpoint's bytes.

    `result` is "good"; "bad" when the bytes are not those that were saved; "unreadable" when that
    could not be told; "gone" when it was removed or replaced meanwhile; "absent" when nothing was
    ever published there. `problems` says what was found, [] for a good one.
    """

    step: int
    result: str
    num_files: int
    bytes: int
    problems: list[str]


def verify(
    catalog: Catalog, steps: Iterable[int] | None = None, tell: Tell = lambda done, all: None
) -> list[Verdict]:
    """A verdict on each of `steps`, else on every checkpoint that was published; ascending.

    `tell` is called with the bytes read so far and the bytes to read, from several threads, one at
    a time. Trouble with single files makes a verdict, trouble in listing them raises.
    """
    asked = _published(catalog) if steps is None else sorted(set(steps))
    looks = {step: look_at(catalog.fs, catalog.run_id, step) for step in asked}
    problems = _problems([look for look in looks.values() if look.complete], catalog, tell)
    return [_verdict(catalog, look, problems.get(step, [])) for step, look in looks.items()]


def _published(catalog: Catalog) -> list[int]:
    steps = sorted({found.step for found in catalog.list()})
    return [step for step in steps if look_at(catalog.fs, catalog.run_id, step).has_marker]


def _problems(
    looks: Sequence[Look], catalog: Catalog, tell: Tell
) -> dict[int, list[tuple[str, str]]]:
    """By step pairs (result, problem), of files with a problem."""
    files = [(look, file) for look in looks if look.manifest for file in look.manifest.files]
    checked = check_files(catalog.fs, [(look.path, file) for look, file in files], tell)
    found: dict[int, list[tuple[str, str]]] = {}
    for (look, _), (result, problem) in zip(files, checked, strict=True):
        if result != GOOD:
            found.setdefault(look.step, []).append((result, problem))
    return found


def check_files(
    fs: Filesystem, files: Sequence[tuple[str, FileDigest]], tell: Tell = lambda done, all: None
) -> list[tuple[str, str]]:
    """For each pair (directory, file) a pair ("good", "bad" or "unreadable", what was found)."""
    progress = _Progress(sum(file.bytes for _, file in files), tell)

    def check(index: int) -> tuple[str, str]:
        path, file = files[index]
        try:
            problem = digest_problem(fs, path, file, progress.add)
        except Exception as error:  # noqa: BLE001 - storage clients raise classes of their own
            return UNREADABLE, f"{file.path}: {type(error).__name__}: {error}"
        return (BAD, problem) if problem else (GOOD, "")

    # The largest first, so that no thread is left alone with one at the end.
    order = sorted(range(len(files)), key=lambda index: -files[index][1].bytes)
    with ThreadPoolExecutor(min(16, 2 * (os.cpu_count() or 1))) as pool:
        asked = {index: pool.submit(check, index) for index in order}
        try:
            return [asked[index].result() for index in range(len(files))]
        except BaseException:
            progress.stopped = True
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _verdict(catalog: Catalog, look: Look, found: list[tuple[str, str]]) -> Verdict:
    manifest = look.manifest
    result, problems = GOOD, sorted(problem for _, problem in found)
    if look.flaw:
        result = UNREADABLE if look.too_new else BAD if look.has_marker else ABSENT
        problems = [look.flaw]
    elif found:
        result = BAD if any(kind == BAD for kind, _ in found) else UNREADABLE
    if result in (BAD, UNREADABLE):
        # The marker goes first: a removal under way looks like damage, but only for a moment.
        again = look_at(catalog.fs, catalog.run_id, look.step)
        if not again.has_marker or (again.complete and again.manifest != manifest):
            result, problems = GONE, ["it was removed or replaced while it was read"]
    return Verdict(
        step=look.step,
        result=result,
        num_files=len(manifest.files) if manifest else 0,
        bytes=look.bytes,
        problems=problems,
    )


class _Stopped(Exception):
    """Nobody waits for the digest any more."""


class _Progress:
    def __init__(self, all_bytes: int, tell: Tell) -> None:
        self.stopped = False
        self._all_bytes = all_bytes
        self._done_bytes = 0
        self._tell = tell
        self._lock = threading.Lock()

    def add(self, num_bytes: int) -> None:
        if self.stopped:
            raise _Stopped
        with self._lock:
            self._done_bytes += num_bytes
            self._tell(self._done_bytes, self._all_bytes)
