"""Which failures are put down to a node, when it is kept out for them, and until when."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.policy import strikes
from elastic.policy.events import Record
from elastic.policy.strikes import Node, StrikeRules, Strikes, judge

RULES = StrikeRules(limit=3, expire_s=3600.0)
HOUR_S = 3600.0
NODES = ("a", "b", "c", "d")


@dataclass(frozen=True, kw_only=True)
class Word:
    kind: str
    time_s: float
    generation: int = -1
    world_rank: int = -1
    data: dict[str, Any] = field(default_factory=dict)


class History:
    """A run on four nodes, told event by event, with a driver that records what follows."""

    def __init__(self, rules: StrikeRules = RULES, nodes: tuple[str, ...] = NODES) -> None:
        self.rules, self.nodes = rules, nodes
        self.now = Strikes()
        self.words: list[Word] = []
        self.records: list[Record] = []
        self.generation = -1

    def tell(self, kind: str, time_s: float, rank: int = -1, **data: Any) -> None:
        data = json.loads(json.dumps(data))
        word = Word(
            kind=kind, time_s=time_s, generation=self.generation, world_rank=rank, data=data
        )
        self.words.append(word)
        self.now = self.now.after(word)

    def settle(self, time_s: float) -> list[str]:
        """The kinds and nodes of what had to be recorded."""
        done = []
        while (due := judge(self.now, self.rules, time_s, self.nodes)) is not None:
            self.records.append(due)
            done.append(f"{due.kind} {due.data['node_id']}")
            self.tell(due.kind, time_s, **due.data)
            assert len(done) < 20, done
        return done

    def start(self, time_s: float) -> None:
        self.generation += 1
        ranks = [
            {"world_rank": rank, "node_id": node, "node_ip": f"10.0.0.{rank}"}
            for rank, node in enumerate(self.nodes)
        ]
        self.tell("generation_started", time_s, ranks=ranks)

    def fail(
        self, time_s: float, node: str, cause: str = "worker_killed", **died: Any
    ) -> list[str]:
        """A group is started, and fails for one rank; what follows from it."""
        self.start(time_s)
        rank = self.nodes.index(node)
        if cause == "hang":
            died = {"hang": "its process is stopped", **died}
        if cause in ("worker_killed", "hang", "host_memory"):
            self.tell("worker_died", time_s, rank, node_id=node, node_ip=f"10.0.0.{rank}", **died)
        self.tell("failure_decided", time_s, rank, cause=cause)
        return self.settle(time_s)

    def out(self) -> list[str]:
        return [one.node.node_id for one in self.now.kept_out]


# --- what is a strike -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cause", ["worker_killed", "worker_died", "cuda_error", "nccl_error", "hang"]
)
def test_the_third_strike_keeps_a_node_out(cause: str) -> None:
    run = History()
    assert run.fail(0.0, "b", cause) == run.fail(100.0, "b", cause) == []
    assert run.fail(720.0, "b", cause) == ["node_kept_out b"]
    (record,) = run.records
    assert record.reason == f"node b (10.0.0.1): 3 strikes in 12 min: {cause} 3"
    assert record.data["until_s"] == 720.0 + HOUR_S
    assert [one["time_s"] for one in record.data["strikes"]] == [0.0, 100.0, 720.0]


@pytest.mark.parametrize(
    "cause",
    [
        *("preemption", "node_lost", "host_memory", "cuda_memory", "data", "storage", "driver"),
        *("user_exception", "start_up", "communication", "no such cause"),
    ],
)
def test_what_is_no_fault_of_a_node_is_no_strike(cause: str) -> None:
    run = History()
    for number in range(9):
        assert run.fail(60.0 * number, "b", cause) == []
    assert run.now.strikes == ()


def test_bad_memory_of_a_gpu_is_enough_at_once() -> None:
    run = History()
    assert run.fail(0.0, "c", "ecc_error") == ["node_kept_out c"]
    assert run.records[0].reason == "node c (10.0.0.2): 1 strike: ecc_error 1"


def test_strikes_count_for_each_node_alone() -> None:
    run = History()
    for number, node in enumerate("abcdabcd"):
        assert run.fail(60.0 * number, node) == []


def test_a_failure_is_one_strike_however_often_it_is_told() -> None:
    run = History()
    run.fail(0.0, "b", "hang", hang="blocked")  # told with the death, and with the decision
    assert len(run.now.strikes) == 1
    run.fail(60.0, "b")
    run.fail(63.0, "b")  # another process of that node, three seconds later
    assert [one.time_s for one in run.now.strikes] == [0.0, 60.0]
    run.fail(64.5, "b", "cuda_error")  # now it is known what it was
    assert [one.cause for one in run.now.strikes] == ["hang", "cuda_error"]
    run.tell("failure_decided", 99.0, 1, cause="hang")  # of the same group, long after it
    assert [one.cause for one in run.now.strikes] == ["hang", "cuda_error"]
    run.tell("failure_decided", 99.0, 1, cause="ecc_error")
    assert [one.cause for one in run.now.strikes] == ["hang", "ecc_error"]


def test_a_rank_that_waited_too_long_for_others_is_not_to_blame() -> None:
    run = History()
    run.start(0.0)
    run.tell("failure_decided", 1.0, 1, cause="hang")
    assert run.now.strikes == ()


def test_a_rank_that_hangs_while_others_re_form_is_a_strike_too() -> None:
    run = History()
    run.start(0.0)
    run.tell("worker_died", 1.0, 2, node_id="c", node_ip="", hang="its process is stopped")
    assert [one.cause for one in run.now.strikes] == ["hang"]


def test_workers_that_die_on_several_nodes_at_once_are_no_nodes_fault() -> None:
    run = History()
    for number in range(5):
        time_s = 60.0 * number
        run.fail(time_s, "a")
        run.tell("worker_died", time_s + 0.5, 1, node_id="b", node_ip="")
        run.settle(time_s + 0.5)
        run.start(time_s + 1.0)
        run.tell("failure_decided", time_s + 1.0, 1, cause="worker_killed")
        run.settle(time_s + 1.0)
    assert run.now.strikes == () and run.records == []


def test_a_node_that_was_kept_out_for_such_a_death_is_let_back_in() -> None:
    run = History()
    run.fail(0.0, "a")
    run.fail(60.0, "a")
    assert run.fail(120.0, "a") == ["node_kept_out a"]
    run.tell("worker_died", 120.2, 3, node_id="d", node_ip="")
    assert run.settle(120.2) == ["node_allowed a"]
    assert "other nodes died in the same moment" in run.records[-1].reason
    assert run.settle(121.0) == [] and run.out() == []


# --- for how long ---------------------------------------------------------------------------------


def test_strikes_expire_before_there_are_enough() -> None:
    run = History()
    for number in range(10):
        assert run.fail(number * 0.51 * HOUR_S, "b") == []


def test_a_node_comes_back_when_its_last_strike_has_expired() -> None:
    run = History()
    for time_s in (0.0, 0.5 * HOUR_S, 0.9 * HOUR_S):
        run.fail(time_s, "b")
    assert run.settle(1.9 * HOUR_S - 1) == [] and run.out() == ["b"]
    assert run.settle(1.9 * HOUR_S) == ["node_allowed b"]
    assert run.records[-1].reason == "node b (10.0.0.1): its strikes have expired"
    assert run.fail(1.9 * HOUR_S + 1, "b") == [], "it begins anew"


def test_another_strike_of_a_node_that_is_out_keeps_it_out_for_longer() -> None:
    run = History()
    for time_s in (0.0, 60.0, 120.0):
        run.fail(time_s, "b")
    assert run.fail(600.0, "b") == ["node_kept_out b"]
    assert [one.until_s for one in run.now.kept_out] == [600.0 + HOUR_S]


def test_a_node_that_is_let_in_begins_anew() -> None:
    run = History()
    for time_s in (0.0, 60.0, 120.0):
        run.fail(time_s, "b")
    (node,) = run.now.nodes()
    record = strikes.allowed(node, "allow asked by ann")
    assert record.reason == "node b (10.0.0.1): allow asked by ann"
    run.tell(record.kind, 130.0, **record.data)
    assert run.settle(130.0) == [] and run.out() == []
    assert run.fail(200.0, "b") == run.fail(260.0, "b") == []


# --- how many -------------------------------------------------------------------------------------


def test_at_most_half_of_the_nodes_are_out_and_those_struck_last() -> None:
    run = History()
    for number, node in enumerate("aaabbbccc"):
        run.fail(60.0 * number, node)
    assert run.out() == ["b", "c"]
    assert "node c (10.0.0.2) was struck since" in next(
        one.reason for one in run.records if one.kind == "node_allowed"
    )


@pytest.mark.parametrize(("nodes", "out"), [("a", []), ("ab", ["a"]), ("abc", ["a"])])
def test_the_only_node_is_never_kept_out(nodes: str, out: list[str]) -> None:
    run = History(nodes=tuple(nodes))
    for number in range(4):
        run.fail(60.0 * number, "a")
    assert run.out() == out
    told = [record.reason for record in run.records if record.kind == "node_tolerated"]
    assert len(told) == (0 if out else 2), "once for each strike over the limit"
    assert all("one of 1 nodes" in reason for reason in told)


def test_nothing_is_decided_before_the_nodes_are_known() -> None:
    run = History()
    for time_s in (0.0, 60.0):
        run.fail(time_s, "b")
    run.start(120.0)
    run.tell("failure_decided", 120.0, 1, cause="worker_killed")
    assert judge(run.now, RULES, 120.0, ()) is None
    assert run.settle(121.0) == ["node_kept_out b"]


def test_without_a_limit_no_node_is_out_and_those_that_were_are_let_in() -> None:
    run = History()
    for time_s in (0.0, 60.0, 120.0):
        run.fail(time_s, "b")
    run.rules = StrikeRules(limit=0)
    assert run.settle(130.0) == ["node_allowed b"]
    assert run.fail(200.0, "b", "ecc_error") == []


@pytest.mark.parametrize(
    ("limit", "expire_s", "name"), [(-1, 60.0, "node_strikes"), (3, 0.0, "node_strikes_expire_s")]
)
def test_rules_that_cannot_be_meant_are_refused(limit: int, expire_s: float, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        StrikeRules(limit=limit, expire_s=expire_s)


# --- whatever happens -----------------------------------------------------------------------------

FAILURES = st.lists(
    st.tuples(
        st.floats(0.0, 2000.0),
        st.sampled_from(NODES),
        st.sampled_from(["worker_killed", "hang", "ecc_error", "user_exception", "node_lost"]),
    ),
    max_size=40,
)


@given(FAILURES)
def test_a_later_driver_knows_what_this_one_knows(failures: list[tuple[float, str, str]]) -> None:
    run = History()
    time_s = 0.0
    for after_s, node, cause in failures:
        time_s += after_s
        run.fail(time_s, node, cause)
        assert len(run.out()) <= len(NODES) // 2
        assert all(one.until_s > time_s for one in run.now.kept_out)
    again = Strikes()
    for word in run.words:
        again = again.after(word)
    assert again == run.now
    assert judge(again, RULES, time_s, NODES) is None


@given(
    st.sampled_from(["generation_started", "worker_died", "failure_decided"])
    | st.sampled_from([strikes.KEPT_OUT, strikes.ALLOWED, strikes.TOLERATED]),
    st.dictionaries(
        st.sampled_from(
            ["ranks", "node_id", "node_ip", "cause", "hang", "until_s", "strikes", "struck_s"]
        ),
        st.none()
        | st.integers()
        | st.text()
        | st.lists(st.none() | st.dictionaries(st.text(), st.text())),
    ),
)
def test_a_damaged_event_does_no_harm(kind: str, data: dict[str, Any]) -> None:
    known = Strikes().after(Word(kind=kind, time_s=1.0, data=data))
    judge(known, RULES, 2.0, NODES)
    assert all(isinstance(node, Node) for node in known.nodes())
