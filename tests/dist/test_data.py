"""The global loader and Parquet tokens: the same samples at any world size, from any position."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from elastic.training.data import GlobalLoader, MicroBatch
from elastic.training.order import EpochOrder
from elastic.training.parquet import ParquetTokens

# What torchdata says of itself, and of this machine's few cores.
pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]
SEED = 3


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


class Numbers:
    """Item i holds its own index, as its label too, and something drawn at random."""

    def __init__(self, num_samples: int, broken: set[int] | None = None) -> None:
        self.num_samples = num_samples
        self.broken = broken or set()

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index in self.broken:
            raise OSError(f"item {index} is on a lost disk")
        drawn = torch.rand(()).item() + np.random.rand() + random.random()
        return {"labels": index, "drawn": drawn}


def loader_of(dataset: Any, **changed: Any) -> GlobalLoader:
    arguments: dict[str, Any] = {
        "global_batch": 4,
        "micro_batch": 2,
        "seed": SEED,
        "world_rank": 0,
        "world_size": 1,
    }
    return GlobalLoader(dataset, **{**arguments, **changed})


def indices(step: list[MicroBatch]) -> list[int]:
    return [
        index for micro in step if not micro.is_padding for index in micro.batch["labels"].tolist()
    ]


def trained(dataset: Any, num_steps: int, **changed: Any) -> list[list[int]]:
    """The indices of each of the next steps over all ranks, in order of rank."""
    world_size = changed.pop("world_size", 1)
    ranks = [
        loader_of(dataset, world_rank=rank, world_size=world_size, **changed)
        for rank in range(world_size)
    ]
    steps = [[step for step, _ in zip(rank, range(num_steps), strict=False)] for rank in ranks]
    return [flat([indices(of_rank[number]) for of_rank in steps]) for number in range(num_steps)]


def reference(num_samples: int, num_epochs: int = 3) -> list[int]:
    epochs = [EpochOrder(num_samples=num_samples, seed=SEED, epoch=e) for e in range(num_epochs)]
    return [index for epoch in epochs for index in epoch.slice(0, num_samples).tolist()]


def flat(steps: list[list[int]]) -> list[int]:
    return [index for step in steps for index in step]


# --- position ----------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(2, 1, 3), (1, 4, 2)])
def test_world_sizes_change_within_an_epoch(sizes: tuple[int, ...]) -> None:  # B28
    found, done = [], 0
    for world_size in sizes:
        found += flat(trained(Numbers(31), 2, world_size=world_size, samples_done=done))
        done += 2 * 4
    assert found == reference(31)[: len(found)]
    assert len(set(found)) == 24, "no index twice within the epoch"


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_resume_at_the_end_of_an_epoch(num_workers: int) -> None:  # B30
    expected = reference(8)
    for done in (6, 8, 10):  # a step before, at, and after the end
        found = trained(Numbers(8), 4, global_batch=2, samples_done=done, num_workers=num_workers)
        assert flat(found) == expected[done : done + 8]


def test_a_global_batch_that_straddles_epochs_is_full() -> None:  # B30
    assert flat(trained(Numbers(7), 10, global_batch=2)) == reference(7)[:20]


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_the_position_is_that_of_the_whole_run(world_size: int) -> None:  # B28
    loader = loader_of(Numbers(10), world_rank=world_size - 1, world_size=world_size)
    found = []
    for _, _ in zip(range(4), loader, strict=False):
        found.append((loader.position, loader.epoch))
    assert found == [(4, 0), (8, 0), (12, 1), (16, 1)]


def test_resumes_within_one_epoch_add_up() -> None:  # B31
    found: list[int] = []
    for stop in (10, 15, 17, 30):
        done = len(found)
        found += flat(trained(Numbers(120), stop - done // 4, samples_done=done))
    assert found == reference(120)[:120]


def test_a_position_is_right_at_any_moment_also_with_prefetched_batches() -> None:  # B33
    done, found = 0, []
    for _ in range(3):
        loader = loader_of(Numbers(40), num_workers=4, samples_done=done)
        found += indices(next(iter(loader)))
        done = loader.position
        loader.close()
    assert done == 12
    assert found == reference(40)[:12]


def test_the_number_of_loader_processes_may_change() -> None:  # B34
    found: list[int] = []
    for num_workers in (2, 0, 1, 3):
        done = len(found)
        found += flat(trained(Numbers(40), 2, num_workers=num_workers, samples_done=done))
    assert found == reference(40)[:32]


@pytest.mark.parametrize("global_batch", [2, 3, 5, 10])
def test_all_ranks_have_equally_many_micro_batches(global_batch: int) -> None:  # B35
    world_size = min(3, global_batch)
    counts = set()
    for rank in range(world_size):
        loader = loader_of(
            Numbers(10), global_batch=global_batch, world_rank=rank, world_size=world_size
        )
        counts.add(tuple(len(step) for step, _ in zip(loader, range(12), strict=False)))
    assert len(counts) == 1


def test_stopping_after_any_step() -> None:  # B36
    num_steps = 12
    whole = trained(Numbers(29), num_steps, global_batch=6)  # 3 micro-batches a step
    for stop in range(1, num_steps + 1):
        loader = loader_of(Numbers(29), global_batch=6)
        before = [indices(step) for step, _ in zip(loader, range(stop), strict=False)]
        # zip takes a step more than it gives when the loader comes first: that one was handed out.
        assert loader.position == 6 * (stop + 1)
        after = trained(Numbers(29), num_steps - stop, global_batch=6, samples_done=6 * stop)
        assert before + after == whole


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_failed_fetch_is_not_counted(num_workers: int) -> None:  # B36
    expected = reference(20)
    dataset = Numbers(20, broken={expected[6]})
    loader = loader_of(dataset, num_workers=num_workers)
    steps = iter(loader)
    assert indices(next(steps)) == expected[:4]
    with pytest.raises(OSError, match="lost disk"):
        next(steps)
    assert loader.position == 4
    dataset.broken.clear()
    assert indices(next(iter(loader))) == expected[4:8], "iterating again goes on"


def test_iterating_again_goes_on_where_the_last_stopped() -> None:
    loader = loader_of(Numbers(40), num_workers=2)
    found = []
    for _ in range(3):
        for step in loader:
            found += indices(step)
            if len(found) % 8 == 0:
                break
    assert found == reference(40)[:24]
    assert (loader.position, loader.epoch) == (24, 0)


def test_epochs_differ_and_ranks_are_disjoint() -> None:  # B37
    epochs = [tuple(trained(Numbers(12), 3, samples_done=12 * epoch)[0]) for epoch in range(3)]
    assert len(set(epochs)) == 3
    resumed = trained(Numbers(12), 3, samples_done=24, world_size=2)
    assert flat(resumed) == reference(12)[24:36], "a resume in epoch 2 has the order of epoch 2"
    assert len({*resumed[0]}) == 4


def test_without_shuffling() -> None:
    assert flat(trained(Numbers(6), 2, shuffle=False)) == [0, 1, 2, 3, 4, 5, 0, 1]


# --- random streams ----------------------------------------------------------------------------


def streams() -> tuple[Any, ...]:
    numpy = np.random.get_state()
    return random.getstate(), numpy[1].tobytes(), numpy[2], torch.get_rng_state().numpy().tobytes()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_random_streams_of_the_process_are_left_alone(num_workers: int) -> None:
    before = streams()
    loader = loader_of(Numbers(20), num_workers=num_workers)
    for _, step in zip(range(3), loader, strict=False):
        assert step
    loader.close()
    assert streams() == before


def test_what_a_dataset_draws_belongs_to_the_sample() -> None:
    """Else a resume, another world size or another number of processes would change the data."""

    def drawn(**changed: Any) -> dict[tuple[int, int], float]:
        found = {}
        world_size = changed.pop("world_size", 1)
        for rank in range(world_size):
            loader = loader_of(Numbers(12), world_rank=rank, world_size=world_size, **changed)
            for number, step in zip(range(6), loader, strict=False):
                for micro in step:
                    if not micro.is_padding:
                        items = zip(
                            micro.batch["labels"].tolist(),
                            micro.batch["drawn"].tolist(),
                            strict=True,
                        )
                        found |= {(number // 3, index): value for index, value in items}
        return found

    expected = drawn()
    assert len(expected) == len({*expected.values()}) == 24, "also another epoch draws anew"
    assert drawn(micro_batch=1) == expected
    for world_size in (1, 2, 3):
        for num_workers in (0, 2):
            assert drawn(world_size=world_size, num_workers=num_workers) == expected


# --- padding -----------------------------------------------------------------------------------


@pytest.mark.parametrize("micro_batch", [1, 2, 4])
@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_twelve_samples_give_one_gradient_at_any_world_size(
    world_size: int, micro_batch: int
) -> None:
    """Padding runs forward and backward and weighs nothing."""
    torch.manual_seed(0)
    inputs = torch.randn(40, 5, dtype=torch.float64)
    labels = torch.randint(0, 3, (40,))
    dataset = torch.utils.data.TensorDataset(inputs, labels)
    model = torch.nn.Linear(5, 3).double()

    def gradient(size: int, micro: int) -> tuple[torch.Tensor, int]:
        model.zero_grad()
        num_tokens = 0
        for rank in range(size):
            loader = loader_of(
                dataset, global_batch=12, micro_batch=micro, world_rank=rank, world_size=size
            )
            for batch in next(iter(loader)):
                x, y = batch.batch
                loss = torch.nn.functional.cross_entropy(model(x), y, reduction="sum")
                assert bool(loss == 0) == batch.is_padding
                loss.backward()
                num_tokens += batch.num_valid_tokens
        return model.weight.grad.clone(), num_tokens

    expected, num_tokens = gradient(1, 12)
    found, found_tokens = gradient(world_size, micro_batch)
    assert found_tokens == num_tokens == 12
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_short_rank_gets_padding_of_its_own() -> None:
    loader = loader_of(Numbers(40), global_batch=12, world_rank=4, world_size=5)
    real, padding = next(iter(loader))
    assert (real.is_padding, real.num_samples, real.num_valid_tokens) == (False, 2, 2)
    assert (padding.is_padding, padding.num_samples, padding.num_valid_tokens) == (True, 0, 0)
    assert padding.batch["labels"].tolist() == [-100, -100]
    assert padding.batch["drawn"].tolist() == real.batch["drawn"].tolist()
    padding.batch["drawn"].zero_()
    assert real.batch["drawn"].all(), "what is done to the one is not done to the other"


def test_valid_tokens_are_the_labels_that_are_not_ignored() -> None:
    labels = torch.tensor([[1, -100, 3], [-100, -100, 2], [-100] * 3, [0, 0, 0]])
    dataset = [{"labels": row} for row in labels]
    step = next(iter(loader_of(dataset, shuffle=False)))
    assert [micro.num_valid_tokens for micro in step] == [3, 3]
    step = next(
        iter(
            loader_of(
                dataset, shuffle=False, count_tokens=lambda b: 7 * bool((b["labels"] != -100).any())
            )
        )
    )
    assert [micro.num_valid_tokens for micro in step] == [7, 7]


Pair = namedtuple("Pair", "inputs labels")


@pytest.mark.parametrize("kind", [tuple, list, Pair])
def test_pairs_of_inputs_and_labels(kind: type) -> None:
    dataset = [
        Pair(torch.ones(2), i) if kind is Pair else kind([torch.ones(2), i]) for i in range(9)
    ]
    loader = loader_of(dataset, global_batch=5, world_rank=1, world_size=2, micro_batch=2)
    first, padding = next(iter(loader))
    assert padding.is_padding
    assert type(first.batch) is type(padding.batch)
    assert padding.batch[1].tolist() == [-100] * 2


@pytest.mark.parametrize(
    ("item", "found"),
    [
        ((1.0, 2.0), "list of (torch.float64, torch.float64)"),
        (torch.ones(2), "Tensor of torch.float32 and shape (1, 2)"),
        ({"x": 1, "y": 2}, "dict with {'x': torch.int64, 'y': torch.int64}"),
        ((1, torch.tensor(3, dtype=torch.uint8)), "torch.uint8"),
        ((1, 2, 3), "list of (torch.int64, torch.int64, torch.int64)"),
    ],
)
def test_items_that_need_padding_from_the_user(item: Any, found: str) -> None:
    with pytest.raises(ValueError, match=r"some ranks have fewer samples.* Pass pad=") as caught:
        loader_of([item] * 8)
    assert found in str(caught.value)


def test_padding_and_counting_by_the_user() -> None:
    dataset = [(torch.ones(2), torch.tensor(float(i))) for i in range(9)]

    def pad(batch: list[torch.Tensor]) -> list[torch.Tensor]:
        batch[0].zero_()
        batch[1].fill_(float("nan"))
        return batch

    arguments: dict[str, Any] = {"global_batch": 5, "world_rank": 1, "world_size": 2, "pad": pad}
    first, padding = next(iter(loader_of(dataset, **arguments)))
    assert first.batch[0].all(), "pad may write into what it is given"
    assert first.num_valid_tokens == 2, "without labels a token is a sample"
    assert padding.batch[1].isnan().all()
    with pytest.raises(ValueError, match="but 1 tokens count in what pad= made"):
        loader_of(dataset, **arguments, count_tokens=lambda batch: len(batch[1]))
    loader_of(dataset, **arguments, count_tokens=lambda batch: int((~batch[1].isnan()).sum()))


def test_a_collate_function_of_the_user() -> None:
    loader = loader_of(
        [(i, i) for i in range(8)],
        collate=lambda items: {"labels": torch.tensor([label for _, label in items])},
    )
    assert indices(next(iter(loader))) == reference(8)[:4]


def test_batches_are_put_on_the_device() -> None:
    dataset = [{"labels": i, "more": (torch.ones(1), "text")} for i in range(8)]
    step = next(iter(loader_of(dataset, device="meta")))
    assert step[0].batch["labels"].is_meta
    assert step[0].batch["more"][0].is_meta
    assert step[0].batch["more"][1] == ("text", "text")
    assert step[0].num_valid_tokens == 2, "counted before, without waiting for the device"


# --- bad input ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"global_batch": 9}, "holds 8 samples, fewer than one global batch of 9"),  # B38
        ({"global_batch": 3, "world_size": 4}, "global batch of 3 samples .* 4 ranks"),  # B38
        ({"global_batch": 0}, "global_batch must be 1 or more, found 0"),
        ({"global_batch": -4}, "global_batch must be 1 or more, found -4"),
        ({"micro_batch": 0}, "micro_batch must be 1 or more, found 0"),
        ({"samples_done": -1}, "0 or more, found -1 and 0"),
        ({"num_workers": -1}, "0 or more, found 0 and -1"),
    ],
)
def test_numbers_that_make_no_step(changed: dict[str, int], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        loader_of(Numbers(8), **changed)


# --- loader processes --------------------------------------------------------------------------


def children() -> set[int]:
    return {int(child.pid or 0) for child in multiprocessing.active_children()}


@pytest.fixture
def _no_child_is_left() -> Iterator[None]:
    before = children()
    gc.disable()
    yield
    after = children()  # before a collection could end them
    gc.enable()
    assert after == before


@pytest.mark.usefixtures("_no_child_is_left")
def test_loader_processes_end_with_their_loop() -> None:
    loader = loader_of(Numbers(40), num_workers=2)
    for _ in loader:
        assert len(children()) >= 2
        break


@pytest.mark.usefixtures("_no_child_is_left")
def test_loader_processes_end_at_close_although_a_traceback_holds_the_loop() -> None:
    loader = loader_of(Numbers(40), num_workers=2)

    def loop() -> None:
        steps = iter(loader)
        raise RuntimeError(len(next(steps)))

    try:
        loop()
    except RuntimeError as error:
        kept = error
    assert len(children()) >= 2
    loader.close()
    loader.close()
    traceback.clear_frames(kept.__traceback__)


@pytest.mark.usefixtures("_no_child_is_left")
def test_loader_processes_end_after_a_failed_fetch() -> None:
    loader = loader_of(Numbers(40, broken={*range(1, 40)}), num_workers=2)
    with pytest.raises(OSError, match="lost disk"):  # the traceback is kept by pytest
        next(iter(loader))
    assert not children()


class Slow(Numbers):
    """All items but those of the first step take a minute to read."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        if multiprocessing.parent_process() is not None and index not in reference(40)[:4]:
            time.sleep(60)
        return super().__getitem__(index)


