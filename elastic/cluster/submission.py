"""Submission: a job on a Ray cluster, from the working directory, through Ray's job API.

A program of its own, `python -m elastic.cluster.submission REQUEST`, since the command `elastic`
must start without Ray. REQUEST is the JSON of a `JobRequest`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import shlex
import sys
import time
from collections.abc import Sequence
from typing import Any

import click

from elastic.cluster.job_request import CannotSubmit, JobRequest, entrypoint
from elastic.cluster.packing import git_ignored, lister, staged
from elastic.cluster.shipment import EXPECTED, Shipment, check_size, plan

_RUN_LINE = re.compile(r"^run .+? in (\S.*)$", re.MULTILINE)
_LOST_S = 15.0
# A cluster that has just begun answers before it can take jobs.
_YOUNG_S = 60.0


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 the job succeeded, or was submitted and not waited for; 1 it did not; 2 it
    could not be submitted."""
    request = JobRequest.from_json(argv[0])
    root = os.path.abspath(request.working_dir)
    try:
        ignored = git_ignored(root)
        shipment = plan(lister(root), ignored or ())
        command = entrypoint(request.target, request.arguments, request.python, root, shipment)
        check_size(shipment, root)
        if ignored is not None:
            # Ray would apply .gitignore anew, also to files that are tracked all the same.
            os.environ["RAY_RUNTIME_ENV_IGNORE_GITIGNORE"] = "1"
        client = _connect(request.address)
        with staged(root, shipment) as folder:
            job = _submit(client, command, folder, request.stop_wait_s)
    except (ValueError, OSError) as error:
        click.echo(f"Error: {error}", err=True)
        return 2
    click.echo(_submitted(job, request.address, shipment), err=request.as_json)
    return _attend(client, job, request)


def _submitted(job: str, address: str, shipment: Shipment) -> str:
    size = f"{len(shipment.files)} files, {shipment.bytes / (1 << 20):.1f} MiB"
    told = [f"{path} ({why})" for path, why in shipment.left_out.items() if why not in EXPECTED]
    rest = f"; left out: {', '.join(told)}" if told else ""
    return f"job {job} submitted to {address} ({size}{rest})"


def _connect(address: str) -> Any:
    from ray.job_submission import JobSubmissionClient

    # Ray tells of each step of an upload, and sets the level of its loggers itself.
    logging.disable(logging.INFO)
    try:
        return JobSubmissionClient(address)
    except Exception as error:
        raise CannotSubmit(
            f"no Ray cluster answers at {address} ({type(error).__name__}: "
            f"{str(error).rstrip('.')}). Start one with `ray start --head`, or give the address "
            "of its dashboard with --address"
        ) from error


def _submit(client: Any, command: str, folder: str, stop_wait_s: int) -> str:
    # Ray's supervisor of the job reads this when it is told to stop: the time to save first.
    env_vars = {"RAY_JOB_STOP_WAIT_TIME_S": str(stop_wait_s)}
    until_s = time.monotonic() + _YOUNG_S
    while True:
        try:
            job: str = client.submit_job(
                entrypoint=command, runtime_env={"working_dir": folder, "env_vars": env_vars}
            )
            return job
        except Exception as error:
            if "No available agent" in str(error) and time.monotonic() < until_s:
                time.sleep(1.0)
                continue
            raise CannotSubmit(f"the cluster refused the job: {_refusal(error)}") from error


def _refusal(error: Exception) -> str:
    text = f"{type(error).__name__}: {str(error).rstrip('.')}"
    if "No available agent" not in text:
        return text
    return f"{text}. Its head's dashboard_agent.log says why, such as a port that is in use"


# --- waiting -------------------------------------------------------------------------------------


def _attend(client: Any, job: str, request: JobRequest) -> int:
    run, status = None, "PENDING"
    if request.wait:
        try:
            run = asyncio.run(_follow(client, job, to_stderr=request.as_json))
            status = _final_status(client, job)
        except KeyboardInterrupt:
            click.echo(f"\nthe job goes on; {_advice(job, request, None)}", err=request.as_json)
            return 130
        except ConnectionError as error:
            click.echo(f"Error: {error}", err=True)
            status = "UNKNOWN"
    if request.as_json:
        found = {"submission_id": job, "address": request.address, "status": status, "run": run}
        click.echo(json.dumps(found))
    else:
        click.echo(f"job {job}: {status}; {_advice(job, request, run)}")
    return 0 if status == "SUCCEEDED" or not request.wait else 1


def _advice(job: str, request: JobRequest, run: str | None) -> str:
    where = "" if run else "  (RUN is the run directory, which the job prints)"
    run = shlex.quote(run) if run else "RUN"
    return (
        f"look at it with: elastic status {run}{where}\n"
        f"  stop it after a save:  elastic stop {run}\n"
        f"  the same through Ray:  ray job stop --address {request.address} {job}"
        f"  (waits {request.stop_wait_s} s for the save)\n"
        "  resume it:             submit it again with the same --name"
    )


async def _follow(client: Any, job: str, *, to_stderr: bool) -> str | None:
    """Print what the job prints until it ends; the run directory that it told, if it did."""
    text, run = "", None
    try:
        async for chunk in client.tail_job_logs(job):
            click.echo(chunk, nl=False, err=to_stderr)
            if run is None:
                text += chunk
                told = _RUN_LINE.search(text[: text.rfind("\n") + 1])
                run = told[1] if told else None
    except Exception as error:  # noqa: BLE001 - a stream that breaks off is not the job's end
        click.echo(f"no more output to be had: {error}; waiting for the job's end", err=True)
    return run


def _final_status(client: Any, job: str) -> str:
    """Raises `ConnectionError` when the cluster has not answered for a while."""
    answered_s = time.monotonic()
    while True:
        try:
            status = client.get_job_status(job)
            answered_s = time.monotonic()
            if status.is_terminal():
                return str(status.value)
        except Exception as error:
            if time.monotonic() - answered_s > _LOST_S:
                raise ConnectionError(
                    f"the cluster does not answer any more ({error}): the job's end is unknown. "
                    "What is committed is safe: submit it again, on any cluster, to resume"
                ) from error
        time.sleep(0.5)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
