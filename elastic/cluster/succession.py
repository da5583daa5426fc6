"""The succession: the drivers of one job, each launched when the one before it has died.

Waits for the end of the run. A new driver takes the run over from ledger and catalogue; what the
dead one had reserved is given back before. An exception of the driver's own code is no death.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import socket
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from elastic.cluster import whereabouts
from elastic.cluster.driver_config import DriverConfig, TakeOver
from elastic.cluster.ray_internals import connection, give_back
from elastic.storage import lease
from elastic.storage.filesystem import Filesystem
from elastic.storage.ledger import LedgerEvent, LedgerWriter, next_life, read_ledger

logger = logging.getLogger("elastic")

MOST_TAKE_OVERS = 3
"""In a row, with no higher checkpoint between them, before the run is given up."""
_BACKOFF_S = (0.0, 1.0, 5.0)
# What a driver asked Ray to reserve in its last moment may be reserved after its death is known.
_SWEEP_S = 10.0
_SHUT_DOWN_S = 1.0
_MOST_TEXT = 400
# As long as a head that is kept by something needs to come back, at most.
_HEAD_BACK_S = 5.0
_NO_HEAD = (
    "the head of the Ray cluster does not answer any more: start a cluster and submit the run "
    "again under its name. Before that "
)
_TERMINAL = ("run_finished", "run_stopped", "run_failed")


class Succession:
    """The drivers of one `fit`. `launch` gives the actor of a driver."""

    def __init__(
        self, filesystem: Filesystem, config: DriverConfig, launch: Callable[[DriverConfig], Any]
    ) -> None:
        self._filesystem = filesystem
        self._config = config
        self._launch = launch
        self._since_life = next_life(filesystem)
        self._stop_asked: tuple[str, float | None] | None = None
        self._connection: object = None
        self._driver: Any = None
        self._dead: Any = None
        self._dead_until_s = 0.0
        self._number = self._num_in_row = 0
        self._best_step = -1
        self._warned: set[str] = set()

    def stop(self, reason: str, within_s: float | None = None) -> None:
        """Have the run save and stop, within that time if it is told, whichever driver it has."""
        self._stop_asked = reason, None if within_s is None else time.monotonic() + within_s
        self._pass_on_stop()

    def _pass_on_stop(self) -> None:
        if self._stop_asked is None or self._driver is None:
            return
        reason, until_s = self._stop_asked
        left_s = None if until_s is None else max(0.0, until_s - time.monotonic())
        self._driver.stop.remote(reason, left_s)

    def outcome(self, on_status: Callable[[dict[str, Any]], None] | None) -> dict[str, Any]:
        """How the run has ended, once it has: see `Driver.outcome`.

        Raises what the driver raises, `LeaseHeld` if the run was taken by another job meanwhile,
        and `RuntimeError` when this process has left its Ray cluster.
        """
        config = self._config
        self._connection = connection()
        while True:
            self._driver = self._launch(config)
            self._pass_on_stop()
            try:
                return self._wait(on_status)
            except BaseException as error:
                # `ray.shutdown` cuts a call off, before it is done, with anything, as SystemExit.
                self._check_connection(0.0 if isinstance(error, RayError) else _SHUT_DOWN_S)
                if not isinstance(error, RayActorError) or error.actor_init_failed:
                    raise
                noticed_s = time.time()
                cause = _words_of(error)
            found = self._after_death(cause, noticed_s)
            if isinstance(found, DriverConfig):
                config = found
            else:
                return found

    def _after_death(self, cause: str, noticed_s: float) -> DriverConfig | dict[str, Any]:
        """What the next driver is told, or how the run has ended."""
        logger.warning("%s", cause)
        has_head = _head_answers()
        if has_head:  # else nobody is left to be asked, and asking would block
            self._bury()
        own = self._own()
        ended = _ended(own)
        if ended is not None:
            return ended
        if not has_head:
            return self._fail(cause, f"{_NO_HEAD}{cause}", own)
        self._count(own)
        if self._num_in_row > MOST_TAKE_OVERS:
            return self._fail(cause, f"{self._why_not_again()}{cause}", own)
        time.sleep(_BACKOFF_S[self._num_in_row - 1])
        return self._successor(own, cause, noticed_s)

    # --- the driver that lives -------------------------------------------------------------------

    def _wait(self, on_status: Callable[[dict[str, Any]], None] | None) -> dict[str, Any]:
        # Waited for in Python: `ray.shutdown` in another thread leaves who waits in Ray there.
        done: Future[None] = self._driver.run.remote().future()
        awaits_page = self._config.page is not None
        while not futures.wait([done], timeout=1.0).done:
            self._check_connection()
            self._sweep()
            # That it has died is told by `done`.
            with contextlib.suppress(TimeoutError, RayActorError):
                status = self._driver.status.remote().future().result(timeout=1.0)
                awaits_page = awaits_page and not _told_of_page(status)
                self._warn(status)
                if on_status is not None:
                    on_status(status)
        done.result()
        outcome: dict[str, Any] = ray.get(self._driver.outcome.remote())
        self._warn(outcome)
        return outcome

    def _warn(self, status: dict[str, Any]) -> None:
        """Tells whoever submitted the run what does not end it, once: few see the driver's log."""
        for warning in status.get("warnings", ()):
            if warning not in self._warned:
                self._warned.add(warning)
                sys.stderr.write(f"elastic: {warning}\n")

    def _check_connection(self, patience_s: float = 0.0) -> None:
        """Ray connects by itself on its next call, to whatever cluster it finds."""
        until_s = time.monotonic() + patience_s
        while (is_here := connection() is self._connection) and time.monotonic() < until_s:
            time.sleep(0.05)
        if not is_here:
            raise RuntimeError(
                "this process left its Ray cluster (`ray.shutdown`) while `fit` waited for a run, "
                "and so has ended the run: call it after `fit`. Submitting the run again under its "
                "name resumes it"
            )

    def _sweep(self) -> None:
        if self._dead is not None:
            give_back(self._dead)
            if time.monotonic() > self._dead_until_s:
                self._dead = None

    # --- the one that has died -------------------------------------------------------------------

    def _bury(self) -> None:
        """End what may be left of it: one that is only out of reach must not go on."""
        with contextlib.suppress(Exception):
            ray.kill(self._driver)
        self._dead, self._driver = self._driver, None
        self._dead_until_s = time.monotonic() + _SWEEP_S
        self._sweep()

    def _own(self) -> list[LedgerEvent]:
        """What the drivers of this job have recorded since its `fit` began."""
        job_id = ray.get_runtime_context().get_job_id()
        events = [e for e in read_ledger(self._filesystem) if e.life >= self._since_life]
        lives = {
            e.life for e in events if e.kind == "run_started" and e.data.get("job_id") == job_id
        }
        return [event for event in events if event.life in lives]

    def _count(self, own: Sequence[LedgerEvent]) -> None:
        best_step = max((e.step for e in own if e.kind == "checkpoint_committed"), default=-1)
        self._num_in_row = 1 if best_step > self._best_step else self._num_in_row + 1
        self._best_step = best_step
        self._number += 1

    def _successor(self, own: Sequence[LedgerEvent], cause: str, noticed_s: float) -> DriverConfig:
        """What was done once, on submission, is not done again."""
        has_begun = any(event.kind == "run_started" for event in own)
        has_saved = any(event.kind == "checkpoint_committed" for event in own)
        return dataclasses.replace(
            self._config,
            from_step=None if has_begun else self._config.from_step,
            from_scratch=self._config.from_scratch and not has_saved,
            take_over=TakeOver(
                number=self._number,
                cause=cause,
                noticed_s=noticed_s,
                lives=frozenset(event.life for event in own),
            ),
        )

    def _why_not_again(self) -> str:
        since = f"step {self._best_step}" if self._best_step >= 0 else "the start"
        return (
            f"the driver died {self._num_in_row} times in a row without a new checkpoint since "
            f"{since} (limit {MOST_TAKE_OVERS}). Look at the memory of this node, where it runs, "
            "then submit the run again. The last time "
        )

    def _fail(self, cause: str, reason: str, own: Sequence[LedgerEvent]) -> dict[str, Any]:
        """The end of the run, told in the ledger in the dead driver's place."""
        generation = max((event.generation for event in own), default=-1)
        held = lease.acquire(self._filesystem, whereabouts.in_words())
        try:
            ledger = LedgerWriter(
                self._filesystem, next_life(self._filesystem), uuid.uuid4().hex[:8]
            )
            for kind, why in (("driver_lost", cause), ("run_failed", reason)):
                ledger.append(kind, time_s=time.time(), generation=generation, reason=why)
            ledger.close()
        except OSError as error:
            logger.error("the ledger could not take the end of the run: %s", error)
        finally:
            held.release()
        return _outcome("failed", reason)


