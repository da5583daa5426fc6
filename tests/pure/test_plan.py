"""How many workers fit: what is held counts once, and only one accelerator type counts."""

from __future__ import annotations

import pytest

from elastic.policy.plan import NodeCapacity, count_workers, of_one_accelerator, workers_on

GPU = {"CPU": 1.0, "GPU": 1.0}


def node(name: str, kind: str = "", *, gpus: int = 4, free: int | None = None, held: int = 0):
    free = gpus - held if free is None else free
    return NodeCapacity(
        node_id=name,
        available={"CPU": float(free), "GPU": float(free)},
        total={"CPU": float(gpus), "GPU": float(gpus)},
        num_held=held,
        accelerator=kind,
    )


@pytest.mark.parametrize(("free", "held", "expected"), [(4, 0, 4), (1, 3, 4), (4, 4, 4), (0, 2, 2)])
def test_what_a_run_holds_counts_once(free: int, held: int, expected: int) -> None:
    assert workers_on(node("a", free=free, held=held), GPU) == expected


def test_a_float_just_below_a_whole_number_is_that_number() -> None:
    almost = NodeCapacity(node_id="a", available={"CPU": 2.99999999}, total={"CPU": 3.0})
    assert workers_on(almost, {"CPU": 1.0}) == 3


def test_a_worker_that_needs_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least a fraction of a CPU"):
        workers_on(node("a"), {"CPU": 0.0})


def names(nodes: list[NodeCapacity]) -> list[str]:
    return [one.node_id for one in nodes]


def test_the_type_with_most_room_is_taken() -> None:
    nodes = [node("a", "A100"), node("h", "H100"), node("i", "H100"), node("plain", gpus=0)]
    alike = of_one_accelerator(nodes, GPU)
    assert names(alike) == ["h", "i"] and count_workers(alike, GPU) == 8


def test_a_run_stays_with_the_type_it_is_on_while_it_holds_any() -> None:
    nodes = [node("a", "A100", held=2), node("h", "H100"), node("i", "H100")]
    assert names(of_one_accelerator(nodes, GPU)) == ["a"]


def test_workers_without_accelerators_go_anywhere() -> None:
    nodes = [node("a", "A100"), node("h", "H100"), node("plain")]
    assert names(of_one_accelerator(nodes, {"CPU": 1.0, "memory": 1e9})) == ["a", "h", "plain"]
    assert of_one_accelerator([], GPU) == []