@pytest.mark.usefixtures("_no_child_is_left")
def test_loader_processes_that_wait_for_storage_do_not_hold_up_the_rank() -> None:
    loader = loader_of(Slow(40), num_workers=2)
    steps = iter(loader)
    assert indices(next(steps)) == reference(40)[:4]
    begin_s = time.monotonic()
    loader.close()
    assert time.monotonic() - begin_s < 3
    assert not children()


@pytest.mark.usefixtures("_no_child_is_left")
def test_a_loader_process_is_forgotten_that_was_waited_for_when_a_signal_came(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seen once: torch's handler raises for the second one killed as the first was being noted."""
    waitpid, seen = os.waitpid, set[int]()

    def interrupted(pid: int, options: int) -> tuple[int, int]:
        found = waitpid(pid, options)
        if found[0] and not seen:
            seen.add(pid)
            raise RuntimeError(f"DataLoader worker (pid {pid}) is killed by signal: Killed.")
        return found

    loader = loader_of(Slow(40), num_workers=2)
    steps = iter(loader)
    next(steps)
    monkeypatch.setattr(os, "waitpid", interrupted)
    loader.close()
    assert seen
    assert not children()


AT_EXIT = """
from tests.dist.test_data import Numbers, loader_of
steps = iter(loader_of(Numbers(40), num_workers=2))
next(steps)
kept_in_a_cycle = [steps]
kept_in_a_cycle.append(kept_in_a_cycle)
"""


def test_a_process_with_an_open_loader_can_exit() -> None:
    done = subprocess.run(
        [sys.executable, "-c", AT_EXIT], timeout=60, capture_output=True, text=True, check=True
    )
    assert "Error" not in done.stderr


class Talkative(Numbers):
    """Tells which process reads."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"labels": index, "pid": os.getpid()}


def reader_pid(loader: GlobalLoader) -> tuple[Iterator[list[MicroBatch]], int]:
    steps = iter(loader)
    return steps, int(next(steps)[0].batch["pid"][0])


def test_a_loader_process_lets_go_of_network_connections() -> None:
    """Else a peer would not see that this rank has left."""
    listener = socket.create_server(("127.0.0.1", 0))
    ours = socket.create_connection(listener.getsockname())
    peer, _ = listener.accept()
    peer.settimeout(10)
    loader = loader_of(Talkative(40), num_workers=1)
    steps, pid = reader_pid(loader)
    assert pid != os.getpid()
    ours.close()
    assert peer.recv(1) == b""
    assert indices(next(steps)), "and goes on reading"
    loader.close()


def _be_killed(pipe: Any) -> None:
    _steps, pid = reader_pid(loader_of(Talkative(40), num_workers=1))
    pipe.send(pid)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_loader_process_dies_with_its_parent() -> None:
    """The far end of a pipe it inherits tells: torch's own watchdog would take 5 s."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    # Not daemonic: it has a child of its own.
    process = context.Process(target=_be_killed, args=(theirs,), daemon=False)
    process.start()
    theirs.close()
    pid = ours.recv()
    process.join()  # with a timeout it would wait for the pipe that its child holds as well
    assert ours.poll(2), "the loader process still holds the pipe"
    with pytest.raises(EOFError):
        ours.recv()
    assert process.exitcode == -signal.SIGKILL
    assert pid != process.pid


def _be_killed_beside_a_fork_server(pipe: Any) -> None:
    multiprocessing.set_start_method("forkserver", force=True)
    _be_killed(pipe)


def test_a_loader_process_of_a_fork_server_dies_with_who_asked_for_it() -> None:
    """The fork server is its parent, and outlives the rank for as long as it has children."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_be_killed_beside_a_fork_server, args=(theirs,), daemon=False)
    process.start()
    theirs.close()
    pid = ours.recv()
    process.join()
    until_s = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < until_s, "the loader process lives on"
        time.sleep(0.02)


# --- Parquet tokens ----------------------------------------------------------------------------


def write(path: Path, column: Any, rows_per_group: int = 5, name: str = "tokens") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({name: column}), path, row_group_size=rows_per_group)
    return path


def items(dataset: ParquetTokens) -> tuple[list[int], list[int]]:
    inputs = [token for item in dataset for token in item["input_ids"].tolist()]
    return inputs, [token for item in dataset for token in item["labels"].tolist()]


@pytest.mark.parametrize("length", [1, 3, 4, 7, 22])
@pytest.mark.parametrize("kind", [pa.uint16(), pa.int64()])
def test_windows_over_row_groups_and_files(tmp_path: Path, length: int, kind: pa.DataType) -> None:
    write(tmp_path / "b.parquet", pa.array(range(12, 24), kind))
    write(tmp_path / "a/x.parquet", pa.array(range(12), kind))
    write(tmp_path / "a/y.parquet", pa.array([], kind))
    write(tmp_path / "_hidden.parquet", pa.array([99], kind))
    dataset = ParquetTokens(tmp_path, length=length)
    num_items = 23 // length
    assert (dataset.num_tokens, len(dataset)) == (24, num_items)
    expected = list(range(24))
    assert items(dataset) == (expected[: num_items * length], expected[1 : num_items * length + 1])
    assert dataset[0]["labels"].dtype == torch.int64
    assert dataset[-1]["labels"].equal(dataset[num_items - 1]["labels"])
    with pytest.raises(IndexError):
        dataset[num_items]


@pytest.mark.parametrize("kind", [pa.list_(pa.int32()), pa.large_list(pa.uint16())])
def test_lists_of_tokens(tmp_path: Path, kind: pa.DataType) -> None:
    rows = pa.array([[0, 1], [], None, [2], [3, 4, 5, 6], [7], [8, 9]], kind)
    dataset = ParquetTokens(write(tmp_path / "x.parquet", rows, 2, "ids"), "ids", length=3)
    assert items(dataset) == (list(range(9)), list(range(1, 10)))


def test_input_and_labels_are_tensors_of_their_own(tmp_path: Path) -> None:
    dataset = ParquetTokens(write(tmp_path / "x.parquet", list(range(9))), length=4)
    item = dataset[0]
    item["labels"].fill_(-100)
    assert item["input_ids"].tolist() == [0, 1, 2, 3]
    assert dataset[0]["labels"].tolist() == [1, 2, 3, 4]


def test_only_so_much_is_kept_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic.training.parquet.BLOCK_TOKENS", 1)
    path = write(tmp_path / "x.parquet", pa.array(range(1000), pa.int64()), rows_per_group=10)
    # A row group, and behind it the tokens that its last item may need.
    dataset = ParquetTokens(path, length=7, cache_bytes=10 * (10 + 7) * 8)
    expected, _ = items(dataset)
    assert expected == list(range(142 * 7))
    assert len(dataset._cache) == 10


@pytest.mark.parametrize("num_workers", [0, 2])
def test_tokens_through_a_loader_after_pickling(tmp_path: Path, num_workers: int) -> None:
    dataset = ParquetTokens(write(tmp_path / "x.parquet", list(range(100))), length=4)
    assert dataset[3]["input_ids"].tolist() == [12, 13, 14, 15]
    dataset = pickle.loads(pickle.dumps(dataset))
    loader = loader_of(dataset, num_workers=num_workers)
    step = next(iter(loader))
    loader.close()
    rows = [row for micro in step for row in micro.batch["input_ids"].tolist()]
    assert rows == [[4 * i, 4 * i + 1, 4 * i + 2, 4 * i + 3] for i in reference(24)[:4]]
    assert [micro.num_valid_tokens for micro in step] == [8, 8]


@pytest.mark.parametrize("name", ["with space", "[a]*?", "50%20", "#x", "ünï"])
def test_a_path_is_taken_literally(tmp_path: Path, name: str, monkeypatch: Any) -> None:  # B62
    path = write(tmp_path / name / "x.parquet", list(range(9)))
    monkeypatch.chdir(tmp_path)
    for form in (path, str(path.parent) + "/", f"file://{path}", f"{name}/x.parquet"):
        assert len(ParquetTokens(form, length=4)) == 2


def test_an_object_store(tmp_path: Path) -> None:
    import fsspec

    path = write(tmp_path / "x.parquet", list(range(9)))
    fsspec.filesystem("memory").pipe_file("/bucket/data/x.parquet", path.read_bytes())
    dataset = ParquetTokens("memory://bucket/data", length=4)
    assert items(dataset)[0] == list(range(8))
    dataset = ParquetTokens("memory://bucket/data/x.parquet", length=4)
    assert items(pickle.loads(pickle.dumps(dataset)))[0] == list(range(8))


def test_parquet_that_holds_no_tokens(tmp_path: Path) -> None:
    cases = {
        "column 'tokens', found text, n": write_columns(tmp_path / "a", text=["x"], n=[1]),
        "integers or lists of integers, found string": write(tmp_path / "b.parquet", ["x"]),
        "integers or lists of integers, found list": write(tmp_path / "c.parquet", [["x"]]),
        "holds 4 tokens .* one item of length 4 needs 5": write(tmp_path / "d.parquet", [1] * 4),
        "no such file or folder": tmp_path / "missing",
    }
    for expected, path in cases.items():
        with pytest.raises(ValueError, match=expected):
            ParquetTokens(path, length=4)
    (tmp_path / "e.parquet").write_text("nothing of the kind")
    with pytest.raises(ValueError, match=r"e\.parquet is not a readable Parquet file"):
        ParquetTokens(tmp_path / "e.parquet", length=4)
    with pytest.raises(ValueError, match="length must be 1 token or more, found 0"):
        ParquetTokens(tmp_path / "d.parquet", length=0)
    dataset = ParquetTokens(write(tmp_path / "f.parquet", [1, None, 3]), length=1)
    with pytest.raises(ValueError, match="row group 0: column 'tokens' has 1 nulls"):
        dataset[0]


def write_columns(folder: Path, **columns: Any) -> Path:
    folder.mkdir()
    pq.write_table(pa.table(columns), folder / "x.parquet")
    return folder
