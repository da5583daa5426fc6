"""Where a generation begins, without a cluster: what is passed by or missing is in the ledger."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from elastic.cluster.commits import Commits, NothingToResume, words_of
from elastic.cluster.driver_config import DriverConfig
from elastic.cluster.group import Group
from elastic.cluster.last_words import LastWords
from elastic.cluster.resumption import Resumption
from elastic.policy.events import Event, GroupStartFailed, Record, StartGroup
from elastic.policy.retention import Retention
from elastic.policy.situation import Rules
from elastic.storage import late_visibility
from elastic.storage.claim import RunSpec
from elastic.storage.ledger import LedgerEvent
from elastic.training.coordinator import Shard
from tests.made_run import add_checkpoint, make_run


class Driven:
    """A run with checkpoints at 10, 20 and 30, and what a driver would be told of it."""

    def __init__(self, root: Path, **more: Any) -> None:
        self.catalog = make_run(root)
        for step in (10, 20, 30):
            add_checkpoint(self.catalog, step)
        kind = "checkpoint_committed"
        past = [
            LedgerEvent(life=0, seq=step, time_s=0.0, kind=kind, step=step) for step in (10, 20, 30)
        ]
        self.words: list[Record | Event] = []
        self.commits = Commits(
            self.catalog,
            Retention(),
            tell=lambda what, found: self.words.extend(words_of(what, found)),
            before_publishing=lambda: None,
            check_right=lambda: None,
        )
        config = DriverConfig(
            run_url=str(root),
            spec=RunSpec(name="demo", seed=0),
            rules=Rules(min_workers=1, max_workers=2),
            keep=Retention(),
            resources_per_worker={"CPU": 1.0},
            **more,
        )
        self.resumption = Resumption(
            config,
            past,
            self.commits,
            lambda: -1,
            post=self.words.append,
            record=self.words.append,
        )

    async def step(self, generation: int) -> int | None:
        found = await self.resumption.choose(generation)
        await asyncio.sleep(0)  # for words of the storage thread
        return found.step

    def told(self) -> list[tuple[str, int, int]]:
        told = [word for word in self.words if isinstance(word, Record)]
        return [(one.kind, one.generation, one.step) for one in told if one.kind != "storage_short"]

    def lose(self, step: int, name: str = "/state.json") -> None:
        self.catalog.fs.remove_tree(f"checkpoints/step-{step}{name}")


def test_a_group_that_resumes_from_an_older_checkpoint_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        run = Driven(tmp_path)
        assert await run.step(1) == 30 and run.told() == []
        run.lose(30)
        assert await run.step(2) == 20
        assert await run.step(3) == 20
        assert run.told() == [("checkpoint_passed_by", 2, 30)]
        told = "passed by, step 30: it was committed and is not complete: state.json is missing"
        assert told in caplog.text

    asyncio.run(main())


def test_a_step_back_over_a_damaged_checkpoint_says_so(tmp_path: Path) -> None:
    async def main() -> None:
        run = Driven(tmp_path)
        assert await run.step(1) == 30
        run.lose(20)
        assert await run.resumption.step_back(1, 30, "bad bytes") == (10, "")
        assert run.told() == [("checkpoint_quarantined", 1, 30), ("checkpoint_passed_by", 1, 20)]

    asyncio.run(main())


def test_a_group_without_any_checkpoint_left_is_not_tried_again(tmp_path: Path) -> None:
    async def main() -> None:
        run = Driven(tmp_path)
        for step in (10, 20, 30):
            run.catalog.quarantine(step, "bad bytes")
        posted: list[Event] = []
        group = Group(
            None,  # type: ignore[arg-type]
            post=posted.append,
            spawn=lambda work: None,
            run_id=run.catalog.run_id,
            last_words=LastWords(run.catalog.fs),
            keepers=run.resumption.keepers,
        )
        command = StartGroup(generation=4, world_size=2)
        await group.start(command, run.resumption.choose, lambda *told, **more: None)
        (failed,) = posted
        assert isinstance(failed, GroupStartFailed) and failed.is_final
        assert "(3 in its quarantine" in failed.reason

    asyncio.run(main())


def test_what_a_wait_is_for_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_visibility, "VISIBLE_S", 0.0)

    async def main() -> None:
        run = Driven(tmp_path)
        run.lose(30, "")
        assert await run.step(1) == 20
        expected = [("checkpoint_awaited", 1, 30), ("checkpoint_passed_by", 1, 30)]
        assert run.told() == expected
        assert await run.step(2) == 20 and run.told() == expected  # nobody waits again

    asyncio.run(main())


@pytest.mark.parametrize("from_scratch", [False, True])
def test_what_was_committed_in_this_life_is_expected_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, from_scratch: bool
) -> None:
    monkeypatch.setattr(late_visibility, "VISIBLE_S", 0.0)

    async def main() -> None:
        run = Driven(tmp_path, from_scratch=from_scratch)
        for step in (10, 20, 30):
            run.lose(step, "")
        if not from_scratch:
            with pytest.raises(NothingToResume, match="3 checkpoints were committed"):
                await run.step(0)
            return
        assert await run.step(0) is None
        path = run.catalog.begin(1, 0, 0)
        saved = Shard(step=1, generation=0, attempt=0, world_rank=0, world_size=1, path=path)
        assert (await run.commits.hand_in(saved)).committed
        assert await run.step(1) == 1
        run.lose(1, "")
        with pytest.raises(NothingToResume, match="1 checkpoint was committed, the last at"):
            await run.step(2)

    asyncio.run(main())
