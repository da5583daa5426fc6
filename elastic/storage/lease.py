"""The lease: which driver, of all clusters that see this storage, may write to a run.

Epoch n is the file `lease/<n>.json`, made exclusively: whoever makes the next one owns the run, and
every older owner is fenced off. The owner beats; a beat that stands still for `STALE_S`, watched on
the watcher's own clock, is a dead owner's. Must not import ray or torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from elastic.storage.filesystem import Filesystem
from elastic.storage.format import check_format

FORMAT_VERSION = 1
BEAT_S = 2.0
STALE_S = 12.0

_DIR = "lease"
_EPOCH = re.compile(r"(\d{6,})\.json")


@dataclass(frozen=True, kw_only=True)
class Holder:
    """Who holds a run, as the lease tells it. `beats` grows while the holder lives."""

    owner: str
    host: str
    pid: int
    machine: str
    """Boot and process-number space in which `pid` means something; empty where unknown."""
    what: str
    """Job and cluster, in words."""
    since_s: float
    """Wall time of the acquisition."""
    beats: int = 0
    released: bool = False
    format_version: int = FORMAT_VERSION

    def __str__(self) -> str:
        began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.since_s))
        return f"process {self.pid} on {self.host} ({self.what}), since {began}"


class LeaseHeld(Exception):
    """Another driver holds the run and is alive."""

    def __init__(self, url: str, holder: str) -> None:
        super().__init__(url, holder)
        self.url = url
        self.holder = holder

    def __str__(self) -> str:
        return (
            f"the run {self.url} is held by {self.holder}: stop it first, or use another name. "
            "Nothing was changed"
        )


class LeaseLost(Exception):
    """Another driver has taken the run over; this one may write no more."""


class Lease:
    """The right to write to one run. Beats by itself, in a thread, until released."""

    def __init__(self, fs: Filesystem, epoch: int, holder: Holder) -> None:
        self.epoch = epoch
        self._fs = fs
        self._holder = holder
        self._closed = threading.Event()
        self._writing = threading.Lock()
        self._thread = threading.Thread(target=self._beat, name="elastic-lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises `LeaseLost` if a newer owner has taken over. One listing of a small directory."""
        newest = _newest_epoch(self._fs)
        if newest != self.epoch:
            raise LeaseLost(
                f"lease {self.epoch} of {self._fs.url} was taken over (now {newest}): this driver "
                "is a leftover and must not write"
            )

    def release(self) -> None:
        """Give the run back, so that a next driver need not wait."""
        self._closed.set()
        self._thread.join(timeout=5.0)
        with contextlib.suppress(LeaseLost, OSError):
            self._write(released=True)

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_S):
            # A beat that fails is one that others do not see; the next one may.
            with contextlib.suppress(OSError, LeaseLost):
                self._write(released=False)

    def _write(self, *, released: bool) -> None:
        with self._writing:
            self.check()
            self._holder = replace(self._holder, beats=self._holder.beats + 1, released=released)
            self._fs.write_bytes(_path(self.epoch), _dump(self._holder))


def acquire(
    fs: Filesystem,
    what: str,
    *,
    stale_s: float = STALE_S,
    sleep: Callable[[float], None] = time.sleep,
) -> Lease:
    """The lease on the run at `fs`. Takes up to `stale_s` if the last owner died without a word.

    `what` tells people about this owner. Raises:
        LeaseHeld: the owner is alive; names it. Nothing was changed.
        UnsupportedFormat: a newer program holds it.
    """
    while True:
        epoch, holder = read(fs)
        if holder is not None and not holder.released and not is_dead(holder):
            _wait_until_stale(fs, epoch, holder, stale_s, sleep)
        ours = _ourselves(what)
        if fs.create_new(_path(epoch + 1), _dump(ours)):
            return Lease(fs, epoch + 1, ours)


def read(fs: Filesystem) -> tuple[int, Holder | None]:
    """The newest epoch and its holder; (0, None) when the run was never held."""
    epoch = _newest_epoch(fs)
    if epoch == 0:
        return 0, None
    try:
        tree = json.loads(fs.read_bytes(_path(epoch)))
        check_format(f"the lease of {fs.url}", tree.get("format_version"), FORMAT_VERSION)
        return epoch, Holder(**tree)
    except (ValueError, TypeError, AttributeError):
        # Nobody can be asked: an owner that lives will beat and make it whole again.
        unknown = Holder(owner="?", host="?", pid=0, machine="", what="unreadable", since_s=0.0)
        return epoch, unknown


def _wait_until_stale(
    fs: Filesystem, epoch: int, holder: Holder, stale_s: float, sleep: Callable[[float], None]
) -> None:
    """Returns once the holder has not beaten for `stale_s`; raises `LeaseHeld` if it does."""
    until_s = time.monotonic() + stale_s
    while time.monotonic() < until_s:
        sleep(min(0.25, stale_s))
        now_epoch, now = read(fs)
        if now is not None and (now.released or is_dead(now)):
            return
        if now is not None and (now_epoch != epoch or now.beats != holder.beats):
            raise LeaseHeld(fs.url, str(now))


def is_dead(holder: Holder) -> bool:
    """Whether the holder's process can be seen to be gone; False where that cannot be told."""
    here = _machine()
    return here != "" and holder.machine == here and not _runs(holder.pid)


def _runs(pid: int) -> bool:
    """A zombie does not, once its last thread has ended: until then one may still write."""
    process = Path(f"/proc/{pid}")
    try:
        state = (process / "stat").read_text().rsplit(") ", 1)[1][0]
        return state not in "ZX" or len(os.listdir(process / "task")) > 1
    except FileNotFoundError:
        return False
    except (OSError, IndexError):
        return process.exists()


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _ourselves(what: str) -> Holder:
    return Holder(
        owner=uuid.uuid4().hex,
        host=socket.gethostname(),
        pid=os.getpid(),
        machine=_machine(),
        what=what,
        since_s=time.time(),
    )


def _newest_epoch(fs: Filesystem) -> int:
    found = (_EPOCH.fullmatch(entry.name) for entry in fs.list(_DIR))
    return max((int(match[1]) for match in found if match), default=0)


def _path(epoch: int) -> str:
    return f"{_DIR}/{epoch:06d}.json"


def _dump(holder: Holder) -> bytes:
    return (json.dumps(asdict(holder), indent=1) + "\n").encode()
