"""Saves and loads: exactly the state at the save, all ranks or none, and only sound bytes."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import hashlib
import inspect
import os
import pickle
import signal
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from elastic.storage.checkpoints import FileDigest, Manifest, digest_problem
from elastic.storage.chunk_digests import ChunkDigester
from elastic.storage.filesystem import Filesystem
from elastic.training.checkpoint import (
    AsyncSaver,
    CheckpointCorrupt,
    LoadFailed,
    SaveHandle,
    WriteFailed,
    describe,
    load,
    unchecked,
    verify_share,
)
from elastic.training.loading import agree, read_tensors
from elastic.training.shard_reader import ShardReader
from elastic.training.state import TrackedState
from tests.dist.processes import run_ranks
from tests.dist.small_run import (
    content,
    manifest_of,
    restore,
    save,
    save_group,
    small,
    train,
)
from tests.dist.storage_faults import delay, faulty


def begin(saver: AsyncSaver, fs: Filesystem, path: str, tracked: TrackedState) -> SaveHandle:
    captured = tracked.capture()
    return saver.save(
        fs,
        path,
        captured.tensors,
        plain={"tracked": captured.plain},
        rank_plain={"rank": dist.get_rank() if dist.is_initialized() else 0},
        rank=dist.get_rank() if dist.is_initialized() else 0,
    )


def built(*, sharded: bool = True, seed: int = 0) -> tuple[TrackedState, Callable[[range], Any]]:
    model = small(sharded=sharded, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    counters = {"steps": 0, "seen": []}
    tracked = TrackedState(model=model, optimizer=optimizer, scheduler=scheduler, counters=counters)

    def count() -> None:
        scheduler.step()
        counters["steps"] += 1
        counters["seen"].append(counters["steps"])

    return tracked, lambda steps: train(model, optimizer, steps, count)


def save_while_training(rank: int, world_size: int, folder: Path) -> None:
    tracked, run = built(sharded=dist.is_initialized())
    saver = AsyncSaver(save_group())
    slow = faulty(str(folder), delay(1.0))
    run(range(2))
    manifests, expected = {}, {}
    for step in (2, 5):  # the second save reuses the memory of the first
        expected[step] = content(tracked)
        handle = begin(saver, slow, f"step-{step}", tracked)
        assert saver.in_flight
        assert not handle.done()
        run(range(step, step + 3))
        assert not handle.done(), "the training went on during the save, or this tests nothing"
        with pytest.raises(AssertionError, match="still being written"):  # B04
            begin(saver, slow, "another", tracked)
        manifests[step] = manifest_of(handle.files(30))
        assert handle.done()
        assert not saver.in_flight
    for step in (2, 5):
        restore(folder, f"step-{step}", manifests[step], tracked)
        assert content(tracked) == expected[step], step


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_save_holds_the_state_of_its_step(tmp_path: Path, world_size: int) -> None:  # B01
    run_ranks(save_while_training, world_size, tmp_path)


class Unpicklable(OSError):
    """As some stores' errors are: they hold a connection or a lock."""

    def __init__(self, where: str) -> None:
        super().__init__(28, f"No space left on device: {where}")
        self.handle = open(os.devnull)  # noqa: SIM115


def one_rank_fails(rank: int, world_size: int, folder: Path) -> list[str]:
    tracked, run = built()
    saver = AsyncSaver(save_group())
    run(range(2))
    before, good = content(tracked), manifest_of(begin(saver, fs(folder), "good", tracked).files())
    run(range(2, 3))
    messages = []
    for operation in ("open_output", "write", "write_bytes"):

        def strike(found: str, path: str, operation: str = operation) -> None:
            name = path.rpartition("/")[2]
            if rank == 1 and found == operation and name in ("rank-1.json", "__1_0.distcp"):
                time.sleep(0.3)  # after rank 0 has finished
                raise Unpicklable(name)

        handle = begin(saver, faulty(str(folder), strike), operation, tracked)
        with pytest.raises(WriteFailed, match=r"rank 1: .*No space left on device") as caught:
            handle.files(20)
        assert handle.done()
        assert not (folder / operation / ".metadata").exists()
        messages.append(str(caught.value))
    # Nothing is stuck: the same saver and group go on, and the save before is still good.
    manifest_of(begin(saver, fs(folder), "next", tracked).files(20))
    restore(folder, "good", good, tracked)
    assert content(tracked) == before
    return messages


