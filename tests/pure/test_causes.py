"""Which class a failure is given, and by what: on real texts, and on what is told together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from elastic.policy.budgets import EXCEPTIONS, FREE, MOST_IN_A_ROW, Failure
from elastic.policy.cause import Told, find, is_victim, of_death, of_error, of_start
from elastic.policy.causes import TOLD_BY, Cause
from elastic.policy.events import RankError, WorkerDied
from elastic.policy.transitions import FINAL_ERRORS

# Each with where it was seen. Texts of programs; ids, addresses and paths in them are made up.
TEXTS: list[dict[str, Any]] = json.loads(
    Path(__file__).with_name("failure_texts.json").read_text(encoding="utf-8")
)
IDS = [f"{number}-{one['cause']}" for number, one in enumerate(TEXTS)]


def told_by(one: dict[str, Any]) -> Told:
    if one["of"] == "error":
        return of_error(one["type"], one["text"], one.get("traceback", ""))
    if one["of"] == "death":
        lines = one.get("last_lines", ())
        return of_death(one["text"], lines, node_lost=one.get("node_lost", False))
    return of_start(one["text"])


@pytest.mark.parametrize("one", TEXTS, ids=IDS)
def test_a_real_text_has_its_class_and_the_line_that_decided(one: dict[str, Any]):
    told = told_by(one)
    assert told.cause == one["cause"] and told.is_victim is one.get("victim", False)
    said = [one["text"], one.get("traceback", ""), f"{one.get('type')}: {one['text']}"]
    said += one.get("last_lines", ())
    assert any(told.evidence in text for text in said)


def test_the_texts_are_many_and_cover_every_class():
    assert len(TEXTS) >= 60 and {one["cause"] for one in TEXTS} == set(Cause)
    assert all(one["seen"] for one in TEXTS)
    assert sum(one["part"] == "held out" for one in TEXTS) >= 20


def test_rays_guesses_are_no_evidence():
    """Ray names the kernel's memory killer in the death of every process that is just gone."""
    text = (
        "Worker unexpectedly exits with a connection error code 2. End of file. There are some "
        "potential root causes. (1) The process is killed by SIGKILL by OOM killer due to high "
        "memory usage. (2) ray stop --force is called."
    )
    assert of_death(text) == Told(cause=Cause.WORKER_KILLED)


@pytest.mark.parametrize(
    "line",
    [
        "node-1:4711:4712 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/RoCE [RO]; OOB eth0:10.0.3.7<0>",
        "node-1:4711:4712 [0] misc/socket.cc:47 NCCL WARN socketProgress: interface eth1 is down",
        "[W915 10:02:11.1 ProcessGroupNCCL.cpp:4115] using GPU 0 to perform barrier",
        "retry 1: connection reset by peer",
        "epoch 3, step 812: loss 2.31, memory 61.2 GB",
    ],
)
def test_what_healthy_ranks_write_is_no_evidence(line: str):
    assert of_death("", [line]) == Told(cause=Cause.WORKER_KILLED)


def test_a_disk_that_no_node_has_is_no_exception_of_the_users():
    """Its class is that of storage, whatever the words of its cause."""
    text = "local='/nvme' cannot be used: PermissionError: [Errno 13] Permission denied: '/nvme'"
    assert of_error("LocalUnusable", text).cause is Cause.STORAGE
    assert "LocalUnusable" in FINAL_ERRORS


RAISED = 'Traceback (most recent call last):\n  File "{}", line 4, in train\n    {}\n'


@pytest.mark.parametrize(
    ("type_name", "text"),
    [
        ("ValueError", "NCCL error: the backend of this config is unknown"),
        ("KeyError", "'CUDA out of memory'"),
        ("AssertionError", "connection closed by peer"),
        ("MyError", "uncorrectable ECC error encountered"),
    ],
)
def test_what_user_code_raises_is_its_own_whatever_it_says(type_name: str, text: str):
    told = of_error(type_name, text)
    assert told.cause is Cause.USER_EXCEPTION and not told.is_victim
    assert told.evidence == f"{type_name}: {text}"


def test_who_raised_a_runtime_error_decides_where_the_traceback_tells():
    text = "Connection closed by peer [127.0.0.1]:4711"
    raised = RAISED.format("/home/me/train.py", f'raise RuntimeError("{text}")')
    called = RAISED.format("/home/me/train.py", "dist.all_reduce(loss)")
    wrapped = "The above exception was the direct cause of the following exception:\n" + raised
    library = RAISED.format("/venv/site-packages/torch/x.py", "raise RuntimeError(text)")
    assert of_error("RuntimeError", text, raised).cause is Cause.USER_EXCEPTION
    for traceback in ("", called, wrapped, library):
        assert is_victim("RuntimeError", text, traceback)
    # Who raises that has run out of memory, has.
    said = 'raise RuntimeError("CUDA out of memory")'
    again = RAISED.format("/home/me/train.py", said)
    assert of_error("RuntimeError", "CUDA out of memory", again).cause is Cause.CUDA_MEMORY


