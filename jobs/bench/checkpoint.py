"""`bench checkpoint`: what a save costs training and what a load takes, DCP's own ways and ours.

All ways alternate in one run, in the same processes on the same state. Must not import torch or
elastic: the ranks do, in `checkpoint_saves` and `checkpoint_loads`.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from jobs.bench import s3_server
from jobs.bench.events import EventLog
from jobs.bench.site import environment, measurement_directory

FULL_BYTES = (400_000_000, 1_500_000_000)
QUICK_BYTES = (8_000_000, 16_000_000)
NUM_RANKS, NUM_RANKS_BEFORE = 2, 3
NONE, MEMCPY, OURS = "none", "memcpy", "elastic"
MEMORY, S3 = "elastic.memory", "elastic.s3"
PLAIN, REUSED = "dcp.async_save", "dcp.async_save.reused"
WAYS = (NONE, MEMCPY, "dcp.save", PLAIN, REUSED, "dcp.async_save.process", OURS)
DEADLINE_S = 1800.0


class MeasurementFailed(RuntimeError):
    """A rank of the benchmark ended without its result."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the ranks of one size are told. Each saves `num_saves` times in each way."""

    directory: str
    bytes_per_rank: int
    num_saves: int
    num_loads: int
    step_s: float
    ways: tuple[str, ...] = WAYS
    has_s3: bool = False

    @property
    def log(self) -> EventLog:
        return EventLog(Path(self.directory) / "events.jsonl")

    @property
    def bucket(self) -> Path:
        """Where the S3 server has its objects; its last component is the bucket's name."""
        return Path(self.directory) / "s3" / "bucket"


@dataclass(frozen=True, kw_only=True)
class Bench:
    """`num_saves` saves in each way at each size; the first of each is thrown away beforehand."""

    sizes: tuple[int, ...] = FULL_BYTES
    num_saves: int = 10
    num_loads: int = 5
    step_s: float = 0.1

    def run(self, say: Callable[[str], None]) -> dict[str, Any]:
        """The report, ready for JSON; sizes that came to nothing are told in `failures`."""
        sizes, failures = [], []
        for size in self.sizes:
            try:
                sizes.append(self._at_size(size, say))
            except MeasurementFailed as failure:
                failures.append(f"{size} bytes a rank: {failure}")
                say(f"    failed: {failures[-1]}")
            else:
                say(table(sizes[-1]))
        return {"sizes": sizes, "failures": failures}

    def _at_size(self, bytes_per_rank: int, say: Callable[[str], None]) -> dict[str, Any]:
        say(f"{bytes_per_rank / 1e6:.0f} MB a rank, {NUM_RANKS} ranks: saves ...")
        begun_s = time.monotonic()
        with measurement_directory() as directory:
            plan = Plan(
                directory=str(directory),
                bytes_per_rank=bytes_per_rank,
                num_saves=self.num_saves,
                num_loads=self.num_loads,
                step_s=self.step_s,
            )
            _ranks("jobs.bench.checkpoint_saves", plan, NUM_RANKS, "save")
            say(f"    loads, saved by {NUM_RANKS_BEFORE} ranks ... {_since(begun_s)}")
            _loads(plan, say)
            events = plan.log.read()
        say(f"    done {_since(begun_s)}")
        return report(bytes_per_rank, events)


def _since(begun_s: float) -> str:
    return f"after {time.monotonic() - begun_s:.0f} s"


def _loads(plan: Plan, say: Callable[[str], None]) -> None:
    """Those of the S3 server too, unless it cannot be had here."""
    with contextlib.ExitStack() as undo:
        why = s3_server.why_unavailable()
        if not why:
            try:
                undo.enter_context(_s3(plan.bucket))
            except RuntimeError as error:
                why = str(error)
        if why:
            say(f"    {S3} is left out: {why}")
        plan = replace(plan, has_s3=not why)
        _ranks("jobs.bench.checkpoint_loads", plan, NUM_RANKS_BEFORE, "write")
        _ranks("jobs.bench.checkpoint_loads", plan, NUM_RANKS, "read")


@contextlib.contextmanager
def _s3(bucket: Path) -> Iterator[None]:
    """A server, which the processes that are started meanwhile find by their environment."""
    bucket.mkdir(parents=True)
    server = s3_server.S3Server(bucket.parent)
    try:
        server.start()
        with environment(s3_server.environment(server.port)):
            yield
    finally:
        server.stop()


def _ranks(module: str, plan: Plan, num_ranks: int, what: str) -> None:
    """Runs `module.main` on so many ranks, and returns when all have ended."""
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(
            target=_rank, args=(module, asdict(plan), what, rank, num_ranks), daemon=False
        )
        for rank in range(num_ranks)
    ]
    for process in ranks:
        process.start()
    try:
        _await(ranks, f"{what} at {plan.bytes_per_rank} bytes a rank")
    finally:
        for process in ranks:
            process.kill()
            process.join()


