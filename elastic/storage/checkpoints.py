"""The catalog: the checkpoints of one run, and the only way for a save to become one.

A save fills an attempt directory; `commit` publishes it, its marker last. On a disk that is a
rename, on an object store the marker names the attempt's prefix. Nothing points to the latest.
Must not import ray or torch, and never interprets the files of a checkpoint.
"""

from __future__ import annotations

import builtins
import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from elastic.storage import quarantine
from elastic.storage.completeness import (
    ATTEMPT_NAME,
    DIR,
    STEP_NAME,
    Checkpoint,
    Look,
    Pointer,
    digest_problem,
    file_sizes,
    home,
    look_at,
    sha256,
    size_problems,
)
from elastic.storage.fence import StaleGeneration, check_fence, raise_fence
from elastic.storage.filesystem import Filesystem
from elastic.storage.manifest import MANIFEST, MARKER, FileDigest, Manifest, TensorInfo

__all__ = [
    "AlreadyComplete",
    "Catalog",
    "Checkpoint",
    "FileDigest",
    "Manifest",
    "NotComplete",
    "SaveIncomplete",
    "StaleGeneration",
    "TensorInfo",
    "digest_problem",
]


class NotComplete(Exception):
    """A checkpoint was asked for that is not complete, and therefore does not exist."""

    def __init__(self, step: int, reason: str) -> None:
        super().__init__(step, reason)
        self.step = step
        self.reason = reason

    def __str__(self) -> str:
        return f"step-{self.step} is not a complete checkpoint: {self.reason}"


class AlreadyComplete(Exception):
    """Another save of this step was published before and is not replaced unasked."""

    def __init__(self, step: int, generation: int) -> None:
        super().__init__(step, generation)
        self.step = step
        self.generation = generation

    def __str__(self) -> str:
        return (
            f"step-{self.step} is complete already, saved by generation {self.generation}: "
            "commit with replace=True to quarantine it and let the resumed history win"
        )


class SaveIncomplete(Exception):
    """Storage does not hold what the ranks reported as written; the save is no checkpoint."""

    def __init__(self, step: int, problems: Sequence[str]) -> None:
        super().__init__(step, list(problems))
        self.step = step
        self.problems = list(problems)

    def __str__(self) -> str:
        return (
            f"the save of step {self.step} is not published, storage does not hold what the ranks "
            f"wrote: {'; '.join(self.problems)}"
        )


