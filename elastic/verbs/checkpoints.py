"""The verbs about checkpoints: list, verify, prune, pin, unpin and restore.

Only prune with --yes, pin, unpin and restore change anything. Must import neither ray nor torch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import click

from elastic.dashboard.checkpoint_report import fates_text, steps_text, verdicts_text
from elastic.dashboard.report import checkpoints_text
from elastic.dashboard.text import plain, size, to_json
from elastic.policy.retention import Retention
from elastic.storage import pins, pruning, verification
from elastic.storage.archive import Archive, archive_of
from elastic.storage.checkpoints import Catalog, Checkpoint, NotComplete
from elastic.storage.completeness import home
from elastic.storage.lease import LeaseHeld
from elastic.storage.pruning import Fate
from elastic.storage.readmission import (
    Readmission,
    ReadmissionRefused,
    last_set_aside,
    readmit,
)
from elastic.storage.suspects import highest_trusted, suspect_steps
from elastic.storage.verification import ABSENT, BAD, GOOD, UNREADABLE, Verdict
from elastic.verbs.progress import progress
from elastic.verbs.requests import who
from elastic.verbs.rollback import holding
from elastic.verbs.run_argument import (
    BadRun,
    Problem,
    json_option,
    open_run,
    reading,
    run_argument,
)

_STEP = click.IntRange(min=0)


@click.group()
def checkpoints() -> None:
    """The checkpoints of a run: look at them, check their bytes, keep or remove them."""


@checkpoints.command("list", short_help="All of them, and why some do not count.")
@run_argument
@json_option
def list_checkpoints(run: str, as_json: bool) -> None:
    """Every checkpoint of RUN, lowest step first, and why an incomplete one does not count.

    Those that lie only in the run's archive are among them, "archived", with their place there:
    sound, and resumed only after `elastic rollback --to` their step. A suspect one
    is passed by when the run resumes, since the losses went wrong when it was loaded; `elastic
    rollback --to` its step makes it count again.
    """
    with reading(run):
        fs, run_file = open_run(run)
        archive = archive_of(run_file)
        catalog = Catalog(fs, run_file.run_id)
        found, suspects = catalog.list(), suspect_steps(catalog)
        pinned = pins.pinned_steps(fs)
    archived = {} if archive is None else _archived(archive)
    found = _with_archived(found, archived)
    places = {step: one.path for step, one in archived.items()}
    if not as_json:
        click.echo(checkpoints_text(found, pinned, places, suspects))
        return
    rows = [{**asdict(one), "suspect": suspects.get(one.step, "")} for one in found]
    if archive is not None:
        rows = [{**row, "archived": places.get(row["step"])} for row in rows]
    click.echo(to_json(rows))


def _archived(archive: Archive) -> dict[int, Checkpoint]:
    try:
        return archive.checkpoints()
    except Exception as error:  # noqa: BLE001 - storage clients raise classes of their own
        why = plain(f"{type(error).__name__}: {error}")
        click.echo(f"Warning: the archive {plain(archive.fs.url)} cannot be read: {why}", err=True)
        return {}


def _with_archived(
    found: Sequence[Checkpoint], archived: Mapping[int, Checkpoint]
) -> list[Checkpoint]:
    """Those of the archive that the run's storage has no more, among the others."""
    here = {one.step for one in found if one.complete}
    why = "in the archive only: elastic rollback brings it back"
    gone = [
        replace(one, complete=False, reason=why)
        for step, one in archived.items()
        if step not in here
    ]
    return sorted([*found, *gone], key=lambda one: (one.step, one.path))


@checkpoints.command(short_help="Read every byte and check it against its digest.")
@run_argument
@json_option
@click.option("--step", "steps", type=_STEP, multiple=True, help="Only this step; repeatable.")
def verify(run: str, as_json: bool, steps: tuple[int, ...]) -> None:
    """Read every byte of RUN's checkpoints, several files at once, and check the digests.

    Changes nothing: a run that is to load a bad one quarantines it itself and takes the next older
    one. One that is removed by retention meanwhile is "gone", which is no problem.

    \b
    Exit codes: 0 all are good, 1 at least one is bad or unreadable, 2 no such run or step.
    """
    with reading(run):
        catalog = _catalog(run)
        with progress("verified") as tell:
            verdicts = verification.verify(catalog, steps or None, tell)
        pinned = pins.pinned_steps(catalog.fs)
        shown = (
            to_json([_verdict(one, one.step in pinned) for one in verdicts])
            if as_json
            else verdicts_text(verdicts, pinned)
        )
        for one in verdicts:
            if one.result == ABSENT:
                raise _no_step(catalog, one.step, one.problems[0])
    click.echo(shown)
    if any(one.result in (BAD, UNREADABLE) or (steps and one.result != GOOD) for one in verdicts):
        raise SystemExit(1)