def _await(ranks: Sequence[BaseProcess], what: str) -> None:
    until_s = time.monotonic() + DEADLINE_S
    for rank, process in enumerate(ranks):
        process.join(max(0.0, until_s - time.monotonic()))
        if process.exitcode != 0:
            raise MeasurementFailed(
                f"rank {rank} of `{what}` ended with {process.exitcode} (None: it had not ended "
                f"after {DEADLINE_S:.0f} s; -9: the system may have had too little memory, of "
                "which all ways together take about 12 times a rank's state); see above"
            )


def _rank(module: str, plan: dict[str, Any], what: str, rank: int, num_ranks: int) -> None:
    import importlib

    importlib.import_module(module).main(Plan(**plan), what, rank, num_ranks)


def report(bytes_per_rank: int, events: list[dict[str, Any]]) -> dict[str, Any]:
    """The JSON of one size, from what rank 0 has noted."""
    saves = [event for event in events if event["event"] == "save"]
    loads = [event for event in events if event["event"] == "load"]
    blocking_s = {way: [e["blocking_s"] for e in saves if e["way"] == way] for way in WAYS}
    added_s = {way: [e["added_s"] for e in saves if e["way"] == way] for way in WAYS}
    names = list(dict.fromkeys(event["way"] for event in loads))
    return {
        "bytes_per_rank": bytes_per_rank,
        "memcpy_s": median(blocking_s[MEMCPY]),
        "save": {
            way: {"blocking_s": blocking_s[way], "added_s": added_s[way]}
            for way in WAYS
            if way != MEMCPY and added_s[way]
        },
        "load_s": {name: [e["load_s"] for e in loads if e["way"] == name] for name in names},
        "memcpy_raw_s": blocking_s[MEMCPY],
        "step_s": median(event["step_s"] for event in saves),
        "cpu_added_s": {
            way: [e["cpu_added_s"] for e in saves if e["way"] == way]
            for way in WAYS
            if added_s[way]
        },
        "ratios": ratios(blocking_s, added_s, {n: _of(loads, n) for n in names}),
    }


def _of(loads: list[dict[str, Any]], way: str) -> list[float]:
    return [event["load_s"] for event in loads if event["way"] == way]


def ratios(
    blocking_s: dict[str, list[float]],
    added_s: dict[str, list[float]],
    load_s: dict[str, list[float]],
) -> dict[str, float]:
    """What is asked of us, as ratios of medians; `none_spread` is the middle half of the row
    without saves, over the effect that is to be seen: plain async_save's added time less ours.
    """
    ours = median(added_s[OURS])
    low, _, high = quantiles(added_s[NONE], n=4)
    found = {
        "blocking_over_memcpy": median(blocking_s[OURS]) / median(blocking_s[MEMCPY]),
        "added_over_async_save": ours / median(added_s[PLAIN]),
        "added_over_reused": ours / median(added_s[REUSED]),
        "none_spread": (high - low) / abs(median(added_s[PLAIN]) - ours),
    }
    for suffix in ("", ".cold"):
        if f"dcp.load{suffix}" in load_s:
            found[f"load_over_dcp{suffix}"] = median(load_s[f"{OURS}{suffix}"]) / median(
                load_s[f"dcp.load{suffix}"]
            )
    for name, way in (("s3", S3), ("cold", f"{OURS}.cold"), ("hot", OURS)):
        if MEMORY in load_s and way in load_s:
            found[f"memory_over_{name}"] = median(load_s[MEMORY]) / median(load_s[way])
    return found


_LEGEND = (
    "blocking: how long the training loop waits. added: by how much the steps until the save has",
    "ended take longer than as many without one; middle half: of these, save by save. Steps vary,",
    f"so that a small cost may come out below 0: the row `{NONE}` shows how far. added cpu: the",
    "same, in rank 0's processor time. ratios: A_over_B is A's median over B's, below 1 A is the",
    f"faster; none_spread is the middle half of `{NONE}` over the `added` that we spare `{PLAIN}`.",
)


def table(size: dict[str, Any]) -> str:
    """The report of one size for a reader."""
    about = f"{size['bytes_per_rank'] / 1e6:.0f} MB a rank, steps of {_ms(size['step_s'])} ms"
    lines = [
        f"{about}; medians in ms, of {len(size['memcpy_raw_s'])} saves each",
        f"{'':24}{'blocking':>10}{'added':>10}{'middle half':>16}{'added cpu':>11}",
        f"{MEMCPY:24}{_ms(size['memcpy_s']):>10}",
    ]
    for way, row in size["save"].items():
        low, added_s, high = quantiles(row["added_s"], n=4)
        blocking, cpu = (_ms(median(v)) for v in (row["blocking_s"], size["cpu_added_s"][way]))
        between = f"{_ms(low)} to {_ms(high)}"
        lines.append(f"{way:24}{blocking:>10}{_ms(added_s):>10}{between:>16}{cpu:>11}")
    for name, taken_s in size["load_s"].items():
        lines.append(f"load {name:19}{_ms(median(taken_s)):>10}")
    told = ", ".join(f"{name} {value:.2f}" for name, value in size["ratios"].items())
    return "\n".join([*lines, f"ratios: {told}", *_LEGEND])


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f}"
