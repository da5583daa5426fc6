"""The verb `elastic plan`: sizes, stalls and save intervals of a run that there is not yet.

Needs no run and no cluster. Must import neither ray nor torch.
"""

from __future__ import annotations

from pathlib import Path

import click
from click.core import ParameterSource

from elastic.dashboard.failure_history import read_failure_times
from elastic.dashboard.forecast import Plan, plan_json, plan_text
from elastic.dashboard.text import plain, to_json
from elastic.policy.durations import told
from elastic.policy.forecast import Machine, forecast
from elastic.policy.mtbf import (
    GPU_MTBF_S,
    GPU_MTBF_SOURCE,
    MERGE_WITHIN_S,
    cluster_mtbf_s,
    history_mtbf,
)
from elastic.policy.sizes import DTYPE_BYTES, OPTIMIZER_STATE, checkpoint_size
from elastic.verbs.quantities import bandwidth, count, duration
from elastic.verbs.run_argument import json_option

ALWAYS_SHOWN_GPUS = (256, 1_024, 10_000)


@click.command(short_help="Checkpoint sizes, stalls and save intervals, before there is a run.")
@click.option(
    "--params", type=count, required=True, metavar="N", help="Parameters: 70e9, 70B, 350M."
)
@click.option(
    "--dtype",
    type=click.Choice(list(DTYPE_BYTES)),
    default="bf16",
    show_default=True,
    help="What the parameters are stored in; fp32 under FSDP2's MixedPrecisionPolicy.",
)
@click.option(
    "--optimizer", type=click.Choice(list(OPTIMIZER_STATE)), default="adamw", show_default=True
)
@click.option(
    "--master-weights/--no-master-weights",
    "master",
    default=None,
    help="Whether the optimizer keeps an fp32 copy of narrower parameters; it does by default.",
)
@click.option("--ema", is_flag=True, help="An average of the parameters is saved too.")
@click.option("--gpus", type=click.IntRange(min=1), required=True, help="One rank on each.")
@click.option("--gpus-per-node", type=click.IntRange(min=1), default=8, show_default=True)
@click.option(
    "--mtbf",
    type=duration("h"),
    metavar="TIME",
    help="Mean time between failures that stop the run, of the whole cluster: hours, 8h, 30min.",
)
@click.option(
    "--mtbf-from",
    "history",
    type=click.Path(exists=True, dir_okay=False, readable=True, path_type=Path),
    metavar="FILE",
    help="Estimate it from a CSV of failure times (ISO 8601, or seconds since 1970), with --mtbf "
    "or the default for one GPU as the prior.",
)
@click.option(
    "--mtbf-gpus",
    type=click.IntRange(min=1),
    help="GPUs of the cluster that --mtbf or --mtbf-from is about.  [default: --gpus]",
)
@click.option(
    "--bandwidth-to-storage",
    type=bandwidth,
    metavar="GB/S",
    default="10",
    show_default=True,
    help="To shared storage, all nodes together.",
)
@click.option(
    "--bandwidth-to-host",
    type=bandwidth,
    metavar="GB/S",
    default="10",
    show_default=True,
    help="From one GPU to host memory.",
)
@click.option(
    "--detection",
    type=duration("s"),
    metavar="TIME",
    default="15s",
    show_default=True,
    help="Until a failure is noticed.",
)
@click.option(
    "--restart",
    type=duration("s"),
    metavar="TIME",
    default="30s",
    show_default=True,
    help="From there until a new group may load.",
)
@json_option
@click.pass_context
def plan(
    ctx: click.Context,
    params: int,
    dtype: str,
    optimizer: str,
    master: bool | None,
    ema: bool,
    gpus: int,
    gpus_per_node: int,
    mtbf: float | None,
    history: Path | None,
    mtbf_gpus: int | None,
    bandwidth_to_storage: float,
    bandwidth_to_host: float,
    detection: float,
    restart: float,
    as_json: bool,
) -> None:
    """What checkpoints of a model will weigh, and how often to save them.

    Reads no run and needs no cluster. Bandwidths are in GB/s, 1e9 bytes per second; what is not
    given is assumed, and the answer says so.
    """
    try:
        size = checkpoint_size(params, dtype=dtype, optimizer=optimizer, master=master, ema=ema)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if mtbf_gpus is not None and mtbf is None and history is None:
        raise click.UsageError("--mtbf-gpus needs --mtbf or --mtbf-from: it says what they are of")
    of_gpus = mtbf_gpus or gpus
    mtbf_s, source = _mtbf(mtbf, history, of_gpus)
    machine = Machine(
        gpus_per_node=gpus_per_node,
        storage_bytes_per_s=bandwidth_to_storage,
        host_bytes_per_s=bandwidth_to_host,
        restart_s=restart,
        detection_s=detection,
    )
    made = Plan(
        num_params=params,
        dtype=dtype,
        optimizer=optimizer,
        num_gpus=gpus,
        size=size,
        machine=machine,
        mtbf_source=source,
        forecasts=tuple(
            forecast(size, num_gpus=num_gpus, mtbf_s=mtbf_s * of_gpus / num_gpus, machine=machine)
            for num_gpus in sorted({*ALWAYS_SHOWN_GPUS, gpus})
        ),
        defaults=_defaults(ctx),
    )
    click.echo(to_json(plan_json(made)) if as_json else plan_text(made))


def _mtbf(given_s: float | None, history: Path | None, num_gpus: int) -> tuple[float, str]:
    """The MTBF in seconds of a cluster of that many GPUs, and where it comes from, in words."""
    if history is not None:
        return _mtbf_of_history(given_s, history, num_gpus)
    if given_s is not None:
        return given_s, f"{told(given_s)} on {_gpus(num_gpus)} (--mtbf)"
    return (
        cluster_mtbf_s(num_gpus=num_gpus),
        f"{GPU_MTBF_S / 3600:,.0f} h for one GPU (default): {GPU_MTBF_SOURCE}",
    )


def _mtbf_of_history(prior_s: float | None, path: Path, num_gpus: int) -> tuple[float, str]:
    try:
        times_s = read_failure_times(path)
    except (ValueError, OSError) as error:
        raise click.BadParameter(plain(str(error)), param_hint="--mtbf-from") from error
    prior_name = "--mtbf" if prior_s is not None else "the default for one GPU"
    prior_s = prior_s if prior_s is not None else cluster_mtbf_s(num_gpus=num_gpus)
    found = history_mtbf(times_s, prior_s=prior_s)
    merged = found.num_failures - found.num_interruptions
    return found.mtbf_s, (
        f"{told(found.mtbf_s)} on {_gpus(num_gpus)}, from {found.num_failures:,} failures in "
        f"{told(found.observed_s)} ({plain(str(path))})"
        + (f", {merged:,} of them within {told(MERGE_WITHIN_S)} of another" if merged else "")
        + f"; prior: one failure in {told(prior_s)} ({prior_name})"
    )


def _gpus(number: int) -> str:
    return f"{number:,} GPU" + ("" if number == 1 else "s")


def _defaults(ctx: click.Context) -> frozenset[str]:
    names = {param.name: param.opts[0] for param in ctx.command.params if param.name}
    return frozenset(
        option
        for name, option in names.items()
        if ctx.get_parameter_source(name) is ParameterSource.DEFAULT
    )
