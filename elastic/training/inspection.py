"""What this process does when its group stands still, as its other threads can tell.

Looks at the stack of the training thread, at the processor time it asks for, and at how many
collectives this rank has begun in each process group. Linux only in part: elsewhere a thread is
never said to run. Must not import ray.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from elastic.policy.culprits import DATA, DRIVER, OWN, PEERS, STORAGE, RankLook
from elastic.storage import deadline

_SAMPLE_S = 0.1
_BUSY_SHARE = 0.3
_SAVE_THREAD = "elastic-save"
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_STATES = {"R": "running", "S": "sleeping", "D": "in the kernel", "T": "stopped", "Z": "dead"}

# The first that fits, from the innermost frame outwards, tells what a thread waits for. Frames of
# the standard library fit none: they are how it waits.
_PLACES = (
    ("/torch/distributed/checkpoint/filesystem", STORAGE),
    ("/torch/distributed/", PEERS),
    ("/elastic/training/agreement.py", PEERS),
    ("/elastic/training/step.py", PEERS),
    ("/elastic/training/process_group.py", PEERS),
    ("/elastic/training/shard_", STORAGE),
    ("/elastic/storage/", STORAGE),
    ("/elastic/training/loading.py", STORAGE),
    ("/fsspec/", STORAGE),
    ("/s3fs/", STORAGE),
    ("/gcsfs/", STORAGE),
    ("/torch/utils/data/", DATA),
    ("/torchdata/", DATA),
    ("/ray/", DRIVER),
    ("/elastic/", ""),
)
_STANDARD = str(Path(threading.__file__).parent)


@dataclass(frozen=True)
class TrainingThread:
    """The thread that calls the user's function."""

    ident: int
    native_id: int

    @classmethod
    def current(cls) -> TrainingThread:
        return cls(threading.get_ident(), threading.get_native_id())


def inspect(thread: TrainingThread, world_rank: int, phase: str) -> RankLook:
    """What this rank does now. Takes a tenth of a second; call it in another thread."""
    is_running = _is_running(thread.native_id)
    frames = sys._current_frames()
    waits_for, place = _standing_of(thread.ident, frames)
    save_waits_for, save_place = _of_saves(frames)
    if waits_for == "" and save_waits_for:
        waits_for, place = save_waits_for, save_place  # it waits for its own save
    return RankLook(
        world_rank=world_rank,
        phase=phase,
        num_begun=_num_begun(),
        waits_for=waits_for or OWN,
        place=place,
        is_running=is_running,
        children=_children(),
        save_waits_for=save_waits_for,
        save_place=save_place,
    )


def stacks() -> str:
    """The Python stack of every thread, innermost frame first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        lines = [f'Thread {ident}: "{names.get(ident, "not of Python")}"']
        lines += [f"    {_told(one)}" for one in _outwards(frame)]
        parts.append("\n".join(lines))
    return "\n".join(parts) + "\n"


def _standing_of(thread_id: int, frames: dict[int, FrameType]) -> tuple[str, str]:
    """What the thread waits for, and the frame that tells so; another may call storage for it."""
    worker_id = deadline.works_for(thread_id)
    return _standing(frames.get(thread_id if worker_id is None else worker_id))


def _standing(frame: FrameType | None) -> tuple[str, str]:
    """What the thread waits for, and the frame that tells so."""
    for one in _outwards(frame):
        path = one.f_code.co_filename
        for part, kind in _PLACES:
            if part in path:
                return kind, _told(one)
        if not path.startswith((_STANDARD, "<")) or "/site-packages/" in path:
            if "/torch/" in path:
                continue  # a module's or an operator's own frames: whose call it is lies outwards
            return OWN, _told(one)
    return OWN, _told(frame) if frame is not None else "no frame of Python"


def _of_saves(frames: dict[int, FrameType]) -> tuple[str, str]:
    """The same of the thread that writes a save, or of those that help it; empty without one."""
    found = ("", "")
    for thread in threading.enumerate():
        frame = frames.get(thread.ident or -1)
        if frame is None or thread.ident == threading.main_thread().ident:
            continue
        if not _is_saving(thread, frame):
            continue
        kind, place = _standing_of(thread.ident or -1, frames)
        if kind == STORAGE:
            return kind, place
        if kind:
            found = kind, place
    return found


def _is_saving(thread: threading.Thread, frame: FrameType) -> bool:
    if thread.name.startswith(_SAVE_THREAD):
        return True
    parts = ("/torch/distributed/checkpoint/", "/elastic/training/shard_writer.py")
    return any(part in one.f_code.co_filename for one in _outwards(frame) for part in parts)


def _outwards(frame: FrameType | None) -> list[FrameType]:
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


def _told(frame: FrameType) -> str:
    path = frame.f_code.co_filename
    return f"{Path(path).name}:{frame.f_lineno} in {frame.f_code.co_name}"


def _num_begun() -> dict[str, int]:
    """Collectives begun, by the process group's name: the same on gloo and NCCL."""
    found: dict[str, int] = {}
    if not dist.is_initialized():
        return found
    groups: dict[Any, Any] = distributed_c10d._world.pg_map
    for group in list(groups):
        with contextlib.suppress(RuntimeError):
            name = distributed_c10d._get_process_group_name(group)
            found[name] = int(group._get_sequence_number_for_group())
    return found


def _is_running(native_id: int) -> bool:
    before = _asked_s(native_id)
    begun_s = time.monotonic()
    time.sleep(_SAMPLE_S)
    return _asked_s(native_id) - before >= _BUSY_SHARE * (time.monotonic() - begun_s)


def _asked_s(native_id: int) -> float:
    """Processor time that a thread has asked for: used, and waited for while others had it.

    One that loops on a crowded machine gets little, but wants all. A kernel without scheduler
    statistics (proc_pid_schedstat(5): all zero, or no such file) tells only what was used.
    """
    task = Path(f"/proc/self/task/{native_id}")
    with contextlib.suppress(OSError):
        used, waited, _ = map(int, (task / "schedstat").read_text().split())
        if used:
            return (used + waited) / 1e9
    try:
        fields = _stat(task / "stat")
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def _stat(path: Path) -> list[str]:
    # The name, the second field, may hold spaces and parentheses; what follows it does not.
    return path.read_text().rsplit(") ", 1)[1].split()


def _children() -> list[str]:
    found = []
    with contextlib.suppress(OSError):
        for task in Path("/proc/self/task").iterdir():
            for pid in (task / "children").read_text().split():
                with contextlib.suppress(OSError):
                    state = _stat(Path(f"/proc/{pid}/stat"))[0]
                    found.append(f"pid {pid} ({_STATES.get(state, state)})")
    return found