class Catalog:
    """The checkpoints below `fs`, the root of the run `run_id`; those of other runs are not ours.

    Reads storage anew on every call. One process of a run may write at a time; any may read.
    """

    def __init__(self, fs: Filesystem, run_id: str) -> None:
        self.fs = fs
        self.run_id = run_id

    def list(self) -> list[Checkpoint]:
        """All there is, by step: complete ones, incomplete ones, attempts and quarantined ones."""
        looks = [self._look(step) for step in self._steps()]
        quarantined = quarantine.checkpoints(self.fs)
        claimed = {look.path for look in looks} | quarantine.kept_data(self.fs)
        attempts = [self._attempt(path) for path in self._attempts() if path not in claimed]
        found = [look.checkpoint() for look in looks] + attempts + quarantined
        return sorted(found, key=lambda checkpoint: (checkpoint.step, checkpoint.path))

    def inspect(self, step: int) -> Checkpoint:
        """What is known of `step-<step>`, also when there is no such directory."""
        return self._look(step).checkpoint()

    def knows(self, step: int) -> bool:
        """Whether it was published: its marker is there, sound files or not, or it is set aside."""
        return self._look(step).has_marker or step in quarantine.steps(self.fs)

    def complete_steps(self) -> builtins.list[int]:
        """Steps of the complete checkpoints, ascending. Raises as `highest` does."""
        return [look.step for look in self._complete(sorted(self._steps()))]

    def highest(self, below: int | None = None) -> Checkpoint | None:
        """The complete checkpoint of the highest step, of those below `below` if given.

        Raises `UnsupportedFormat` when a newer program saved one of this run on the way: to pass it
        by would lose its work in silence.
        """
        steps = [step for step in self._steps() if below is None or step < below]
        for look in self._complete(sorted(steps, reverse=True)):
            return look.checkpoint()
        return None

    def manifest(self, step: int) -> Manifest:
        """The manifest of a complete checkpoint. Raises `NotComplete`, `UnsupportedFormat`."""
        return self._require(step)[1]

    def data_path(self, step: int) -> str:
        """Where the files of a complete checkpoint lie, relative to the run's root.

        Raises `NotComplete`, `UnsupportedFormat`.
        """
        return self._require(step)[0].path

    def attempt_path(self, step: int, generation: int, attempt: int) -> str:
        """Where that attempt's files go, relative to the run's root."""
        return f"{DIR}/step-{step}.tmp-{generation}-{attempt}"

    def begin(self, step: int, generation: int, attempt: int) -> str:
        """The attempt's path, emptied of what an earlier try of this very attempt has left.

        Raises `StaleGeneration`, `UnsupportedFormat`, and `AlreadyComplete` if it was published.
        """
        check_fence(self.fs, generation)
        path = self.attempt_path(step, generation, attempt)
        self.discard(path)
        self.fs.make_dirs(path)
        return path

    def discard(self, attempt_path: str) -> None:
        """Frees the space of an attempt that failed; nothing happens when it is missing.

        Raises `AlreadyComplete` if it was published, `UnsupportedFormat`.
        """
        step, generation, attempt = _attempt_numbers(attempt_path)
        look = self._look(step)
        if look.too_new:
            raise look.too_new
        if look.has_marker and (look.path == attempt_path or look.is_of(generation, attempt)):
            raise AlreadyComplete(step, generation)
        self.fs.remove_tree(attempt_path)

    def commit(
        self,
        manifest: Manifest,
        attempt_path: str,
        *,
        replace: bool = False,
        doubts: Callable[[int], str] | None = None,
    ) -> Checkpoint:
        """The published checkpoint; a crash at any point leaves it complete or absent.

        Takes an unpublished leftover of the same step out of the way. A complete checkpoint of this
        very attempt is returned as it is; one of another attempt is quarantined with `replace`, and
        the reason has what `doubts` says of its step. (Where a disk cannot exchange two
        directories, a crash may then leave the step with neither.) Raises `SaveIncomplete`,
        `AlreadyComplete`, `StaleGeneration`, `UnsupportedFormat`, and `ValueError` for a manifest
        of another run or attempt.
        """
        self._check_ours(manifest, attempt_path)
        check_fence(self.fs, manifest.generation)
        return self.adopt(manifest, attempt_path, replace=replace, doubts=doubts)

    def adopt(
        self,
        manifest: Manifest,
        attempt_path: str,
        *,
        replace: bool = False,
        doubts: Callable[[int], str] | None = None,
    ) -> Checkpoint:
        """As `commit`, of a copy of what an older generation has saved.

        For the holder of the run's lease alone, since no fence is asked.
        """
        self._check_ours(manifest, attempt_path)
        step = manifest.step
        old = self._look(step)
        if old.too_new:
            raise old.too_new
        if old.complete and old.manifest:
            if old.is_of(manifest.generation, manifest.attempt):
                return old.checkpoint()
            if not replace:
                raise AlreadyComplete(step, old.manifest.generation)
        problems = size_problems(manifest, file_sizes(self.fs, attempt_path))
        if problems:
            raise SaveIncomplete(step, problems)
        text = manifest.to_json().encode()
        self.fs.write_bytes(f"{attempt_path}/{MANIFEST}", text)
        why = f"replaced by a save of generation {manifest.generation}"
        if old.complete and doubts is not None and (doubt := doubts(step)):
            why = f"{why}; it was suspect: {doubt}"
        if not (old.complete and self._exchange(step, attempt_path, text, why)):
            self._make_way(old, why)
            self._publish(step, attempt_path, text)
        new = self._look(step)
        if not new.complete:
            # It was nobody's checkpoint yet, and its bytes would be kept for ever.
            with contextlib.suppress(OSError):
                self.remove(step)
            raise SaveIncomplete(step, [new.flaw])
        return new.checkpoint()

    def verify_files(
        self, step: int, files: Sequence[FileDigest] | None = None
    ) -> builtins.list[str]:
        """Problems found by reading the files (all of them, or those given) to the end; [] if none.

        Trouble in reading raises, since it says nothing about the bytes.
        """
        look = self._look(step)
        if look.flaw or look.manifest is None:
            return [look.flaw]
        asked = look.manifest.files if files is None else files
        found = (digest_problem(self.fs, look.path, file) for file in asked)
        return [problem for problem in found if problem]

    def quarantine(self, step: int, reason: str) -> str:
        """The path that now holds the step's files and a file REASON; it is a checkpoint no more.

        On an object store the files stay where they are, and the path holds the marker that names
        them. Raises `FileNotFoundError` when there is nothing at this step.
        """
        if not self.fs.exists(home(step)):
            raise FileNotFoundError(f"no {home(step)} in {self.fs.url} to quarantine")
        target = quarantine.set_aside(self.fs, step, reason)
        if not self.fs.is_local:
            self.fs.remove_tree(f"{home(step)}/{MARKER}")
        return target

    def remove(self, step: int) -> None:
        """Deletes a checkpoint, its marker first; nothing happens when it is missing."""
        path = self._look(step).path
        self.fs.remove_tree(f"{home(step)}/{MARKER}")
        if self.fs.is_local:
            # What is left by a crash is no checkpoint that has lost its marker.
            self.fs.remove_tree(f"{home(step)}/{MANIFEST}")
        if path != home(step) and path not in quarantine.kept_data(self.fs):
            self.fs.remove_tree(path)
        self.fs.remove_tree(home(step))

    def sweep(self, generation: int) -> builtins.list[str]:
        """Paths of the unpublished attempts of older generations, now removed.

        From here on an older generation can neither begin nor commit. Raises `StaleGeneration` when
        this generation itself is an older one, `UnsupportedFormat`.
        """
        raise_fence(self.fs, generation)
        looks = [self._look(step) for step in self._steps()]
        for look in looks:
            if look.too_new:
                # Which attempt holds its files is not known, and that one must not be swept.
                raise look.too_new
        kept = {look.path for look in looks} | quarantine.kept_data(self.fs)
        unkept = [path for path in self._attempts() if path not in kept]
        stale = [path for path in unkept if _attempt_numbers(path)[1] < generation]
        for path in stale:
            self.fs.remove_tree(path)
        return stale

    def _look(self, step: int) -> Look:
        return look_at(self.fs, self.run_id, step)

    def _complete(self, steps: Iterable[int]) -> Iterator[Look]:
        for step in steps:
            look = self._look(step)
            if look.too_new:
                raise look.too_new
            if look.complete:
                yield look

    def _require(self, step: int) -> tuple[Look, Manifest]:
        look = self._look(step)
        if look.too_new:
            raise look.too_new
        if look.flaw or look.manifest is None:
            raise NotComplete(step, look.flaw)
        return look, look.manifest

    def _steps(self) -> Sequence[int]:
        return [int(name.removeprefix("step-")) for name in self._names(DIR, STEP_NAME)]

    def _attempts(self) -> Sequence[str]:
        return [f"{DIR}/{name}" for name in self._names(DIR, ATTEMPT_NAME)]

    def _names(self, path: str, pattern: re.Pattern[str]) -> Iterator[str]:
        for entry in self.fs.list(path):
            if entry.is_dir and pattern.fullmatch(entry.name):
                yield entry.name

    def _attempt(self, path: str) -> Checkpoint:
        step, generation, attempt = _attempt_numbers(path)
        return Checkpoint(
            step=step,
            complete=False,
            bytes=sum(file_sizes(self.fs, path).values()),
            world_size=None,
            generation=generation,
            path=path,
            reason=f"attempt {attempt} of generation {generation}, in progress or abandoned",
        )

    def _check_ours(self, manifest: Manifest, attempt_path: str) -> None:
        if manifest.run_id != self.run_id:
            raise ValueError(f"a manifest of run {manifest.run_id!r}, expected {self.run_id!r}")
        expected = self.attempt_path(manifest.step, manifest.generation, manifest.attempt)
        if attempt_path != expected:
            raise ValueError(f"this manifest commits {expected!r}, found {attempt_path!r}")

    def _make_way(self, old: Look, reason: str) -> None:
        is_whole = self.fs.is_local and self.fs.exists(f"{home(old.step)}/{MANIFEST}")
        if old.has_marker or is_whole:
            # It was published once, by us or by another run: such bytes are never deleted here,
            # nor are those of which only the marker was lost.
            quarantine.set_aside(self.fs, old.step, f"{old.flaw}; {reason}" if old.flaw else reason)
        elif self.fs.is_local:
            self.fs.remove_tree(home(old.step))

    def _exchange(self, step: int, attempt_path: str, manifest_text: bytes, why: str) -> bool:
        """Whether the attempt now is the step, and the complete one that was there is set aside."""
        if not self.fs.is_local:
            return False
        pointer = Pointer(path=home(step), manifest_digest=sha256(manifest_text))
        self.fs.write_bytes(f"{attempt_path}/{MARKER}", pointer.to_json())
        if not self.fs.exchange(attempt_path, home(step)):
            self.fs.remove_tree(f"{attempt_path}/{MARKER}")
            return False
        # The save is published: that the old one lies where it was would be no reason to fail it.
        with contextlib.suppress(OSError):
            quarantine.set_aside(self.fs, step, why, attempt_path)
        return True

    def _publish(self, step: int, attempt_path: str, manifest_text: bytes) -> None:
        if self.fs.is_local:
            self.fs.rename(attempt_path, home(step))
        path = home(step) if self.fs.is_local else attempt_path
        pointer = Pointer(path=path, manifest_digest=sha256(manifest_text))
        self.fs.write_bytes(f"{home(step)}/{MARKER}", pointer.to_json())


def _attempt_numbers(path: str) -> tuple[int, int, int]:
    matched = ATTEMPT_NAME.fullmatch(path.removeprefix(f"{DIR}/"))
    if matched is None:
        raise ValueError(f"{path!r} is no attempt's path: expected what attempt_path returns")
    return int(matched[1]), int(matched[2]), int(matched[3])
