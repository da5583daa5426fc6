"""The forecast of `elastic plan` as a person reads it, and as JSON. Pure: text from values."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from elastic.dashboard.text import size as sized
from elastic.dashboard.text import table
from elastic.policy.durations import told
from elastic.policy.forecast import Forecast, Machine, SavePlan
from elastic.policy.intervals import FORMULA, OVERHEAD_FORMULA, SOURCE
from elastic.policy.sizes import CheckpointSize

_GB = 1e9
_WIDTH = 96
_KINDS = {"parameters": "parameters", "optimizer": "optimizer state", "ema": "EMA"}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What was asked and what came out: all that the two views show."""

    num_params: int
    dtype: str
    optimizer: str
    num_gpus: int
    size: CheckpointSize
    machine: Machine
    mtbf_source: str
    forecasts: tuple[Forecast, ...]
    """By rising number of GPUs; one of them is of `num_gpus`."""
    defaults: frozenset[str]
    """The options that were not given."""

    def asked(self) -> Forecast:
        return next(one for one in self.forecasts if one.num_gpus == self.num_gpus)


def plan_json(plan: Plan) -> dict[str, Any]:
    """All of the plan and the sums of its sizes; bytes, seconds, and shares of 1."""
    ranks = plan.num_gpus
    components = [
        {**asdict(one), "per_rank_bytes": one.per_rank_bytes(ranks)} for one in plan.size.components
    ]
    return {
        "num_params": plan.num_params,
        "dtype": plan.dtype,
        "optimizer": plan.optimizer,
        "num_gpus": ranks,
        "checkpoint": {
            "components": components,
            **{f"{kind}_bytes": plan.size.num_bytes(kind) for kind in _KINDS},
            "num_bytes": plan.size.num_bytes(),
            "per_rank_bytes": plan.size.per_rank_bytes(ranks),
        },
        "machine": asdict(plan.machine),
        "mtbf_source": plan.mtbf_source,
        "defaults": sorted(plan.defaults),
        "forecasts": [asdict(one) for one in plan.forecasts],
        "formulas": {"interval": FORMULA, "overhead": OVERHEAD_FORMULA, "source": SOURCE},
    }


def plan_text(plan: Plan) -> str:
    """Sizes, stalls, intervals, what they assume, and the formulas."""
    sections = (
        [_title(plan)],
        _sizes(plan),
        _one_save(plan),
        _intervals(plan),
        _doubts(plan),
        _assumptions(plan),
        _formulas(plan),
    )
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def _title(plan: Plan) -> str:
    asked, per_node = plan.asked(), plan.machine.gpus_per_node
    return (
        f"{_count(plan.num_params)} parameters in {plan.dtype} with {plan.optimizer}, on "
        f"{_many(asked.num_gpus, 'GPU')} ({_many(asked.num_nodes, 'node')} of {per_node}). "
        "GB is 1e9 bytes."
    )


def _sizes(plan: Plan) -> list[str]:
    ranks = plan.num_gpus
    rows = []
    for kind, words in _KINDS.items():
        parts = [one for one in plan.size.components if one.kind == kind]
        for one in parts:
            name = words if len(parts) == 1 else f"  {one.name}"
            rows.append([name, one.dtype, sized(one.per_rank_bytes(ranks)), sized(one.num_bytes)])
        if len(parts) > 1:
            rows.insert(-len(parts), [words, "", *_sums(plan, kind)])
    rows.append(["in all", "", *_sums(plan, None)])
    return table(["CHECKPOINT", "DTYPE", "RANK", "TOTAL"], rows, right="RANK TOTAL")


def _sums(plan: Plan, kind: str | None) -> tuple[str, str]:
    whole = plan.size
    return sized(whole.per_rank_bytes(plan.num_gpus, kind)), sized(whole.num_bytes(kind))


def _one_save(plan: Plan) -> list[str]:
    asked, machine = plan.asked(), plan.machine
    whole, share = sized(plan.size.num_bytes()), sized(asked.per_rank_bytes)
    blocking, beside = asked.blocking.costs, asked.asynchronous.costs
    blocking_words = (
        f"stalls training for {told(blocking.stall_s)}: {whole} to storage at "
        f"{_rate(machine.storage_bytes_per_s)}"
    )
    beside_words = (
        f"stalls training for {told(beside.stall_s)}: {share} of each GPU to host memory at "
        f"{_rate(machine.host_bytes_per_s)};"
    )
    writing_words = (
        f"writes for {told(beside.write_s)} beside training, from a copy of "
        f"{sized(asked.host_bytes_per_node)} on each node"
    )
    return [
        f"One save on {_many(asked.num_gpus, 'GPU')}",
        f"  blocking      {blocking_words}",
        f"  asynchronous  {beside_words}",
        f"                {writing_words}",
    ]


