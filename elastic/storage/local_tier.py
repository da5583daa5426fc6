"""The local tier: one run's directory on this node's own disk, for the files of its newest saves.

Only a faster copy: what is missing, damaged or full there is read from, or written to, the run's
storage. The ranks of a node share the directory, which holds the newest committed checkpoint and
the save in flight, never more. Must not import ray or torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import shutil
import stat
import threading
from collections.abc import Callable, Sequence

from elastic.storage.completeness import ATTEMPT_NAME, DIR, digest_problem
from elastic.storage.copying import CopyStopped, copy_file, give_way
from elastic.storage.filesystem import Entry, Filesystem
from elastic.storage.local_store import LocalStore
from elastic.storage.manifest import FileDigest, Manifest
from elastic.storage.tiered_store import LocalFirst, Nearest

__all__ = ["LocalTier", "LocalUnusable", "check_local"]

logger = logging.getLogger("elastic")

UNUSED_S = 3600.0
"""How long another run's directory stays that no living process uses."""

_NAME = re.compile(r"elastic-([0-9A-Za-z_-]{1,64})")
_LOCK = ".lock"
_COMMITTED = "committed"
"""Names the newest save here that was committed, for who restores from elsewhere."""

TellLocal = Callable[[str, str], None]


class LocalUnusable(Exception):
    """This node cannot keep files at the place that `local=` names."""

    def __init__(self, root: str, problem: str) -> None:
        super().__init__(root, problem)
        self.root = root
        self.problem = problem

    def __str__(self) -> str:
        return (
            f"local={self.root!r} cannot be used: {self.problem}. Expected a directory on the "
            "node's own disk that this user may write, or a name for one in a directory that is "
            "there: mount the disk, name another place, or leave local out, and all saves go to "
            "storage directly"
        )


def check_local(local: str | None, storage: str) -> None:
    """Raises `ValueError` for a place that cannot be a node's own; looks at no disk."""
    if local is None:
        return
    if not local.startswith("/") or ".." in local.split("/") or "\0" in local:
        raise ValueError(
            f"local must be an absolute path on each node's own disk, such as /nvme/elastic; "
            f"found {local!r}"
        )
    runs = Filesystem.at(storage).local_root
    if runs is not None and _is_in(os.path.normpath(local), runs):
        raise ValueError(
            f"local {local!r} lies in the storage of the runs, {storage!r}: expected a disk of the "
            "node's own, since all nodes would write to the same directory"
        )


