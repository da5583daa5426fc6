"""Loggers: told all of it in order, apart from each other, and never at the run's expense."""

from __future__ import annotations

import logging
import re
import sys
import threading
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from elastic.storage.filesystem import Filesystem
from elastic.storage.metrics import current_metrics
from elastic.training.loggers import fan_out
from elastic.training.loggers.fan_out import FannedOutMetrics, FanOut
from elastic.training.loggers.logger import Logger, check_loggers

README = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
RECOVERED = {
    "old_world_size": 3,
    "new_world_size": 2,
    "lost_steps": 2,
    "phases_s": {"load": 0.5, "wait": 0.25},
}


class Recording:
    """A logger that keeps what it is told, and may be slow or raise."""

    def __init__(self, raises_in: str = "", waits_for: threading.Event | None = None) -> None:
        self.told: list[tuple[Any, ...]] = []
        self._raises_in = raises_in
        self._waits_for = waits_for

    def _take(self, *told: Any) -> None:
        if self._waits_for is not None:
            assert self._waits_for.wait(60)
        if told[0] == self._raises_in:
            raise OSError("no connection")
        self.told.append(told)

    def rewind(self, step: int) -> None:
        self._take("rewind", step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._take("log", step, dict(values))

    def annotate(self, step: int, text: str) -> None:
        self._take("annotate", step, text)

    def flush(self) -> None:
        self._take("flush")

    def close(self) -> None:
        self._take("close")


def killed_at_12(metrics: FannedOutMetrics, loggers: FanOut) -> None:
    """A checkpoint at 10, a kill at 12; the run goes on to 14."""
    metrics.start(0, 1, 0.0)
    for step in range(1, 13):
        metrics.add(0, step, float(step), {"loss": float(step)})
    metrics.flush()
    metrics.start(1, 11, 13.0)
    loggers.heard("recovered", 11, "rank 1 died", RECOVERED)
    for step in range(11, 15):
        metrics.add(1, step, 10.0 + step, {"loss": 100.0 + step})
    metrics.flush()
    loggers.close()


def told_of_kill(*loggers: Logger, root: Path) -> Filesystem:
    fs = Filesystem.at(str(root))
    together = FanOut(loggers)
    killed_at_12(FannedOutMetrics(fs, together), together)
    return fs


def test_b88_a_logger_hears_of_a_rewind_before_the_steps_that_are_done_again(
    tmp_path: Path,
) -> None:
    logger = Recording()
    fs = told_of_kill(logger, root=tmp_path)
    kept: dict[int, dict[str, float]] = {}
    for what, *rest in logger.told:
        if what == "rewind":
            kept = {step: values for step, values in kept.items() if step < rest[0]}
        elif what == "log":
            assert rest[0] not in kept, f"step {rest[0]} twice"
            kept[rest[0]] = rest[1]
    assert kept == current_metrics(fs)
    assert sorted(kept) == list(range(1, 15))
    assert logger.told[-1] == ("close",)


def test_a_restart_is_an_annotation_with_its_cause_and_cost(tmp_path: Path) -> None:
    logger = Recording()
    told_of_kill(logger, root=tmp_path)
    text = "restarted: rank 1 died. 3 -> 2 workers in 0.8 s, 2 steps done again"
    assert [told for told in logger.told if told[0] == "annotate"] == [("annotate", 11, text)]


def test_a_failed_run_is_annotated_and_nothing_else() -> None:
    logger = Recording()
    loggers = FanOut([logger])
    for kind in ("run_started", "progress", "worker_died", "run_failed", "run_finished"):
        loggers.heard(kind, -1, "the disk is full", {})
    loggers.close()
    assert logger.told == [("annotate", 0, "the run failed: the disk is full"), ("close",)]


@pytest.mark.parametrize("where", ["rewind", "log", "annotate", "flush", "close"])
def test_a_logger_that_raises_is_let_go_and_the_others_go_on(
    where: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken, sound, alone = Recording(raises_in=where), Recording(), Recording()
    with caplog.at_level(logging.WARNING, "elastic"):
        fs = told_of_kill(broken, sound, root=tmp_path / "both")
    told_of_kill(alone, root=tmp_path / "alone")
    assert sound.told == alone.told
    assert len(current_metrics(fs)) == 14
    (warning,) = [record.getMessage() for record in caplog.records]
    assert f"the logger Recording raised OSError in {where}: no connection" in warning


def test_a_logger_that_stands_still_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fan_out, "_FLUSH_S", 0.01)
    monkeypatch.setattr(fan_out, "_CLOSE_S", 0.01)
    gate = threading.Event()
    slow, sound = Recording(waits_for=gate), Recording()
    told_of_kill(slow, sound, root=tmp_path)  # would never return
    assert not slow.told
    gate.set()


def test_a_logger_that_is_too_far_behind_is_let_go(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fan_out, "_MOST_WAITING", 5)
    monkeypatch.setattr(fan_out, "_CLOSE_S", 0.01)
    gate = threading.Event()
    loggers = FanOut([Recording(waits_for=gate)])
    with caplog.at_level(logging.WARNING, "elastic"):
        for step in range(20):
            loggers.log(step, {"loss": 1.0})
    gate.set()
    loggers.close()
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "is 5 words behind; it is told nothing more, the run goes on" in warning


def test_a_flush_is_done_before_it_returns() -> None:
    logger = Recording()
    loggers = FanOut([logger])
    loggers.log(1, {"loss": 1.0})
    loggers.flush()
    assert logger.told == [("log", 1, {"loss": 1.0}), ("flush",)]
    loggers.close()


def test_what_is_no_logger_is_refused_by_name() -> None:
    check_loggers([Recording()])
    assert isinstance(Recording(), Logger)
    with pytest.raises(TypeError, match="found none called rewind, log, annotate, flush, close"):
        check_loggers([object()])
    with pytest.raises(TypeError, match="found a class: call it"):
        check_loggers([Recording])


# --- the README's example ------------------------------------------------------------------------


class _WandbRun:
    """What the example asks of a run of W&B, with its rule that steps only grow."""

    def __init__(self, told: list[tuple[Any, ...]], history: dict[int, dict[str, float]]) -> None:
        self._told, self.history = told, history

    def log(self, values: dict[str, float], step: int) -> None:
        assert step > max(self.history, default=-1), f"W&B drops step {step}"
        self.history[step] = values

    def alert(self, title: str, text: str) -> None:
        self._told.append(("alert", title, text))

    def finish(self) -> None:
        self._told.append(("finish",))


def test_b88_the_readmes_example_for_wandb_shows_each_step_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (example,) = re.findall(
        r"(?:^    (?:import wandb|class WandbLogger).*\n(?:^(?:    .*)?\n)+)", README, re.M
    )
    histories: dict[str, dict[int, dict[str, float]]] = {}
    told: list[tuple[Any, ...]] = []

    def init(*, project: str, resume_from: str | None = None, **named: Any) -> _WandbRun:
        run_id, _, last = (resume_from or f"{named['id']}?_step=-1").partition("?_step=")
        before = histories.get(run_id, {}) if resume_from else {}
        histories[run_id] = {step: it for step, it in before.items() if step <= int(last)}
        return _WandbRun(told, histories[run_id])

    module = types.ModuleType("wandb")
    module.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    names: dict[str, Any] = {}
    exec("\n".join(line[4:] for line in example.splitlines()), names)
    logger = names["WandbLogger"](project="mine", run_id="demo")
    check_loggers([logger])
    fs = told_of_kill(logger, root=tmp_path)
    assert histories["demo"] == current_metrics(fs)
    assert [one[0] for one in told] == ["finish", "alert", "finish"]
