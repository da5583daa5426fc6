"""The save engine: the file's image in memory, what is worked out once, one save at a time."""

from __future__ import annotations

import gc
import io
import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from elastic.policy.mesh import Mesh
from elastic.policy.retention import Retention
from elastic.storage.checkpoints import Catalog
from elastic.storage.filesystem import Filesystem
from elastic.training import jsonable, process_group, saving, verdicts
from elastic.training.agreement import Agreement
from elastic.training.checkpoint import AsyncSaver, WriteFailed, load
from elastic.training.coordinator import CommitResult, Orders
from elastic.training.coordinator import Shard as Handed
from elastic.training.membership import Membership, TrainingConfig
from elastic.training.publishing import publish
from elastic.training.reporter import Reporter
from elastic.training.saves import Saves
from elastic.training.shard_image import image_bytes, lay_out, places_for
from elastic.training.state import TrackedState
from jobs.bench.checkpoint import QUICK_BYTES, Bench
from tests.dist.processes import run_ranks
from tests.dist.small_run import content, restore, save, save_group
from tests.dist.storage_faults import faulty

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64]


def test_the_image_is_what_torch_loads() -> None:
    sources = [torch.ones(shape).to(dtype) for dtype in DTYPES for shape in ((), (3, 5), (0, 2))]
    sources.append(torch.arange(70_000).view(7, -1).t())
    places = places_for(sources)
    block = torch.full((image_bytes(places) + 64,), 7, dtype=torch.uint8).numpy()
    for view, source in zip(lay_out(block, places, sources), sources, strict=True):
        view.copy_(source)
    for place, source in zip(places, sources, strict=True):
        record = block[place.start : place.start + place.length].tobytes()
        found = torch.load(io.BytesIO(record), weights_only=True)
        assert found.dtype == source.dtype
        assert torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (found, source)))
        assert found.untyped_storage().nbytes() == source.nbytes
        stock = io.BytesIO()
        torch.save(source.contiguous(), stock)
        assert len(record) == len(stock.getvalue())
    assert (block[image_bytes(places) :] == 7).all()


def test_what_is_written_where_is_worked_out_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    real = verdicts.metadata_of

    def counted(*arguments: Any) -> bytes:
        made.append(arguments)
        return real(*arguments)

    monkeypatch.setattr(verdicts, "metadata_of", counted)
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    tracked = TrackedState(model=model, optimizer=optimizer)
    saver = AsyncSaver()
    counts = []
    for step in range(4):
        save(tmp_path, f"step-{step}", tracked, saver=saver)
        counts.append(len(made))
        if step == 1:  # moments appear
            model(torch.ones(3)).sum().backward()
            optimizer.step()
    assert counts == [1, 1, 2, 2]
    before = (tmp_path / "step-2" / ".metadata").read_bytes()
    assert (tmp_path / "step-3" / ".metadata").read_bytes() == before


def test_plain_values_are_kept_as_they_were_when_the_save_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Callable[[], None]] = []
    monkeypatch.setattr(saving, "_in_background", lambda write: begun.append(write) or Future())
    values: dict[str, Any] = {"seen": [1], "array": np.ones(2)}
    AsyncSaver().save(
        Filesystem.at(str(tmp_path)), "a", {}, plain=values, rank_plain={"deep": [values]}, rank=0
    )
    values["seen"].append(2)
    values["array"][:] = 7.0
    begun[0]()
    plain = jsonable.loads((tmp_path / "a" / "state.json").read_bytes())
    rank_plain = jsonable.loads((tmp_path / "a" / "rank-0.json").read_bytes())
    for found in (plain, *rank_plain["deep"]):
        assert (found["seen"], found["array"].tolist()) == ([1], [1.0, 1.0])


