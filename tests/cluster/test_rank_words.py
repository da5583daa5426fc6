"""What ranks tell the driver, without a cluster: each word belongs to its own generation."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from elastic.cluster.rank_words import RankWords
from elastic.cluster.recovery import Recovery
from elastic.policy.events import Record


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
