"""The driver's state machine: every pair of phase and event is in the table below.

`decide` is a pure function of (rules, situation, event, time). It returns the next situation,
the commands to perform in that order, and the reason, which is the one string that reaches log,
ledger and dashboard. An event about another generation than the current changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from elastic.policy import departure, growth
from elastic.policy.budgets import ADVICE, FREE, Failure, as_recorded, without_numbers
from elastic.policy.cause import Finding, find, first_cause, headline, of_start
from elastic.policy.causes import Cause
from elastic.policy.departure import Way
from elastic.policy.events import (
    CapacitySeen,
    Command,
    Committed,
    Diagnose,
    End,
    EndRanks,
    Event,
    GroupStarted,
    GroupStartFailed,
    GroupStopped,
    HangFound,
    JoinersFailed,
    JoinersReady,
    LookForCapacity,
    NodesDraining,
    OrderLeave,
    OrderSave,
    Progressed,
    RankError,
    RankFailed,
    RankFinished,
    RankLeft,
    Record,
    Reform,
    ReformFailed,
    SaveRequested,
    Stalled,
    StallPassed,
    StartGroup,
    StartJoiners,
    StopGroup,
    StopRequested,
    Tick,
    Unrecoverable,
    WorkerDied,
)
from elastic.policy.situation import FINAL, Phase, Rules, Situation, Then


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What to remember, what to do, and why."""

    situation: Situation
    commands: tuple[Command, ...] = ()
    reason: str = ""


class IllegalEvent(AssertionError):
    """An event that cannot happen in this phase: a fault of ours, never of the cluster."""


# Errors of ours that say the run's input does not fit, or its storage has no room: trying again
# gives the same answer.
FINAL_ERRORS = (
    *("StateMismatch", "NoSoundCheckpoint", "InvalidInput", "LossNotFinite"),
    *("SnapshotsDoNotFit", "HostMemoryShort", "LocalUnusable", "StorageFull"),
)

_MOST_DOUBLINGS = 10
_BACKING_OFF = "backing off for"
# What is kept of the time until the run's processes are killed, to close the run and to exit.
_EXIT_S = 1.0
_ENDED_S = 0.5
_SAME_DEADLINE_S = 1.0

Handler = Callable[[Rules, Situation, Event, float], Decision]


def decide(rules: Rules, now: Situation, event: Event, time_s: float) -> Decision:
    """The next situation and the commands that lead there.

    `time_s` is monotonic. Raises:
        IllegalEvent: the pair of phase and event is marked illegal in the table.
    """
    if event.generation not in (-1, now.generation):
        return Decision(situation=now)
    if now.fitting.mesh != rules.mesh:
        now = replace(now, fitting=replace(now.fitting, mesh=rules.mesh))
    bounds = now.fitting.bounds(rules.min_workers, rules.max_workers)
    if bounds and bounds != (rules.min_workers, rules.max_workers):
        rules = replace(rules, min_workers=bounds[0], max_workers=bounds[1])
    return TABLE[now.phase, type(event)](rules, now, event, time_s)


# --- handlers -----------------------------------------------------------------------------------


def _ignore(rules: Rules, now: Situation, event: Event, time_s: float) -> Decision:
    return Decision(situation=now)


def _illegal(rules: Rules, now: Situation, event: Event, time_s: float) -> Decision:
    raise IllegalEvent(f"{type(event).__name__} cannot happen while {now.phase}")


def _look_or_wait(rules: Rules, now: Situation, event: Event, time_s: float) -> Decision:
    assert isinstance(event, CapacitySeen)
    size = min(event.num_workers, rules.max_workers)
    if now.ceiling is not None:
        size = min(size, max(now.ceiling, rules.min_workers))
    size = now.fitting.largest(size)
    if size < rules.min_workers:
        return _wait(rules, now, event, time_s)
    if time_s < now.not_before_s:
        return _back_off(now)
    return _start(now, size, event, time_s)


def _back_off(now: Situation) -> Decision:
    """There is room, but the last tries have failed one after the other."""
    if now.phase is Phase.WAITING and now.reason.startswith(_BACKING_OFF):
        return Decision(situation=now)
    wait_s = now.not_before_s - now.since_s
    reason = f"{_BACKING_OFF} {wait_s:g} s before the next try: {now.reason}"
    record = Record(kind="waiting", generation=now.generation, reason=reason)
    new = replace(now, phase=Phase.WAITING, reason=reason)
    return Decision(situation=new, commands=(record,), reason=reason)


def _wait(rules: Rules, now: Situation, event: CapacitySeen, time_s: float) -> Decision:
    reason = (
        f"{event.num_workers} of at least {rules.min_workers} workers can run now; "
        f"{'; '.join(filter(None, (event.note, now.fitting.note)))}; "
        f"Ray's autoscaler is asked for {rules.max_workers}; waiting up to "
        f"{rules.wait_for_capacity_s:g} s for more"
    )
    since_s = time_s if now.waiting_since_s is None else now.waiting_since_s
    told = now.phase is Phase.WAITING and now.reason == reason
    new = replace(now, phase=Phase.WAITING, since_s=time_s, waiting_since_s=since_s, reason=reason)
    commands = () if told else (Record(kind="waiting", reason=reason),)
    return _or_give_up(rules, new, commands, time_s)


def _or_give_up(
    rules: Rules, new: Situation, commands: tuple[Command, ...], time_s: float
) -> Decision:
    waited_s = time_s - (time_s if new.waiting_since_s is None else new.waiting_since_s)
    if waited_s < rules.wait_for_capacity_s:
        return Decision(situation=new, commands=commands, reason=new.reason)
    reason = f"gave up after {waited_s:.0f} s without enough workers: {new.reason}"
    return _end(new, "failed", reason, time_s, before=commands)


def _wait_on(rules: Rules, now: Situation, event: Event, time_s: float) -> Decision:
    return _or_give_up(rules, now, (), time_s)


def _start(now: Situation, size: int, event: CapacitySeen, time_s: float) -> Decision:
    generation = now.generation + 1
    reason = f"starting generation {generation} with {size} workers"
    new = replace(
        now,
        phase=Phase.STARTING,
        generation=generation,
        world_size=size,
        since_s=time_s,
        errors=(),
        deaths=(),
        left=frozenset(),
        finished=frozenset(),
        then=Then.RESTART,
        is_stalled=False,
        draining=frozenset(),
        gone_by_s=None,
        awaits_commit=False,
        save_begun_s=None,
        reason=reason,
        error=None,
    )
    commands = (
        Record(
            kind="generation_planned",
            generation=generation,
            reason=reason,
            data={"world_size": size},
        ),
        StartGroup(generation=generation, world_size=size),
    )
    return Decision(situation=new, commands=commands, reason=reason)


