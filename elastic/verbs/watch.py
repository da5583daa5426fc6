"""The verb watch: how a run stands, again and again, on a terminal or as JSON lines. Reads only.

Must import neither ray nor torch.
"""

from __future__ import annotations

import contextlib
import json
import select
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import click

from elastic.dashboard.run_picture import RunPicture, RunReader
from elastic.dashboard.status import AGES, TERMINAL
from elastic.dashboard.text import finite
from elastic.policy.goodput import Goodput
from elastic.storage.filesystem import Filesystem
from elastic.storage.run_file import RunFile
from elastic.verbs.run_argument import json_option, open_run, reading, run_argument

_REFRESH_S = 1.0
_GOODPUT_S = 10.0
_MOST_SHARE = 4.0
"""A reading that takes long is repeated after so many times as long."""
_PIPED_WIDTH = 120
_NOTE = "q quits; elastic explain RUN tells each restart as a story, elastic goodput RUN the rest"
# What is another one at each look.
_VOLATILE = AGES | {"goodput"}


@click.command(short_help="How it stands, live.")
@run_argument
@click.option("--once", is_flag=True, help="Print one frame and end.")
@json_option
def watch(run: str, once: bool, as_json: bool) -> None:
    """RUN on one screen, anew each second: state and why, goodput, restarts, ranks, checkpoints,
    tries left. Ends with q or Ctrl-C. Where stdout is no terminal it prints one frame.

    --json prints an object a line whenever anything but an age has changed, until the run is over.

    \b
    Exit codes: 0 done, 2 no such run.
    """
    with reading(run):
        look = _Look(*open_run(run))
        first = look()
    if as_json:
        _print_changes(run, look, first, once=once)
    elif once or not sys.stdout.isatty():
        _print_frame(first)
    else:
        _show(look, first)


class _Look:
    """Reads the run anew at each call, and its goodput more seldom."""

    def __init__(self, fs: Filesystem, run_file: RunFile) -> None:
        self._reader = RunReader(fs)
        self._run_file = run_file
        self._goodput: Goodput | None = None
        self._goodput_until_s = 0.0
        self.took_s = 0.0

    def __call__(self) -> RunPicture:
        begun_s = time.monotonic()
        known = self._goodput if begun_s < self._goodput_until_s else None
        found = self._reader.picture(self._run_file, now_s=time.time(), goodput=known)
        if known is None:
            self._goodput = found.status.goodput
            self._goodput_until_s = time.monotonic() + _GOODPUT_S
        self.took_s = time.monotonic() - begun_s
        return found

    def pause_s(self) -> float:
        """Until the next one."""
        return max(_REFRESH_S, _MOST_SHARE * self.took_s)


# --- JSON lines ----------------------------------------------------------------------------------


def _print_changes(run: str, look: _Look, picture: RunPicture, *, once: bool) -> None:
    before: dict[str, Any] = {}
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            told = _told(picture)
            now = {name: value for name, value in told.items() if name not in _VOLATILE}
            if now != before:
                before = now
                click.echo(json.dumps({"time_s": time.time(), **told}, allow_nan=False))
            if once or picture.status.state in TERMINAL:
                return
            time.sleep(look.pause_s())
            with reading(run):
                picture = look()


def _told(picture: RunPicture) -> dict[str, Any]:
    tries = None if picture.tries is None else [asdict(one) for one in picture.tries]
    told: dict[str, Any] = finite(asdict(picture.status) | {"tries_left": tries})
    return told


# --- a screen ------------------------------------------------------------------------------------


def _print_frame(picture: RunPicture) -> None:
    # Not at the top: a quick verb would take as long to import it as for all the rest.
    from rich.console import Console

    from elastic.dashboard.screen import frame

    console = Console(highlight=False, markup=False, emoji=False)
    is_terminal = console.is_terminal
    width = console.width if is_terminal else _PIPED_WIDTH
    height = console.height - 1 if is_terminal else None
    console.width = width
    console.print(frame(picture, now_s=time.time(), width=width, height=height))


def _show(look: _Look, picture: RunPicture) -> None:
    from rich.console import Console
    from rich.live import Live

    from elastic.dashboard.screen import frame

    console = Console(highlight=False, markup=False, emoji=False)
    note = _NOTE
    with (
        contextlib.suppress(KeyboardInterrupt),
        _keys() as wants_to_quit,
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        while True:
            shown = frame(
                picture,
                now_s=time.time(),
                width=console.width,
                height=console.height,
                note=note,
            )
            live.update(shown, refresh=True)
            if wants_to_quit(look.pause_s()):
                return
            try:
                picture = look()
                note = _NOTE
            except Exception as error:  # noqa: BLE001 - storage that is away for a moment ends no watch
                note = f"cannot read it, still trying: {type(error).__name__}: {error}"


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Waits so many seconds, and tells whether q was pressed meanwhile."""
    if not sys.stdin.isatty():
        yield _sleep
        return
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield _pressed
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _sleep(wait_s: float) -> bool:
    time.sleep(wait_s)
    return False


def _pressed(wait_s: float) -> bool:
    until_s = time.monotonic() + wait_s
    while (left_s := until_s - time.monotonic()) > 0:
        if select.select([sys.stdin], [], [], left_s)[0]:
            key = sys.stdin.read(1)
            if key in ("q", "Q", ""):
                return True
    return False