# --- several reports together -----------------------------------------------------------------


def error(rank: int, name: str, text: str) -> RankError:
    return RankError(world_rank=rank, type_name=name, message=text, is_victim=is_victim(name, text))


def death(rank: int, **others: Any) -> WorkerDied:
    lost = others.pop("node_lost", False)
    return WorkerDied(world_rank=rank, node_lost=lost, detail="gone", **others)


VICTIMS = [one for one in TEXTS if one.get("victim") and one["of"] == "error"]
CAUSES = [one for one in TEXTS if not one.get("victim") and one["of"] != "start"]
RESET = error(0, "RuntimeError", "Read error [10.0.3.7]:1: Connection reset by peer")


@pytest.mark.parametrize("one", CAUSES, ids=[f"{i}-{one['cause']}" for i, one in enumerate(CAUSES)])
@pytest.mark.parametrize("when", ["before", "after"])
def test_victims_never_outrank_the_first_cause(one: dict[str, Any], when: str):  # B81
    victims = [
        error(3 + place, victim["type"], victim["text"]) for place, victim in enumerate(VICTIMS)
    ]
    errors, deaths = list(victims), []
    if one["of"] == "error":
        cause = RankError(
            world_rank=1,
            type_name=one["type"],
            message=one["text"],
            traceback=one.get("traceback", ""),
        )
        errors = [*victims, cause] if when == "after" else [cause, *victims]
    else:
        lines = tuple(one.get("last_lines", ()))
        lost = one.get("node_lost", False)
        deaths = [death(1, told=one["text"], last_lines=lines, node_lost=lost)]
        watchdog = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1)"
        deaths.insert(0 if when == "after" else 1, death(2, last_lines=(watchdog,)))
    found = find(errors, deaths)
    assert (found.cause, found.world_rank) == (one["cause"], 1)


def test_victims_alone_are_told_by_the_one_that_says_most():
    link = error(1, "DistBackendError", "NET/IB : Got completion from peer with error 12")
    late = error(2, "RuntimeError", "Timed out waiting 6000ms for recv operation to complete")
    assert find([RESET], []).cause is Cause.COMMUNICATION
    assert find([RESET, late], []).cause is Cause.HANG
    assert find([RESET, late, link], []).cause is Cause.NCCL_ERROR
    assert find([RESET, late, link], []).world_rank == -1


def test_a_death_on_a_node_that_drains_is_a_preemption_and_an_exception_there_is_not():  # B85
    assert find([], [death(1)], draining={1}).cause is Cause.PREEMPTION
    assert find([], [death(1, node_lost=True)], draining={1}).cause is Cause.PREEMPTION
    assert find([], [death(2)], draining={1}).cause is Cause.WORKER_KILLED
    assert find([error(1, "ValueError", "boom")], [], draining={1}).cause is Cause.USER_EXCEPTION


def test_an_exception_outranks_a_death_and_a_told_death_one_without_words():
    """A rank that raises may take its process with it."""
    killed, told = death(1), death(2, told="node running low on memory")
    assert find([error(0, "ValueError", "boom")], [killed]).cause is Cause.USER_EXCEPTION
    assert find([], [killed, told]).world_rank == 2
    assert find([], [killed, told, death(3, node_lost=True)]).cause is Cause.NODE_LOST
    assert find([], [death(3), death(4)]).world_rank == 3


def test_a_rank_that_we_ended_hung():
    found = find([RESET], [death(1, hang="runs on at train.py:4")])
    assert (found.cause, found.evidence) == (Cause.HANG, "runs on at train.py:4")


# --- the README ---------------------------------------------------------------------------------


def table() -> str:
    """The classes as a Markdown table: what they are told by, and what a run forgives of them."""
    lines = [
        "| cause | told by | restarts granted | given back by | the same again ends the run |",
        "|---|---|---|---|---|",
    ]
    for cause in Cause:
        alike = Failure(cause=cause, step=1, text="" if cause is Cause.WORKER_KILLED else "x")
        again = {0: "never", 2: "the 2nd time", 3: "the 3rd time"}[alike.num_same_to_end]
        granted, refill = "`max_failures_without_progress`", "a new checkpoint"
        if cause in FREE:
            granted, refill = "as many as it takes", ""
        elif cause in EXCEPTIONS:
            granted, refill = "`max_failures`", "a new submission"
        elif cause in MOST_IN_A_ROW:
            granted = str(MOST_IN_A_ROW[cause])
        lines.append(f"| {cause} | {TOLD_BY[cause]} | {granted} | {refill} | {again} |")
    return "\n".join(lines)


def test_the_readmes_table_of_causes_is_the_one_the_driver_uses():
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    assert table() in readme, f"put this table into the README:\n{table()}"
