"""The verb rollback: make an earlier checkpoint the one that is resumed. Deletes nothing.

Must import neither ray nor torch.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

import click

from elastic.dashboard.text import plain, to_json
from elastic.storage import lease
from elastic.storage.archive import Archive, archive_of
from elastic.storage.checkpoints import Catalog
from elastic.storage.filesystem import Filesystem
from elastic.storage.lease import LeaseHeld
from elastic.storage.ledger import LedgerWriter, next_life
from elastic.storage.rollback import Rollback, RollbackRefused, roll_back, steps_above
from elastic.storage.suspects import suspect_steps
from elastic.verbs.requests import who
from elastic.verbs.run_argument import (
    BadRun,
    Problem,
    json_option,
    open_run,
    reading,
    run_argument,
)


@click.command(short_help="Go back to an earlier checkpoint; deletes nothing.")
@run_argument
@click.option(
    "--to",
    "step",
    type=click.IntRange(min=0),
    required=True,
    metavar="N",
    help="The step of a complete checkpoint.",
)
@click.option("--reason", default="", metavar="TEXT", help="Why, for the ledger.")
@json_option
def rollback(run: str, step: int, reason: str, as_json: bool) -> None:
    """Make the checkpoint of step N the newest of RUN, so that the next submission resumes it.

    One that lies only in the run's archive is copied back, and one that is suspect is trusted
    again. Newer checkpoints are moved to checkpoints/quarantine with the reason; nothing is
    deleted, and `elastic checkpoints restore` brings one back. Only while nobody is at the run,
    which can take some seconds to find out: stop it first.

    \b
    Exit codes: 0 done, 1 somebody is at the run, 2 no such run or checkpoint.
    """
    with reading(run):
        fs, run_file = open_run(run)
        catalog = Catalog(fs, run_file.run_id)
        archive = archive_of(run_file)
        try:
            is_newest = not steps_above(catalog, step, archive) and catalog.inspect(step).complete
            is_newest = is_newest and step not in suspect_steps(catalog)
            why = reason or f"asked by {who()}"
            done = None if is_newest else _roll_back(catalog, archive, step, why)
        except RollbackRefused as error:
            raise BadRun(plain(str(error))) from error
        except LeaseHeld as error:
            raise Problem(plain(str(error))) from error
    said = (
        _said(done)
        if done
        else f"step {step} is the newest checkpoint already: nothing was changed"
    )
    done = done or Rollback(to_step=step, set_aside={})
    click.echo(to_json(asdict(done)) if as_json else said)


def _roll_back(catalog: Catalog, archive: Archive | None, step: int, reason: str) -> Rollback:
    with holding(catalog.fs, "rollback") as ledger:
        return roll_back(catalog, ledger, step, reason, time_s=time.time(), archive=archive)


@contextmanager
def holding(fs: Filesystem, verb: str) -> Iterator[LedgerWriter]:
    """The run's ledger, while nobody else may write to the run. Raises `LeaseHeld`."""
    held = lease.acquire(fs, f"elastic {verb}, {who()}")
    try:
        ledger = LedgerWriter(fs, next_life(fs), f"{verb}-{uuid.uuid4().hex[:8]}")
        try:
            yield ledger
        finally:
            ledger.close()
    finally:
        held.release()


def _said(done: Rollback) -> str:
    aside = "\n".join(f"  step {step} to {path}" for step, path in done.set_aside.items())
    kept = f". Set aside, and kept:\n{aside}" if aside else ""
    trusted = ", which is trusted again" if done.trusted else ""
    return f"rolled back to step {done.to_step}{trusted}: the next submission resumes it{kept}"