def _told_of_page(status: dict[str, Any]) -> bool:
    """Tells whoever submitted the run where its page is; False while the driver does not say."""
    if status.get("page_url"):
        where = f"{status['page_url']} on {status['page_host']}"
        sys.stderr.write(f"elastic: the run's page is at {where}\n")
    return "page_url" in status


def _head_answers() -> bool:
    """Whether the head's process takes connections, or does so again within some seconds."""
    host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
    until_s = time.monotonic() + _HEAD_BACK_S
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_HEAD_BACK_S).close()
            return True
        except OSError:
            if time.monotonic() > until_s:
                return False
            time.sleep(0.2)


def _ended(own: Sequence[LedgerEvent]) -> dict[str, Any] | None:
    """How the run has ended, if the driver died only after that: what is over stays so."""
    last = next((e for e in reversed(own) if e.kind in (*_TERMINAL, "run_started")), None)
    if last is None or last.kind == "run_started":
        return None
    return _outcome(last.kind.removeprefix("run_"), last.reason)


def _outcome(outcome: str, reason: str) -> dict[str, Any]:
    return {
        "outcome": outcome,
        "reason": reason,
        "traceback": "",
        "cause_rank": -1,
        "last_lines": (),
    }


def _words_of(error: RayActorError) -> str:
    """What Ray knows of the death, of its several lines the one that says why."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    why = next((line for line in lines if "because" in line), lines[-1] if lines else "")
    return f"the driver died: {why}"[:_MOST_TEXT]