def held_alike(rank: int, world_size: int, folder: Path) -> list[list[int]]:
    """Ranks whose meshes do not meet, and hold the same; the sizes of their files at each save."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("apart", "alone"))["alone"]
    entries: dict[str, Any] = {
        name: distribute_tensor(torch.full((1000,), float(i)), mesh, [Replicate()])
        for i, name in enumerate("abcd")
    }
    tracked = TrackedState(entries=entries)
    saver, sizes = AsyncSaver(save_group()), []
    for step in range(3):
        manifest = save(folder, f"step-{step}", tracked, saver=saver)
        by_name = {file.path: file.bytes for file in manifest.files}
        sizes.append([by_name.get(f"__{r}_0.distcp", 0) for r in range(world_size)])
        expected = content(tracked)
        for tensor in entries.values():
            tensor.to_local().zero_()
        restore(folder, f"step-{step}", manifest, tracked)
        assert content(tracked) == expected, step
    if rank == 0:  # what rank 1 has left to it is gone
        del entries["a"], entries["b"], entries["c"], entries["d"]
    with pytest.raises(WriteFailed, match="do not make up the tensors"):
        save(folder, "torn", tracked, saver=saver)
    save(folder, "whole", tracked, saver=saver)
    return sizes


def test_what_ranks_hold_alike_is_written_by_one_of_them(tmp_path: Path) -> None:
    first, second, third = run_ranks(held_alike, 2, tmp_path)[0]
    assert first[0] == first[1] == pytest.approx(sum(second), abs=100)
    assert third == second
    assert second[0] == second[1]


def replicated(rank: int, world_size: int, folder: Path) -> list[int]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    tensors = {
        str(i): distribute_tensor(torch.full((4, 100), float(i)), mesh, [Replicate(), Shard(0)])
        for i in range(6)
    }
    # Two ranks of three rows: one has none.
    tensors["short"] = distribute_tensor(torch.ones(1, 5), mesh, [Replicate(), Shard(0)])
    tracked = TrackedState(entries=tensors)
    manifest = save(folder, "step-1", tracked)
    expected = content(tracked)
    restore(folder, "step-1", manifest, tracked)
    assert content(tracked) == expected
    files = {file.path: file.bytes for file in manifest.files}
    return [files.get(f"__{r}_0.distcp", 0) for r in range(world_size)]


def test_replicas_share_the_writing(tmp_path: Path) -> None:
    sizes = run_ranks(replicated, 4, tmp_path)[0]
    assert max(sizes) < 1.4 * min(sizes)
    assert sum(sizes) < 6 * 4 * 100 * 4 + 13 * 2000


class Line:
    """A coordinator that commits at once, in the rank's own process."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.told: list[str] = []

    def notify(self, kind: str, data: Mapping[str, Any]) -> None:
        self.told.append(kind)

    def orders(self) -> Orders:
        return Orders()

    def is_over(self) -> bool:
        return False

    def commit(self, shard: Handed, timeout_s: float) -> CommitResult:
        if shard.failure:
            return CommitResult(committed=False, reason=shard.failure)
        publish(self.catalog, [shard], Retention(keep=2), ())
        return CommitResult(committed=True)

    def next_checkpoint(self, rejected_step: int, reason: str) -> int | None:
        raise NotImplementedError


class Alone:
    """One rank's saves of a model, as the service makes them."""

    def __init__(self, fs: Filesystem, model: nn.Module, behind: str = "skip") -> None:
        member = Membership(
            run_id="run",
            generation=1,
            world_rank=0,
            world_size=1,
            local_rank=0,
            local_world_size=1,
            node_rank=0,
            store_host="",
            store_port=0,
            resume_step=None,
        )
        shape = Mesh().shape(1)
        assert dist.group.WORLD is not None
        groups = process_group.Groups(
            control=dist.group.WORLD,
            saves=save_group(),  # type: ignore[arg-type]
            mesh=init_device_mesh("cpu", (1,)),
            shape=shape,
        )
        self.model = model
        self.catalog = Catalog(fs, "run")
        self.line = Line(self.catalog)
        self.counters = {"made": 0}
        self.state = TrackedState(model=model, counters=self.counters)
        self.saver = AsyncSaver(groups.saves)
        self.reporter = Reporter(self.line)
        self.saves = Saves(
            member=member,
            config=TrainingConfig(run_url=fs.url, save_behind=behind),
            coordinator=self.line,
            groups=groups,
            filesystem=fs,
            saver=self.saver,
            reporter=self.reporter,
            positions=dict,
        )

    def step(self) -> int:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(1.0)
        self.counters["made"] += 1
        return self.counters["made"]

    def save(self) -> None:
        step = self.counters["made"]
        counters = {"step": step, "samples": 0, "tokens": 0, "epoch": 0}
        self.saves.save_or_skip(self.state, counters)

    def read(self, step: int) -> dict[str, Any]:
        """The content of that checkpoint; what is live stays as it is."""
        other = TrackedState(model=type(self.model)(4, 4), counters={"made": 0})
        load(self.catalog.fs, f"checkpoints/step-{step}", self.catalog.manifest(step), other)
        return content(other)


@pytest.fixture
def alone() -> Any:
    """Makes `Alone` in a process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    made: list[Alone] = []

    def make(fs: Filesystem, model: nn.Module, **options: Any) -> Alone:
        made.append(Alone(fs, model, **options))
        return made[-1]

    yield make
    for one in made:
        one.reporter.close()
    dist.destroy_process_group()


class Gate:
    """A store that writes only while it is open, and counts who stands before it."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.most_at_once = self._now = 0
        self._lock = threading.Lock()
        self.reached = threading.Event()

    def strike(self, operation: str, path: str) -> None:
        if operation not in ("write", "open_output") or not path.endswith(".distcp"):
            return
        with self._lock:
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
        self.reached.set()
        assert self.open.wait(30)
        with self._lock:
            self._now -= 1


