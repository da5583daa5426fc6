"""The command line of the benchmarks: parses, prints, writes JSON. Measures nothing itself."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import Any

from elastic.policy.durations import parse_duration_s
from jobs import json_flag
from jobs.bench.engines import DEFAULT_ENGINES, ENGINES
from jobs.bench.faults import FAULTS
from jobs.bench.network import why_unavailable
from jobs.bench.sizes import parse_bytes


def main(arguments: list[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if problem := options.check(options):
        parser.error(problem)
    # Where the JSON goes to stdout, it has that for itself.
    with contextlib.redirect_stdout(sys.stderr if options.json == json_flag.STDOUT else sys.stdout):
        result: dict[str, Any] = options.run(options)
    json_flag.write(result, options.json, print)
    return 1 if result.get("failures") else 0


def _fault_reaches_engines(options: argparse.Namespace) -> str:
    """Why the fault cannot be measured under these engines, or on this machine; empty when it
    can.
    """
    beyond = [name for name in options.engines if not ENGINES[name].needs_cluster]
    if FAULTS[options.fault].needs_cluster and beyond:
        return (
            f"--fault {options.fault} strikes a Ray node, and {', '.join(beyond)} runs without "
            "Ray; leave it out of --engines, or take --fault worker"
        )
    if FAULTS[options.fault].needs_namespaces and (problem := why_unavailable()):
        return f"--fault {options.fault}: {problem}"
    return ""


def _engines_need_ray(options: argparse.Namespace) -> str:
    beyond = [name for name in options.engines if not ENGINES[name].needs_cluster]
    return f"nodes of Ray are preempted, and {', '.join(beyond)} has none" if beyond else ""


def _saves_have_a_spread(options: argparse.Namespace) -> str:
    return "--saves 1 has no spread: expected 2 or more" if options.saves < 2 else ""


def _nothing_to_check(options: argparse.Namespace) -> str:
    return ""


def _recovery(options: argparse.Namespace) -> dict[str, Any]:
    from jobs.bench.recovery import Bench, table

    bench = Bench(
        fault=FAULTS[options.fault],
        engines=[ENGINES[name] for name in options.engines],
        num_repeats=1 if options.quick else options.repeats,
        save_every_steps=6 if options.quick else 20,
        state_bytes=options.state_bytes,
    )
    result = bench.run(_say)
    print(table(result))
    return result


def _growth(options: argparse.Namespace) -> dict[str, Any]:
    from jobs.bench.growth import Bench, table

    bench = Bench(
        num_repeats=1 if options.quick else options.repeats,
        save_every_steps=6 if options.quick else 20,
    )
    result = bench.run(_say)
    print(table(result))
    return result


def _preemption(options: argparse.Namespace) -> dict[str, Any]:
    from jobs.bench.preemption import WORLD_RANKS, Bench, table

    bench = Bench(
        engines=[ENGINES[name] for name in options.engines],
        world_ranks=WORLD_RANKS[:1] if options.quick else WORLD_RANKS,
        steps_between=20 if options.quick else 40,
    )
    result = bench.run(_say)
    print(table(result))
    return result


def _overhead(options: argparse.Namespace) -> dict[str, Any]:
    from jobs.bench.overhead import Bench, table

    bench = Bench(num_blocks=10 if options.quick else options.blocks)
    result = bench.run(_say)
    print(table(result))
    return result


def _page(options: argparse.Namespace) -> dict[str, Any]:
    from jobs.bench.page import Bench, table

    bench = Bench(num_blocks=3 if options.quick else options.blocks)
    result = bench.run(_say)
    print(table(result))
    return result


def _intervals(options: argparse.Namespace) -> dict[str, Any]:
    from jobs.bench.intervals import Bench, Conditions, table

    conditions = Conditions(
        stall_s=options.stall,
        write_s=options.write,
        down_s=options.down,
        mtbf_s=options.mtbf,
        num_failures=options.failures,
    )
    num_traces = 20 if options.quick else options.traces
    bench = Bench(num_traces=num_traces, seed=options.seed, conditions=conditions)
    result = bench.run(_say)
    print(table(result))
    return result


def _data(options: argparse.Namespace) -> dict[str, Any]:
    from jobs.bench.loading import Bench, table

    bench = (
        Bench(num_repeats=2, num_files=2, groups_per_file=4)
        if options.quick
        else Bench(num_repeats=options.repeats)
    )
    result = bench.run(_say)
    print(table(result))
    return result


def _checkpoint(options: argparse.Namespace) -> dict[str, Any]:
    from jobs.bench.checkpoint import FULL_BYTES, QUICK_BYTES, Bench

    bench = (
        Bench(sizes=QUICK_BYTES, num_saves=2, num_loads=1, step_s=0.01)
        if options.quick
        else Bench(sizes=tuple(options.bytes_per_rank or FULL_BYTES), num_saves=options.saves)
    )
    return bench.run(_say)


def _say(line: str) -> None:
    print(line, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m jobs.bench", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    recovery = commands.add_parser(
        "recovery", help="time from a fault to the first new step, and the steps lost"
    )
    recovery.add_argument("--fault", choices=sorted(FAULTS), default="worker")
    _take_engines(recovery, list(ENGINES), default=list(DEFAULT_ENGINES))
    recovery.add_argument("--repeats", type=_positive, default=5, metavar="N")
    recovery.add_argument(
        "--state-bytes",
        type=parse_bytes,
        default=0,
        metavar="N",
        help="of model and optimizer in all, as 1GB or 500MB; without it a small model",
    )
    recovery.set_defaults(run=_recovery, check=_fault_reaches_engines)

    growth = commands.add_parser(
        "growth", help="time without a step when a node joins the run, and the steps lost"
    )
    growth.add_argument("--repeats", type=_positive, default=5, metavar="N")
    growth.set_defaults(run=_growth, check=_nothing_to_check)

    preemption = commands.add_parser(
        "preemption",
        help="steps and seconds wasted when spot nodes go after a notice, and others come",
    )
    on_ray = [name for name, engine in ENGINES.items() if engine.needs_cluster]
    _take_engines(preemption, on_ray, default=["elastic", "ray-train"])
    preemption.set_defaults(run=_preemption, check=_engines_need_ray)

    overhead = commands.add_parser(
        "overhead", help="step time of the service against the same loop without it"
    )
    overhead.add_argument(
        "--blocks", type=_positive, default=100, metavar="N", help="blocks of the service's steps"
    )
    overhead.set_defaults(run=_overhead, check=_nothing_to_check)

    page = commands.add_parser(
        "page", help="step time while somebody looks at the run's page against nobody"
    )
    page.add_argument(
        "--blocks", type=_positive, default=40, metavar="N", help="blocks with the page open"
    )
    page.set_defaults(run=_page, check=_nothing_to_check)

    data = _add_data(commands)
    intervals = _add_intervals(commands)
    checkpoint = _add_checkpoint(commands)

    for command in (recovery, growth, preemption, overhead, page, data, intervals, checkpoint):
        command.add_argument(
            "--quick", action="store_true", help="smaller and less sure: a check that it works"
        )
        json_flag.add_to(command)
    return parser


def _add_data(commands: Any) -> argparse.ArgumentParser:
    data: argparse.ArgumentParser = commands.add_parser(
        "data", help="tokens a second out of a loader, against a plain scan of the same files"
    )
    data.add_argument("--repeats", type=_positive, default=5, metavar="N")
    data.set_defaults(run=_data, check=_nothing_to_check)
    return data


def _add_checkpoint(commands: Any) -> argparse.ArgumentParser:
    checkpoint: argparse.ArgumentParser = commands.add_parser(
        "checkpoint", help="what a save costs training and a load takes, against DCP's own ways"
    )
    checkpoint.add_argument(
        "--saves", type=_positive, default=10, metavar="N", help="in each way, at each size (10)"
    )
    checkpoint.add_argument(
        "--bytes-per-rank",
        type=parse_bytes,
        action="append",
        metavar="N",
        help="of state; repeatable (400MB and 1.5GB)",
    )
    checkpoint.set_defaults(run=_checkpoint, check=_saves_have_a_spread)
    return checkpoint


def _add_intervals(commands: Any) -> argparse.ArgumentParser:
    intervals: argparse.ArgumentParser = commands.add_parser(
        "intervals", help="time lost with the computed save interval and with fixed ones; simulated"
    )
    intervals.add_argument("--traces", type=_positive, default=200, metavar="N")
    intervals.add_argument("--seed", type=int, default=1)
    intervals.add_argument(
        "--failures", type=_positive, default=20, metavar="N", help="in a trace, on average"
    )
    for flag, default, what in (
        ("--mtbf", "35min", "the true one, which the run does not know"),
        ("--stall", "2s", "of one save"),
        ("--write", "8s", "of one save, beside training"),
        ("--down", "10s", "from a failure to the first new step"),
    ):
        intervals.add_argument(
            flag, type=_duration_s, default=default, metavar="TIME", help=f"{what} ({default})"
        )
    intervals.set_defaults(run=_intervals, check=_nothing_to_check)
    return intervals


def _take_engines(
    command: argparse.ArgumentParser, names: list[str], *, default: list[str]
) -> None:
    command.add_argument(
        "--engines",
        type=_engine_names,
        default=default,
        metavar="NAME,...",
        help=f"of {', '.join(names)}",
    )


def _engine_names(text: str) -> list[str]:
    names = list(dict.fromkeys(text.split(",")))
    if unknown := [name for name in names if name not in ENGINES]:
        raise argparse.ArgumentTypeError(
            f"expected engines of {', '.join(ENGINES)}, found {', '.join(unknown)}"
        )
    return names


def _duration_s(text: str) -> float:
    try:
        return parse_duration_s(text, bare_unit="s")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, found {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