def fs(folder: Path) -> Filesystem:
    return Filesystem.at(str(folder))


def test_one_failing_rank_fails_the_save_on_all(tmp_path: Path) -> None:  # B13
    one, other = run_ranks(one_rank_fails, 2, tmp_path)
    assert one == other


def one_rank_cannot_begin(rank: int, world_size: int, folder: Path) -> None:
    tracked, _ = built()
    saver = AsyncSaver(save_group())
    captured = tracked.capture()
    sparse = torch.ones(2).to_sparse()
    for tensors, rank_plain, message in [
        ({"odd": sparse} if rank == 0 else {}, {}, "rank 0: ValueError: 'odd' .*cannot be kept"),
        ({}, {"odd": {1}} if rank == 1 else {}, r"rank 1: NotPlain: rank_plain\.odd: a .*set"),
    ]:
        handle = saver.save(
            fs(folder),
            "bad",
            {**captured.tensors, **tensors},
            plain={"tracked": captured.plain},
            rank_plain=rank_plain,
            rank=rank,
        )
        with pytest.raises(WriteFailed, match=message):
            handle.files(30)
    begin(saver, fs(folder), "good", tracked).files(30)


def test_a_rank_that_cannot_even_begin_does_not_leave_the_others_waiting(tmp_path: Path) -> None:
    run_ranks(one_rank_cannot_begin, 2, tmp_path)


def one_rank_dies(rank: int, world_size: int, folder: Path) -> str:
    tracked, _ = built()
    saver = AsyncSaver(save_group())

    def strike(operation: str, path: str) -> None:
        if rank == 1 and operation == "write":
            os.kill(os.getpid(), signal.SIGKILL)

    handle = begin(saver, faulty(str(folder), strike), "torn", tracked)
    with pytest.raises(WriteFailed) as caught:
        handle.files(30)
    saver.attach(None)
    assert not saver.in_flight
    return str(caught.value)


def test_a_rank_that_dies_fails_the_save_of_the_others_at_once(tmp_path: Path) -> None:
    begun_s = time.monotonic()
    outcome = run_ranks(one_rank_dies, 3, tmp_path, may_die=[1])
    assert outcome[1] is None
    assert "the save to torn failed" in outcome[0]
    assert time.monotonic() - begun_s < 30


def saved_by_two(rank: int, world_size: int, folder: Path) -> tuple[Any, Manifest]:
    tracked, run = built()
    run(range(2))
    captured = tracked.capture()
    handle = begin(AsyncSaver(save_group()), fs(folder), "step-2", tracked)
    files = handle.files(30)
    names = {file.path for file in files}
    expected = {f"__{rank}_0.distcp", f"rank-{rank}.json"}
    assert names == (expected | {".metadata", "state.json"} if rank == 0 else expected)
    for file in files:
        assert digest_problem(fs(folder), "step-2", file) == ""
        assert file.num_chunks == (1 if file.path.endswith(".distcp") else 0)
    return content(tracked), manifest_of(files, describe(captured.tensors))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], Manifest]:
    """A checkpoint of two ranks at `step-2` of a folder, its content and its manifest."""
    folder = tmp_path_factory.mktemp("two-ranks")
    found, manifest = run_ranks(saved_by_two, 2, folder)[0]
    return folder, found, manifest


Checkpoint = tuple[Path, dict[str, Any], Manifest]


def test_a_process_without_a_group_loads_it(checkpoint: Checkpoint) -> None:
    folder, expected, manifest = checkpoint
    tracked, _ = built(sharded=False, seed=4)
    restored = load(fs(folder), "step-2", manifest, tracked)
    assert content(tracked) == expected
    assert restored.rank_plain == {"rank": 0}
    assert restored.plain["tracked"]["counters"]["plain"] == {"steps": 2, "seen": [1, 2]}


@pytest.mark.parametrize("nested", [False, True])
def test_stock_dcp_loads_it_from_the_directory_alone(checkpoint: Checkpoint, nested: bool) -> None:
    folder, _, manifest = checkpoint
    tracked, _ = built(sharded=False, seed=4)
    restore(folder, "step-2", manifest, tracked)
    expected = {f"model.{n}": t for n, t in small(sharded=False).state_dict().items()}
    expected = {name: tracked.capture().tensors[name] for name in expected}
    blank = small(sharded=False, seed=9).state_dict()
    state: Any = {"model": blank} if nested else {f"model.{n}": t for n, t in blank.items()}
    dcp.load(state, checkpoint_id=str(folder / "step-2"))
    for name, tensor in blank.items():
        assert torch.equal(tensor, expected[f"model.{name}"]), name


