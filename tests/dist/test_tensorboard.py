"""TensorBoard, read back by its own reader: one value for each step, and restarts as text."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch.utils.tensorboard  # noqa: F401 - a busy machine takes longer to load it than a close waits
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util import tensor_util

from elastic import TensorBoardLogger
from elastic.training.loggers.logger import check_loggers
from tests.pure.test_loggers import told_of_kill

ALL = {"scalars": 0, "tensors": 0}


def read(log_dir: Path) -> EventAccumulator:
    found = EventAccumulator(str(log_dir), size_guidance=ALL)
    found.Reload()
    return found


def test_b88_a_step_that_is_done_again_replaces_its_earlier_value(tmp_path: Path) -> None:
    """Kill at 12, checkpoint at 10: 11 and 12 stand there once, as of the life that counts."""
    logger = TensorBoardLogger(str(tmp_path / "tb"))
    check_loggers([logger])
    told_of_kill(logger, root=tmp_path / "run")
    values = [(one.step, one.value) for one in read(tmp_path / "tb").Scalars("loss")]
    before = [(step, float(step)) for step in range(1, 11)]
    assert values == before + [(step, 100.0 + step) for step in range(11, 15)]


def test_a_restart_stands_there_as_text(tmp_path: Path) -> None:
    told_of_kill(TensorBoardLogger(str(tmp_path / "tb")), root=tmp_path / "run")
    (tag,) = [tag for tag in read(tmp_path / "tb").Tags()["tensors"] if "restarts" in tag]
    (event,) = read(tmp_path / "tb").Tensors(tag)
    (text,) = tensor_util.make_ndarray(event.tensor_proto).ravel()
    assert event.step == 11
    assert b"restarted: rank 1 died. 3 -> 2 workers" in text


def test_a_driver_that_was_killed_leaves_no_step_twice(tmp_path: Path) -> None:
    """Its writer was never closed, and the next driver has one of its own."""
    dead = TensorBoardLogger(str(tmp_path))
    dead.rewind(1)
    for step in range(1, 13):
        dead.log(step, {"loss": float(step)})
    dead.flush()
    heir = pickle.loads(pickle.dumps(TensorBoardLogger(str(tmp_path))))
    heir.rewind(11)
    for step in range(11, 15):
        heir.log(step, {"loss": 100.0 + step})
    heir.close()
    values = [(one.step, one.value) for one in read(tmp_path).Scalars("loss")]
    assert [step for step, _ in values] == list(range(1, 15))
    assert dict(values)[12] == 112.0


def test_steps_are_there_as_soon_as_they_are_flushed(tmp_path: Path) -> None:
    logger = TensorBoardLogger(str(tmp_path))
    logger.log(1, {"loss": 0.5, "lr": float("nan")})
    logger.flush()
    (found,) = read(tmp_path).Scalars("loss")
    assert (found.step, found.value) == (1, pytest.approx(0.5))
    logger.close()