class LocalTier:
    """The directory of the run `run_id` below `root`, in use by this process until `close`.

    `tell(kind, reason)` is called once for each thing that goes wrong with the disk.
    """

    def __init__(self, root: str, run_id: str, shared: Filesystem) -> None:
        """Raises `LocalUnusable`."""
        self.root = root
        self.shared = shared
        self.problem = ""
        """Why nothing is written here any more, "" while it is."""
        self.tell: TellLocal = lambda kind, reason: None
        self._lock = threading.Lock()
        self._kept: str | None = None
        self._left_out: str | None = None
        self._nearest: Nearest | None = None
        self._descriptor = -1
        try:
            self._path = _place(root, run_id, shared)
            self._descriptor = _hold(self._path)
            self.fs = Filesystem(LocalStore(), self._path)
            self.fs.write_bytes(f"probe-{os.getpid()}", b"")
            self.fs.remove_tree(f"probe-{os.getpid()}")
        except (OSError, ValueError) as error:
            self.close(is_over=False)
            raise LocalUnusable(root, f"{type(error).__name__}: {error}") from error

    def free_bytes(self) -> int | None:
        """What the disk has left; None where it does not say."""
        try:
            return shutil.disk_usage(self._path).free
        except OSError:
            return None

    # --- saving ----------------------------------------------------------------------------------

    def to_write(self) -> Filesystem:
        """The run's storage, where the files of an attempt go to this disk as long as it takes
        them."""
        store = LocalFirst(self.shared, self.fs, fail=self._fail, is_off=lambda: bool(self.problem))
        return Filesystem(store, self.shared.root)

    def replicate(
        self, attempt: str, files: Sequence[FileDigest], is_stopped: Callable[[], bool]
    ) -> None:
        """The files of this rank are in the run's storage too, their digests checked.

        Gives this thread low priority. Raises `CopyDamaged`, `CopyStopped`, and what storage
        raises; then the save has failed.
        """
        give_way()
        with contextlib.suppress(OSError):
            os.utime(f"{self._path}/{_LOCK}")  # in use: see UNUSED_S
        for file in files:
            if self._size(f"{attempt}/{file.path}") == file.bytes:
                self._copy(attempt, file, is_stopped)
                continue
            # It went to storage directly, piece by piece from a disk that failed in between.
            problem = digest_problem(self.shared, attempt, file)
            if problem:
                raise OSError(f"{attempt}: {problem}, after {self.problem or 'it left this disk'}")

    def _copy(self, attempt: str, file: FileDigest, is_stopped: Callable[[], bool]) -> None:
        try:
            copy_file(self.fs, attempt, self.shared, attempt, file, is_stopped)
        except CopyStopped:
            raise
        except Exception:
            damage = self._damage(attempt, file)
            if damage:  # this save is lost, the next ones go where they are safe
                self._fail(OSError(f"what was written cannot be read back: {damage}"))
            raise

    def settled(self, attempt: str, *, committed: bool) -> None:
        """The save has ended: its files make older ones here needless, or are needless."""
        if not committed:
            self._remove([attempt])
            return
        self._kept = attempt
        with contextlib.suppress(OSError):
            self.fs.write_bytes(_COMMITTED, attempt.encode())
        begun = _order(attempt)
        self._remove([path for path in self._attempts() if _order(path) < begun])

    # --- restoring -------------------------------------------------------------------------------

    def to_read(self, path: str, manifest: Manifest) -> Filesystem:
        """The run's storage, where the files of that checkpoint come from this disk if they are
        here with their sizes.

        What is read here is for the reader to check, as what is read there. Where it finds damage,
        it shall `drop_damaged` here, and then `leave_out`, before it blames the checkpoint.
        """
        self._kept = attempt = _attempt_of(manifest)
        if attempt == self._left_out:
            self._nearest = None
            return self.shared
        files = {file.path: file for file in manifest.files}
        self._drop(attempt, [self._wrong_size(attempt, file) for file in manifest.files])
        self._nearest = Nearest(self.shared, path, self.fs, attempt, files)
        return Filesystem(self._nearest, self.shared.root)

    def num_read(self) -> tuple[int, int]:
        """How many files of the checkpoint last read came from this disk, and how many from
        storage; (0, 0) where the disk was left out."""
        if self._nearest is None:
            return 0, 0
        return len(self._nearest.read), len(self._nearest.read_in_storage)

    def drop_damaged(self, manifest: Manifest) -> list[str]:
        """What was wrong with files read here of that checkpoint, which are gone now; [] if none
        was."""
        read = set() if self._nearest is None else self._nearest.read
        found = {
            file.path: self._damage(_attempt_of(manifest), file)
            for file in manifest.files
            if file.path in read
        }
        return self._drop(_attempt_of(manifest), list(found.items()))

    def leave_out(self) -> bool:
        """From now on nothing is read here of the checkpoint last read; whether something was."""
        was_read = self._nearest is not None and bool(self._nearest.read)
        self._left_out, self._nearest = self._kept, None
        return was_read

    def _drop(self, attempt: str, found: Sequence[tuple[str, str]]) -> list[str]:
        """Removes the files of these pairs (path, problem) that have one; the problems."""
        bad = [(path, problem) for path, problem in found if problem]
        self._remove([f"{attempt}/{path}" for path, _ in bad])
        problems = [problem for _, problem in bad]
        if problems:
            told = f"{self._path}/{attempt}: {'; '.join(problems)}; read from storage instead"
            self._say("local_copy_damaged", told)
        return problems

    def _wrong_size(self, attempt: str, file: FileDigest) -> tuple[str, str]:
        size = self._size(f"{attempt}/{file.path}")
        is_right = size in (None, file.bytes)
        return file.path, "" if is_right else f"{file.path}: {size} bytes, expected {file.bytes}"

    def _damage(self, attempt: str, file: FileDigest) -> str:
        try:
            return digest_problem(self.fs, attempt, file)
        except OSError as error:
            return f"{file.path}: {type(error).__name__}: {error}"

    # --- what is here ----------------------------------------------------------------------------

    def sweep(self, generation: int, now_s: float) -> list[str]:
        """What is now gone: saves of older generations but the checkpoint that was restored, or
        else the newest one that was committed, and other runs' directories that no process has used
        for `UNUSED_S`.

        `now_s` is wall time. Of the ranks of a node one calls it, after it has restored.
        """
        kept = self._kept or self._committed()
        stale = [path for path in self._attempts() if _order(path)[0] < generation]
        gone = [path for path in stale if path != kept]
        self._remove(gone)
        return gone + [name for name in self._others() if _remove_unused(name, now_s)]

    def held_bytes(self) -> int:
        """Of all files of the run here."""
        return sum(entry.bytes for attempt in self._attempts() for entry in self._list(attempt))

    def close(self, *, is_over: bool) -> None:
        """This process needs it no more; where the run is over, nobody does, and it goes."""
        if is_over:
            shutil.rmtree(self._path, ignore_errors=True)
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _committed(self) -> str | None:
        with contextlib.suppress(OSError):
            return self.fs.read_bytes(_COMMITTED).decode(errors="replace")
        return None

    def _attempts(self) -> list[str]:
        found = [entry.name for entry in self._list(DIR) if entry.is_dir]
        return [f"{DIR}/{name}" for name in found if ATTEMPT_NAME.fullmatch(name)]

    def _others(self) -> list[str]:
        parent, own = os.path.split(self._path)
        names: list[str] = []
        with contextlib.suppress(OSError):
            names = sorted(os.listdir(parent))
        return [os.path.join(parent, n) for n in names if n != own and _NAME.fullmatch(n)]

    def _list(self, path: str) -> list[Entry]:
        """What can be seen there: a disk that cannot be read holds nothing of use."""
        with contextlib.suppress(OSError):
            return self.fs.list(path)
        return []

    def _size(self, path: str) -> int | None:
        with contextlib.suppress(OSError):
            return self.fs.size(path)
        return None

    def _remove(self, paths: Sequence[str]) -> None:
        for path in paths:
            # Another rank of the node may be at it too.
            shutil.rmtree(f"{self._path}/{path}", ignore_errors=True)
            with contextlib.suppress(OSError):
                os.unlink(f"{self._path}/{path}")

    def _fail(self, error: OSError) -> None:
        with self._lock:
            if self.problem:
                return
            self.problem = f"{type(error).__name__}: {error}"
        self._say(
            "local_disk_failed",
            f"{self._path} takes no more files ({self.problem}): from here on saves go to the "
            "run's storage directly",
        )

    def _say(self, kind: str, reason: str) -> None:
        logger.warning("%s", reason)
        self.tell(kind, reason)