def _intervals(plan: Plan) -> list[str]:
    rows = [
        [
            f"{one.num_gpus:,}" if save is one.blocking else "",
            told(one.mtbf_s) if save is one.blocking else "",
            save.saves,
            told(save.costs.stall_s),
            told(save.interval.seconds) + ("*" if save.interval.held_by_write else " "),
            _percent(save.overhead),
            told(save.lost_work_s),
            told(save.young_s),
            told(save.daly_s),
        ]
        for one in plan.forecasts
        for save in one.plans()
    ]
    names = ["GPUS", "MTBF", "SAVES", "STALL", "EVERY ", "OVERHEAD", "LOST", "YOUNG", "DALY"]
    lines = [
        "How often to save",
        *table(names, rows, right="GPUS MTBF STALL OVERHEAD LOST YOUNG DALY"),
        "EVERY: the best interval. OVERHEAD: time lost to saves, lost work and recovery, per time.",
        "LOST: work lost with one failure, on average. YOUNG, DALY: the older formulas' intervals.",
    ]
    if any(save.interval.held_by_write for _, save in _plans(plan)):
        lines.append(
            "*: as long as one save takes to be written; the formula alone would save more often."
        )
    return lines


def _doubts(plan: Plan) -> list[str]:
    """Each doubt once for each way to save, where it begins: more GPUs only fail more often."""
    lines, told_of = [], {save.saves: 0 for save in plan.forecasts[0].plans()}
    for one, save in _plans(plan):
        new = save.doubts[told_of[save.saves] :]
        told_of[save.saves] += len(new)
        where = f"Doubtful from {_many(one.num_gpus, 'GPU')} on, {save.saves} saves: "
        lines += [line for doubt in new for line in _wrapped(f"{where}{doubt}.", indent=2)]
    return lines


def _plans(plan: Plan) -> Iterable[tuple[Forecast, SavePlan]]:
    return ((one, save) for one in plan.forecasts for save in one.plans())


def _assumptions(plan: Plan) -> list[str]:
    machine, load_s = plan.machine, plan.asked().blocking.costs.stall_s
    values = [
        ("--bandwidth-to-storage", _rate(machine.storage_bytes_per_s), "all nodes together"),
        ("--bandwidth-to-host", _rate(machine.host_bytes_per_s), "from each GPU"),
        ("--detection", told(machine.detection_s), "until a failure is noticed"),
        (
            "--restart",
            told(machine.restart_s),
            f"until a new group may load; loading adds {told(load_s)}",
        ),
    ]
    lines = [
        f"  {name:<23} {value}{' (default)' if name in plan.defaults else ''}, {what}"
        for name, value, what in values
    ]
    return [
        "Assumed",
        *lines,
        *_wrapped(f"  {'MTBF':<23} {plan.mtbf_source}", indent=26),
        *_wrapped(
            "  Any one failure stops the whole run, so N times the GPUs fail N times as often. "
            "Tensors are split evenly over all ranks. Planning a save and barriers are left out, "
            "and so are counters, schedulers and random streams (less than 1 MB a rank).",
            indent=2,
        ),
    ]


def _formulas(plan: Plan) -> list[str]:
    costs = plan.asked().asynchronous.costs
    tables = (
        "Where a published table of intervals by cluster size deviates from these formulas, the "
        "numbers here follow the formulas."
    )
    if costs.write_s > costs.stall_s:
        tables += (
            " One common slip, the write time of an asynchronous save taken for C, would space "
            f"saves {(costs.write_s / costs.stall_s) ** 0.5:.1f} times too far apart here."
        )
    return [
        "Formulas: C stall, W write time after it, M MTBF, D detection, R restart and load",
        f"  EVERY     {FORMULA}",
        f"            {SOURCE}",
        f"  OVERHEAD  {OVERHEAD_FORMULA}   (Young 1974, with recovery)",
        "  LOST      T/2 + W   (Vaidya 1997: a checkpoint counts once it is written)",
        "  YOUNG     sqrt(2 M C)   (1974)",
        "  DALY      sqrt(2 M C) (1 + sqrt(C/2M)/3 + C/18M)   (2006, its stall included)",
        *_wrapped("  " + tables, indent=2),
    ]


def _wrapped(text: str, *, indent: int) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / _GB:g} GB/s"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share < 1 else "over 100 %"


def _count(number: int) -> str:
    for unit, name in ((10**12, "trillion"), (10**9, "billion"), (10**6, "million")):
        if number >= unit:
            return f"{number / unit:.4g} {name}"
    return f"{number:,}"


def _many(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