def _started(rules: Rules, now: Situation, event: Event, time_s: float) -> Decision:
    assert isinstance(event, GroupStarted)
    reason = f"generation {now.generation} runs with {event.world_size} workers"
    new = replace(
        now,
        phase=Phase.RUNNING,
        # Fewer than planned, if one more was found dead while the others were told.
        world_size=event.world_size,
        since_s=time_s,
        is_growing=False,
        grown_s=time_s if now.is_growing else None,
        waiting_since_s=None,
        ceiling=None,
        reason=reason,
    )
    if now.deaths or any(not error.is_victim for error in now.errors):
        return _fail(rules, new, time_s)
    if now.errors:
        return Decision(situation=replace(new, phase=Phase.GATHERING))
    if new.finished | new.left and len(new.finished | new.left) >= new.world_size:
        return _all_done(rules, new, time_s)
    if now.stop_reason:
        return _leave(new, Then.STOP, now.stop_reason, time_s)
    if now.num_joiners and _size_with_joiners(new) > new.world_size:
        return _take_in(new, time_s)
    if now.save_asked_at is None:
        return Decision(situation=new, reason=reason)
    # The group that was asked is gone; of this one any save will do.
    owed = replace(new, save_asked_at=-1)
    return Decision(situation=owed, commands=(OrderSave(generation=now.generation),), reason=reason)


def _died_early(rules: Rules, now: Situation, event: Event, time_s: float) -> Decision:
    """A death while the rest of the group still starts: kept until the start has ended."""
    assert isinstance(event, WorkerDied)
    return Decision(
        situation=replace(now, deaths=(*now.deaths, event)), commands=(record_death(now, event),)
    )


def _done_early(rules: Rules, now: Situation, event: Event, time_s: float) -> Decision:
    """Word of a rank's end that overtakes the word that the group stands."""
    assert isinstance(event, RankFinished | RankLeft)
    return Decision(situation=_with_done(now, event))


def _failed_early(rules: Rules, now: Situation, event: Event, time_s: float) -> Decision:
    assert isinstance(event, RankFailed)
    new = replace(now, errors=(*now.errors, event.error))
    return Decision(situation=new, commands=(_record_error(event),))


def _died_reforming(rules: Rules, now: Situation, event: Event, time_s: float) -> Decision:
    """One more death while the survivors re-form: they do so again without it, if they can."""
    assert isinstance(event, WorkerDied)
    record = record_death(now, event)
    reason = f"{now.reason}; then {headline(event, ())}"
    new = replace(now, reason=reason, since_s=time_s)
    size = now.world_size - 1 + now.num_joiners
    if now.stop_reason or size < 1:
        then = Then.STOP if now.stop_reason else Then.RESTART
        new = replace(new, phase=Phase.STOPPING, then=then)
        commands = (record, StopGroup(generation=now.generation))
        return Decision(situation=new, commands=commands, reason=reason)
    if size < rules.min_workers:
        return _hold(rules, replace(new, deaths=(event,)), time_s, before=(record,))
    return _reform(new, size, time_s, before=(record,))


def _reform_failed(rules: Rules, now: Situation, event: Event, time_s: float) -> Decision:
    """The safety net: end what did not come along, and start anew at the size that is there."""
    assert isinstance(event, ReformFailed)
    then = Then.STOP if now.stop_reason else Then.RESTART
    new = replace(now, phase=Phase.STOPPING, since_s=time_s, then=then, reason=event.reason)
    record = Record(kind="reform_failed", generation=now.generation, reason=event.reason)
    return Decision(
        situation=new,
        commands=(record, StopGroup(generation=now.generation)),
        reason=event.reason,
    )


def _start_failed(rules: Rules, now: Situation, event: Event, time_s: float) -> Decision:
    """Want of room, or a node lost meanwhile, is tried again; any other fault is counted, and what
    no try can mend ends the run."""
    assert isinstance(event, GroupStartFailed)
    told = of_start(event.reason)
    failure = Failure(
        cause=told.cause, step=-1, text=without_numbers(told.evidence), headline=event.reason
    )
    data: dict[str, object] = {}
    if not event.is_capacity:
        cause = Cause.STORAGE if event.is_final else told.cause
        data = {"cause": cause, "evidence": told.evidence}
        data["counted"] = as_recorded(failure, now.committed_step)
    record = Record(kind="start_failed", generation=now.generation, reason=event.reason, data=data)
    if now.stop_reason:
        return _end(now, "stopped", now.stop_reason, time_s, before=(record,))
    since_s = time_s if now.waiting_since_s is None else now.waiting_since_s
    new = replace(
        now,
        phase=Phase.LOOKING,
        since_s=time_s,
        waiting_since_s=since_s,
        reason=event.reason,
        world_size=0,
        ceiling=now.world_size - 1 if event.is_capacity else now.ceiling,
    )
    if event.is_final:
        return _end(new, "failed", event.reason, time_s, before=(record,))
    if not event.is_capacity:
        new, gave_up = _count(rules, new, failure, time_s)
        if gave_up:
            return _end(new, "failed", gave_up, time_s, before=(record,))
    return _or_give_up(rules, new, (record, LookForCapacity()), time_s)


def _count(rules: Rules, now: Situation, failure: Failure, time_s: float) -> tuple[Situation, str]:
    """The situation with one more failure, and why to give up, or an empty string."""
    budgets = now.budgets.count(failure, now.committed_step)
    wait_s = 0.0 if failure.cause in FREE else budgets.backoff_s(rules)
    new = replace(now, budgets=budgets, not_before_s=time_s + wait_s)
    return new, budgets.verdict(rules, failure)


def _grow_or_not(rules: Rules, now: Situation, event: Event, time_s: float) -> Decision:
    assert isinstance(event, CapacitySeen)
    if now.draining:
        return _replace_leaving(rules, now, event, time_s)
    size = now.fitting.largest(min(event.num_workers, rules.max_workers))
    since_s = max(now.since_s, now.tried_to_grow_s)
    is_soon = not now.owes_growth and time_s - since_s < _growth_wait_s(rules, now)
    if size <= now.world_size or is_soon or now.is_joining:
        return Decision(situation=now)
    verdict = growth.judge(
        now.world_size,
        size,
        cost_s=now.growth_cost_s,
        lifetimes_s=now.growth_lifetimes_s,
        quiet_s=time_s - now.lost_s,
    )
    if not verdict.pays and not now.owes_growth:
        return _decline(now, size, verdict.text)
    if not rules.warm:
        reason = f"growing from {now.world_size} to {size} workers after a save: {event.note}"
        new = replace(now, is_growing=True, growing_since_s=time_s)
        return _leave(new, Then.RESTART, reason, time_s)
    new = replace(now, is_joining=True, tried_to_grow_s=time_s, owes_growth=False)
    num = size - now.world_size - now.num_joiners
    reason = f"starting {num} workers beside the {now.world_size} that train"
    planned = Record(
        kind="growth_planned",
        generation=now.generation,
        reason=f"{reason}: {event.note}",
        data={"old_world_size": now.world_size, "new_world_size": size},
    )
    commands = (planned, StartJoiners(num=num))
    return Decision(situation=new, commands=commands, reason=now.reason)