def test_the_buffer_of_a_save_is_left_alone_until_it_is_durable(  # B08 B01
    tmp_path: Path, alone: Callable[..., Alone]
) -> None:
    gate = Gate()
    run = alone(faulty(str(tmp_path), gate.strike), nn.Linear(4, 4))
    expected = {}
    for step in (1, 2):
        run.step()
        expected[step] = content(run.state)
        gate.open.clear()
        gate.reached.clear()
        run.save()
        for _ in range(3):  # the model and a plain counter go on while the writer stands still
            run.step()
            run.save()
        assert gate.reached.wait(10)
        run.counters["made"] = step
        gate.open.set()
        assert run.saves.wait().committed
    assert run.line.told.count("save_skipped") == 6
    assert gate.most_at_once == 1
    assert {step: run.read(step) for step in (1, 2)} == expected


def test_a_save_in_flight_when_the_step_began_is_asked_about(alone: Callable[..., Alone]) -> None:
    alone(Filesystem.at("/"), nn.Linear(1, 1))
    for ended in (True, False):
        agreement = Agreement(
            num_valid_tokens=1,
            num_samples=1,
            save=True,
            leave=False,
            last_step_s=0.0,
            group=dist.group.WORLD,
            saves_ended=ended,
        )
        assert agreement.saves_ended() == ended


def test_every_save_asked_for_is_committed_or_counted_as_skipped(  # B04
    tmp_path: Path, alone: Callable[..., Alone]
) -> None:
    gate = Gate()
    run = alone(faulty(str(tmp_path), gate.strike), nn.Linear(4, 4))
    committed = Counter[int]()
    for step in range(30):
        run.step()
        if step % 5 == 0:
            assert run.saves.wait().committed
            gate.open.clear()
            gate.reached.clear()
        if step % 5 == 4:
            assert gate.reached.wait(10)
        run.save()
        if step % 5 == 4:
            gate.open.set()
            assert run.saves.wait().committed
            committed[run.saves.committed_step] += 1
    assert gate.most_at_once == 1
    assert len(committed) == 6
    assert len(committed) + run.line.told.count("save_skipped") == 30


def test_recovery_beside_a_save_sees_the_one_before(  # B03
    tmp_path: Path, alone: Callable[..., Alone]
) -> None:
    gate = Gate()
    run = alone(faulty(str(tmp_path), gate.strike), nn.Linear(4, 4))
    run.step()
    expected = content(run.state)
    run.save()
    assert run.saves.wait().committed
    run.step()
    gate.open.clear()
    gate.reached.clear()
    run.save()
    assert gate.reached.wait(10)
    newest = run.catalog.highest()
    assert newest is not None and newest.step == 1
    assert run.read(1) == expected
    gate.open.set()
    assert run.saves.wait().committed
    newest = run.catalog.highest()
    assert newest is not None and newest.step == 2


def held_bytes() -> int:
    """Resident memory of this process and what lies in /dev/shm."""
    gc.collect()
    lines = Path("/proc/self/status").read_text().splitlines()
    resident = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS"))
    shared = shutil.disk_usage("/dev/shm").used if os.path.isdir("/dev/shm") else 0
    return resident + shared


def sixty_saves(rank: int, world_size: int, folder: Path) -> None:
    run = Alone(Filesystem.at(str(folder)), nn.Linear(2200, 2200))
    model_bytes = 4 * 2200 * 2200

    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    at_ten: tuple[int, int, int] | None = None
    for _ in range(60):
        step = run.step()
        run.save()
        assert run.saves.wait().committed
        if step == 10:
            at_ten = held_bytes(), open_files(), threading.active_count()
    assert at_ten is not None
    assert held_bytes() - at_ten[0] < model_bytes
    assert (open_files(), threading.active_count()) == at_ten[1:]
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text()
    assert children == ""
    assert run.catalog.complete_steps() == [59, 60]
    run.reporter.close()


def test_memory_stays_flat_over_sixty_saves(tmp_path: Path) -> None:  # B09
    run_ranks(sixty_saves, 1, tmp_path)


def test_only_what_the_optimizers_step_changes_may_be_copied_late() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[0].bias.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=torch.tensor(0.1), foreach=False)
    ema = {"0.weight": model[0].weight.detach().clone()}
    tracked = TrackedState(model=model, optimizer=optimizer, ema=ema)
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    stepped = tracked.capture().stepped
    params = {"model.0.weight", "model.1.weight", "model.1.bias"}
    assert {name for name in stepped if name.startswith("model")} == params
    moments = {name for name in stepped if not name.startswith("model")}
    assert "optimizer.param_groups.0.lr" in tracked.capture().tensors
    assert len(moments) == 9 and all(name.startswith("optimizer.") for name in moments)


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_the_benchmark_runs() -> None:
    bench = Bench(sizes=QUICK_BYTES[:1], num_saves=2, num_loads=1, step_s=0.01)
    (size,) = bench.run(lambda line: None)["sizes"]
    assert all(len(row["added_s"]) == 2 for row in size["save"].values())
    ours = {"elastic", "elastic.cold", "elastic.s3", "elastic.memory"}
    assert set(size["load_s"]) == {"dcp.load", "dcp.load.cold"} | ours
    assert all(len(taken_s) == 1 for taken_s in size["load_s"].values())
    assert size["ratios"].keys() >= {"memory_over_s3", "memory_over_cold", "memory_over_hot"}