@checkpoints.command(short_help="Remove old ones; shows first what would go.")
@run_argument
@json_option
@click.option(
    "--keep", type=click.IntRange(min=1), required=True, metavar="K", help="Keep the newest K."
)
@click.option(
    "--keep-every",
    type=click.IntRange(min=1),
    metavar="N",
    help="Keep those too whose step N divides.",
)
@click.option("--yes", is_flag=True, help="Do it. Without this nothing is removed.")
def prune(run: str, as_json: bool, keep: int, keep_every: int | None, yes: bool) -> None:
    """Remove complete checkpoints of RUN, all but the newest K; says what, does it with --yes.

    Never removes the newest, nor a pinned one. Where it would remove any, it first reads the newest
    and checks its digests, with --yes and without: where that is damaged, nothing is removed.
    Leaves incomplete ones, saves in progress and the quarantine alone.

    \b
    Exit codes: 0 done or shown, 1 refused or not all removed, 2 no such run.
    """
    with reading(run):
        catalog = _catalog(run)
        fates = pruning.plan(catalog, Retention(keep=keep, keep_every=keep_every))
        if any(fate.remove for fate in fates):
            trusted = [fate for fate in fates if fate.why != pruning.SUSPECT]
            _check_newest(catalog, trusted[-1].checkpoint.step, yes)
        shown = "" if as_json else fates_text(fates)
    removed: list[int] = []
    if yes:
        with _changing("not all could be removed", removed):
            # One by one, so that those before a failure are told.
            removed.extend(pruning.perform(catalog, fates))
    if as_json:
        click.echo(to_json(_pruned(fates, yes, removed)))
    else:
        click.echo(shown)
        click.echo(_sum(fates, yes, removed))


@checkpoints.command(short_help="Keep one for ever.")
@run_argument
@click.argument("step", type=_STEP, metavar="STEP")
@json_option
def pin(run: str, step: int, as_json: bool) -> None:
    """Keep RUN's checkpoint of STEP for ever: neither retention nor prune removes it.

    \b
    Exit codes: 0 it is pinned, 1 it cannot be, 2 no such run or step.
    """
    with reading(run):
        catalog = _catalog(run)
        try:
            catalog.manifest(step)
        except NotComplete as error:
            if catalog.fs.exists(home(step)):
                raise Problem(f"{plain(str(error))}. Only a complete one can be pinned") from error
            raise _no_step(catalog, step, error.reason) from error
    with _changing(f"step {step} could not be pinned"):
        changed = pins.pin(catalog, step, time_s=time.time())
    again = "" if changed else " already"
    _tell_pin(step, True, changed, f"step {step} is pinned{again}: it stays until unpin", as_json)


@checkpoints.command(short_help="Leave it to retention again.")
@run_argument
@click.argument("step", type=_STEP, metavar="STEP")
@json_option
def unpin(run: str, step: int, as_json: bool) -> None:
    """Leave RUN's checkpoint of STEP to retention and prune again; removes nothing itself.

    \b
    Exit codes: 0 it is not pinned, 1 the pin could not be removed, 2 no such run.
    """
    with reading(run):
        catalog = _catalog(run)
    with _changing(f"step {step} could not be unpinned"):
        changed = pins.unpin(catalog.fs, step)
    said = f"step {step} is no longer pinned" if changed else f"step {step} was not pinned"
    _tell_pin(step, False, changed, said, as_json)