def _decline(now: Situation, size: int, text: str) -> Decision:
    """Not now: said once for each size, for whoever wonders why the run stays small."""
    told = f"{now.world_size} to {size}"
    if now.declined == told:
        return Decision(situation=now)
    reason = f"growing does not pay yet: {text}"
    record = Record(kind="growth_declined", generation=now.generation, reason=reason)
    return Decision(situation=replace(now, declined=told), commands=(record,))


def _growth_wait_s(rules: Rules, now: Situation) -> float:
    return rules.grow_interval_s * float(2 ** min(now.num_flaps, _MOST_DOUBLINGS))


def _judge_growth(rules: Rules, now: Situation, time_s: float) -> Situation:
    """Whether the last growth was worth its re-form, now that a worker of its group has died."""
    now = replace(now, lost_s=time_s, growing_since_s=None, declined="")
    if now.grown_s is None:
        return now
    is_flap = time_s - now.grown_s < _growth_wait_s(rules, now)
    return replace(
        now,
        grown_s=None,
        num_flaps=now.num_flaps + 1 if is_flap else 0,
        growth_lifetimes_s=growth.remember(now.growth_lifetimes_s, time_s - now.grown_s),
    )


def _grow(rules: Rules, now: Situation, event: Event, time_s: float) -> Decision:
    """The new workers are warm: the group saves at a step and re-forms with them."""
    assert isinstance(event, JoinersReady)
    new = replace(now, is_joining=False, num_joiners=now.num_joiners + event.num)
    if new.draining:
        return _depart(rules, new, time_s)
    if _size_with_joiners(new) <= new.world_size:
        return Decision(situation=new)  # too few have come: they wait for others
    return _take_in(new, time_s)


def _size_with_joiners(now: Situation) -> int:
    return now.fitting.mesh.largest(now.world_size + now.num_joiners)


def _take_in(now: Situation, time_s: float) -> Decision:
    size = _size_with_joiners(now)
    reason = f"growing from {now.world_size} to {size} workers after a save"
    new = replace(now, is_growing=True, growing_since_s=time_s)
    return _leave(new, Then.REFORM, reason, time_s)


def _joiners_wait(rules: Rules, now: Situation, event: Event, time_s: float) -> Decision:
    assert isinstance(event, JoinersReady)
    return Decision(
        situation=replace(now, is_joining=False, num_joiners=now.num_joiners + event.num)
    )


def _not_joined(rules: Rules, now: Situation, event: Event, time_s: float) -> Decision:
    assert isinstance(event, JoinersFailed)
    record = Record(kind="growth_failed", generation=now.generation, reason=event.reason)
    new = replace(now, is_joining=False, tried_to_grow_s=time_s)
    return Decision(situation=new, commands=(record,))


def _stop_running(rules: Rules, now: Situation, event: Event, time_s: float) -> Decision:
    assert isinstance(event, StopRequested)
    new = _note_stop(now, event, time_s)
    drop_step = _way_to_stop(new, time_s) is not Way.STEP
    return _leave(new, Then.STOP, event.reason, time_s, drop_step=drop_step)


def _note_stop(now: Situation, event: StopRequested, time_s: float) -> Situation:
    """The wish, and until when: of several, the first to come."""
    by_s = now.leave_by_s if now.stop_reason else None
    if event.within_s is not None:
        asked_s = time_s + max(0.0, event.within_s - _EXIT_S)
        by_s = asked_s if by_s is None else min(by_s, asked_s)
    return replace(now, stop_reason=now.stop_reason or event.reason, leave_by_s=by_s)


def _way_to_stop(now: Situation, time_s: float) -> Way:
    """There is nothing to lose by trying: what does not fit is ended when its time is over."""
    return departure.choose(now.pace, _left_s(now.leave_by_s, time_s)).way


def _left_s(by_s: float | None, time_s: float) -> float | None:
    return None if by_s is None else max(0.0, by_s - time_s)


def _leave(
    now: Situation,
    then: Then,
    reason: str,
    time_s: float,
    *,
    drop_step: bool = False,
    before: tuple[Command, ...] = (),
) -> Decision:
    new = replace(now, phase=Phase.LEAVING, since_s=time_s, then=then, reason=reason)
    commands = (
        *before,
        Record(
            kind="leave_ordered",
            generation=now.generation,
            step=now.step,
            reason=reason,
            data={"within_s": _left_s(now.leave_by_s, time_s), "drop_step": drop_step},
        ),
        _order_leave(new, drop_step=drop_step),
    )
    return Decision(situation=new, commands=commands, reason=reason)


def _order_leave(now: Situation, *, drop_step: bool) -> OrderLeave:
    return OrderLeave(
        generation=now.generation,
        reason=now.reason,
        has_deadline=now.leave_by_s is not None or now.gone_by_s is not None,
        drop_step=drop_step,
    )


def _stop_anyway(rules: Rules, now: Situation, event: Event, time_s: float) -> Decision:
    """A stop asked for while the group leaves or ends for another reason."""
    assert isinstance(event, StopRequested)
    then = Then.STOP if now.then in (Then.RESTART, Then.REFORM) else now.then
    return Decision(situation=replace(_note_stop(now, event, time_s), then=then))


def _stop_leaving(rules: Rules, now: Situation, event: Event, time_s: float) -> Decision:
    """The ranks leave already; now they may have to hurry."""
    new = replace(_stop_anyway(rules, now, event, time_s).situation, awaits_commit=False)
    order = _order_leave(new, drop_step=_way_to_stop(new, time_s) is not Way.STEP)
    return Decision(situation=new, commands=(order,))


def _stop_later(rules: Rules, now: Situation, event: Event, time_s: float) -> Decision:
    """While a group is on its way all that counts is saved: with little time, that is the end."""
    assert isinstance(event, StopRequested)
    new = _note_stop(now, event, time_s)
    if new.leave_by_s is None:
        return Decision(situation=new)
    reason = f"{event.reason}; generation {now.generation} had not yet begun to train"
    return _end(new, "stopped", reason, time_s)


def _stopping_overdue(rules: Rules, now: Situation, event: Event, time_s: float) -> Decision:
    """What of the group does not end now is left to Ray, which ends it with the job."""
    if now.then is Then.STOP and _is_stop_due(now, time_s - _ENDED_S):
        return _end(now, "stopped", now.reason, time_s)
    return Decision(situation=now)


