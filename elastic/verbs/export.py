"""The verb export: a module of a checkpoint as one file. Must import neither ray nor torch.

The work needs torch, which takes seconds to load and which no other verb needs: it is done by a
process of its own, whose words are shown here.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

import elastic
from elastic.dashboard.text import age, plain, size, to_json
from elastic.storage.archive import archive_of
from elastic.storage.checkpoints import Catalog
from elastic.storage.filesystem import Filesystem
from elastic.storage.run_file import RunFile
from elastic.verbs.progress import progress
from elastic.verbs.run_argument import (
    BadRun,
    Problem,
    json_option,
    open_run,
    reading,
    run_argument,
)

_FORMATS = {".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", ".bin": "torch"}
# A tensor's memory goes back to the machine when it is freed; glibc else keeps up to 64 MB of it.
EXPORTER_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
_DTYPES = ("float64", "float32", "bfloat16", "float16")


@click.command(short_help="A checkpoint's model as one file for others.")
@run_argument
@json_option
@click.option("--step", type=click.IntRange(min=0), metavar="N", help="Not the newest, but this.")
@click.option(
    "--format",
    "file_format",
    type=click.Choice(sorted(set(_FORMATS.values()))),
    help="Else told by FILE's suffix: .pt, .pth, .bin or .safetensors.",
)
@click.option("--out", required=True, metavar="FILE", help="Where to write it; replaced if there.")
@click.option(
    "--dtype", type=click.Choice(_DTYPES), help="Of the model's floating-point tensors, else kept."
)
@click.option("--with-optimizer", is_flag=True, help="The optimizer's state too.")
@click.option(
    "--object",
    "tracked",
    default="model",
    show_default=True,
    metavar="NAME",
    help="The module, by its name in run.track(NAME=...): an EMA for instance.",
)
def export(
    run: str,
    as_json: bool,
    step: int | None,
    file_format: str | None,
    out: str,
    dtype: str | None,
    with_optimizer: bool,
    tracked: str,
) -> None:
    """Write the model of RUN's newest checkpoint to FILE, under the names of its state_dict().

    A torch file loads with torch.load(FILE, weights_only=True), mapped too. With --with-optimizer
    it holds a dict with the module and each optimizer's state_dict under the names they are tracked
    by; a safetensors file then holds its tensors as <optimizer>.<parameter>.<key>.

    Needs no cluster and no GPU, memory for two copies of the largest tensor, and time to read the
    checkpoint twice: its digests are checked before FILE is begun. FILE appears when it is whole; a
    file that was there stays as it is when anything goes wrong. Works while the run trains.

    \b
    Exit codes: 0 written, 1 not written (damaged checkpoint, full disk),
    2 wrong usage, no such run or step.
    """
    chosen = file_format or _FORMATS.get(Path(out).suffix.lower())
    if chosen is None:
        raise click.UsageError(f"cannot tell the format from {plain(out)!r}: give --format")
    with reading(run):
        fs, run_file = open_run(run)
        if step is not None:
            fs = _where(fs, run_file, step)
    request = {
        "url": fs.url,
        "run_id": run_file.run_id,
        "out": os.path.abspath(os.path.expanduser(out)),
        "format": chosen,
        "step": step,
        "dtype": dtype,
        "tracked": tracked,
        "with_optimizer": with_optimizer,
    }
    answer = _ask(request)
    if answer["kind"] == "failed":
        kind = BadRun if answer["exit_code"] == 2 else Problem
        raise kind(f"not exported: {plain(answer['reason'])}")
    for warning in answer["warnings"]:
        click.echo(f"Warning: {plain(warning)}", err=True)
    del answer["kind"]
    click.echo(to_json(answer) if as_json else _text(answer))


def _where(fs: Filesystem, run_file: RunFile, step: int) -> Filesystem:
    """The root below which that checkpoint lies: the run's own, else its archive's."""
    archive = archive_of(run_file)
    if archive is None or Catalog(fs, run_file.run_id).inspect(step).complete:
        return fs
    return archive.fs if archive.has(step) else fs


def _ask(request: Mapping[str, Any]) -> dict[str, Any]:
    """What the exporting process answers in the end."""
    answer = None
    with progress("verified") as tell, _exporter(request) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if not line.startswith("{"):
                continue  # some library's own words
            message = json.loads(line)
            if message["kind"] == "progress":
                tell(message["done"], message["all"], message["what"])
            else:
                answer = message
    if answer is None:
        code = process.returncode
        why = ": most likely there was not enough memory" if code == -signal.SIGKILL else ""
        raise Problem(f"not exported: the exporting process ended with exit code {code}{why}")
    return dict(answer)


@contextmanager
def _exporter(request: Mapping[str, Any]) -> Iterator[subprocess.Popen[str]]:
    # The same elastic as this one, whatever lies in the directory that the operator is in.
    ours = str(Path(elastic.__file__).parents[1])
    paths = [ours, *filter(None, [os.environ.get("PYTHONPATH")])]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "elastic.training.export", json.dumps(request)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **EXPORTER_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths)},
    )
    with process:
        try:
            yield process
        except BaseException:
            process.terminate()
            raise


def _text(answer: Mapping[str, Any]) -> str:
    dtypes = ", ".join(f"{count} {name}" for name, count in answer["dtypes"].items())
    return (
        f"wrote {plain(answer['out'])}: {answer['format']}, {size(answer['bytes'])}, "
        f"{answer['num_tensors']} tensors ({dtypes}) of step {answer['step']}, "
        f"in {age(answer['duration_s'])}"
    )
