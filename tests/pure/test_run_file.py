"""The run file: made once, read at each resume, refused when newer; and which fields differ."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from elastic.storage.filesystem import Filesystem
from elastic.storage.format import UnsupportedFormat
from elastic.storage.run_file import (
    ABSENT,
    RunFile,
    create_run_file,
    differences,
    load_run_file,
    update_run_file,
)


@pytest.fixture
def fs(tmp_path: Path) -> Filesystem:
    return Filesystem.at(str(tmp_path))


def create(fs: Filesystem, **changes: Any) -> RunFile:
    facts: dict[str, Any] = {
        "name": "demo",
        "created_s": 1.5,
        "seed": 7,
        "config": {"lr": 1e-3, "betas": (0.9, 0.95)},
        "identity": {"global_batch": 512},
        "operational": {"workers": [2, 8]},
        "versions": {"torch": "2.13.0"},
    }
    return create_run_file(fs, **(facts | changes))


def test_what_was_created_is_loaded(fs: Filesystem) -> None:
    assert load_run_file(fs) is None
    created = create(fs)
    assert load_run_file(fs) == created
    assert created.config["betas"] == [0.9, 0.95]
    assert created.format_version == 1


def test_each_run_has_an_id_of_its_own(fs: Filesystem) -> None:  # B90: it owns the checkpoints
    first, second = create(fs.sub("a")), create(fs.sub("b"))
    assert first.run_id != second.run_id
    assert len(first.run_id) == 32


def test_a_run_is_not_created_over_another(fs: Filesystem) -> None:
    created = create(fs)
    with pytest.raises(FileExistsError, match="resume it"):
        create(fs)
    assert load_run_file(fs) == created


def test_update_changes_the_fields_and_keeps_the_owner(fs: Filesystem) -> None:
    created = create(fs)
    changed = dataclasses.replace(created, operational={"workers": [1, 4]})
    assert update_run_file(fs, changed) == changed == load_run_file(fs)
    for stranger in (dataclasses.replace(created, run_id="other"), created):
        where = fs if stranger.run_id == "other" else fs.sub("elsewhere")
        with pytest.raises(ValueError, match="not updated"):
            update_run_file(where, stranger)
    assert load_run_file(fs) == changed


def test_values_that_are_not_json_are_refused_before_anything_is_written(fs: Filesystem) -> None:
    with pytest.raises(TypeError):
        create(fs, config={"act": print})
    assert fs.list() == []


def test_a_newer_format_is_refused_by_name(fs: Filesystem) -> None:
    create(fs)
    tree = json.loads(fs.read_bytes("run.json"))
    fs.write_bytes("run.json", json.dumps(tree | {"format_version": 2, "new": 1}).encode())
    with pytest.raises(UnsupportedFormat, match=r"run\.json.*version 2.*up to 1"):
        load_run_file(fs)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format_version": 1}', '{"format_version": "1"}']
)
def test_a_garbled_file_is_an_error_and_not_a_new_run(fs: Filesystem, text: str) -> None:
    fs.write_bytes("run.json", text.encode())
    with pytest.raises(ValueError, match=r"run\.json .*cannot be read"):
        load_run_file(fs)


def test_fields_of_a_later_minor_program_are_passed_over(fs: Filesystem) -> None:
    created = create(fs)
    tree = json.loads(fs.read_bytes("run.json"))
    fs.write_bytes("run.json", json.dumps(tree | {"note": "x"}).encode())
    assert load_run_file(fs) == created


def test_differing_fields_are_named() -> None:
    old = {"model": {"dim": 8, "layers": 2}, "optimizer": {"lr": 1e-3}, "data": ["a"], "gone": 0}
    new = {
        "model": {"dim": 16, "layers": 2},
        "optimizer": {"lr": 1e-3},
        "data": ["a", "b"],
        "come": 1,
    }
    found = {each.field: (each.old, each.new) for each in differences(old, new)}
    assert found == {
        "model.dim": (8, 16),
        "data": (["a"], ["a", "b"]),
        "gone": (0, ABSENT),
        "come": (ABSENT, 1),
    }
    assert str(differences({"seed": 1}, {"seed": 2})[0]) == "seed: was 1, now 2"


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ((0.9, 0.95), [0.9, 0.95], True),
        (1, 1.0, True),
        ([1, {"a": 2}], [1.0, {"a": 2.0}], True),
        (math.nan, math.nan, True),
        (True, 1, False),
        (None, ABSENT, False),
        ([1], [True], False),
        ({"a": 1}, 1, False),
        ("1", 1, False),
    ],
)
def test_values_are_compared_as_json(old: Any, new: Any, same: bool) -> None:
    assert (differences({"x": old}, {"x": new}) == []) is same


def test_a_resume_with_the_same_config_differs_in_nothing(fs: Filesystem) -> None:
    config = {"lr": 1e-3, "betas": (0.9, 0.95), "layers": {"1": None}}
    created = create(fs, config=config)
    assert differences(created.config, config) == []