def _is_stop_due(now: Situation, time_s: float) -> bool:
    return bool(now.stop_reason) and now.leave_by_s is not None and time_s >= now.leave_by_s


def _stop_now(rules: Rules, now: Situation, event: Event, time_s: float) -> Decision:
    assert isinstance(event, StopRequested)
    return _end(now, "stopped", event.reason, time_s)


def _save_running(rules: Rules, now: Situation, event: Event, time_s: float) -> Decision:
    later = _save_later(rules, now, event, time_s)
    return replace(later, commands=(OrderSave(generation=now.generation),))


def _save_later(rules: Rules, now: Situation, event: Event, time_s: float) -> Decision:
    """A save asked for while no group trains: the next one is told, if none came before."""
    assert isinstance(event, SaveRequested)
    return Decision(situation=replace(now, save_asked_at=now.step))


def _died(rules: Rules, now: Situation, event: Event, time_s: float) -> Decision:
    assert isinstance(event, WorkerDied)
    new = replace(now, deaths=(*now.deaths, event))
    return _fail(rules, new, time_s, before=(record_death(now, event),))


def record_death(now: Situation, event: WorkerDied) -> Record:
    """What the ledger is told of a death."""
    return Record(
        kind="node_lost" if event.node_lost else "worker_died",
        generation=event.generation,
        world_rank=event.world_rank,
        step=now.step,
        reason=event.detail,
        data={
            "last_lines": list(event.last_lines),
            "node_id": event.node_id,
            "node_ip": event.node_ip,
            **({"hang": event.hang} if event.hang else {}),
        },
    )


def _stalled(rules: Rules, now: Situation, event: Event, time_s: float) -> Decision:
    """Nobody goes on: find out who holds up the others before anything is ended."""
    assert isinstance(event, Stalled)
    if now.is_stalled:
        return Decision(situation=now)
    reason = f"the group stands still: {event.detail}"
    record = Record(kind="stall_seen", generation=now.generation, step=now.step, reason=reason)
    new = replace(now, is_stalled=True, reason=reason)
    return Decision(
        situation=new, commands=(record, Diagnose(generation=now.generation)), reason=reason
    )


def _stall_passed(rules: Rules, now: Situation, event: Event, time_s: float) -> Decision:
    assert isinstance(event, StallPassed)
    if not now.is_stalled:
        return Decision(situation=now)
    reason = event.why
    record = Record(kind="stall_passed", generation=now.generation, step=now.step, reason=reason)
    return Decision(
        situation=replace(now, is_stalled=False, reason=reason), commands=(record,), reason=reason
    )


def _hang_found(rules: Rules, now: Situation, event: Event, time_s: float) -> Decision:
    """End who is at fault: that frees the others. If nobody is, all of them."""
    assert isinstance(event, HangFound)
    if not now.is_stalled:
        return Decision(situation=now)  # a death has decided meanwhile
    told = "; ".join(f"rank {one.world_rank}: {one.text}" for one in event.culprits)
    reason = told or f"no rank is at fault: all wait for each other; {'; '.join(event.places)}"
    record = Record(
        kind="hang_found",
        generation=now.generation,
        world_rank=event.culprits[0].world_rank if event.culprits else -1,
        step=now.step,
        reason=reason,
        data={
            "culprits": [vars(one) for one in event.culprits],
            "places": list(event.places),
            "stacks": event.stacks,
        },
    )
    if not event.culprits:
        return _fail(rules, now, time_s, before=(record,), hang=f"{now.reason}; {reason}")
    end = EndRanks(generation=now.generation, culprits=event.culprits)
    return Decision(situation=replace(now, reason=reason), commands=(record, end), reason=reason)


def _rank_failed(rules: Rules, now: Situation, event: Event, time_s: float) -> Decision:
    assert isinstance(event, RankFailed)
    new = replace(now, errors=(*now.errors, event.error))
    record = _record_error(event)
    everyone = len({error.world_rank for error in new.errors}) >= now.world_size
    if not event.error.is_victim or (everyone and now.phase is Phase.GATHERING):
        return _fail(rules, new, time_s, before=(record,))
    if now.phase is Phase.GATHERING:
        return Decision(situation=new, commands=(record,))
    reason = f"rank {event.error.world_rank} lost a peer; waiting for word of the cause"
    gathering = replace(new, phase=Phase.GATHERING, since_s=time_s, reason=reason)
    return Decision(situation=gathering, commands=(record,), reason=reason)


def _record_error(event: RankFailed) -> Record:
    error = event.error
    return Record(
        kind="rank_failed",
        generation=event.generation,
        world_rank=error.world_rank,
        reason=f"{error.type_name}: {error.message}",
        data={
            "is_victim": error.is_victim,
            "traceback": error.traceback,
            "last_lines": list(error.last_lines),
        },
    )


def _record_late(rules: Rules, now: Situation, event: Event, time_s: float) -> Decision:
    """Word of a rank that arrives once the decision has been made: told, and no more."""
    assert isinstance(event, RankFailed)
    return Decision(situation=now, commands=(_record_error(event),))


def _gathered(rules: Rules, now: Situation, event: Event, time_s: float) -> Decision:
    if time_s - now.since_s < rules.gather_s and not _is_stop_due(now, time_s):
        return Decision(situation=now)
    return _fail(rules, now, time_s)


def _fail(
    rules: Rules,
    now: Situation,
    time_s: float,
    before: tuple[Command, ...] = (),
    hang: str = "",
) -> Decision:
    """End the group, and restart, unless the cause has used up its budget.

    `hang` tells of a group that stands still though no rank is at fault.
    """
    found = find(now.errors, now.deaths, now.draining)
    if hang:
        found = Finding(cause=Cause.HANG, evidence=hang)
    reason = hang or headline(found.source, now.errors)
    new = replace(now, phase=Phase.STOPPING, since_s=time_s, reason=reason, then=Then.RESTART)
    new = replace(new, is_growing=False)
    if isinstance(found.source, RankError):
        new = replace(new, error=found.source)
    if isinstance(found.source, WorkerDied):
        new = _judge_growth(rules, new, time_s)
    if found.cause is Cause.CUDA_MEMORY and now.world_size not in now.fitting.tried:
        return _rule_out(rules, new, found, before)
    failure = _as_failure(now, found, reason)
    new, gave_up = _count(rules, new, failure, time_s)
    if isinstance(found.source, RankError) and found.source.type_name in FINAL_ERRORS:
        gave_up = f"{reason} (a restart cannot mend this)"
    if now.stop_reason:
        new = replace(new, then=Then.STOP)
    if gave_up:
        new = replace(new, then=Then.FAIL, reason=gave_up)
    survivors = _num_alive(now)
    warm = rules.warm and new.then is Then.RESTART and survivors > 0
    warm = warm and isinstance(found.source, WorkerDied)
    counted = as_recorded(failure, now.committed_step)
    record = _record_failure(now, new, found, reason, recovery="warm" if warm else "cold")
    record = replace(record, data={**record.data, "counted": counted})
    if warm and survivors < rules.min_workers:
        return _hold(rules, new, time_s, before=(*before, record))
    if warm:
        return _reform(new, survivors, time_s, before=(*before, record))
    commands = (*before, record, StopGroup(generation=now.generation))
    return Decision(situation=new, commands=commands, reason=new.reason)


