"""The verb rehearse: does this training function resume as if nothing had happened?

The work needs torch, which no other verb does: a process of its own does it, and speaks for itself.
Must import neither ray nor torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click

import elastic
from elastic.training.rehearsal.plan import Plan


@click.command(short_help="Kill and resume a training function here, and compare its losses.")
@click.argument("target", metavar="FILE_OR_MODULE[:FUNCTION]")
@click.argument("arguments", nargs=-1, metavar="[-- ARGS]...", type=click.UNPROCESSED)
@click.option("--steps", type=int, default=200, show_default=True, help="Steps in all.")
@click.option("--workers", type=int, default=2, show_default=True, help="Ranks, as processes.")
@click.option(
    "--other-workers",
    type=int,
    default=3,
    show_default=True,
    help="Another number of ranks to resume on; 0 tries none.",
)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--metric", default="loss", show_default=True, help="What is compared, as logged.")
@click.option(
    "--tolerance",
    type=float,
    metavar="REL",
    help="At the other size; by the model's dtype if not given: 1e-9 for float64, 1e-5 for "
    "float32.",
)
@click.option("--limit", "limit_s", type=float, default=600.0, show_default=True, metavar="SECONDS")
@click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="PATH",
    help="Write what was found here, for programs.",
)
def rehearse(
    target: str,
    arguments: tuple[str, ...],
    steps: int,
    workers: int,
    other_workers: int,
    seed: int,
    metric: str,
    tolerance: float | None,
    limit_s: float,
    json_path: Path | None,
) -> None:
    """Rehearse a training function on this machine, on the CPU and without a cluster.

    Trains it for some steps; then again, with every rank killed by SIGKILL at half of them, and
    resumed: the losses after the kill must be the same to the bit. Then the resume is done at
    another number of ranks, where they must agree within a tolerance. Where they part, it says at
    which step, by how much, and which state was likely forgotten in run.track.

    \b
    FILE.py or a module is taken with its function train(run) and, if there is one, its CONFIG; or
    with what its rehearsal(argv) returns for ARGS: a training function and its configuration.

    \b
    Exit codes: 0 equal, 1 they differ or it could not resume,
    2 wrong usage, or the function does not train as it is.
    """
    try:
        plan = Plan(
            target=target,
            arguments=arguments,
            steps=steps,
            workers=workers,
            other_workers=other_workers,
            seed=seed,
            metric=metric,
            tolerance=tolerance,
            limit_s=limit_s,
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if json_path is not None and not json_path.absolute().parent.is_dir():
        # Now, not after minutes of work.
        raise click.UsageError(f"--json {json_path}: there is no such directory")
    command = [sys.executable, "-P", "-m", "elastic.training.rehearsal", plan.to_json()]
    command += [str(json_path)] if json_path else []
    # The same elastic as this one, whatever lies in the directory that the operator is in.
    paths = [str(Path(elastic.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment)
    try:
        code = process.wait()
    except KeyboardInterrupt:
        # The terminal has told both: it ends its ranks and then itself.
        code = process.wait()
    click.get_current_context().exit(code if code >= 0 else 1)
