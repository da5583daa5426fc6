"""The verb `logs`: what the ranks of a run have written, afterwards or as it comes.

Reads storage only, so that it works when nodes and cluster are gone. Must import neither ray nor
torch. Nothing that a rank wrote reaches a terminal unescaped.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from itertools import islice

import click

from elastic.dashboard.run_watch import RunWatch
from elastic.dashboard.tail import Line, Tail
from elastic.dashboard.text import plain
from elastic.storage.filesystem import Filesystem
from elastic.storage.log_lines import readable
from elastic.storage.rank_logs import LOGS, logged_generations, logged_ranks
from elastic.verbs.run_argument import (
    BadRun,
    Problem,
    json_option,
    open_run,
    reading,
    run_argument,
)

_FOLLOWED_LINES = 20
_BATCH = 1000
_POLL_S = 0.5
_POLL_OBJECTS_S = 1.0


@click.command(short_help="What the ranks have written, afterwards or as it comes.")
@run_argument
@click.option("--rank", type=click.IntRange(min=0), metavar="N", help="Only this rank.")
@click.option(
    "--generation",
    type=click.IntRange(min=0),
    metavar="G",
    help="This one rather than the newest.",
)
@click.option("-f", "--follow", is_flag=True, help="Go on until the run ends.")
@click.option(
    "-n",
    "--lines",
    "num_lines",
    type=click.IntRange(min=0),
    metavar="N",
    help=f"Begin N lines before each rank's end; else all, with --follow {_FOLLOWED_LINES}.",
)
@json_option
def logs(
    run: str,
    rank: int | None,
    generation: int | None,
    follow: bool,
    num_lines: int | None,
    as_json: bool,
) -> None:
    """Everything that the ranks of RUN have written to stdout and stderr, C++ and crashes too.

    Of the newest generation, rank by rank; with --follow as it comes, on through later generations
    until the run ends. --json prints an object for each line.

    \b
    Exit codes: 0 done, 1 no logs yet or no driver any more, 2 no such run, generation or rank.
    """
    with reading(run):
        fs, _ = open_run(run)
        _check(fs, rank, generation, follow)
        if follow and num_lines is None:
            num_lines = _FOLLOWED_LINES
        tail = Tail(fs, generation=generation, world_rank=rank, num_lines=num_lines)
    if follow:
        _follow(run, fs, tail, as_json)
    else:
        _print(run, tail.read(to_end=True), as_json)


def _check(fs: Filesystem, rank: int | None, generation: int | None, follow: bool) -> None:
    """Refuse what there is no log of. Who follows the newest generation may wait for it."""
    generations = logged_generations(fs)
    if follow and generation is None:
        return
    if not generations:
        raise Problem(
            f"no rank of {plain(fs.url)} has written anything yet: {LOGS}/ is empty. Ranks begin "
            "once a generation stands, which elastic status tells; with --follow this waits for it"
        )
    if generation is not None and generation not in generations:
        raise BadRun(
            f"no logs of generation {generation}: there are those of {_listed(generations)}"
        )
    shown = generations[-1] if generation is None else generation
    ranks = logged_ranks(fs, shown)
    if rank is not None and rank not in ranks:
        raise BadRun(f"no log of rank {rank} in generation {shown}: there are {_listed(ranks)}")


def _listed(numbers: list[int]) -> str:
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers)) or "none"


def _follow(run: str, fs: Filesystem, tail: Tail, as_json: bool) -> None:
    watch = RunWatch(fs)
    try:
        while True:
            # Asked first, so that all that was written before the end is read after it.
            with reading(run):
                end = watch.end()
                superseded = tail.is_superseded()
            has_come = _print(run, tail.read(), as_json)
            if end is not None or (superseded and not has_come):
                break
            time.sleep(_POLL_S if fs.is_local else _POLL_OBJECTS_S)
    except KeyboardInterrupt:
        return
    _print(run, tail.read(to_end=True), as_json)
    if end is None:
        click.echo("that generation is over", err=True)
    elif end[0] == "UNKNOWN":
        raise Problem(f"the run has not ended, but nobody drives it: {plain(end[1])}")
    else:
        click.echo(f"the run is {end[0]}: {plain(end[1])}", err=True)


def _print(run: str, lines: Iterator[Line], as_json: bool) -> bool:
    """Whether there were any."""
    has_come = False
    while True:
        # Only the reading: a pipe that nobody reads any more is no fault of the run.
        with reading(run):
            batch = list(islice(lines, _BATCH))
        if not batch:
            return has_come
        has_come = True
        click.echo("\n".join(_shown(batch, as_json)))


def _shown(lines: Iterable[Line], as_json: bool) -> Iterator[str]:
    for line in lines:
        if as_json:
            place = {"generation": line.generation, "world_rank": line.world_rank}
            yield json.dumps({**place, "line": line.raw.decode("utf-8", "backslashreplace")})
        else:
            yield f"g{line.generation} rank{line.world_rank} | {readable(line.raw)}"
