"""The verbs that ask a live run for something: stop and save.

They put a request into the run's directory and watch its ledger for the answer, so that they need
the storage and no cluster. Must import neither ray nor torch.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import click

from elastic.dashboard.status import state_of
from elastic.dashboard.text import plain, to_json
from elastic.policy.strikes import ALLOWED
from elastic.storage import lease, requests
from elastic.storage.checkpoints import Catalog
from elastic.storage.filesystem import Filesystem
from elastic.storage.lease import Holder
from elastic.storage.ledger import LedgerEvent, read_ledger
from elastic.storage.requests import ALLOW, SAVE, STOP, Request
from elastic.storage.run_file import RunFile
from elastic.verbs.run_argument import (
    BadRun,
    Problem,
    json_option,
    open_run,
    reading,
    run_argument,
)

POLL_S = 0.5
# A driver that is cut off from its storage for a moment is not gone.
GONE_S = 2 * lease.STALE_S
# By then another driver of its job has taken the run over from one that died.
TAKEN_OVER_S = 15.0

timeout_option = click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="Wait this long at most.",
)


class NobodyThere(BadRun):
    """Nobody is at the run, or whoever was has left without an answer."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What came of a request. `step` is that of the checkpoint that the run now resumes from."""

    outcome: str
    """stopped, finished, failed, saved, allowed or discarded."""
    step: int | None
    reason: str


@click.command(short_help="Save at an agreed step and stop; the run can be resumed.")
@run_argument
@timeout_option
@json_option
def stop(run: str, timeout_s: float, as_json: bool) -> None:
    """Have RUN save at a step that all ranks agree on, and stop; waits until it is STOPPED.

    Submit it again under the same name to go on. A run that finishes first is fine too.

    \b
    Exit codes: 0 stopped or finished, 1 not within the timeout, or the run failed instead,
    2 no such run, or nobody is at it.
    """
    answer = ask_run(run, STOP, timeout_s)
    where = _where(answer)
    said = {
        "stopped": f"stopped {where}; submit it again under its name to resume",
        "finished": f"finished {where}, before it had to stop",
    }
    _tell(answer, said, as_json)


@click.command(short_help="Commit a checkpoint now, and go on.")
@run_argument
@timeout_option
@json_option
def save(run: str, timeout_s: float, as_json: bool) -> None:
    """Have RUN commit a checkpoint at the next step that all ranks agree on; prints its step.

    While the run waits for capacity or re-forms, it saves once it trains again.

    \b
    Exit codes: 0 committed, 1 not within the timeout, or the run failed instead,
    2 no such run, or nobody is at it.
    """
    answer = ask_run(run, SAVE, timeout_s)
    said = {
        "saved": f"saved step {answer.step}",
        "finished": f"the run has finished meanwhile {_where(answer)}",
        "stopped": f"the run has stopped meanwhile {_where(answer)}",
    }
    _tell(answer, said, as_json)


def _tell(answer: Answer, said: dict[str, str], as_json: bool) -> None:
    if as_json:
        click.echo(to_json(asdict(answer)))
    if answer.outcome == "discarded":
        raise Problem(f"the request was discarded: {plain(answer.reason)}")
    if answer.outcome not in said:
        raise Problem(f"the run {answer.outcome} instead: {plain(answer.reason)}")
    if not as_json:
        click.echo(said[answer.outcome])


def _where(answer: Answer) -> str:
    return "before its first checkpoint" if answer.step is None else f"at step {answer.step}"


def answer_to(request: Request, events: Sequence[LedgerEvent]) -> Answer | None:
    """What the events since the request say of it; None while they say nothing final."""
    taken: LedgerEvent | None = None
    for event in events:
        is_ours = event.data.get("id") == request.id
        if event.kind == "request_discarded" and is_ours:
            return Answer(outcome="discarded", step=None, reason=event.reason)
        if event.kind == "request_taken" and is_ours:
            taken = event
        elif request.kind == SAVE and taken is not None and _answers(event, taken):
            return Answer(outcome="saved", step=event.step, reason="")
        elif event.kind == ALLOWED and event.data.get("node_id") == request.node:
            return Answer(outcome="allowed", step=-1, reason=event.reason)
        elif event.kind in ("run_stopped", "run_finished", "run_failed"):
            outcome = event.kind.removeprefix("run_")
            return Answer(outcome=outcome, step=None, reason=event.reason)
    return None


def _answers(event: LedgerEvent, taken: LedgerEvent) -> bool:
    """Whether this commit holds what the run had reached when it was asked."""
    if event.kind != "checkpoint_committed":
        return False
    return event.step > taken.step or event.generation > taken.generation


# --- asking --------------------------------------------------------------------------------------


