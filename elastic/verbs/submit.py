"""The verb submit: hands over to the program that knows Ray, `elastic.cluster.submission`.

Imports neither ray nor torch, so that asking for help stays fast.
"""

from __future__ import annotations

import os
import sys

import click

from elastic.cluster.job_request import JobRequest
from elastic.verbs.run_argument import json_option


@click.command(
    context_settings={"allow_interspersed_args": False},
    short_help="Run a training script on a Ray cluster as a job.",
)
@click.argument("target", metavar="FILE_OR_MODULE")
@click.argument("arguments", metavar="[ARGS]...", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--address",
    envvar="RAY_ADDRESS",
    default="http://127.0.0.1:8265",
    show_default="$RAY_ADDRESS, or http://127.0.0.1:8265",
    metavar="URL",
    help="The cluster's dashboard.",
)
@click.option(
    "--working-dir",
    default=".",
    type=click.Path(exists=True, file_okay=False),
    help="What is shipped; the current directory unless given.",
)
@click.option(
    "--python", default="python", show_default=True, help="The interpreter on the cluster."
)
@click.option(
    "--stop-wait",
    "stop_wait_s",
    type=click.IntRange(min=3),
    envvar="RAY_JOB_STOP_WAIT_TIME_S",
    default=600,
    show_default=True,
    metavar="SECONDS",
    help="How long `ray job stop` leaves the job to save.",
)
@click.option("--no-wait", is_flag=True, help="Return once the job is submitted.")
@json_option
def submit(
    target: str,
    arguments: tuple[str, ...],
    address: str,
    working_dir: str,
    python: str,
    stop_wait_s: int,
    no_wait: bool,
    as_json: bool,
) -> None:
    """Run FILE_OR_MODULE with ARGS on a Ray cluster, such as

    \b
        elastic submit jobs/pretrain.py --name demo --num-workers 2:4 --storage /mnt/runs

    Options of this command stand before FILE_OR_MODULE, ARGS are the script's own. With those of
    jobs.pretrain the same --name resumes, --from-step N goes back to an earlier checkpoint first,
    and --fresh begins a new run NAME-2, NAME-3 and so on beside the one there is.

    Ships the working directory without version control, environments, caches, what git ignores,
    and what runs have left in it; refuses more than 100 MiB. Prints what the job prints; Ctrl-C
    leaves the job running.

    \b
    Exit codes: 0 the job succeeded (with --no-wait: was submitted), 1 it did not,
    2 it could not be submitted.
    """
    request = JobRequest(
        target=target,
        arguments=arguments,
        address=address,
        working_dir=working_dir,
        python=python,
        stop_wait_s=stop_wait_s,
        wait=not no_wait,
        as_json=as_json,
    )
    command = [sys.executable, "-m", "elastic.cluster.submission", request.to_json()]
    sys.stdout.flush()
    os.execv(sys.executable, command)
