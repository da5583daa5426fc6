"""The verbs below data: which samples a step has used, and whether two runs used the same.

Read only the ledger. Must import neither ray nor torch.
"""

from __future__ import annotations

import dataclasses
import sys

import click

from elastic.dashboard.text import to_json
from elastic.storage.ledger import read_ledger
from elastic.verbs.run_argument import BadRun, json_option, open_run, reading, run_argument

loader_option = click.option(
    "--loader", metavar="NAME", help="Steps of this loader alone, as in run.loader(name=)."
)


@click.group(short_help="Which samples a step used; whether two runs used the same.")
def data() -> None:
    """What runs have read, sample by sample, worked out from their ledgers alone.

    A sample is told by its epoch and its index in the dataset; of a source without random access,
    by the pass over it and the count within that.
    """


@data.command(short_help="Which samples a step used, by rank.")
@run_argument
@click.option(
    "--step", type=click.IntRange(min=1), required=True, metavar="N", help="An optimizer step."
)
@loader_option
@json_option
def show(run: str, step: int, loader: str | None, as_json: bool) -> None:
    """The samples that step N of RUN used, in order, and how they were split over the ranks of the
    generation whose step counts. Of a step that is not finished, those that it will use.

    \b
    Exit codes: 0 told, 2 no such run, or its ledger does not tell.
    """
    # Not at the top: a quick verb would take as long to import it as for all the rest.
    from elastic.dashboard.data_history import DataHistory
    from elastic.dashboard.data_report import use_json, use_text

    with reading(run):
        fs, _ = open_run(run)
        history = DataHistory(read_ledger(fs))
        use = history.use(step, loader)
        newest = use.stretch.generation
        others = [one for one in history.uses(step) if one.stretch.generation != newest]
        text = to_json(use_json(use, others)) if as_json else use_text(use, others)
    click.echo(text)


@data.command(short_help="Whether two runs used the same samples.")
@click.argument("run_a", metavar="RUN_A")
@click.argument("run_b", metavar="RUN_B")
@loader_option
@json_option
def diff(run_a: str, run_b: str, loader: str | None, as_json: bool) -> None:
    """Whether each step that both runs have finished used the same samples in the same order; and
    from which steps on not, and why. The number of ranks makes no difference. What the samples
    hold is not compared: two datasets of one length look the same.

    \b
    Exit codes: 0 they agree, 1 they do not, 2 no such run, or no step to compare.
    """
    from elastic.dashboard.data_history import DataHistory, NotRecorded
    from elastic.dashboard.data_report import compare, compared_text

    histories, urls = [], []
    for run in (run_a, run_b):
        with reading(run):
            fs, _ = open_run(run)
            histories.append(DataHistory(read_ledger(fs)))
            urls.append(fs.url)
            histories[-1].check_loader(loader)
            if not histories[-1].stretches(loader):
                raise NotRecorded(f"no finished step of {fs.url} has told what it read")
    with reading(f"{run_a} and {run_b}"):
        found = compare(histories[0], histories[1], loader)
        if found.num_steps == 0:
            raise BadRun("there is no step that both runs have finished and recorded")
        told = {"agree": found.agree, **dataclasses.asdict(found)}
        text = to_json(told) if as_json else compared_text(found, *urls)
    click.echo(text)
    sys.exit(0 if found.agree else 1)