def _as_failure(now: Situation, found: Finding, reason: str) -> Failure:
    """What makes a failure the same as another one. A rank that raised knows its step exactly."""
    has_stepped = now.stepped_generation == now.generation
    step = now.step if now.heard_first[0] == now.generation else now.committed_step
    if isinstance(found.source, RankError) and found.source.step >= 0:
        step = found.source.step
    text = without_numbers(found.evidence)
    return Failure(
        cause=found.cause, step=step, text=text, has_stepped=has_stepped, headline=reason
    )


def _rule_out(
    rules: Rules, now: Situation, found: Finding, before: tuple[Command, ...]
) -> Decision:
    """Out of memory at a size that has made no step: it is not started again, and others are."""
    size = now.world_size
    fitting = now.fitting.without(size)
    bounds = fitting.bounds(rules.min_workers, rules.max_workers)
    left = (
        f"{bounds[0]} to {bounds[1]} workers are left to try"
        if bounds
        else (
            f"no size from {rules.min_workers} to {rules.max_workers} workers is left. "
            f"{ADVICE[Cause.CUDA_MEMORY]}"
        )
    )
    reason = f"{now.reason}; {size} workers have made no step yet and are ruled out: {left}"
    then = Then.STOP if now.stop_reason else Then.RESTART if bounds else Then.FAIL
    new = replace(now, fitting=fitting, then=then, reason=reason)
    ruled_out = Record(
        kind="size_infeasible",
        generation=now.generation,
        step=now.step,
        reason=reason,
        data={"ran_out": sorted(fitting.ran_out), "tried": sorted(fitting.tried)},
    )
    record = _record_failure(now, new, found, now.reason, recovery="cold")
    commands = (*before, record, ruled_out, StopGroup(generation=now.generation))
    return Decision(situation=new, commands=commands, reason=reason)


def _record_failure(
    now: Situation, new: Situation, found: Finding, reason: str, recovery: str
) -> Record:
    return Record(
        kind="failure_decided",
        generation=now.generation,
        world_rank=found.world_rank,
        step=now.step,
        reason=new.reason,
        data={
            "cause": found.cause,
            "evidence": found.evidence,
            "then": str(new.then),
            "cause_text": reason,
            "recovery": recovery,
            "world_size": now.world_size,
        },
    )


def _num_alive(now: Situation) -> int:
    """Processes that could make the next generation: survivors, and joiners that wait."""
    gone = {death.world_rank for death in now.deaths} | now.draining
    return now.world_size - len(gone) + now.num_joiners


def _hold(
    rules: Rules, now: Situation, time_s: float, before: tuple[Command, ...] = ()
) -> Decision:
    """Too few are left to go on: they wait, with all they hold, for others to take the places."""
    alive = _num_alive(now)
    reason = (
        f"{now.reason}; {alive} of at least {rules.min_workers} workers are left, "
        "and wait for new ones"
    )
    new = replace(now, phase=Phase.HOLDING, since_s=time_s, reason=reason, is_stalled=False)
    if before:
        new = replace(new, waiting_since_s=time_s)
    held = Record(kind="holding", generation=now.generation, step=now.step, reason=reason)
    return Decision(situation=new, commands=(*before, held, LookForCapacity()), reason=reason)


def _fill_up(rules: Rules, now: Situation, event: Event, time_s: float) -> Decision:
    """New workers are started as soon as there is room for enough of them."""
    assert isinstance(event, CapacitySeen)
    size = now.fitting.mesh.largest(min(event.num_workers, rules.max_workers))
    if now.is_joining or size < rules.min_workers:
        return Decision(situation=now)
    num = size - _num_alive(now)
    return Decision(situation=replace(now, is_joining=True), commands=(StartJoiners(num=num),))


def _filled_up(rules: Rules, now: Situation, event: Event, time_s: float) -> Decision:
    assert isinstance(event, JoinersReady)
    new = replace(now, is_joining=False, num_joiners=now.num_joiners + event.num)
    size = _num_alive(new)
    if size < rules.min_workers:
        return Decision(situation=new, commands=(LookForCapacity(),))
    return _reform(replace(new, waiting_since_s=None), size, time_s, before=())


def _not_filled_up(rules: Rules, now: Situation, event: Event, time_s: float) -> Decision:
    """No room after all: the next look at what there is will tell when there is."""
    assert isinstance(event, JoinersFailed)
    record = Record(kind="growth_failed", generation=now.generation, reason=event.reason)
    return Decision(situation=replace(now, is_joining=False), commands=(record,))


def _died_holding(rules: Rules, now: Situation, event: Event, time_s: float) -> Decision:
    assert isinstance(event, WorkerDied)
    new = replace(now, deaths=(*now.deaths, event))
    record = record_death(now, event)
    if _num_alive(new) > new.num_joiners:
        return Decision(situation=new, commands=(record,))
    return _let_go(new, f"{now.reason}; then {headline(event, ())}", time_s, before=(record,))


def _hold_on(rules: Rules, now: Situation, event: Event, time_s: float) -> Decision:
    since_s = time_s if now.waiting_since_s is None else now.waiting_since_s
    # What it holds could be of use to others; it goes on waiting without.
    if time_s - since_s < min(rules.hold_s, rules.wait_for_capacity_s):
        return Decision(situation=now)
    return _let_go(now, f"{now.reason}; for {time_s - since_s:.0f} s in vain", time_s)


def _let_go(
    now: Situation, reason: str, time_s: float, before: tuple[Command, ...] = ()
) -> Decision:
    """Nobody is held any longer: the group is ended, and starts anew when there is room."""
    new = replace(now, phase=Phase.STOPPING, since_s=time_s, then=Then.RESTART, reason=reason)
    commands = (*before, StopGroup(generation=now.generation))
    return Decision(situation=new, commands=commands, reason=reason)


def _stop_holding(rules: Rules, now: Situation, event: Event, time_s: float) -> Decision:
    assert isinstance(event, StopRequested)
    new = replace(
        now,
        phase=Phase.STOPPING,
        since_s=time_s,
        then=Then.STOP,
        stop_reason=event.reason,
        reason=event.reason,
    )
    commands = (StopGroup(generation=now.generation),)
    return Decision(situation=new, commands=commands, reason=event.reason)


