"""The local tier: a disk of the node that may be full, broken or gone, and never costs a save."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic.storage import local_store, local_tier, tiered_store
from elastic.storage.completeness import digest_problem, sha256
from elastic.storage.copying import CopyDamaged, CopyStopped
from elastic.storage.filesystem import Filesystem
from elastic.storage.local_tier import LocalTier, LocalUnusable, check_local
from elastic.storage.manifest import FileDigest, Manifest

BIG = os.urandom(3 << 20)


def attempt(step: int, generation: int = 0, number: int = 1) -> str:
    return f"checkpoints/step-{step}.tmp-{generation}-{number}"


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """That data is synced, and in which order, is what test_filesystem.py is about."""
    monkeypatch.setattr(local_store.os, "fsync", lambda descriptor: None)


@pytest.fixture
def shared(tmp_path: Path) -> Filesystem:
    return Filesystem.at(str(tmp_path / "storage" / "run"))


@pytest.fixture
def open_tier(tmp_path: Path, shared: Filesystem) -> Iterator[Callable[..., LocalTier]]:
    opened: list[LocalTier] = []

    def open_tier(run_id: str = "me") -> LocalTier:
        opened.append(LocalTier(str(tmp_path / "nvme"), run_id, shared))
        return opened[-1]

    yield open_tier
    for tier in opened:
        tier.close(is_over=False)


@pytest.fixture
def tier(open_tier: Callable[..., LocalTier]) -> LocalTier:
    return open_tier()


def write(tier: LocalTier, path: str, name: str = "shard", data: bytes = BIG) -> FileDigest:
    with tier.to_write().open_output(f"{path}/{name}") as file:
        for start in range(0, len(data), 1 << 18):
            file.write(memoryview(data)[start : start + (1 << 18)])
    return FileDigest(path=name, bytes=len(data), digest=sha256(data))


def manifest_of(files: list[FileDigest], step: int = 10) -> Manifest:
    return Manifest(
        run_id="me",
        step=step,
        world_size=1,
        generation=0,
        attempt=1,
        created_s=0.0,
        counters={},
        tensors={},
        files=files,
    )


def saved(tier: LocalTier, step: int = 10) -> Manifest:
    """A save on both tiers, called committed."""
    file = write(tier, attempt(step))
    tier.replicate(attempt(step), [file], lambda: False)
    tier.settled(attempt(step), committed=True)
    return manifest_of([file], step)


def copy_of(tier: LocalTier, path: str, name: str = "shard") -> Path:
    return Path(tier.fs.root, path, name)


# --- saving --------------------------------------------------------------------------------------


def test_files_are_local_first_and_then_in_storage_too(tier: LocalTier, shared: Filesystem) -> None:
    path = attempt(10)
    file = write(tier, path)
    tier.to_write().write_bytes(f"{path}/state.json", b"{}")
    assert shared.list() == []
    small = FileDigest(path="state.json", bytes=2, digest=sha256(b"{}"))
    tier.replicate(path, [file, small], lambda: False)
    assert [digest_problem(shared, path, one) for one in (file, small)] == ["", ""]
    assert os.stat(tier.fs.root).st_mode & 0o777 == 0o700
    assert tier.problem == ""


def test_only_what_saves_write_goes_to_the_disk(tier: LocalTier, shared: Filesystem) -> None:
    fs = tier.to_write()
    for path in ("metrics/0.arrows", "checkpoints/step-10/manifest.json", "checkpoints/fence.json"):
        fs.write_bytes(path, b"x")
        assert shared.read_bytes(path) == b"x"
    assert tier.held_bytes() == 0


class Breaking(tiered_store.DirectFile):
    """A disk that is full, or breaks, after so many bytes; nothing it has taken is lost."""

    left_bytes = 1 << 20
    error = errno.ENOSPC

    def write(self, data: Any, /) -> int:
        taken = memoryview(data)[: self.left_bytes]
        if len(taken) == 0:
            raise OSError(self.error, os.strerror(self.error))
        self.left_bytes -= len(taken)
        return super().write(taken)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("left_bytes", [0, 1, (1 << 20) + 7])
def test_a_disk_that_fails_in_the_middle_costs_no_save(
    tier: LocalTier,
    shared: Filesystem,
    monkeypatch: pytest.MonkeyPatch,
    error: int,
    left_bytes: int,
) -> None:
    told: list[tuple[str, str]] = []
    tier.tell = lambda kind, reason: told.append((kind, reason))
    monkeypatch.setattr(Breaking, "left_bytes", left_bytes)
    monkeypatch.setattr(Breaking, "error", error)
    monkeypatch.setattr(tiered_store, "DirectFile", Breaking)
    file = write(tier, attempt(10))
    again = write(tier, attempt(10), "second")
    tier.replicate(attempt(10), [file, again], lambda: False)
    for one in (file, again):
        assert digest_problem(shared, attempt(10), one) == ""
    assert tier.held_bytes() == 0, "the room is given back"
    assert [kind for kind, _ in told] == ["local_disk_failed"], "once is enough"
    assert os.strerror(error) in told[0][1]


def test_a_disk_that_cannot_sync_costs_no_save(
    tier: LocalTier, shared: Filesystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = str(copy_of(tier, attempt(10)))

    def fsync(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}") == shard:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(tiered_store.os, "fsync", fsync)
    file = write(tier, attempt(10))
    tier.replicate(attempt(10), [file], lambda: False)
    assert digest_problem(shared, attempt(10), file) == ""
    assert tier.problem


def test_a_directory_that_went_away_costs_no_save(tier: LocalTier, shared: Filesystem) -> None:
    checkpoints = Path(tier.fs.root, "checkpoints")
    checkpoints.write_text("no directory")  # ENOTDIR for root too, whom no mode stops
    file = write(tier, attempt(10))
    tier.to_write().write_bytes(f"{attempt(10)}/state.json", b"{}")
    tier.replicate(attempt(10), [file], lambda: False)
    tier.settled(attempt(10), committed=True)
    assert digest_problem(shared, attempt(10), file) == ""
    assert shared.read_bytes(f"{attempt(10)}/state.json") == b"{}"
    assert tier.sweep(1, time.time()) == []
    assert tier.held_bytes() == 0


def test_bytes_that_rot_before_they_are_copied_are_no_checkpoint(
    tier: LocalTier, shared: Filesystem
) -> None:
    file = write(tier, attempt(10))
    _flip(copy_of(tier, attempt(10)))
    with pytest.raises(CopyDamaged, match="shard"):
        tier.replicate(attempt(10), [file], lambda: False)
    assert "cannot be read back" in tier.problem
    next_one = write(tier, attempt(20, 0, 2))
    assert digest_problem(shared, attempt(20, 0, 2), next_one) == "", "it trusts that disk no more"


def test_what_is_neither_here_nor_in_storage_is_no_checkpoint(tier: LocalTier) -> None:
    file = write(tier, attempt(10))
    copy_of(tier, attempt(10)).unlink()
    with pytest.raises(OSError, match="shard is missing"):
        tier.replicate(attempt(10), [file], lambda: False)


def test_a_copy_that_nobody_waits_for_stops(tier: LocalTier) -> None:
    file = write(tier, attempt(10))
    with pytest.raises(CopyStopped):
        tier.replicate(attempt(10), [file], lambda: True)


def test_the_disk_holds_the_newest_checkpoint_and_the_save_in_flight(tier: LocalTier) -> None:
    """B64: with 30 saves never more than two checkpoints, and nothing when the run is over."""
    most = 0
    for number in range(1, 31):
        path = attempt(number * 10, 0, number)
        file = write(tier, path, data=BIG[:1000])
        most = max(most, tier.held_bytes())
        tier.replicate(path, [file], lambda: False)
        tier.settled(path, committed=number % 7 != 0)
    assert most == 2000
    assert tier.held_bytes() == 1000
    assert [entry.name for entry in tier.fs.list("checkpoints")] == ["step-300.tmp-0-30"]
    tier.close(is_over=True)
    assert os.listdir(tier.root) == []


# --- restoring -----------------------------------------------------------------------------------


def test_the_nearest_copy_is_read(tier: LocalTier, shared: Filesystem) -> None:
    manifest = saved(tier)
    shared.rename(attempt(10), "checkpoints/step-10")
    shared.write_bytes("checkpoints/step-10/shard", bytes(len(BIG)))  # same size, other bytes
    fs = tier.to_read("checkpoints/step-10", manifest)
    assert fs.read_bytes("checkpoints/step-10/shard") == BIG
    assert fs.size("checkpoints/step-10/shard") == len(BIG)
    assert digest_problem(fs, "checkpoints/step-10", manifest.files[0]) == ""
    assert tier.num_read() == (1, 0)
    other = tier.to_read("checkpoints/step-10", manifest)
    with other.open_input("checkpoints/step-10/shard") as stream:
        stream.seek(7)
        assert stream.read(5) == BIG[7:12]
    assert other.store.read_range(f"{shared.root}/checkpoints/step-10/shard", 7, 5) == BIG[7:12]  # type: ignore[attr-defined]


def test_what_is_not_here_is_read_in_storage(tier: LocalTier, shared: Filesystem) -> None:
    manifest = saved(tier)
    copy_of(tier, attempt(10)).unlink()
    fs = tier.to_read(attempt(10), manifest)
    assert digest_problem(fs, attempt(10), manifest.files[0]) == ""
    assert tier.num_read() == (0, 1)
    assert tier.drop_damaged(manifest) == []
    assert not tier.leave_out()


def test_what_is_not_whole_here_any_more_is_read_in_storage(tier: LocalTier) -> None:
    manifest = saved(tier)
    fs = tier.to_read(attempt(10), manifest)
    os.truncate(copy_of(tier, attempt(10)), 7)
    assert fs.read_bytes(f"{attempt(10)}/shard") == BIG


@pytest.mark.parametrize("damage", ["truncated", "flipped"])
def test_a_damaged_copy_is_removed_and_told_and_storage_read(tier: LocalTier, damage: str) -> None:
    told: list[str] = []
    tier.tell = lambda kind, reason: told.append(kind)
    manifest = saved(tier)
    copy = copy_of(tier, attempt(10))
    if damage == "truncated":
        copy.write_bytes(BIG[:-1])
    else:
        _flip(copy)
    fs = tier.to_read(attempt(10), manifest)
    if damage == "flipped":
        assert "expected sha256" in digest_problem(fs, attempt(10), manifest.files[0])
        (problem,) = tier.drop_damaged(manifest)
        assert "shard" in problem
        fs = tier.to_read(attempt(10), manifest)
    assert not copy.exists()
    assert told == ["local_copy_damaged"]
    assert digest_problem(fs, attempt(10), manifest.files[0]) == ""


def test_a_copy_that_vanishes_while_it_is_read_is_not_blamed_on_the_checkpoint(
    tier: LocalTier,
) -> None:
    manifest = saved(tier)
    fs = tier.to_read(attempt(10), manifest)
    fs.open_input(f"{attempt(10)}/shard").close()
    copy_of(tier, attempt(10)).unlink()
    assert tier.drop_damaged(manifest) == ["shard is missing"]


def test_a_copy_that_was_read_and_seems_sound_is_left_out_all_the_same(tier: LocalTier) -> None:
    manifest = saved(tier)
    tier.to_read(attempt(10), manifest).read_bytes(f"{attempt(10)}/shard")
    assert tier.drop_damaged(manifest) == []
    assert tier.leave_out()
    assert tier.to_read(attempt(10), manifest) is tier.shared
    assert not tier.leave_out(), "there is no third try"


def test_a_disk_that_cannot_read_has_not_got_the_file() -> None:
    # Nothing is mapped at the beginning of this file, which makes a real EIO.
    with tiered_store.DiskFile("/proc/self/mem") as file:
        with pytest.raises(FileNotFoundError, match="Input/output error"):
            file.readinto(bytearray(8))
        with pytest.raises(FileNotFoundError, match="Input/output error"):
            file.readall()


# --- whose it is ---------------------------------------------------------------------------------


def test_older_generations_go_but_not_what_was_restored(
    open_tier: Callable[..., LocalTier],
) -> None:
    before = open_tier()
    for number in (1, 2):
        write(before, attempt(number * 10, 0, number), data=b"x")
    before.close(is_over=False)
    tier = open_tier()
    tier.to_read(attempt(10), manifest_of([]))
    write(tier, attempt(20, 1, 1), data=b"x")
    assert tier.sweep(1, time.time()) == [attempt(20, 0, 2)]
    kept = [entry.name for entry in tier.fs.list("checkpoints")]
    assert kept == ["step-10.tmp-0-1", "step-20.tmp-1-1"]


def test_what_was_committed_last_stays_for_who_restored_from_elsewhere(
    open_tier: Callable[..., LocalTier],
) -> None:
    before = open_tier()
    saved(before)
    write(before, attempt(20, 0, 2), data=b"in flight when all died")
    before.close(is_over=False)
    tier = open_tier()
    assert tier.sweep(1, time.time()) == [attempt(20, 0, 2)]
    assert copy_of(tier, attempt(10)).exists()


def test_another_runs_leftovers_go_once_nobody_uses_them(
    open_tier: Callable[..., LocalTier],
) -> None:
    tier, dead, alive, recent = (open_tier(run) for run in ("me", "dead", "alive", "recent"))
    for other in (dead, alive, recent):
        write(other, attempt(10), data=b"x")
    dead.close(is_over=False)
    recent.close(is_over=False)
    for other in (dead, alive):
        os.utime(Path(other.fs.root, ".lock"), (1.0, 1.0))
    foreign = Path(tier.root, "elastic-notes")
    foreign.mkdir()
    assert tier.sweep(1, time.time()) == [dead.fs.root]
    assert sorted(os.listdir(tier.root)) == [
        "elastic-alive",
        "elastic-me",
        "elastic-notes",
        "elastic-recent",
    ]


def test_a_directory_that_is_being_swept_is_made_anew(
    tmp_path: Path, open_tier: Callable[..., LocalTier]
) -> None:
    """Whoever opens it meanwhile must not write below a name that is about to go."""
    before = open_tier()
    before.close(is_over=False)
    lock = Path(before.fs.root, ".lock")
    inode = lock.stat().st_ino
    flock, opened = fcntl.flock, []

    def swept_meanwhile(descriptor: int, how: int) -> None:
        if not opened:
            opened.append(descriptor)
            local_tier.shutil.rmtree(before.fs.root)
        flock(descriptor, how)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(local_tier.fcntl, "flock", swept_meanwhile)
        tier = open_tier()
    assert opened
    assert lock.exists()
    write(tier, attempt(10))
    assert inode


@pytest.mark.parametrize("kind", ["link", "open to others", "a file"])
def test_a_directory_that_others_prepared_is_not_used(
    tmp_path: Path, open_tier: Callable[..., LocalTier], kind: str
) -> None:
    place = tmp_path / "nvme" / "elastic-me"
    place.parent.mkdir()
    if kind == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        place.symlink_to(tmp_path / "elsewhere")
    elif kind == "open to others":
        place.mkdir()
        place.chmod(0o777)
    else:
        place.write_text("")
    with pytest.raises(LocalUnusable, match="elastic-me"):
        open_tier()


def test_a_place_that_is_not_there_is_told(tmp_path: Path, shared: Filesystem) -> None:
    with pytest.raises(LocalUnusable, match="not mounted") as refused:
        LocalTier(str(tmp_path / "nvme" / "of" / "another"), "me", shared)
    assert "or leave local out" in str(refused.value), "what to do"
    with pytest.raises(LocalUnusable, match="makes no name"):
        LocalTier(str(tmp_path), "../me", shared)


def test_a_link_into_the_storage_is_no_disk_of_the_nodes_own(
    tmp_path: Path, shared: Filesystem
) -> None:
    shared.make_dirs("inside")
    (tmp_path / "link").symlink_to(Path(shared.root, "inside"))
    with pytest.raises(LocalUnusable, match="the run's own storage"):
        LocalTier(str(tmp_path / "link"), "me", shared)


@pytest.mark.parametrize(
    ("local", "said"),
    [
        ("nvme", "absolute"),
        ("s3://bucket/nvme", "absolute"),
        ("/nvme/../mnt/runs", "absolute"),
        ("/mnt/runs", "lies in the storage"),
        ("/mnt/runs/local", "lies in the storage"),
        ("/mnt/./runs/local", "lies in the storage"),
    ],
)
def test_a_place_that_cannot_be_a_nodes_own_is_refused(local: str, said: str) -> None:
    """B63: what every node shares is wrong here, as what each has of its own is for storage."""
    with pytest.raises(ValueError, match=said):
        check_local(local, "/mnt/runs")


def test_any_other_place_is_taken() -> None:
    for storage in ("/mnt/runs", "memory://bucket/runs"):
        check_local("/mnt/runs-local", storage)
        check_local(None, storage)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