def _attempt_of(manifest: Manifest) -> str:
    return f"{DIR}/step-{manifest.step}.tmp-{manifest.generation}-{manifest.attempt}"


def _order(attempt: str) -> tuple[int, int]:
    """Generation and attempt: the order in which saves begin."""
    matched = ATTEMPT_NAME.fullmatch(attempt.removeprefix(f"{DIR}/"))
    assert matched is not None, attempt
    return int(matched[2]), int(matched[3])


def _is_in(path: str, directory: str) -> bool:
    return f"{path}/".startswith(f"{directory.rstrip('/')}/")


def _place(root: str, run_id: str, shared: Filesystem) -> str:
    """The run's directory below `root`, without links. Raises `ValueError`, `OSError`."""
    name = f"elastic-{run_id}"
    if not _NAME.fullmatch(name):
        raise ValueError(f"the run's id {run_id!r} makes no name of a directory")
    place = os.path.join(_existing(root), name)
    if shared.local_root is not None and _is_in(place, os.path.realpath(shared.local_root)):
        raise ValueError(f"it leads into the run's own storage, to {place!r}")
    return place


def _existing(root: str) -> str:
    """`root` without links, made if only its last part is missing."""
    if not os.path.isdir(os.path.dirname(root.rstrip("/")) or "/"):
        raise NotADirectoryError(f"there is no directory {os.path.dirname(root)!r}: not mounted?")
    with contextlib.suppress(FileExistsError):
        os.mkdir(root)
    return os.path.realpath(root)


def _hold(path: str) -> int:
    """A descriptor of the directory's lock, as long as which is open nobody else sweeps it."""
    while True:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        found = os.lstat(path)
        is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
        if not is_ours or found.st_mode & 0o077:
            raise PermissionError(
                f"{path!r} is there and is not a directory of this user's alone "
                f"(mode {stat.S_IMODE(found.st_mode):o}, owner {found.st_uid}): remove it"
            )
        lock = os.path.join(path, _LOCK)
        try:
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
        except FileNotFoundError:
            continue  # swept away between the two
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        with contextlib.suppress(FileNotFoundError):
            if os.stat(lock).st_ino == os.fstat(descriptor).st_ino:
                os.utime(descriptor)
                return descriptor
        os.close(descriptor)


def _remove_unused(path: str, now_s: float) -> bool:
    """Whether another run's directory was removed, which no living process holds."""
    lock = os.path.join(path, _LOCK)
    try:
        found = os.lstat(path)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            return False
        descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        if now_s - os.fstat(descriptor).st_mtime < UNUSED_S:
            return False
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
        return not os.path.exists(path)
    except OSError:
        return False  # somebody holds it
    finally:
        os.close(descriptor)
