"""Several loaders in one run, and loops that the user owns: each goes on at its own position."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from elastic.dashboard.data_history import DataHistory
from elastic.policy.retention import Retention
from elastic.policy.saves import SaveInterval
from elastic.storage.claim import RunSpec
from elastic.storage.filesystem import Filesystem
from elastic.storage.ledger import read_ledger
from elastic.training.data import MicroBatch
from elastic.training.membership import TrainingConfig
from elastic.training.order import SampleStream
from elastic.training.padding import IGNORED_LABEL
from elastic.training.run import Run
from elastic.training.standalone import train_standalone
from tests.dist.processes import RankFailed, run_ranks
from tests.dist.standalone_run import Numbers, Passes, own_store

Used = dict[int, list[int]]


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training function, and how far it is to go."""

    root: str
    train: Callable[[Run, int, Used], None]
    until: int
    accepted: tuple[str, ...] = ()


def run(world_size: int, job: Job) -> Used:
    """What all ranks used by step, in order of rank."""
    ranks = run_ranks(_rank, world_size, job)
    return {step: [index for rank in ranks for index in rank[step]] for step in ranks[0]}


def _rank(rank: int, world_size: int, job: Job) -> Used:
    used: Used = {}
    train_standalone(
        lambda run: job.train(run, job.until, used),
        TrainingConfig(run_url=job.root, save=SaveInterval(steps=3)),
        RunSpec(name="loaders", seed=0, accepted=job.accepted),
        Retention(keep=-1),
        world_rank=rank,
        world_size=world_size,
        local_rank=rank,
        local_world_size=world_size,
        store=own_store(rank),
    )
    return used


def history(job: Job) -> DataHistory:
    return DataHistory(read_ledger(Filesystem.at(job.root)))


def ids(batch: dict[str, Any]) -> list[int]:
    pairs = zip(batch["index"].tolist(), batch["labels"].tolist(), strict=True)
    return [index for index, label in pairs if label != IGNORED_LABEL]


def order(num_items: int, count: int) -> list[int]:
    stream = SampleStream(num_samples=num_items, seed=0)
    return [index for _, index in stream.indices(0, count)]


def flat(used: Used) -> list[int]:
    return [index for step in sorted(used) for index in used[step]]


def two_phases(run: Run, until: int, used: Used) -> None:
    """Six steps of one dataset, then another one; a few samples of a third one after each."""
    run.track(counter={"n": 0})
    first = run.loader(Numbers(40), global_batch=6, micro_batch=2)
    second = run.loader(Passes(8), global_batch=5, micro_batch=2, name="second")
    held_out = run.loader(Numbers(9), global_batch=3, micro_batch=3, name="held out")
    for loader, end in ((first, min(6, until)), (second, until)):
        for step in run.steps(loader, until=end):
            used[step.number] = [index for batch in step for index in ids(batch)]
            for batches in itertools.islice(held_out, 1):
                used[-step.number] = [index for batch in batches for index in ids(batch.batch)]


def test_each_loader_goes_on_where_it_was(tmp_path: Path) -> None:
    """Not where the run is: the second one begins at its own beginning."""
    job = Job(root=f"{tmp_path}/run", train=two_phases, until=4)
    used = run(1, job)
    for size, until in ((2, 8), (3, 11), (1, 15)):
        used |= run(size, Job(root=job.root, train=two_phases, until=until))
    assert [index for step in range(1, 7) for index in used[step]] == order(40, 36)
    places = [index for step in range(7, 16) for index in used[step]]
    assert places == [place % 8 for place in range(45)]
    held_out = [index for step in range(1, 16) for index in used[-step]]
    assert held_out == order(9, 45)
    told = [history(job).use(step).stretch for step in (6, 7, 15)]
    assert [stretch.facts["loader"] for stretch in told] == ["data", "second", "second"]
    assert [index for _, index in told[2].samples(15)] == used[15]
    assert told[0].other_loaders == ["second", "held out"]
    assert history(job).untold_loaders == ["held out"]


def read_ahead(run: Run, until: int, used: Used) -> None:
    """A loop of the user's own, which has taken the next batch before it ends a step."""
    run.track(counter={"n": 0})
    steps: Iterator[list[MicroBatch]] = iter(run.loader(Numbers(40), global_batch=6, micro_batch=2))
    ahead = next(steps)
    while run.step < until:
        batches, ahead = ahead, next(steps)
        number = run.step + 1
        used[number] = [index for batch in batches for index in ids(batch.batch)]
        run.end_step(samples=sum(batch.num_samples for batch in batches))


def test_what_a_loop_of_ones_own_has_read_ahead_is_not_trained(tmp_path: Path) -> None:
    """B33 B36."""
    job = Job(root=f"{tmp_path}/run", train=read_ahead, until=4)
    used = run(1, job)
    for size, until in ((2, 8), (3, 11)):
        used |= run(size, Job(root=job.root, train=read_ahead, until=until))
    assert flat(used) == order(40, 66)
    assert [index for _, index in history(job).use(11).stretch.samples(11)] == used[11]


def ever_larger(run: Run, until: int, used: Used) -> None:
    run.track(counter={"n": 0})
    loader = run.loader(Numbers(40), global_batch=6 + until, micro_batch=2)
    for step in run.steps(loader, until=until):
        used[step.number] = [index for batch in step for index in ids(batch)]


def test_another_global_batch_is_refused_and_once_accepted_in_the_ledger(tmp_path: Path) -> None:
    job = Job(root=f"{tmp_path}/run", train=ever_larger, until=4)
    used = run(1, job)
    with pytest.raises(RankFailed, match="GlobalBatchDiffers: global_batch of loader 'data': was"):
        run(1, dataclasses.replace(job, until=6))
    used |= run(1, dataclasses.replace(job, until=6, accepted=("global_batch",)))
    assert flat(used) == order(40, 4 * 10 + 2 * 12)
    told = [e for e in read_ledger(Filesystem.at(job.root)) if e.kind == "data_read"]
    assert ["was 10, now 12" in event.reason for event in told] == [False, True]


def same_name(run: Run, until: int, used: Used) -> None:
    run.track(counter={"n": 0})
    for _ in range(2):
        run.loader(Numbers(40), global_batch=6, micro_batch=2)


def test_two_loaders_of_one_name(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="a second loader with the name 'data'"):
        run(1, Job(root=f"{tmp_path}/run", train=same_name, until=1))