def test_stock_dcp_converts_it_to_one_file(checkpoint: Checkpoint, tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    folder, _, _ = checkpoint
    dcp_to_torch_save(str(folder / "step-2"), str(tmp_path / "all.pt"))
    whole = torch.load(tmp_path / "all.pt", weights_only=True)
    small(sharded=False).load_state_dict(whole["model"])
    assert whole["optimizer"]["norm.bias.step"] == 2


def damaged(source: Path, folder: Path, name: str, how: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for file in (source / "step-2").iterdir():
        (folder / "step-2").mkdir(exist_ok=True)
        (folder / "step-2" / file.name).write_bytes(file.read_bytes())
    victim = folder / "step-2" / name
    data = bytearray(victim.read_bytes())
    if how == "deleted":
        victim.unlink()
        return
    if how == "flipped":
        data[len(data) // 2] ^= 1
    victim.write_bytes({"halved": data[: len(data) // 2], "emptied": b""}.get(how, data))


DAMAGES = ["halved", "emptied", "flipped", "deleted"]


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("name", ["__1_0.distcp", ".metadata", "state.json", "rank-0.json"])
def test_damage_is_found_and_named(  # B14 B24
    checkpoint: Checkpoint, tmp_path: Path, name: str, how: str
) -> None:
    folder, _, manifest = checkpoint
    damaged(folder, tmp_path, name, how)
    found = [verify_share(fs(tmp_path), "step-2", manifest.files, rank, 2) for rank in range(2)]
    problems = found[0] + found[1]
    assert len(problems) == 1
    assert name in problems[0]
    tracked, _ = built(sharded=False)
    with pytest.raises(CheckpointCorrupt, match=name):
        load(fs(tmp_path), "step-2", manifest, tracked)


def test_what_no_rank_checks_as_it_reads_is_named(checkpoint: Checkpoint) -> None:
    _, _, manifest = checkpoint
    assert [file.path for file in unchecked(manifest, 1)] == ["rank-1.json"]
    assert unchecked(manifest, 2) == unchecked(manifest, 3) == []
    whole = [
        FileDigest(path=file.path, bytes=file.bytes, digest="sha256:00") for file in manifest.files
    ]
    older = dataclasses.replace(manifest, format_version=1, files=whole)
    names = {file.path for file in unchecked(older, 2)}
    assert names == {"__0_0.distcp", "__1_0.distcp"}


def test_the_files_are_shared_out_over_the_ranks(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _, manifest = checkpoint
    read: list[FileDigest] = []
    monkeypatch.setattr(
        "elastic.training.loading.digest_problem", lambda fs, path, file: read.append(file) or ""
    )
    shares = []
    for rank in range(3):
        before = len(read)
        assert verify_share(fs(folder), "step-2", manifest.files, rank, 3) == []
        shares.append(sum(file.bytes for file in read[before:]))
    assert sorted(file.path for file in read) == sorted(file.path for file in manifest.files)
    largest = max(file.bytes for file in manifest.files)
    assert max(shares) <= max(largest, sum(shares) / 2)
    assert min(shares) > 0


def rows(world_size: int) -> dict[str, torch.Tensor]:
    """A large tensor and a small one, sharded by rows; row r of the large one holds r."""
    mesh = init_device_mesh("cpu", (world_size,))
    whole = torch.arange(60.0).unsqueeze(1).expand(60, 50).contiguous()
    return {
        "rows": distribute_tensor(whole, mesh, [Shard(0)]),
        "small": distribute_tensor(torch.arange(7.0), mesh, [Shard(0)]),
    }


def rows_saved(rank: int, world_size: int, folder: Path) -> Manifest:
    saver = AsyncSaver(save_group())
    handle = saver.save(
        fs(folder), "step-2", rows(world_size), plain={"tracked": {}}, rank_plain={}, rank=rank
    )
    return in_small_chunks(folder, manifest_of(handle.files(30)))


def in_small_chunks(folder: Path, manifest: Manifest) -> Manifest:
    """As if the shards had been digested in chunks of 500 bytes."""
    files = []
    for file in manifest.files:
        if file.chunk_bytes:
            digester = ChunkDigester(500)
            digester.update((folder / "step-2" / file.path).read_bytes())
            file = digester.file(file.path)
        files.append(file)
    return dataclasses.replace(manifest, files=files)


def rows_loaded(rank: int, world_size: int, folder: Path, manifest: Manifest) -> Any:
    targets = rows(world_size)
    expected = {name: tensor.to_local().clone() for name, tensor in targets.items()}
    for tensor in targets.values():
        tensor.to_local().zero_()
    problem: Exception | None = None
    try:
        read_tensors(ShardReader(fs(folder), "step-2", manifest.files), targets)
        for name, tensor in targets.items():
            assert torch.equal(tensor.to_local(), expected[name]), name
    except CheckpointCorrupt as error:
        problem = error
    alone = str(problem)
    try:
        agree(problem, "step-2", dist.group.WORLD)
    except CheckpointCorrupt as error:
        return alone, str(error)
    return alone, ""


def test_a_byte_that_one_rank_alone_reads_is_checked_by_it(tmp_path: Path) -> None:  # B14
    manifest = run_ranks(rows_saved, 3, tmp_path)[0]
    assert run_ranks(rows_loaded, 2, tmp_path, manifest) == [("None", "")] * 2
    # Of the middle file, whose rows both ranks share, the last rows are the second rank's.
    path = tmp_path / "step-2" / "__1_0.distcp"
    data = bytearray(path.read_bytes())
    at = data.index(torch.full((50,), 38.0).numpy().tobytes()) + 100
    data[at] ^= 1
    path.write_bytes(data)
    start = at // 500 * 500
    found = run_ranks(rows_loaded, 2, tmp_path, manifest)
    assert found[0][0] == "None"
    for problem in (found[1][0], found[0][1], found[1][1]):
        assert "the checkpoint at step-2 is damaged: __1_0.distcp: expected xxh3_128:" in problem
        assert f"for its bytes {start} to {start + 500}, found xxh3_128:" in problem


class Bomb:
    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.trace}",)


def test_nothing_foreign_is_unpickled(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder, _, manifest = checkpoint
    damaged(folder, tmp_path, ".metadata", "flipped")
    data = pickle.dumps(Bomb(tmp_path / "exploded"))
    (tmp_path / "step-2" / ".metadata").write_bytes(data)
    tracked, _ = built(sharded=False)
    with pytest.raises(CheckpointCorrupt):
        load(fs(tmp_path), "step-2", manifest, tracked)
    digest = FileDigest(
        path=".metadata", bytes=len(data), digest=f"sha256:{hashlib.sha256(data).hexdigest()}"
    )
    files = [digest if file.path == ".metadata" else file for file in manifest.files]
    object.__setattr__(manifest := pickle.loads(pickle.dumps(manifest)), "files", files)
    with pytest.raises(pickle.UnpicklingError, match=r"posix\.system"):
        load(fs(tmp_path), "step-2", manifest, tracked)
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("error", [PermissionError("denied"), ConnectionError("reset")])
def test_trouble_in_reading_is_not_taken_for_damage(
    checkpoint: Checkpoint, error: Exception
) -> None:
    folder, _, manifest = checkpoint

    def strike(operation: str, path: str) -> None:
        if operation == "read" and path.endswith(".distcp"):
            raise error

    tracked, _ = built(sharded=False)
    with pytest.raises(type(error), match=str(error)):
        load(faulty(str(folder), strike), "step-2", manifest, tracked)


def trouble_on_one_rank(rank: int, world_size: int, folder: Path, manifest: Manifest) -> str:
    def strike(operation: str, path: str) -> None:
        if rank == 1 and operation == "read" and path.endswith(".distcp"):
            raise PermissionError("denied")

    tracked, _ = built()
    with pytest.raises(Exception, match="denied") as caught:
        load(faulty(str(folder), strike), "step-2", manifest, tracked, dist.group.WORLD)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_a_rank_that_cannot_load_is_named_on_the_others(checkpoint: Checkpoint) -> None:
    folder, _, manifest = checkpoint
    assert run_ranks(trouble_on_one_rank, 2, folder, manifest) == [
        "LoadFailed: rank 1 could not load step-2: PermissionError: denied",
        "PermissionError: denied",
    ]


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)


def buffers_that_differ(rank: int, world_size: int, folder: Path) -> list[list[float]]:
    module = Normed()
    tracked = TrackedState(model=module)
    for buffer in (module.norm.running_mean, module.norm.running_var):
        buffer.fill_(rank + 1)
    manifest = save(folder, "a", tracked)
    restore(folder, "a", manifest, tracked)
    return [module.norm.running_mean.tolist(), module.norm.running_var.tolist()]


def test_buffers_come_from_one_rank_and_go_to_all(tmp_path: Path) -> None:  # B54
    assert run_ranks(buffers_that_differ, 3, tmp_path) == [[[1.0] * 3] * 2] * 3


def own_entries(rank: int, world_size: int, folder: Path, manifest: Manifest) -> Any:
    tracked, _ = built()
    return load(fs(folder), "step-2", manifest, tracked, dist.group.WORLD).rank_plain


def test_each_rank_gets_its_own_entry_and_new_ranks_none(checkpoint: Checkpoint) -> None:
    folder, _, manifest = checkpoint
    assert run_ranks(own_entries, 3, folder, manifest) == [{"rank": 0}, {"rank": 1}, None]


def test_staging_memory_is_kept_and_left_to_a_save_that_never_ends(tmp_path: Path) -> None:
    model = nn.Linear(64, 64)
    tracked = TrackedState(model=model)
    saver = AsyncSaver()
    begin(saver, fs(tmp_path), "a", tracked).files()
    kept = saver._stager._block
    saver.attach(None)
    handle = begin(saver, faulty(str(tmp_path), delay(1.0)), "b", tracked)
    assert saver._stager._block is kept
    with torch.no_grad():
        expected = model.weight.clone()
        model.weight.zero_()
    saver.attach(None)  # a new generation, while the old save is still being written
    begin(saver, fs(tmp_path), "c", tracked).files()
    assert saver._stager._block is not kept
    manifest = manifest_of(handle.files())
    restore(tmp_path, "b", manifest, tracked)
    assert torch.equal(model.weight, expected)


def test_private_names_of_torch_are_there() -> None:
    from torch.cuda import _pin_memory_utils as pinning
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import _StridedShard

    def names(function: Any) -> list[str]:
        return list(inspect.signature(function).parameters)

    assert names(pinning.pin_memory) == ["data_ptr", "size"]
    assert names(pinning.unpin_memory) == ["data_ptr"]
    assert names(_StorageInfo)[:3] == ["relative_path", "offset", "length"]
    assert names(DefaultSavePlanner.lookup_object) == ["self", "index"]
    assert names(DTensor.__create_chunk_list__) == ["self"]
    assert _StridedShard(1, split_factor=2).split_factor == 2


@pytest.mark.parametrize("fails", [False, True])
def test_a_save_that_has_ended_keeps_no_model_alive(tmp_path: Path, fails: bool) -> None:
    def strike(operation: str, path: str) -> None:
        if fails and operation == "write":
            raise OSError("full")

    saver = AsyncSaver()
    model = nn.Linear(3, 3)
    handle = begin(saver, faulty(str(tmp_path), strike), "a", TrackedState(model=model))
    with contextlib.suppress(WriteFailed):
        handle.files()
    assert not fails or not handle._writer.written
    # On a GPU the next generation's model would not fit beside it.
    model = weakref.ref(model)
    gc.collect()
    assert model() is None


def test_an_object_store_holds_it_as_well(tmp_path: Path) -> None:
    store = Filesystem.at(f"memory://bucket/{tmp_path.name}")
    tracked, run = built(sharded=False)
    run(range(2))
    expected = content(tracked)
    manifest = manifest_of(begin(AsyncSaver(), store, "a", tracked).files())
    run(range(2, 3))
    assert verify_share(store, "a", manifest.files, 0, 1) == []
    load(store, "a", manifest, tracked)
    assert content(tracked) == expected


@pytest.mark.parametrize(
    "error",
    [
        WriteFailed("step-1", "rank 1: OSError: full"),
        CheckpointCorrupt("step-1", "__0_0.distcp: expected 3 bytes, found 2"),
        LoadFailed("step-1", 2, "PermissionError: denied"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_survive_pickling(error: Exception) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (type(error), str(error))