@checkpoints.command(short_help="Bring one back from the quarantine.")
@run_argument
@json_option
@click.option("--step", type=_STEP, required=True, metavar="N", help="The step of the checkpoint.")
@click.option("--reason", default="", metavar="TEXT", help="Why, for the ledger.")
def restore(run: str, as_json: bool, step: int, reason: str) -> None:
    """Bring RUN's checkpoint of step N back from checkpoints/quarantine to its place.

    Of several of that step it takes the one that was set aside last. Every byte is read first:
    where one is not what was saved, nothing is changed. Only while nobody is at the run, which can
    take some seconds to find out: stop it first.

    \b
    Exit codes: 0 it counts again, 1 it cannot be brought back, 2 no such run or checkpoint.
    """
    with reading(run):
        catalog = _catalog(run)
        if last_set_aside(catalog, step) is None:
            raise _no_step(catalog, step, "none of it is in the quarantine")
    with _changing(f"step {step} could not be brought back"):
        why = reason or f"asked by {who()}"
        try:
            with holding(catalog.fs, "restore") as ledger, progress("verified") as tell:
                done = readmit(catalog, ledger, step, why, time_s=time.time(), tell=tell)
        except (LeaseHeld, ReadmissionRefused) as error:
            raise Problem(plain(str(error))) from error
        newest = highest_trusted(catalog)
    resumed = None if newest is None else newest.step
    click.echo(
        to_json({**asdict(done), "resumed_next": resumed}) if as_json else _back(done, resumed)
    )


# --- what they have in common --------------------------------------------------------------------


def _catalog(run: str) -> Catalog:
    fs, run_file = open_run(run)
    return Catalog(fs, run_file.run_id)


def _no_step(catalog: Catalog, step: int, reason: str) -> BadRun:
    have = steps_text(catalog.complete_steps())
    return BadRun(f"no checkpoint of step {step} ({plain(reason)}). Complete ones: {have}")


@contextmanager
def _changing(what: str, removed: Sequence[int] = ()) -> Iterator[None]:
    try:
        yield
    except click.ClickException:
        raise
    except Exception as error:  # storage clients raise classes of their own
        before = f" (removed before that: {steps_text(removed)})" if removed else ""
        raise Problem(f"{what}: {type(error).__name__}: {plain(str(error))}{before}") from error


def _back(done: Readmission, resumed: int | None) -> str:
    said = f"step {done.step} is back from {done.path}, all {size(done.bytes)} of it checked"
    if resumed == done.step:
        return f"{said}: the next submission resumes it"
    which = "none, since all are suspect" if resumed is None else f"step {resumed}"
    return (
        f"{said}. The next submission resumes {which}, and retention counts this one as any other: "
        f"`elastic checkpoints pin` keeps it, `elastic rollback --to {done.step}` resumes it"
    )


def _verdict(one: Verdict, pinned: bool) -> dict[str, Any]:
    return {**asdict(one), "pinned": pinned}


def _check_newest(catalog: Catalog, newest: int, yes: bool) -> None:
    with progress(f"step {newest} verified") as tell:
        (verdict,) = verification.verify(catalog, [newest], tell)
    if verdict.result != GOOD:
        nothing = "nothing was removed" if yes else "with --yes nothing would be removed"
        raise Problem(
            f"{nothing}: the newest checkpoint, step {newest}, is {verdict.result} "
            f"({plain('; '.join(verdict.problems))}), so that an older one may be needed"
        )


def _pruned(fates: Sequence[Fate], yes: bool, removed: Sequence[int]) -> dict[str, Any]:
    return {
        "applied": yes,
        "removed": list(removed),
        "freed_bytes": _freed_bytes(fates, removed),
        "checkpoints": [
            {
                "step": fate.checkpoint.step,
                "bytes": fate.checkpoint.bytes,
                "pinned": fate.pinned,
                "remove": fate.remove,
                "why": fate.why,
            }
            for fate in fates
        ],
    }


def _sum(fates: Sequence[Fate], yes: bool, removed: Sequence[int]) -> str:
    going = [fate.checkpoint.step for fate in fates if fate.remove]
    if not going:
        return "nothing to remove"
    if yes:
        left = sorted(set(going) - set(removed))
        changed = f"; left alone, since they changed meanwhile: {steps_text(left)}" if left else ""
        return f"removed {len(removed)}, freed {size(_freed_bytes(fates, removed))}{changed}"
    freed = size(_freed_bytes(fates, going))
    return f"would remove {len(going)} and free {freed}; with --yes it does"


def _freed_bytes(fates: Sequence[Fate], steps: Sequence[int]) -> int:
    return sum(fate.checkpoint.bytes for fate in fates if fate.checkpoint.step in steps)


def _tell_pin(step: int, pinned: bool, changed: bool, said: str, as_json: bool) -> None:
    facts = {"step": step, "pinned": pinned, "changed": changed}
    click.echo(to_json(facts) if as_json else said)
