"""Snapshots: what comes out of the nodes' memories is what went in, at any number of ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, cast

import pytest
import torch
import torch.distributed as dist

from elastic.policy.coverage import Unneeded
from elastic.policy.mesh import TENSOR
from elastic.policy.saves import SaveInterval
from elastic.storage.chunk_digests import CHUNK_BYTES, ChunkDigester
from elastic.storage.filesystem import Filesystem
from elastic.storage.manifest import FileDigest
from elastic.training import jsonable, piece
from elastic.training.loading import LoadFailed, read_tensors
from elastic.training.membership import Membership, TrainingConfig
from elastic.training.node_memory import NotKept, PieceLost
from elastic.training.piece import Layout as Pieces
from elastic.training.process_group import Groups
from elastic.training.saves import Saves
from elastic.training.saving import STATE, AsyncSaver, rank_file
from elastic.training.shard_reader import CheckpointCorrupt
from elastic.training.snapshot_reader import SnapshotReader, load_snapshot
from elastic.training.snapshots import Snapshots, SnapshotsDoNotFit
from elastic.training.state import TrackedState
from tests.dist.mesh_run import LAYOUTS, Layout, backward, generation
from tests.dist.mesh_run import built as on_its_mesh
from tests.dist.processes import run_ranks
from tests.dist.small_run import content, restore, save, small, train


class InFile:
    """A copy of a piece in a file, as if on another machine unless `is_here`."""

    def __init__(self, path: Path, *, is_here: bool) -> None:
        self.where = path.name
        self._path = path
        self._is_here = is_here
        self.fetched: list[tuple[int, int]] = []

    def index(self) -> bytes:
        if not self._path.exists():
            raise PieceLost(self.where)
        return self._path.with_suffix(".index").read_bytes()

    def digests(self) -> FileDigest:
        digester = ChunkDigester()
        digester.update(self._path.with_suffix(".sound").read_bytes())
        return digester.file("the piece")

    def open(self) -> BinaryIO | None:
        return self._path.open("rb") if self._is_here else None

    def fetch(self, start: int, num_bytes: int) -> Callable[[], memoryview]:
        self.fetched.append((start, num_bytes))
        return lambda: memoryview(self._path.read_bytes()[start : start + num_bytes])


def sources(folder: Path, world_size: int, *copies: str) -> list[list[InFile]]:
    """Of each rank's piece the copies of these kinds."""
    return [
        [InFile(folder / f"{rank}.{kind}", is_here=kind == "own") for kind in copies]
        for rank in range(world_size)
    ]