def ask_run(run: str, kind: str, timeout_s: float, *, node: str = "") -> Answer:
    """What came of asking whoever is at the run. `node` is the id of the one to `ALLOW`.

    Raises:
        BadRun: no such run, or it cannot be written to.
        NobodyThere: nobody is at it, or whoever was has left.
        Problem: no answer in time.
    """
    with reading(run):
        fs, run_file = open_run(run)
        before = read_ledger(fs)
        epoch, holder = _at_the_run(fs, before)
    request = _put(fs, kind, epoch, node)
    click.echo(f"asked {plain(str(holder))}", err=True)
    try:
        with reading(run):
            return _wait(fs, run_file, request, len(before), timeout_s)
    finally:
        # Whoever gives up asking must not stop the run later.
        with contextlib.suppress(Exception):
            requests.withdraw(fs, request.id)


def _put(fs: Filesystem, kind: str, epoch: int, node: str) -> Request:
    try:
        return requests.ask(fs, kind, who=who(), time_s=time.time(), epoch=epoch, node=node)
    except Exception as error:  # storage clients raise classes of their own
        raise BadRun(
            f"cannot put a request into {plain(fs.url)}: {type(error).__name__}: "
            f"{plain(str(error))}. Asking needs leave to write there"
        ) from error


def who() -> str:
    """The person at this machine, in words."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # no such user in a container
        user = f"user {os.getuid()}"
    return f"{user} on {socket.gethostname()}"


def _at_the_run(fs: Filesystem, events: Sequence[LedgerEvent]) -> tuple[int, Holder]:
    """The lease of the driver at the run. Raises `NobodyThere` when there is none."""
    epoch, holder = lease.read(fs)
    if holder is None or holder.released:
        state, reason = state_of(events, silent_s=0.0)
        why = f"it is {state}" + (f" ({plain(reason)})" if reason else "")
        raise NobodyThere(f"nobody is at the run {plain(fs.url)} to be asked: {why}")
    if lease.is_dead(holder):
        raise _nobody_left(fs, holder)
    return epoch, holder


def _nobody_left(fs: Filesystem, holder: Holder) -> NobodyThere:
    return NobodyThere(
        f"nobody is at the run {plain(fs.url)} to be asked: its last driver, "
        f"{plain(str(holder))}, is gone without a word. Submit the run again to resume it"
    )


# --- waiting -------------------------------------------------------------------------------------


def _wait(
    fs: Filesystem, run_file: RunFile, request: Request, num_before: int, timeout_s: float
) -> Answer:
    """The answer. Raises `Problem` at the deadline, `NobodyThere` when nobody is left."""
    until_s = time.monotonic() + timeout_s
    watch, tell = _Watch(fs), _teller()
    while True:
        # The lease first: a driver that has let go of it has written its last word before.
        is_left = watch.is_left()
        new = read_ledger(fs)[num_before:]
        tell(request, new)
        answer = answer_to(request, new)
        if answer is not None:
            return _with_step(answer, Catalog(fs, run_file.run_id))
        if is_left:
            raise _nobody_left(fs, watch.holder)
        if time.monotonic() >= until_s:
            raise Problem(_timed_out(request, new, timeout_s))
        time.sleep(POLL_S)


def _with_step(answer: Answer, catalog: Catalog) -> Answer:
    if answer.step is not None:
        return answer
    highest = catalog.highest()
    step = None if highest is None else highest.step
    return Answer(outcome=answer.outcome, step=step, reason=answer.reason)


def _timed_out(request: Request, events: Sequence[LedgerEvent], timeout_s: float) -> str:
    if any(event.data.get("id") == request.id for event in events):
        return (
            f"not done within {timeout_s:g} s; the run has taken the request and is still at it: "
            "look with elastic status and elastic events"
        )
    return f"nobody took the request within {timeout_s:g} s; it was withdrawn"


class _Watch:
    """Whether somebody is still at the run: released, seen to be dead, or still for too long."""

    def __init__(self, fs: Filesystem) -> None:
        self._fs = fs
        self._seen: tuple[int, int] | None = None
        self._seen_s = time.monotonic()
        self.holder: Holder

    def is_left(self) -> bool:
        epoch, holder = lease.read(self._fs)
        assert holder is not None
        self.holder = holder
        if (epoch, holder.beats) != self._seen:
            self._seen, self._seen_s = (epoch, holder.beats), time.monotonic()
        patience_s = TAKEN_OVER_S if lease.is_dead(holder) else GONE_S
        return holder.released or time.monotonic() - self._seen_s > patience_s


def _teller() -> Callable[[Request, Sequence[LedgerEvent]], None]:
    """A function that says on standard error what is new among the events."""
    num_told = 0

    def tell(request: Request, events: Sequence[LedgerEvent]) -> None:
        nonlocal num_told
        for event in events[num_told:]:
            is_taken = event.kind == "request_taken" and event.data.get("id") == request.id
            if is_taken and request.kind != ALLOW:  # which is done at once
                click.echo("taken; waiting for the ranks to save", err=True)
            elif event.kind == "checkpoint_committed":
                click.echo(f"checkpoint of step {event.step} is complete", err=True)
            elif event.kind in ("failure_decided", "waiting", "checkpoint_failed"):
                click.echo(f"{event.kind.replace('_', ' ')}: {plain(event.reason)}", err=True)
        num_told = len(events)

    return tell