def _reform(now: Situation, size: int, time_s: float, before: tuple[Command, ...]) -> Decision:
    """A new generation of the processes that are alive, unless so many are known not to fit.

    Those that are too many for the mesh are ended: what they held waits for others.
    """
    num_alive, size = size, now.fitting.mesh.largest(size)
    if size < 1 or now.fitting.largest(size) != size:
        return _let_go(now, f"{now.reason}; {now.fitting.note}", time_s, before)
    generation = now.generation + 1
    told = f"re-forming as generation {generation} with {size} workers"
    if size < num_alive:
        told += f"; {num_alive - size} of {num_alive} wait: {now.fitting.mesh.note}"
    new = replace(
        now,
        phase=Phase.REFORMING,
        generation=generation,
        world_size=size,
        since_s=time_s,
        errors=(),
        deaths=(),
        left=frozenset(),
        finished=frozenset(),
        then=Then.RESTART,
        is_stalled=False,
        error=None,
        num_joiners=0,
        draining=frozenset(),
        gone_by_s=None,
        leave_by_s=None,
        awaits_commit=False,
        save_begun_s=None,
        owes_growth=bool(now.draining) or now.owes_growth,
    )
    planned = Record(
        kind="generation_planned",
        generation=generation,
        reason=told,
        data={"world_size": size},
    )
    reform = Reform(
        generation=generation,
        world_size=size,
        reason=now.reason,
        old_world_size=now.world_size,
        without=now.draining,
    )
    commands = (*before, planned, reform)
    return Decision(situation=new, commands=commands, reason=now.reason)


def _unrecoverable(rules: Rules, now: Situation, event: Event, time_s: float) -> Decision:
    assert isinstance(event, Unrecoverable)
    new = replace(
        now, phase=Phase.STOPPING, since_s=time_s, then=Then.FAIL, reason=event.reason, error=None
    )
    record = Record(
        kind="failure_decided",
        generation=now.generation,
        reason=event.reason,
        data={
            "cause": Cause.STORAGE,
            "evidence": event.reason,
            "then": "fail",
            "cause_text": event.reason,
            "world_size": now.world_size,
        },
    )
    commands = (record, StopGroup(generation=now.generation))
    return Decision(situation=new, commands=commands, reason=event.reason)


def _rank_done(rules: Rules, now: Situation, event: Event, time_s: float) -> Decision:
    """A rank has finished or has left; when all have, the group is ended."""
    assert isinstance(event, RankFinished | RankLeft)
    new = _with_done(now, event)
    if len(new.finished | new.left) < now.world_size:
        return Decision(situation=new)
    return _all_done(rules, new, time_s)


def _with_done(now: Situation, event: RankFinished | RankLeft) -> Situation:
    new = replace(now, step=max(now.step, event.step))
    if isinstance(event, RankFinished):
        return replace(new, finished=now.finished | {event.world_rank})
    return replace(new, left=now.left | {event.world_rank})


def _nodes_draining(rules: Rules, now: Situation, event: Event, time_s: float) -> Decision:
    """Nodes are about to go: the group saves and re-forms without them, and no step is lost.

    Where too few would be left, it goes on until others are there to take the places, or until
    there is just time enough for the save.
    """
    assert isinstance(event, NodesDraining)
    if _is_known(now, event, time_s):
        return Decision(situation=now)
    new, record = _note_drain(now, event, time_s)
    if _num_alive(new) >= rules.min_workers or new.gone_by_s is None or not rules.warm:
        left = _depart(rules, new, time_s, before=(record,))
        return replace(left, commands=(*left.commands, LookForCapacity()))
    reason = (
        f"training on until others take the place of rank {_told(new.draining)}: {record.reason}"
    )
    new = replace(new, reason=reason)
    return Decision(situation=new, commands=(record, LookForCapacity()), reason=reason)


def _is_known(now: Situation, event: NodesDraining, time_s: float) -> bool:
    """Nodes are told again and again; news is one more of them, or an earlier end."""
    if not event.world_ranks <= now.draining:
        return False
    told_s = _gone_by_s(event, time_s)
    return told_s is None or (
        now.gone_by_s is not None and told_s > now.gone_by_s - _SAME_DEADLINE_S
    )


def _gone_by_s(event: NodesDraining, time_s: float) -> float | None:
    return None if event.remaining_s is None else time_s + event.remaining_s


def _note_drain(now: Situation, event: NodesDraining, time_s: float) -> tuple[Situation, Record]:
    ends_s = [end_s for end_s in (now.gone_by_s, _gone_by_s(event, time_s)) if end_s is not None]
    verdict = departure.choose(now.pace, event.remaining_s)
    record = Record(
        kind="drain_noticed",
        generation=now.generation,
        step=now.step,
        reason=event.detail,
        data={
            "world_ranks": sorted(event.world_ranks),
            "remaining_s": event.remaining_s,
            "way": str(verdict.way),
            "predicted": verdict.text,
        },
    )
    is_all = now.draining <= event.world_ranks
    new = replace(
        now,
        draining=now.draining | event.world_ranks,
        gone_by_s=min(ends_s, default=None),
        drain_detail=event.detail if is_all else f"{now.drain_detail}; {event.detail}",
    )
    return new, record


def _told(ranks: frozenset[int]) -> str:
    return ", ".join(str(rank) for rank in sorted(ranks))


def _more_draining(rules: Rules, now: Situation, event: Event, time_s: float) -> Decision:
    """Nodes about to go while the group leaves already: it leaves them all at once."""
    assert isinstance(event, NodesDraining)
    if _is_known(now, event, time_s):
        return Decision(situation=now)
    new, record = _note_drain(now, event, time_s)
    if now.then is Then.STOP or now.awaits_commit or not rules.warm:
        return Decision(situation=new, commands=(record,))
    verdict = departure.choose(new.pace, _left_s(new.gone_by_s, time_s))
    new = _with_deadline(rules, replace(new, then=Then.REFORM), time_s)
    order = _order_leave(new, drop_step=verdict.way is not Way.STEP)
    return Decision(situation=new, commands=(record, order, LookForCapacity()))


def _with_deadline(rules: Rules, now: Situation, time_s: float) -> Situation:
    """If enough are left without the draining ranks, the leave is not waited for beyond it."""
    if now.gone_by_s is None or _num_alive(now) < rules.min_workers or not rules.warm:
        return now
    return replace(now, leave_by_s=time_s + departure.latest_s(now.gone_by_s - time_s))


def _depart(
    rules: Rules, now: Situation, time_s: float, before: tuple[Command, ...] = ()
) -> Decision:
    """Leave the nodes that are about to go, in the way that the time until then allows."""
    verdict = departure.choose(now.pace, _left_s(now.gone_by_s, time_s))
    ranks = _told(now.draining)
    if verdict.way is Way.LAST_CHECKPOINT and rules.warm:
        return _depart_unsaved(rules, now, time_s, verdict.text, before)
    reason = f"leaving {now.drain_detail}, with rank {ranks}, after a save"
    then = Then.REFORM if rules.warm else Then.RESTART
    drop_step = verdict.way is not Way.STEP
    new = _with_deadline(rules, now, time_s)
    return _leave(new, then, reason, time_s, drop_step=drop_step, before=before)


