"""What ranks tell the driver, without a cluster: each word belongs to its own generation."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from elastic.cluster.rank_words import RankWords
from elastic.cluster.recovery import Recovery
from elastic.policy.events import Record

NONE = {"every": None, "step": None, "kept_s": None, "skipped": 0, "problem": ""}


def words_of(recovery: Recovery, records: list[Record]) -> RankWords:
    def nothing(*_: Any, **__: Any) -> None:
        pass

    return RankWords(
        recovery=recovery,
        metrics=SimpleNamespace(start=nothing, add=nothing),
        post=nothing,
        record=records.append,
        on_connected=nothing,
        on_restored=nothing,
        standstill=SimpleNamespace(begin=nothing, heard=nothing, ended=nothing),
        pacing=SimpleNamespace(look=nothing, skipped=nothing),
    )


def test_a_late_word_of_the_group_before_is_no_part_of_the_re_form() -> None:
    records: list[Record] = []
    recovery = Recovery()
    words = words_of(recovery, records)
    words.begin(0, 1)
    recovery.failed("a death", world_size=2)
    late = {"build_s": 0.1, "load_s": 99.0, "step": 0, "resumed": True, "source": ""}
    words.hear(0, 0, "restored_state", late)
    words.hear(0, 0, "first_step", {"first_step_s": 99.0, "step": 1})
    words.begin(1, 1)
    words.hear(1, 0, "restored_state", {**late, "load_s": 0.2})
    words.hear(1, 0, "first_step", {"first_step_s": 0.3, "step": 1})
    (found,) = [record for record in records if record.kind == "recovered"]
    assert found.generation == 1
    assert found.data["phases_s"]["load"] == 0.2 and found.data["phases_s"]["first_step"] == 0.3


def test_what_the_ranks_read_is_recorded() -> None:
    records: list[Record] = []
    words = words_of(Recovery(), records)
    words.begin(3, 2)
    told = {"step": 40, "reason": "Numbers from sample 480 on", "facts": {"read": "by index"}}
    words.hear(3, 0, "data_read", told)
    (found,) = records
    assert (found.kind, found.generation, found.step) == ("data_read", 3, 40)
    assert (found.reason, found.data) == (told["reason"], told["facts"])


def test_the_newest_snapshot_and_those_skipped_are_known_without_an_event_each() -> None:
    records: list[Record] = []
    words = words_of(Recovery(), records)
    words.begin(0, 1)
    words.hear(0, 0, "snapshots_on", {"every": 5})
    for step in (5, 10):
        words.hear(0, 0, "snapshot_skipped", {"step": step, "why": "late"})
    assert words.latest["snapshots"] == NONE | {"every": 5, "skipped": 2}
    words.hear(0, 1, "snapshot_failed", {"step": 11, "reason": "no room"})
    assert words.latest["snapshots"]["problem"] == "no room"
    for step in (15, 20):
        told = {"step": step, "bytes": 8, "stall_s": 0.1, "took_s": 0.2}
        words.hear(0, 0, "snapshot_kept", told)
    now = words.latest["snapshots"]
    assert (now["step"], now["skipped"], now["problem"]) == (20, 2, "")
    kinds = [(record.kind, record.step, record.world_rank) for record in records]
    assert kinds == [
        *(("snapshot_skipped", 5, -1), ("snapshot_failed", 11, 1), ("snapshot_kept", 15, -1)),
    ]
    restored = {"build_s": 0.1, "load_s": 0.1, "resumed": True}
    course = ((1, "memory", 20, 20), (2, "memory", 15, 15), (3, "storage", 10, None))
    for generation, source, step, expected in course:
        words.begin(generation, 1)
        told = {**restored, "step": step, "source": source}
        words.hear(generation, 0, "restored_state", told)
        assert words.latest["snapshots"]["step"] == expected
