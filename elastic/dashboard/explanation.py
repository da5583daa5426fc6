"""The restarts of a run as a person reads them at night: a table, or one of them as a short story.

Pure: text from values. What a run recorded reaches the terminal only through `plain`.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from elastic.dashboard.advice import advice
from elastic.dashboard.kept_out import SHOWN
from elastic.dashboard.last_lines import last_lines_told, quoted
from elastic.dashboard.report import UNSAID, moment
from elastic.dashboard.restarts import (
    ABANDONED,
    RECOVERED,
    UNDER_WAY,
    Restart,
    Totals,
    number,
    whole,
    words,
)
from elastic.dashboard.text import age, count, plain, table
from elastic.dashboard.tries_left import TriesLeft, left_text
from elastic.storage.ledger import LedgerEvent
from elastic.storage.rank_logs import LOGS

_REASON_CHARS = 100
_SENTENCE_CHARS = 300
_TRACEBACK_LINES = 4
_MOST_PLACES = 8
_MOST_OF_A_KIND = 3
"""With a thousand ranks, a thousand of them lose a peer."""

_OUTCOMES = {
    RECOVERED: "recovered",
    UNDER_WAY: "no new step so far",
    ABANDONED: "no new step before the run was submitted again",
    "failed": "the run failed",
    "stopped": "the run was stopped",
    "finished": "the run finished",
}


def restarts_text(
    restarts: Sequence[Restart],
    sums: Totals,
    tries: Sequence[TriesLeft] | None,
    *,
    run: str,
    now_s: float,
) -> str:
    """One restart a line, their sum, and the tries left. `run` is its URL."""
    if not restarts:
        return "\n".join(["no restarts", *_tries(tries)])
    rows = [restart_row(one, now_s) for one in restarts]
    lines = table(RESTART_HEADER, rows, right=RESTART_RIGHT)
    causes = ", ".join(f"{plain(cause)} {count}" for cause, count in sums.by_cause.items())
    example = f"elastic explain {_shell(run)} --restart {restarts[-1].number}"
    return "\n".join(
        [
            *lines,
            "",
            f"{'by cause':<12}{causes}",
            (
                f"{'lost':<12}{count(sums.lost_steps, 'step')} done again, and "
                f"{_seconds(sums.took_s)} s without a step"
            ),
            *_tries(tries),
            "",
            f"One of them with its evidence: {example}",
        ]
    )


def restart_text(
    one: Restart,
    num_restarts: int,
    tries: Sequence[TriesLeft] | None,
    *,
    run: str,
    now_s: float,
) -> str:
    """The story of one restart: the gist, what was told in order, phases, what is left to do."""
    return "\n".join(
        [
            *_gist(one, num_restarts, now_s),
            *_block("What happened (UTC)", _story(one)),
            *_block("Where the time went", _phases(one)),
            *_block("Look at", places(one, run)),
            *_block("Next", next_steps(one, run)),
            "",
            *_tries(tries),
        ]
    )


def places(one: Restart, run: str) -> list[str]:
    """Where logs and stacks of it lie. `run` is the URL of the run."""
    found = []
    if one.generation is not None:
        found.append(f"logs    {run}/{LOGS}/g{one.generation}/")
    if one.stacks:
        found.append(f"stacks  {run}/{one.stacks}/")
    return list(map(plain, found))


def next_steps(one: Restart, run: str) -> list[str]:
    """What an operator may do about it: advice, then commands. `run` is the URL of the run."""
    steps = advice(one)
    named = _shell(run)
    if one.generation is not None and one.is_failure:
        rank = "" if one.world_rank is None else f" --rank {one.world_rank}"
        steps.append(f"elastic logs {named}{rank} --generation {one.generation}")
    for event in _of(one.events, "node_kept_out"):
        node = words(event.data.get("node_id"))[:SHOWN]
        if node:
            steps.append(f"elastic node allow {named} {_shell(node)}   (once it is sound)")
    if one.outcome == "failed":
        steps.append("Mend it, and submit the run again under its name: it goes on from its newest")
        steps[-1] += " checkpoint, with full budgets."
    elif one.outcome == UNDER_WAY:
        steps.append(f"elastic status {named}")
    return steps


RESTART_HEADER = (
    *("N", "WHEN (UTC)", "AGO", "CAUSE", "STEP", "LOST", "FROM", "SECONDS", "WORKERS", "REASON"),
)
RESTART_RIGHT = "N AGO STEP LOST SECONDS"


def restart_row(one: Restart, now_s: float) -> list[str]:
    """A restart by the columns of `RESTART_HEADER`; not yet fit for a terminal."""
    return [
        str(one.number),
        moment(one.time_s)[:19],
        age(max(0.0, now_s - one.time_s)),
        _causes(one),
        _or_dash(one.step),
        _or_dash(one.lost_steps),
        one.source or UNSAID,
        UNSAID if one.took_s is None else _seconds(one.took_s),
        _sizes(one),
        _brief(one.reason, _REASON_CHARS)
        if one.outcome == RECOVERED
        else f"[{_OUTCOMES[one.outcome]}] {_brief(one.reason, _REASON_CHARS)}",
    ]


def _gist(one: Restart, num_restarts: int, now_s: float) -> list[str]:
    took = "" if one.took_s is None else f" in {_seconds(one.took_s)} s"
    facts = {
        "restart": f"{one.number} of {num_restarts}: {_causes(one)}",
        "outcome": _OUTCOMES[one.outcome] + took,
        "when": f"{moment(one.time_s)[:19]} UTC, {age(max(0.0, now_s - one.time_s))} ago",
        "where": _where(one),
        "workers": _sizes(one),
        "lost": _lost(one),
        "reason": _brief(one.reason, _SENTENCE_CHARS) or UNSAID,
    }
    return [f"{name:<12}{plain(fact)}" for name, fact in facts.items()]


def _where(one: Restart) -> str:
    facts = [
        "" if one.generation is None else f"generation {one.generation}",
        "" if one.step is None else f"step {one.step}",
        "" if one.world_rank is None else f"rank {one.world_rank}",
    ]
    return ", ".join(filter(None, facts)) or UNSAID


def _story(one: Restart) -> Iterator[str]:
    """A sentence for each event, evidence below it."""
    seen: Counter[str] = Counter()
    before: list[str] = []
    for event in one.events:
        kind = _kind(event)
        seen[kind] += 1
        if seen[kind] <= _MOST_OF_A_KIND:
            sentence = _SENTENCES.get(event.kind, _other)(event)
            if event.kind == "failure_decided":
                sentence = _decided(event, before)
            yield f"{_clock(event.time_s)}  {plain(_brief(sentence, _SENTENCE_CHARS))}"
            yield from quoted(_evidence(event))
        before.append(event.reason)
    for kind, num in seen.items():
        if num > _MOST_OF_A_KIND:
            yield f"and {num - _MOST_OF_A_KIND} more of: {kind}"


def _kind(event: LedgerEvent) -> str:
    if event.kind == "rank_failed" and event.data.get("is_victim"):
        return "a rank lost a peer"
    return event.kind.replace("_", " ")


def _evidence(event: LedgerEvent) -> list[str]:
    if event.kind == "rank_failed" and not event.data.get("is_victim"):
        trace = words(event.data.get("traceback")).strip().splitlines()
        return [*trace[-_TRACEBACK_LINES:], *_wrote_last(event)]
    if event.kind == "hang_found":
        told = event.data.get("places")
        known = [words(place) for place in told] if isinstance(told, list) else []
        more = [f"and {len(known) - _MOST_PLACES} more ranks"] if len(known) > _MOST_PLACES else []
        stacks = words(event.data.get("stacks"))
        return [*known[:_MOST_PLACES], *more, *([f"stacks in {stacks}/"] if stacks else [])]
    if event.kind == "failure_decided":
        told_of = words(event.data.get("evidence")).strip()
        return [] if not told_of or told_of in event.reason else told_of.splitlines()[:3]
    return _wrote_last(event)


def _wrote_last(event: LedgerEvent) -> list[str]:
    lines = last_lines_told(event)
    return ["it wrote last:", *(f"  {line}" for line in lines)] if lines else []


def _noticed(event: LedgerEvent) -> str:
    remaining_s = number(event.data.get("remaining_s"))
    told = event.data.get("world_ranks")
    ranks = ", ".join(map(str, told[:_MOST_PLACES])) if isinstance(told, list) else ""
    parts = [
        f"a node is to be left: {event.reason}",
        "" if remaining_s is None else f"gone in {_seconds(remaining_s)} s",
        f"rank {ranks} lives there" if ranks else "",
        words(event.data.get("predicted")),
    ]
    return "; ".join(filter(None, parts))


def _raised(event: LedgerEvent) -> str:
    did = "lost a peer" if event.data.get("is_victim") else "raised"
    most = _REASON_CHARS if event.data.get("is_victim") else _SENTENCE_CHARS
    return f"{_rank(event)} {did}: {_brief(event.reason, most)}"


def _decided(event: LedgerEvent, before: Sequence[str]) -> str:
    """With its reason, unless that stands in what was told before and nothing was given up."""
    then = {"restart": "restart", "fail": "give up", "stop": "stop"}
    what = then.get(words(event.data.get("then")), "")
    how = words(event.data.get("recovery")) if what == "restart" else ""
    cause = words(event.data.get("cause")) or "cause unknown"
    injected = ", injected" if event.data.get("injected") else ""
    head = ", ".join(filter(None, [f"{cause}{injected}", " ".join(filter(None, [what, how]))]))
    is_told = what == "restart" and any(reason and reason in event.reason for reason in before)
    whose = f" (of {_rank(event)})" if event.world_rank >= 0 else ""
    return f"decided: {head}" + (whose if is_told else f": {event.reason}")


def _stands(event: LedgerEvent) -> str:
    size = whole(event.data.get("world_size"))
    workers = "" if size is None else f" with {count(size, 'worker')}"
    return f"generation {event.generation} stands{workers}"


def _from_step(event: LedgerEvent) -> str:
    source = {"memory": ", from the nodes' memories", "storage": ", from storage"}
    where = source.get(str(event.data.get("source")), "")
    return f"all ranks hold the state of step {event.step}{where}"


def _took_over(event: LedgerEvent) -> str:
    took_s = number(event.data.get("took_s"))
    return "another driver took over" + ("" if took_s is None else f" after {_seconds(took_s)} s")


def _told_by(text: str) -> Callable[[LedgerEvent], str]:
    return lambda event: f"{text}: {event.reason}" if event.reason else text


def _other(event: LedgerEvent) -> str:
    """Its reason often says all; the kind leads, for who looks it up with `elastic events`."""
    return _told_by(event.kind.replace("_", " "))(event)


_SENTENCES: Mapping[str, Callable[[LedgerEvent], str]] = {
    "fault_announced": _told_by("a fault was announced that somebody injects"),
    "drain_noticed": _noticed,
    "worker_died": lambda event: _told_by(f"{_rank(event)} died")(event),
    "node_lost": lambda event: _told_by(f"{_rank(event)} was lost with its node")(event),
    "rank_failed": _raised,
    "stall_seen": _told_by("seen"),
    "hang_found": _told_by("hang"),
    "growth_planned": _told_by("growth"),
    "leave_ordered": _told_by("all ranks were asked to save and leave"),
    "left_unsaved": _told_by("left without a save"),
    "driver_lost": _told_by("the driver was lost"),
    "driver_took_over": _took_over,
    "generation_planned": lambda event: event.reason or "a generation was planned",
    "generation_started": _stands,
    "started": _from_step,
    "resumed": _from_step,
    "recovered": lambda event: f"step {event.step} is the first new one",
    "run_failed": _told_by("the run failed"),
    "run_stopped": _told_by("the run was stopped"),
}


def _phases(one: Restart) -> list[str]:
    """Those that took any time, and their sum."""
    took = {name: took_s for name, took_s in one.phases_s.items() if took_s >= 0.0005}
    rows = [[name, f"{took_s:.3f} s"] for name, took_s in took.items()]
    if rows:
        rows.append(["together", f"{sum(one.phases_s.values()):.3f} s"])
    return table(["PHASE", "TOOK"], rows, right="TOOK")[1:]


def _lost(one: Restart) -> str:
    if not one.lost_steps:
        return UNSAID if one.lost_steps is None else "no finished step"
    held = [event.step for event in one.events if event.kind in ("started", "resumed")]
    since = f", done again from step {held[-1]}" if held else ""
    return f"{count(one.lost_steps, 'finished step')}{since}"


def _tries(tries: Sequence[TriesLeft] | None) -> list[str]:
    if tries is None:
        return [f"{'tries left':<12}not recorded: an older version wrote this run"]
    rows = [
        [
            one.budget,
            f"{left_text(one)} left" if one.granted else left_text(one),
            f"{one.used} used, {one.comes_back}",
        ]
        for one in tries
    ]
    lines = table(["BUDGET", "LEFT", "USED"], rows)[1:]
    heads = ["tries left", *[""] * len(lines)]
    return [f"{head:<12}{line}" for head, line in zip(heads, lines, strict=False)]


def _block(title: str, lines: Iterable[str]) -> list[str]:
    told = list(lines)
    return ["", title, *(f"  {line}" for line in told)] if told else []


def _of(events: Iterable[LedgerEvent], kind: str) -> list[LedgerEvent]:
    return [event for event in events if event.kind == kind]


def _causes(one: Restart) -> str:
    counts = Counter(one.causes)
    return ", ".join(f"{cause} x{n}" if n > 1 else cause for cause, n in counts.items())


def _sizes(one: Restart) -> str:
    old, new = one.old_world_size, one.new_world_size
    return UNSAID if old is None and new is None else f"{_or_dash(old)} -> {_or_dash(new)}"


def _rank(event: LedgerEvent) -> str:
    return f"rank {event.world_rank}" if event.world_rank >= 0 else "a rank"


def _shell(text: str) -> str:
    return shlex.quote(plain(text))


def _clock(time_s: float) -> str:
    """The time of day; a moment that no calendar has as it is."""
    told = moment(time_s)
    return told[11:] if len(told) == len("2027-01-15 08:00:00.000") else told


def _first_line(text: str) -> str:
    return next(iter(text.strip().splitlines()), "")


def _brief(text: str, most: int) -> str:
    line = _first_line(text)
    return line if len(line) <= most else f"{line[:most]} ..."


def _seconds(seconds: float) -> str:
    return f"{seconds:,.1f}"


def _or_dash(value: int | None) -> str:
    return UNSAID if value is None else str(value)