def _depart_unsaved(
    rules: Rules, now: Situation, time_s: float, why: str, before: tuple[Command, ...]
) -> Decision:
    """No time for a save: the one under way, if it ends in time, or the last that has ended."""
    if _num_alive(now) < rules.min_workers:
        return Decision(situation=now, commands=before)  # nothing better than to train on
    reason = f"leaving {now.drain_detail}, with rank {_told(now.draining)}, without a save: {why}"
    new = _with_deadline(rules, replace(now, reason=reason), time_s)
    save_s, by_s = now.pace.save_s, new.leave_by_s
    if now.save_begun_s is None or save_s is None or by_s is None:
        return _leave_as_it_is(new, time_s, before)
    if now.save_begun_s + save_s >= by_s:
        return _leave_as_it_is(new, time_s, before)
    reason += "; the save that is under way will be complete before"
    new = replace(
        new,
        phase=Phase.LEAVING,
        since_s=time_s,
        then=Then.REFORM,
        awaits_commit=True,
        reason=reason,
    )
    return Decision(situation=new, commands=before, reason=reason)


def _leave_as_it_is(now: Situation, time_s: float, before: tuple[Command, ...] = ()) -> Decision:
    """Re-form without the ranks on nodes that go, from the last checkpoint."""
    record = Record(
        kind="left_unsaved",
        generation=now.generation,
        step=now.step,
        reason=now.reason,
        data={"committed_step": now.committed_step},
    )
    return _reform(now, _num_alive(now), time_s, before=(*before, record))


def _departure_due(rules: Rules, now: Situation, event: Event, time_s: float) -> Decision:
    """Nobody has come to take the places of those who go: there is just time for the save."""
    if not now.draining or now.gone_by_s is None:
        return Decision(situation=now)
    if time_s < now.gone_by_s - departure.needed_s(now.pace):
        return Decision(situation=now)
    return _depart(rules, now, time_s)


def _replace_leaving(rules: Rules, now: Situation, event: Event, time_s: float) -> Decision:
    """Workers that take the places of those who go start at the notice, not at the loss."""
    assert isinstance(event, CapacitySeen)
    num = now.fitting.mesh.largest(min(event.num_workers, rules.max_workers)) - _num_alive(now)
    if not now.draining or now.then is Then.STOP or now.is_joining or num < 1 or not rules.warm:
        return Decision(situation=now)
    planned = Record(
        kind="growth_planned",
        generation=now.generation,
        reason=f"starting {num} workers in place of rank {_told(now.draining)}: {event.note}",
        data={"old_world_size": now.world_size, "new_world_size": _num_alive(now) + num},
    )
    new = replace(now, is_joining=True, tried_to_grow_s=time_s)
    return Decision(situation=new, commands=(planned, StartJoiners(num=num)))


def _all_done(rules: Rules, now: Situation, time_s: float) -> Decision:
    if now.then is Then.REFORM and not now.finished:
        size = _num_alive(now)
        if size < rules.min_workers:
            return _hold(rules, replace(now, waiting_since_s=time_s), time_s)
        return _reform(now, size, time_s, before=())
    then = Then.FINISH if now.finished else now.then
    reason = f"all ranks finished at step {now.step}" if now.finished else now.reason
    ended = Record(kind="generation_ended", generation=now.generation, step=now.step, reason=reason)
    return _stop_group(replace(now, then=then, reason=reason), time_s, before=(ended,))


def _leave_overdue(rules: Rules, now: Situation, event: Event, time_s: float) -> Decision:
    by_s = now.since_s + rules.leave_s if now.leave_by_s is None else now.leave_by_s
    if time_s < by_s:
        return Decision(situation=now)
    late = f"not all ranks had saved and left after {time_s - now.since_s:.1f} s"
    if now.draining and now.then is Then.REFORM and now.leave_by_s is not None:
        return _leave_as_it_is(replace(now, reason=f"{now.reason}; {late}"), time_s)
    reason = f"{now.reason}; {late}: what counts is the checkpoint of step {now.committed_step}"
    ended = Record(kind="generation_ended", generation=now.generation, step=now.step, reason=reason)
    return _stop_group(replace(now, reason=reason), time_s, before=(ended,))


def _stop_group(now: Situation, time_s: float, before: tuple[Command, ...] = ()) -> Decision:
    """End the group. A stop that has little time does not wait for it."""
    if now.then is Then.STOP and now.leave_by_s is not None:
        return _end(now, "stopped", now.reason, time_s, before=before)
    new = replace(now, phase=Phase.STOPPING, since_s=time_s)
    commands = (*before, StopGroup(generation=now.generation))
    return Decision(situation=new, commands=commands, reason=now.reason)


def _stopped(rules: Rules, now: Situation, event: Event, time_s: float) -> Decision:
    new = replace(now, world_size=0, num_joiners=0, is_joining=False)
    if now.then is Then.FINISH:
        return _end(new, "finished", now.reason, time_s)
    if now.then is Then.STOP:
        told = now.reason if now.stop_reason in now.reason else now.stop_reason
        return _end(new, "stopped", told, time_s)
    if now.then is Then.FAIL:
        return _end(new, "failed", now.reason, time_s)
    new = replace(new, phase=Phase.LOOKING, since_s=time_s)
    return Decision(situation=new, commands=(LookForCapacity(),), reason=now.reason)


def _end(
    now: Situation,
    outcome: str,
    reason: str,
    time_s: float,
    before: tuple[Command, ...] = (),
) -> Decision:
    phase = {"finished": Phase.FINISHED, "stopped": Phase.STOPPED, "failed": Phase.FAILED}[outcome]
    new = replace(now, phase=phase, since_s=time_s, reason=reason)
    record = Record(kind=f"run_{outcome}", generation=now.generation, step=now.step, reason=reason)
    end = End(outcome=outcome, reason=reason)
    if outcome == "failed":
        end = replace(end, error=now.error)
        cause = first_cause(now.errors, now.deaths)
        if cause is not None:
            end = replace(end, cause_rank=cause.world_rank, last_lines=cause.last_lines)
    return Decision(situation=new, commands=(*before, record, end), reason=reason)