def put(folder: Path, tracked: TrackedState) -> None:
    """This rank's piece and a copy of it."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    captured = tracked.capture()
    files = {rank_file(rank): jsonable.dumps({"rank": rank}).encode()}
    if rank == 0:
        files[STATE] = jsonable.dumps({"tracked": captured.plain}).encode()
    layout, tensors = piece.lay_out(captured.tensors, files, rank)
    room = bytearray(layout.num_bytes + 100)  # as a segment is, larger than what lies in it
    piece.copy(layout, tensors, files, memoryview(room))
    for kind in ("own", "copy"):
        path = folder / f"{rank}.{kind}"
        path.write_bytes(room)
        path.with_suffix(".index").write_bytes(layout.to_json())
        path.with_suffix(".sound").write_bytes(room[: layout.num_bytes])


def built(seed: int) -> TrackedState:
    model = small(seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, range(seed, seed + 2))
    return TrackedState(model=model, optimizer=optimizer, counters={"seed": seed})


def make(rank: int, world_size: int, folder: Path) -> tuple[dict[str, Any], Any]:
    tracked = built(seed=1)
    put(folder, tracked)
    manifest = save(folder, "checkpoint", tracked)
    return content(tracked), manifest


def take_over(rank: int, world_size: int, folder: Path, num_saved: int, manifest: Any) -> Any:
    tracked = built(seed=7)
    restored = load_snapshot(sources(folder, num_saved, "own"), "it", tracked, dist.group.WORLD)
    assert restored.is_snapshot
    assert restored.rank_plain == ({"rank": rank} if rank < num_saved else None)
    found = content(tracked)
    other = built(seed=9)
    restore(folder, "checkpoint", manifest, other)
    assert content(other) == found
    third = built(seed=11)
    load_snapshot(sources(folder, num_saved, "copy"), "it", third, dist.group.WORLD)
    assert content(third) == found
    return found


def damaged(rank: int, world_size: int, folder: Path, num_saved: int) -> Any:
    tracked = built(seed=7)
    with pytest.raises(CheckpointCorrupt, match=r"node 1\.own.*expected .* found"):  # B14
        load_snapshot(sources(folder, num_saved, "own"), "it", tracked, dist.group.WORLD)
    load_snapshot(sources(folder, num_saved, "own", "copy"), "it", tracked, dist.group.WORLD)
    return content(tracked)


def lost(rank: int, world_size: int, folder: Path, num_saved: int) -> None:
    with pytest.raises((PieceLost, LoadFailed)):
        load_snapshot(sources(folder, num_saved, "own"), "it", built(seed=7), dist.group.WORLD)


def test_a_snapshot_is_what_a_checkpoint_is_at_any_size(tmp_path: Path) -> None:
    whole, manifest = run_ranks(make, 3, tmp_path)[0]
    for world_size in (2, 4):
        for found in run_ranks(take_over, world_size, tmp_path, 3, manifest):
            assert found == whole
    with (tmp_path / "1.own").open("r+b") as file:  # a byte that every rank reads
        layout = Pieces.from_json((tmp_path / "1.index").read_bytes())
        file.seek(layout.parts[0].start)
        byte = file.read(1)
        file.seek(layout.parts[0].start)
        file.write(bytes([byte[0] ^ 1]))
    for found in run_ranks(damaged, 2, tmp_path, 3):
        assert found == whole
    (tmp_path / "2.own").unlink()
    run_ranks(lost, 2, tmp_path, 3)


def large(seed: int) -> TrackedState:
    """So much that two threads read it, each chunks that hold parts of two tensors."""
    torch.manual_seed(seed)
    model = torch.nn.ParameterList(torch.randn(size) for size in (9_000_001, 2_000_003, 9_000_005))
    return TrackedState(model=model)


def flip(folder: Path, kind: str, *parts: int) -> None:
    """A byte in each of these parts of the piece of rank 0 is another one."""
    layout = Pieces.from_json((folder / "0.index").read_bytes())
    with (folder / f"0.{kind}").open("r+b") as file:
        for part in parts:
            middle = layout.parts[part].start + layout.parts[part].num_bytes // 2
            file.seek(middle)
            byte = file.read(1)
            file.seek(middle)
            file.write(bytes([byte[0] ^ 1]))


def test_threads_that_all_meet_a_bad_copy_read_the_other_one(tmp_path: Path) -> None:
    saved = large(seed=1)
    put(tmp_path, saved)
    whole = content(saved)
    for kinds in (("own",), ("copy",)):
        found = large(seed=2)
        load_snapshot(sources(tmp_path, 1, *kinds), "it", found)
        assert content(found) == whole
    flip(tmp_path, "own", 0, 2)
    found = large(seed=2)
    with pytest.raises(CheckpointCorrupt, match=r"node 0\.own.*expected .* found"):  # B14
        load_snapshot(sources(tmp_path, 1, "own"), "it", found)
    load_snapshot(sources(tmp_path, 1, "own", "copy"), "it", found)
    assert content(found) == whole
    flip(tmp_path, "copy", 2)
    with pytest.raises(CheckpointCorrupt, match=r"node 0\.copy.*expected .* found"):
        load_snapshot(sources(tmp_path, 1, "own", "copy"), "it", found)


@pytest.mark.parametrize("kind", ["own", "copy"])
def test_a_bad_file_is_found_by_itself_and_read_from_the_other_copy(
    tmp_path: Path, kind: str
) -> None:
    saved = large(seed=1)
    put(tmp_path, saved)
    start, size, _ = Pieces.from_json((tmp_path / "0.index").read_bytes()).files[STATE]
    with (tmp_path / f"0.{kind}").open("r+b") as file:
        file.seek(start + size - 1)
        file.write(b"?")
    with pytest.raises(CheckpointCorrupt, match=rf"node 0\.{kind}.*{STATE}.*expected .* found"):
        SnapshotReader(sources(tmp_path, 1, kind), "it").read_file(0, STATE)  # B14
    ((bad,),) = sources(tmp_path, 1, kind)
    ((sound,),) = sources(tmp_path, 1, {"own": "copy", "copy": "own"}[kind])
    found = SnapshotReader([[bad, sound]], "it").read_file(0, STATE)
    assert found == SnapshotReader([[sound]], "it").read_file(0, STATE)
    assert all(num_bytes == size for _, num_bytes in [*bad.fetched, *sound.fetched])


def test_of_another_machine_only_the_chunks_of_what_is_wanted_are_asked_for_and_once(
    tmp_path: Path,
) -> None:
    saved = large(seed=1)
    put(tmp_path, saved)
    (copies,) = sources(tmp_path, 1, "copy")
    reader = SnapshotReader([copies], "it")
    part = Pieces.from_json((tmp_path / "0.index").read_bytes()).parts[2]
    target = torch.zeros(part.lengths)
    read_tensors(reader, {part.name: target})
    assert torch.equal(target, saved.capture().tensors[part.name])
    first, last = part.start // CHUNK_BYTES, (part.start + part.num_bytes - 1) // CHUNK_BYTES
    starts = [start for start, _ in copies[0].fetched]
    assert starts == [number * CHUNK_BYTES for number in range(first, last + 1)]


ALONE = Membership(
    run_id="run",
    generation=0,
    world_rank=0,
    world_size=1,
    local_rank=0,
    local_world_size=1,
    node_rank=0,
    store_host="",
    store_port=0,
    resume_step=None,
)


class Full:
    """A node without memory for snapshots."""

    asked_bytes = (0, 0)

    def check(self, piece_bytes: int, beside_bytes: int) -> str:
        self.asked_bytes = piece_bytes, beside_bytes
        return "node here: snapshots need 8.00 GB of memory, found 4.00 GB available"


def test_snapshots_that_do_not_fit_are_refused_before_the_first_step() -> None:
    memory: Any = Full()
    config = TrainingConfig(run_url="/unused", snapshot_every=2)
    unused: dict[str, Any] = dict.fromkeys(("groups", "reporter", "positions", "tell"))
    found = Snapshots(config=config, memory=memory, member=ALONE, **unused)
    model = torch.nn.Linear(1000, 10, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(SnapshotsDoNotFit, match=r"found 4.00 GB available.*snapshot_every=None"):
        found.checked(TrackedState(model=model, optimizer=optimizer), saves(1.0).missing_bytes)
    # Moments that are not there yet count, and so does what saves are about to take.
    assert memory.asked_bytes == pytest.approx((3 * 40_000, 3 * 40_000), rel=0.1)


class InMaking:
    """Memory that is there once it is wanted to be, and takes or refuses what is put into it."""

    def __init__(self) -> None:
        self.is_there, self.is_sealed = threading.Event(), threading.Event()
        self.rooms: list[bytearray] = []
        self.problem = ""

    def check(self, piece_bytes: int, beside_bytes: int) -> str:
        return ""

    def prepare(self, num_bytes: int, unneeded: Unneeded) -> None:
        self.is_there.wait()
        self.rooms = [bytearray(num_bytes + 1000) for _ in range(2)]

    def room(self, num_bytes: int, unneeded: Unneeded) -> memoryview | None:
        fitting = [room for room in self.rooms if len(room) >= num_bytes]
        return memoryview(fitting[0]) if fitting else None

    def seal(self, *_: object) -> None:
        self.is_sealed.wait()
        if self.problem:
            raise NotKept(self.problem)


def test_a_snapshot_that_is_not_made_is_told_with_why() -> None:
    """What nobody hears of, the operator takes for protection."""
    memory, told = InMaking(), list[tuple[str, Any]]()
    unused: dict[str, Any] = {"positions": dict, "reporter": SimpleNamespace(flush=None, step=0)}
    unused["reporter"].flush = lambda: None
    found = Snapshots(
        config=TrainingConfig(run_url="/unused", snapshot_every=2),
        memory=cast("Any", memory),
        member=ALONE,
        groups=cast("Any", SimpleNamespace(shape={TENSOR: 1})),
        tell=lambda kind, data: told.append((kind, dict(data))),
        **unused,
    )
    grown = torch.nn.ParameterList([torch.zeros(8)])
    state = found.checked(TrackedState(model=grown), lambda _: 0)

    def boundary(step: int) -> list[tuple[str, Any]]:
        ended, kept = found.is_ended, found.is_kept
        agreed = SimpleNamespace(snapshot_is_ended=lambda: ended, snapshot_is_kept=lambda: kept)
        found.at_boundary(state, {"step": step}, cast("Any", agreed), lambda: None)
        new = [(kind, data.get("step"), data.get("why", "")) for kind, data in told]
        told.clear()
        return new

    def through() -> None:
        until_s = time.monotonic() + 10.0
        while not found.is_ended:
            assert time.monotonic() < until_s
            time.sleep(0.001)

    no_room, late = "the memory for it is still being made", "not all ranks were through"
    assert told.pop() == ("snapshots_on", {"every": 2})
    assert boundary(1) == []
    assert boundary(2) == [("snapshot_skipped", 2, no_room)]
    memory.is_there.set()
    through()
    assert boundary(4) == []
    ((kind, step, why),) = boundary(6)
    assert (kind, step) == ("snapshot_skipped", 6) and late in why
    memory.is_sealed.set()
    through()
    assert boundary(7) == [("snapshot_kept", 4, "")]
    memory.problem = "the other node is gone"
    memory.is_sealed.clear()
    assert boundary(8) == []
    memory.is_sealed.set()
    through()
    failed, lost = boundary(9)
    assert failed[0] == "snapshot_failed" and lost[:2] == ("snapshot_skipped", 8)
    grown.append(torch.zeros(100_000))  # more than the room that is there
    memory.is_there.clear()
    state = TrackedState(model=grown)
    assert boundary(10) == [("snapshot_skipped", 10, no_room)]
    assert not found.is_kept, "its other ranks would take their parts for a whole snapshot"
    memory.is_there.set()
    through()


def saves(every_s: float) -> Saves:
    unused: dict[str, Any] = dict.fromkeys(("coordinator", "groups", "reporter"))
    return Saves(
        member=ALONE,
        filesystem=Filesystem.at("/unused"),
        config=TrainingConfig(run_url="/unused", save=SaveInterval(seconds=every_s)),
        saver=AsyncSaver(),
        positions=dict,
        **unused,
    )


def test_what_came_from_memory_is_no_checkpoint_and_is_saved_soon() -> None:
    found = saves(every_s=1000.0)
    found.restored(5)
    assert found.committed_step == 5 and not found.is_due(6)
    found.restored(7, is_snapshot=True)
    assert found.committed_step < 0, "the end of the run, or a leave, would find it saved"
    assert not found.is_due(7) and found.is_due(8)


def on_mesh(rank: int, world_size: int, folder: Path, layout: Layout) -> None:
    with generation(0, rank, layout, str(folder)) as groups:
        tracked = stepped(groups, seed=1)
        put(folder, tracked)
        whole = content(tracked)
        kept = [Pieces.from_json((folder / f"{r}.index").read_bytes()) for r in range(world_size)]
        parts = [(part.name, part.offsets) for one in kept for part in one.parts]
        if groups.shape[TENSOR] == 1:
            assert len(parts) == len(set(parts)), "replicas are kept once"
    if rank < 2:
        with generation(1, rank, LAYOUTS[1], str(folder)) as groups:
            tracked = stepped(groups, seed=2)
            load_snapshot(sources(folder, world_size, "copy"), "it", tracked, groups.control)
            assert content(tracked) == whole


def stepped(groups: Groups, seed: int) -> TrackedState:
    model = on_its_mesh(groups, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    backward(model, 0, groups.shape, dist.get_rank())
    optimizer.step()
    optimizer.zero_grad()
    return TrackedState(model=model, optimizer=optimizer)


@pytest.mark.thorough
@pytest.mark.parametrize("layout", LAYOUTS[4:6], ids=str)
def test_a_snapshot_of_replicas_and_of_tensor_parallel_ranks_loads_on_another_mesh(
    tmp_path: Path, layout: Layout
) -> None:
    run_ranks(on_mesh, layout.size, tmp_path, layout)