def _progressed(rules: Rules, now: Situation, event: Event, time_s: float) -> Decision:
    assert isinstance(event, Progressed)
    if now.growing_since_s is not None and now.grown_s is not None:
        now = replace(now, growth_cost_s=time_s - now.growing_since_s, growing_since_s=None)
    pace = now.pace if event.step_s is None else now.pace.stepped(event.step_s)
    begun_s = None if event.save_age_s is None else time_s - event.save_age_s
    # Not the highest ever: after a re-form the group is where it resumed.
    new = replace(now, step=event.step, pace=pace, save_begun_s=begun_s)
    return Decision(situation=_with_steps(new))


def _with_steps(now: Situation) -> Situation:
    """What a told step says of this generation. A step that raises is told as the others are, so
    that a size is known to fit only when there was one before it."""
    is_first = now.heard_first[0] != now.generation
    now = replace(now, heard_first=(now.generation, now.step)) if is_first else now
    num_steps = now.step - now.heard_first[1]
    if num_steps > 0:
        now = replace(now, stepped_generation=now.generation)
    return replace(now, fitting=now.fitting.stepped(now.world_size)) if num_steps > 1 else now


def _committed(rules: Rules, now: Situation, event: Event, time_s: float) -> Decision:
    assert isinstance(event, Committed)
    new = replace(now, committed_step=max(now.committed_step, event.step))
    # Without a group it is a checkpoint that was found, not one that was made.
    is_made = now.phase in (Phase.RUNNING, Phase.GATHERING, Phase.LEAVING, Phase.STOPPING)
    if is_made and now.save_asked_at is not None and event.step > now.save_asked_at:
        new = replace(new, save_asked_at=None)
    if event.took_s is not None:
        new = replace(new, pace=now.pace.saved(event.took_s), save_begun_s=None)
    if now.awaits_commit and is_made and now.phase is Phase.LEAVING:
        return _leave_as_it_is(new, time_s)
    return Decision(situation=new)


# --- the table ----------------------------------------------------------------------------------

EVENTS = (
    CapacitySeen,
    GroupStarted,
    GroupStartFailed,
    GroupStopped,
    ReformFailed,
    JoinersReady,
    JoinersFailed,
    WorkerDied,
    RankFailed,
    RankLeft,
    RankFinished,
    Progressed,
    Committed,
    Unrecoverable,
    Stalled,
    HangFound,
    StallPassed,
    NodesDraining,
    StopRequested,
    SaveRequested,
    Tick,
)

# Word that a rank may still send when its group is already being ended.
_LATE: dict[type[Event], Handler] = {
    CapacitySeen: _ignore,
    WorkerDied: _ignore,
    RankFailed: _record_late,
    RankLeft: _ignore,
    RankFinished: _ignore,
    Progressed: _ignore,
    # Of a group that is no more: they were ended with it.
    JoinersReady: _ignore,
    JoinersFailed: _ignore,
    Committed: _committed,
    Unrecoverable: _ignore,
    Stalled: _ignore,
    HangFound: _ignore,
    StallPassed: _ignore,
    NodesDraining: _ignore,
    SaveRequested: _save_later,
    Tick: _ignore,
}
_NO_GROUP: dict[type[Event], Handler] = {
    **_LATE,
    ReformFailed: _illegal,
    GroupStarted: _illegal,
    GroupStartFailed: _illegal,
    GroupStopped: _illegal,
    CapacitySeen: _look_or_wait,
    StopRequested: _stop_now,
    Tick: _wait_on,
}
_GROUP: dict[type[Event], Handler] = {
    CapacitySeen: _ignore,
    GroupStarted: _illegal,
    GroupStartFailed: _illegal,
    GroupStopped: _illegal,
    ReformFailed: _illegal,
    WorkerDied: _died,
    RankFailed: _rank_failed,
    RankLeft: _rank_done,
    RankFinished: _rank_done,
    Progressed: _progressed,
    JoinersReady: _joiners_wait,
    JoinersFailed: _not_joined,
    Committed: _committed,
    Unrecoverable: _unrecoverable,
    Stalled: _stalled,
    HangFound: _hang_found,
    StallPassed: _stall_passed,
    NodesDraining: _ignore,  # told again and again, while ranks are there
    StopRequested: _stop_anyway,
    SaveRequested: _save_later,
    Tick: _ignore,
}

_ROWS: dict[Phase, dict[type[Event], Handler]] = {
    Phase.LOOKING: {**_NO_GROUP},
    Phase.WAITING: {**_NO_GROUP},
    # No rank is told to train before the whole group stands, so that only deaths can come here.
    Phase.STARTING: {
        **_LATE,
        WorkerDied: _died_early,
        GroupStarted: _started,
        GroupStartFailed: _start_failed,
        GroupStopped: _illegal,
        ReformFailed: _illegal,
        StopRequested: _stop_later,
    },
    # The ranks join before the group is known to stand, so that their words may come first.
    Phase.REFORMING: {
        **_GROUP,
        CapacitySeen: _ignore,
        GroupStarted: _started,
        ReformFailed: _reform_failed,
        WorkerDied: _died_reforming,
        # Joining has a deadline of its own.
        Stalled: _ignore,
        HangFound: _ignore,
        StallPassed: _ignore,
        RankFailed: _failed_early,
        RankLeft: _done_early,
        RankFinished: _done_early,
        StopRequested: _stop_later,
    },
    # The ranks that are left have lost a peer, and wait: what they still say decides nothing.
    Phase.HOLDING: {
        **_LATE,
        CapacitySeen: _fill_up,
        # All had joined just before one of them died.
        GroupStarted: _ignore,
        GroupStartFailed: _illegal,
        GroupStopped: _illegal,
        ReformFailed: _ignore,
        WorkerDied: _died_holding,
        JoinersReady: _filled_up,
        JoinersFailed: _not_filled_up,
        StopRequested: _stop_holding,
        Tick: _hold_on,
    },
    Phase.RUNNING: {
        **_GROUP,
        CapacitySeen: _grow_or_not,
        JoinersReady: _grow,
        NodesDraining: _nodes_draining,
        StopRequested: _stop_running,
        SaveRequested: _save_running,
        Tick: _departure_due,
    },
    Phase.GATHERING: {**_GROUP, Tick: _gathered},
    Phase.LEAVING: {
        **_GROUP,
        CapacitySeen: _replace_leaving,
        NodesDraining: _more_draining,
        StopRequested: _stop_leaving,
        Tick: _leave_overdue,
    },
    Phase.STOPPING: {
        **_LATE,
        GroupStarted: _illegal,
        GroupStartFailed: _illegal,
        GroupStopped: _stopped,
        # Its time was up just as a death had ended the attempt.
        ReformFailed: _ignore,
        StopRequested: _stop_anyway,
        Tick: _stopping_overdue,
    },
    **{phase: dict.fromkeys(EVENTS, _ignore) for phase in FINAL},
}

TABLE: dict[tuple[Phase, type[Event]], Handler] = {
    (phase, event): handler for phase, row in _ROWS.items() for event, handler in row.items()
}
